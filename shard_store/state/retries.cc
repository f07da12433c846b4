#include "shard_store/state/retries.h"

#include <chrono>
#include <system_error>
#include <utility>
#include <vector>

namespace zeroshard::store {
namespace {

constexpr std::chrono::milliseconds kPause(5);
// At once: a store without memory must not be busy with asking for it.
constexpr size_t kMostAtOnce = 32;

}  // namespace

Retries::~Retries() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Retries::Add(std::function<void()> task, int node) {
  std::unique_lock<std::mutex> lock(mutex_);
  try {
    if (!thread_.joinable()) thread_ = std::thread([this] { Main(); });
  } catch (const std::system_error&) {  // then without a pause
    lock.unlock();
    pool_->Add(std::move(task), node);
    return;
  }
  paused_.push_back({std::move(task), node});
  lock.unlock();
  changed_.notify_all();
}

void Retries::Main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !paused_.empty(); });
    changed_.wait_for(lock, kPause, [this] { return ending_; });
    if (ending_) return;
    std::vector<Task> now;
    while (!paused_.empty() && now.size() < kMostAtOnce) {
      now.push_back(std::move(paused_.front()));
      paused_.pop_front();
    }
    lock.unlock();
    for (Task& task : now) pool_->Add(std::move(task.run), task.node);
    lock.lock();
  }
}

}  // namespace zeroshard::store
