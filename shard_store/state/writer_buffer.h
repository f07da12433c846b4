// The memory of who writes a snapshot. Within this library.
#pragma once

#include <atomic>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "shard_store/state/buffer.h"
#include "shard_store/state/memory_budget.h"

namespace zeroshard::store {

// So many snapshots are written at a time by all jobs of a store, with a buffer of one section of a
// chunk each; one whose write hangs keeps its own until that returns.
inline constexpr int kMostWriters = 4;

// Of `writing`, which the jobs of a store share; waits its turn where others have it all.
// CANCELLED once `stop` (may be null) is true; RESOURCE_EXHAUSTED after `patience`, or where the
// system has no memory.
absl::StatusOr<std::shared_ptr<Buffer>> TakeWriterBuffer(size_t bytes, MemoryBudget* writing,
                                                         const std::atomic<bool>* stop,
                                                         absl::Duration patience);

}  // namespace zeroshard::store
