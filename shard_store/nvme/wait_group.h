// Waits on one thread for operations that end on others.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "shard_store/nvme/aio.h"

namespace zeroshard::nvme {

// Add is called by the thread that waits. AsyncIo ends what it started within its own limit, so
// this needs none.
class WaitGroup {
 public:
  WaitGroup() = default;
  ~WaitGroup() { (void)Wait(); }
  WaitGroup(const WaitGroup&) = delete;
  WaitGroup& operator=(const WaitGroup&) = delete;

  // What one operation calls at its end, once; its buffer goes back.
  AsyncIo::Done Add() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pending_;
    return [this](absl::Status status, IoBuffer buffer) {
      buffer.Reset();  // before who waits goes on
      std::lock_guard<std::mutex> ending(mutex_);
      if (first_.ok()) first_ = std::move(status);
      if (--pending_ == 0) ended_.notify_all();
    };
  }

  // The first error of all.
  absl::Status Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [this] { return pending_ == 0; });
    return first_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  int pending_ = 0;
  absl::Status first_;
};

}  // namespace zeroshard::nvme
