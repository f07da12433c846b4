// Something done to many chunks on the pool's threads, by a caller that waits for it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "shard_store/state/memory_chunk.h"
#include "shard_store/state/task_pool.h"

namespace zeroshard::store {

// Calls `work` with each chunk, about in order, on threads of its node, several at once. After each
// chunk other tasks of the pool get their turn. The first error ends it, after which no other chunk
// is begun; CANCELLED once `stop` (may be null) is true. Not on a thread of the pool.
absl::Status ForEachChunk(TaskPool* pool, const std::vector<std::shared_ptr<MemoryChunk>>& chunks,
                          const std::function<absl::Status(MemoryChunk*)>& work,
                          const std::atomic<bool>* stop = nullptr);

}  // namespace zeroshard::store
