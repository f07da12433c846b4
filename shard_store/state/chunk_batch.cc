#include "shard_store/state/chunk_batch.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

#include "shard_store/state/caught.h"

namespace zeroshard::store {
namespace {

class Batch {
 public:
  Batch(const TaskPool* pool, const std::function<absl::Status(MemoryChunk*)>& work,
        const std::atomic<bool>* stop)
      : pool_(*pool), work_(work), stop_(stop), queues_(static_cast<size_t>(pool->nodes())) {}

  absl::Status Run(const std::vector<std::shared_ptr<MemoryChunk>>& chunks) {
    for (size_t i = 0; i < chunks.size(); ++i)
      queues_[Queue(chunks[i]->node, i)].push_back(chunks[i].get());
    std::vector<std::thread> threads;
    std::vector<size_t> without;  // nodes that got none
    for (size_t node = 0; node < queues_.size(); ++node) {
      const size_t wanted =
          std::min(static_cast<size_t>(pool_.threads_of_nodes()[node]), queues_[node].size());
      size_t started = 0;
      try {
        threads.reserve(threads.size() + wanted);
        for (; started < wanted; ++started) {
          threads.emplace_back([this, node] {
            pool_.Bind(static_cast<int>(node));
            GiveWay();
            Work(node);
          });
        }
      } catch (const std::exception&) {
        // With fewer it takes longer.
      }
      if (started == 0) without.push_back(node);
    }
    for (const size_t node : without) Work(node);
    for (std::thread& thread : threads) thread.join();
    return status_;
  }

 private:
  size_t Queue(int node, size_t index) const {
    const bool known = node >= 0 && static_cast<size_t>(node) < queues_.size();
    return known ? static_cast<size_t>(node) : index % queues_.size();
  }

  void Work(size_t node) {
    while (true) {
      MemoryChunk* chunk = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (status_.ok() && stop_ != nullptr && *stop_) status_ = absl::CancelledError("stopped");
        if (!status_.ok() || queues_[node].empty()) return;
        chunk = queues_[node].front();
        queues_[node].pop_front();
      }
      absl::Status status = Caught([&] { return work_(chunk); });
      std::lock_guard<std::mutex> lock(mutex_);
      if (status_.ok()) status_ = std::move(status);
    }
  }

  const TaskPool& pool_;
  const std::function<absl::Status(MemoryChunk*)>& work_;
  const std::atomic<bool>* const stop_;
  std::mutex mutex_;
  std::vector<std::deque<MemoryChunk*>> queues_;  // by node
  absl::Status status_;
};

}  // namespace

absl::Status ForEachChunk(const TaskPool* pool,
                          const std::vector<std::shared_ptr<MemoryChunk>>& chunks,
                          const std::function<absl::Status(MemoryChunk*)>& work,
                          const std::atomic<bool>* stop) {
  return Batch(pool, work, stop).Run(chunks);
}

}  // namespace zeroshard::store
