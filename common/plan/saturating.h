// Sizes of memory that no machine has: sums and products of what is not negative, which stay at
// kMostBytes instead of overflowing. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>

#include "common/types.h"

namespace zeroshard {

// A multiple of 64, to which allocations are aligned.
constexpr int64_t kMostBytes = std::numeric_limits<int64_t>::max() / 64 * 64;

inline int64_t SaturatingAdd(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) || sum > kMostBytes ? kMostBytes : sum;
}

inline int64_t SaturatingProduct(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (int64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product) || product > kMostBytes)
      return kMostBytes;
  }
  return product;
}

// Rounded up to a multiple of 64.
inline int64_t AlignedBytes(int64_t elements, DType dtype) {
  const int64_t bytes = SaturatingProduct({elements, static_cast<int64_t>(SizeOf(dtype))});
  return bytes > kMostBytes - 64 ? kMostBytes : RoundUp(bytes, 64);
}

}  // namespace zeroshard
