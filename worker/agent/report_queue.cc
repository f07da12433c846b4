#include "worker/agent/report_queue.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr size_t kBatch = 512;
// How often a waiting Push or Flush looks for a cancellation.
constexpr std::chrono::milliseconds kLook(50);

}  // namespace

ReportQueue::ReportQueue(ClusterClient* client, v1::Fence fence, Cancellation* cancellation,
                         std::function<void(const absl::Status&)> on_error, size_t capacity)
    : client_(client),
      fence_(std::move(fence)),
      cancellation_(cancellation),
      on_error_(std::move(on_error)),
      capacity_(capacity),
      thread_([this] { Main(); }) {}

ReportQueue::~ReportQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ReportQueue::Push(const v1::StepRecord& record) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (records_.size() >= capacity_ && failed_.ok() && !cancellation_->cancelled()) {
    changed_.wait_for(lock, kLook);
  }
  if (!failed_.ok() || cancellation_->cancelled()) return;
  records_.push_back(record);
  changed_.notify_all();
}

bool ReportQueue::ShouldHold() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return records_.size() > capacity_ / 2;
}

absl::Status ReportQueue::Flush(absl::Duration timeout) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!records_.empty()) {
    if (!failed_.ok()) return failed_;
    if (absl::Status reason = cancellation_->status(); !reason.ok()) return reason;
    if (absl::FromChrono(std::chrono::steady_clock::now() - start) >= timeout) {
      return absl::DeadlineExceededError(
          absl::StrCat(records_.size(), " step records could not be delivered"));
    }
    changed_.wait_for(lock, kLook);
  }
  return failed_;
}

void ReportQueue::Main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !records_.empty(); });
    if (closing_) return;
    const size_t count = std::min(records_.size(), kBatch);
    const std::vector<v1::StepRecord> batch(records_.begin(), records_.begin() + count);
    lock.unlock();
    absl::Status status =
        client_->ReportSteps(fence_, batch, absl::InfiniteDuration(), cancellation_);
    lock.lock();
    if (status.ok()) {
      records_.erase(records_.begin(), records_.begin() + count);
      changed_.notify_all();
      continue;
    }
    failed_ = status;
    changed_.notify_all();
    lock.unlock();
    if (!cancellation_->cancelled()) on_error_(status);
    return;
  }
}

}  // namespace zeroshard
