// Something long done to many chunks by a caller that waits for it: filling, digests.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "shard_store/state/memory_chunk.h"
#include "shard_store/state/task_pool.h"

namespace zeroshard::store {

// Calls `work` with each chunk, about in order, on as many threads of each node as the pool has,
// several at once. They are threads of this call's own, which may wait for a disk and give way to
// the pool's: nobody's updates wait for them. The first error ends it, after which no other chunk
// is begun; CANCELLED once `stop` (may be null) is true.
absl::Status ForEachChunk(const TaskPool* pool,
                          const std::vector<std::shared_ptr<MemoryChunk>>& chunks,
                          const std::function<absl::Status(MemoryChunk*)>& work,
                          const std::atomic<bool>* stop = nullptr);

}  // namespace zeroshard::store
