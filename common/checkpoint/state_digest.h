// A digest of the model's fp32 weights, or moments, that does not depend on how they are sharded:
// each 64-element block is hashed with its unit and position, and the hashes are added. Plain data,
// 16 bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

// Some elements of a 64-element block whose others are elsewhere. Plain data: ranks send it.
struct BlockPart {
  uint32_t kind = 0;  // for who has parts of several kinds of state in one list
  uint32_t unit = 0;
  uint64_t block = 0;           // its first element in the unit's flat vector
  uint32_t begin = 0, end = 0;  // which of its 64 elements
  float values[64] = {};        // of these alone
};

// The digest of ranges that begin and end anywhere, as the slices of tensor ranks do: of the blocks
// that are there in full, with the parts of the others.
struct PartedDigest {
  WeightDigest whole;
  std::vector<BlockPart> parts;

  // `values` start at `element` of the unit's flat vector. `ends`: a tensor ends with them, so that
  // zeros follow up to a multiple of 64.
  void Add(uint64_t unit, uint64_t element, absl::Span<const float> values, bool ends);
  void Combine(const PartedDigest& other);
};

// Of the blocks that `parts` (of one kind) are of, in any order. INTERNAL names a block of which an
// element is missing or there twice.
absl::StatusOr<WeightDigest> JoinParts(const std::vector<BlockPart>& parts);

// The digest, in hex, of one kind of a checkpoint's values as the ranks that wrote it computed it:
// every unit's flat vector with its padding; of the moments only units with something trainable,
// whose frozen tensors have zeros. `model` is the manifest's (CheckModel has passed). A few hundred
// KiB of memory. Errors are the reader's.
absl::StatusOr<std::string> DigestOf(const CheckpointReader& reader, const ModelTable& model,
                                     StateKind kind);

}  // namespace zeroshard
