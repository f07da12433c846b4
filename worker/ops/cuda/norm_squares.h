// The order-free sum of squares (worker/ops/norm_accumulator.h): blocks of 64 elements in fp64,
// each converted to fixed point; integers are added in any order. Eight threads share a block: one
// each of the eight lanes of its sum.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/host_device.h"
#include "worker/ops/norm_accumulator.h"

namespace zeroshard::cuda {

inline constexpr int kSquareBlock = 64, kSquareLanes = 8;

// The sum of x's squares at lane, lane + 8, ... of block `block`. Squares of fp32 numbers are exact
// in fp64, so a fused and an unfused multiply-add agree.
template <class T>
ZS_HOST_DEVICE double LaneSquares(const T* x, int64_t n, int64_t block, int lane) {
  double sum = 0;
  ZS_UNROLL(8)
  for (int k = 0; k < kSquareBlock / kSquareLanes; ++k) {
    const int64_t i = block * kSquareBlock + k * kSquareLanes + lane;
    const double value = i < n ? static_cast<double>(Element<T>::Widen(x[i])) : 0.0;
    sum += value * value;
  }
  return sum;
}

// total += a block's sum of squares (>= 0, an infinity or a NaN), as NormAccumulator::AddBlock; but
// nonfinite counts without saturation, which takes 2^64 blocks.
ZS_HOST_DEVICE void AddWords(uint64_t low, uint64_t middle, uint64_t high, NormAccumulator* total) {
  total->low += low;
  const uint64_t carry = total->low < low ? 1 : 0;
  const uint64_t second = middle + carry;
  total->middle += second;
  const uint64_t carry2 = (second < middle ? 1 : 0) + (total->middle < second ? 1 : 0);
  const uint64_t third = high + carry2;
  total->high += third;
  if (third < high || total->high < third) total->nonfinite += 1;
}

ZS_HOST_DEVICE uint64_t BitsOf64(double value) {
#ifdef __CUDA_ARCH__
  return static_cast<uint64_t>(__double_as_longlong(value));
#else
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

ZS_HOST_DEVICE void AddBlock(double sum_of_squares, NormAccumulator* total) {
  constexpr int kFractionBits = 96, kMantissaBits = 52, kExponentBias = 1023;
  const uint64_t bits = BitsOf64(sum_of_squares);
  const int exponent = static_cast<int>(bits >> kMantissaBits);  // with the sign above it
  if (exponent >= kExponentBias + kFractionBits) {               // also infinity and NaN
    total->nonfinite += 1;
    return;
  }
  if (exponent == 0) return;  // zero, or far below a unit
  const uint64_t one = uint64_t{1} << kMantissaBits;
  const uint64_t mantissa = one | (bits & (one - 1));
  const int shift = exponent - kExponentBias - kMantissaBits + kFractionBits;
  if (shift < 0) {
    AddWords(shift > -64 ? mantissa >> -shift : 0, 0, 0, total);
    return;
  }
  const int word = shift / 64, by = shift % 64;
  const uint64_t first = mantissa << by;
  const uint64_t second = by == 0 ? 0 : mantissa >> (64 - by);
  // The second word is zero where the first is the highest: the value is below 2^96.
  AddWords(word == 0 ? first : 0,
           word == 1   ? first
           : word == 0 ? second
                       : 0,
           word == 2   ? first
           : word == 1 ? second
                       : 0,
           total);
}

ZS_HOST_DEVICE void AddPart(const NormAccumulator& part, NormAccumulator* total) {
  AddWords(part.low, part.middle, part.high, total);
  total->nonfinite += part.nonfinite;
}

// The same where other threads add at the same time: whoever makes a word wrap carries.
ZS_HOST_DEVICE uint64_t AddCarrying(uint64_t* word, uint64_t addend) {
  return FetchAdd(word, addend) + addend < addend ? 1 : 0;
}

ZS_HOST_DEVICE void AddPartShared(const NormAccumulator& part, NormAccumulator* total) {
  uint64_t carry = part.low == 0 ? 0 : AddCarrying(&total->low, part.low);
  uint64_t addend = part.middle + carry;
  carry = addend < carry ? 1 : 0;
  if (addend != 0) carry += AddCarrying(&total->middle, addend);
  addend = part.high + carry;
  uint64_t passed = addend < carry ? 1 : 0;
  if (addend != 0) passed += AddCarrying(&total->high, addend);
  passed += part.nonfinite;
  if (passed != 0) FetchAdd(&total->nonfinite, passed);
}

}  // namespace zeroshard::cuda
