#include "shard_store/state/task_pool.h"

#include <pthread.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <utility>

namespace zeroshard::store {

TaskPool::TaskPool(int threads, NumaLayout layout)
    : layout_(std::move(layout)),
      threads_of_nodes_(ThreadsOfNodes(layout_, threads)),
      queues_(threads_of_nodes_.size() + 1) {
  for (size_t node = 0; node < threads_of_nodes_.size(); ++node) {
    for (int i = 0; i < threads_of_nodes_[node]; ++i)
      threads_.emplace_back([this, node] { Main(static_cast<int>(node)); });
  }
}

TaskPool::~TaskPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void TaskPool::Add(std::function<void()> task, int node) {
  const bool any = node < 0 || node >= nodes();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queues_[static_cast<size_t>(any ? nodes() : node)].push_back({added_++, std::move(task)});
  }
  if (nodes() == 1) {
    changed_.notify_one();
  } else {
    changed_.notify_all();  // one would wake a thread of another node
  }
}

bool TaskPool::Next(int node, std::function<void()>* task) {
  std::deque<Task>* own = &queues_[static_cast<size_t>(node)];
  std::deque<Task>* any = &queues_.back();
  std::deque<Task>* from = own->empty() ? any : own;
  if (!own->empty() && !any->empty() && any->front().order < own->front().order) from = any;
  if (from->empty()) return false;
  *task = std::move(from->front().run);
  from->pop_front();
  return true;
}

void TaskPool::Bind(int node) const {
  if (nodes() < 2 || node < 0 || node >= nodes()) return;
  const std::vector<int>& cpus = layout_.cpus[static_cast<size_t>(node)];
  if (cpus.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &set);
  // Only speed depends on it.
  (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

void TaskPool::Main(int node) {
  Bind(node);
  std::function<void()> task;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    if (Next(node, &task)) {
      lock.unlock();
      task();
      task = nullptr;  // what it holds goes before the next is waited for
      lock.lock();
    } else if (ending_) {
      return;
    } else {
      changed_.wait(lock);
    }
  }
}

void GiveWay() {
  constexpr int kNice = 10;
  // Of this thread alone, on Linux.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
}

}  // namespace zeroshard::store
