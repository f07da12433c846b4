// A digest of the model's fp32 weights, or moments, that does not depend on how they are sharded:
// each 64-element block is hashed with its unit and position, and the hashes are added. Plain data,
// 16 bytes.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/checkpoint/reader.h"
#include "common/plan/model_table.h"

namespace zeroshard {

struct WeightDigest {
  uint64_t low = 0, high = 0;

  // `values` start at `element` (a multiple of 64) of the unit's flat vector.
  void Add(uint64_t unit, uint64_t element, absl::Span<const float> values);
  void Combine(const WeightDigest& other);
  std::string Hex() const;
};
static_assert(sizeof(WeightDigest) == 16);

// The digest, in hex, of one kind of a checkpoint's values as the ranks that wrote it computed it:
// every unit's flat vector with its padding; of the moments only units with something trainable,
// whose frozen tensors have zeros. `model` is the manifest's (CheckModel has passed). A few hundred
// KiB of memory. Errors are the reader's.
absl::StatusOr<std::string> DigestOf(const CheckpointReader& reader, const ModelTable& model,
                                     StateKind kind);

}  // namespace zeroshard
