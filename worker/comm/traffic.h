// What each collective sends, in closed form: the communicator counts by these and a planner
// predicts by them. Bytes of payload that `rank` of `size` sends to other ranks; sizes in elements.
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "common/types.h"

namespace zeroshard {

// (size - 1) * count elements.
int64_t AllGatherBytes(int64_t count, DType type, int size);

// All counts but its own where rank < contributors, else 0.
int64_t ReduceScatterBytes(absl::Span<const int64_t> counts, int contributors, DType type,
                           int rank);

// Up to kDirectAllReduce elements every rank sends all to all others: (size - 1) * count elements.
// Beyond, rank r owns elements [r*S, min((r+1)*S, count)), S = ceil(count / size), reduces them and
// sends the sum: count + (size - 2) * own elements, that is 2 * count * (size-1)/size where
// size divides count.
constexpr int64_t kDirectAllReduce = 4096;
int64_t AllReduceBytes(int64_t count, DType type, int size, int rank);

// The root sends to every other rank.
int64_t BroadcastBytes(int64_t bytes, int root, int size, int rank);

// The first of the elements that `rank` owns in the sharing above, and how many they are.
int64_t PartStart(int64_t count, int size, int rank);
int64_t PartCount(int64_t count, int size, int rank);

}  // namespace zeroshard
