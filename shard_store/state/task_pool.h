// Threads that the store computes with: a fixed number, each bound to a NUMA node where there are
// several. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace zeroshard::store {

class TaskPool {
 public:
  explicit TaskPool(int threads);
  // Runs what was added, then ends.
  ~TaskPool();
  TaskPool(const TaskPool&) = delete;
  TaskPool& operator=(const TaskPool&) = delete;

  // Tasks begin in the order in which they were added, those of a node on its threads (-1: any).
  // A task must not wait for another of the pool, and must not throw.
  void Add(std::function<void()> task, int node = -1);
  int threads() const { return static_cast<int>(threads_.size()); }
  int nodes() const { return nodes_; }  // that have threads

 private:
  struct Task {
    uint64_t order = 0;
    std::function<void()> run;
  };

  void Main(int node, const std::vector<int>& cpus);
  bool Next(int node, std::function<void()>* task);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Task>> queues_;  // by node; the last is anybody's
  uint64_t added_ = 0;
  bool ending_ = false;
  int nodes_ = 1;
  std::vector<std::thread> threads_;
};

}  // namespace zeroshard::store
