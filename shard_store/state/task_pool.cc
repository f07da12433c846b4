#include "shard_store/state/task_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace zeroshard::store {
namespace {

// "0-3,8-11", as Linux lists the processors of a node; those that this process may use.
std::vector<int> ParseCpus(const std::string& text, const cpu_set_t& allowed) {
  std::vector<int> cpus;
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, '-');
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last)) continue;
    for (int cpu = std::max(first, 0); cpu <= last && cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(static_cast<size_t>(cpu), &allowed)) cpus.push_back(cpu);
  }
  return cpus;
}

// The processors of each NUMA node that has any for this process; empty where nothing is known.
std::vector<std::vector<int>> NumaNodes() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return {};
  std::vector<std::vector<int>> nodes;
  std::error_code error;
  for (int node = 0;; ++node) {
    const std::string folder = "/sys/devices/system/node/node" + std::to_string(node);
    if (!std::filesystem::exists(folder, error)) break;
    std::ifstream file(folder + "/cpulist");
    std::string text;
    std::getline(file, text);
    if (std::vector<int> cpus = ParseCpus(text, allowed); !cpus.empty()) nodes.push_back(cpus);
  }
  return nodes;
}

}  // namespace

TaskPool::TaskPool(int threads) {
  threads = std::max(threads, 1);
  std::vector<std::vector<int>> nodes = NumaNodes();
  // A node without a thread would never run its tasks.
  if (nodes.size() < 2 || static_cast<int>(nodes.size()) > threads) nodes.assign(1, {});
  nodes_ = static_cast<int>(nodes.size());
  queues_.resize(nodes.size() + 1);
  for (int i = 0; i < threads; ++i) {
    const int node = i % nodes_;
    threads_.emplace_back(
        [this, node, cpus = nodes[static_cast<size_t>(node)]] { Main(node, cpus); });
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
  const bool any = node < 0 || node >= nodes_;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queues_[static_cast<size_t>(any ? nodes_ : node)].push_back({added_++, std::move(task)});
  }
  if (nodes_ == 1) {
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

void TaskPool::Main(int node, const std::vector<int>& cpus) {
  if (!cpus.empty()) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(static_cast<size_t>(cpu), &set);
    // Only speed depends on it.
    (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  }
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

}  // namespace zeroshard::store
