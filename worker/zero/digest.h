// A digest of the model's fp32 weights that does not depend on how they are sharded: each
// 64-element block is hashed with its unit and position, and the hashes are added. Plain data, 16
// bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace zeroshard {

struct WeightDigest {
  uint64_t low = 0, high = 0;

  // `values` start at `element` (a multiple of 64) of the unit's flat vector.
  void Add(uint64_t unit, uint64_t element, absl::Span<const float> values);
  void Combine(const WeightDigest& other);
  std::string Hex() const;
};
static_assert(sizeof(WeightDigest) == 16);

}  // namespace zeroshard
