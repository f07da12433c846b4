// Threads that the store computes updates with: a fixed number, each bound to a NUMA node where
// there are several. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "shard_store/state/numa.h"

namespace zeroshard::store {

class TaskPool {
 public:
  // Another layout than the host's: tests alone.
  explicit TaskPool(int threads, NumaLayout layout = SystemNumaLayout());
  // Runs what was added, then ends.
  ~TaskPool();
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  // Tasks begin in the order in which they were added, those of a node on its threads (-1: any).
  // A task must not wait for anything but memory and must not throw.
  void Add(std::function<void()> task, int node = -1);
  int threads() const { return static_cast<int>(threads_.size()); }
  int nodes() const { return static_cast<int>(threads_of_nodes_.size()); }
  const std::vector<int>& threads_of_nodes() const { return threads_of_nodes_; }
  // Makes the calling thread run where those of `node` do.
  void Bind(int node) const;

 private:
  struct Task {
    uint64_t order = 0;
    std::function<void()> run;
  };

  void Main(int node);
  bool Next(int node, std::function<void()>* task);

  const NumaLayout layout_;
  const std::vector<int> threads_of_nodes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Task>> queues_;  // by node; the last is anybody's
  uint64_t added_ = 0;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

// Lets other threads go first where there are fewer processors than work; inherited by those that
// the calling thread starts.
void GiveWay();

}  // namespace zeroshard::store
