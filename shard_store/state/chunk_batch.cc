#include "shard_store/state/chunk_batch.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <new>

#include "absl/strings/str_cat.h"

namespace zeroshard::store {
namespace {

class Batch {
 public:
  Batch(TaskPool* pool, const std::function<absl::Status(MemoryChunk*)>& work,
        const std::atomic<bool>* stop)
      : pool_(pool), work_(work), stop_(stop), queues_(static_cast<size_t>(pool->nodes())) {}

  absl::Status Run(const std::vector<std::shared_ptr<MemoryChunk>>& chunks) {
    for (const auto& chunk : chunks) queues_[Queue(chunk->node)].push_back(chunk.get());
    const size_t threads =
        std::max<size_t>(1, static_cast<size_t>(pool_->threads()) / queues_.size());
    std::unique_lock<std::mutex> lock(mutex_);
    for (size_t node = 0; node < queues_.size(); ++node) {
      const size_t chains = std::min(threads, queues_[node].size());
      for (size_t i = 0; i < chains; ++i) {
        ++chains_;
        pool_->Add([this, node] { Step(node); }, static_cast<int>(node));
      }
    }
    ended_.wait(lock, [this] { return chains_ == 0; });
    return status_;
  }

 private:
  size_t Queue(int node) const {
    return node >= 0 && static_cast<size_t>(node) < queues_.size() ? static_cast<size_t>(node) : 0;
  }

  // One chunk, then its place at the end of the pool's queue again.
  void Step(size_t node) {
    MemoryChunk* chunk = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (status_.ok() && stop_ != nullptr && *stop_) status_ = absl::CancelledError("stopped");
      if (!status_.ok() || queues_[node].empty()) {
        if (--chains_ == 0) ended_.notify_all();
        return;
      }
      chunk = queues_[node].front();
      queues_[node].pop_front();
    }
    absl::Status status;
    try {
      status = work_(chunk);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("out of memory on this host");
    } catch (const std::exception& error) {
      status = absl::InternalError(absl::StrCat("unexpected exception: ", error.what()));
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (status_.ok()) status_ = std::move(status);
    }
    pool_->Add([this, node] { Step(node); }, static_cast<int>(node));
  }

  TaskPool* const pool_;
  const std::function<absl::Status(MemoryChunk*)>& work_;
  const std::atomic<bool>* const stop_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::vector<std::deque<MemoryChunk*>> queues_;  // by node
  size_t chains_ = 0;
  absl::Status status_;
};

}  // namespace

absl::Status ForEachChunk(TaskPool* pool, const std::vector<std::shared_ptr<MemoryChunk>>& chunks,
                          const std::function<absl::Status(MemoryChunk*)>& work,
                          const std::atomic<bool>* stop) {
  return Batch(pool, work, stop).Run(chunks);
}

}  // namespace zeroshard::store
