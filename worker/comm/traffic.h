// What each collective sends, in closed form: the communicator counts by these and a planner
// predicts by them. Bytes of payload that `rank` of `size` sends to other ranks; sizes in elements.
// All-reduces are in common/plan/collective_bytes.h.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "common/plan/collective_bytes.h"
#include "common/types.h"

namespace zeroshard {

// (size - 1) * count elements.
int64_t AllGatherBytes(int64_t count, DType type, int size);

// All counts but its own where rank < contributors, else 0.
int64_t ReduceScatterBytes(absl::Span<const int64_t> counts, int contributors, DType type,
                           int rank);

// The root sends to every other rank.
int64_t BroadcastBytes(int64_t bytes, int root, int size, int rank);

}  // namespace zeroshard
