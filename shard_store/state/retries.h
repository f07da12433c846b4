// Tasks of a pool that cannot go on yet, for want of something that nobody announces: they are
// added to the pool again after a pause. Thread-safe.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "shard_store/state/task_pool.h"

namespace zeroshard::store {

class Retries {
 public:
  // `pool` outlives it. It has a thread from the first task on.
  explicit Retries(TaskPool* pool) : pool_(pool) {}
  // Tasks that are still paused are dropped.
  ~Retries();
  Retries(const Retries&) = delete;
  Retries& operator=(const Retries&) = delete;

  // The oldest come first, a few at a time: who still cannot go on says so again.
  void Add(std::function<void()> task, int node);

 private:
  struct Task {
    std::function<void()> run;
    int node = -1;
  };

  void Main();

  TaskPool* const pool_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> paused_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace zeroshard::store
