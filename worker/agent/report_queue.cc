#include "worker/agent/report_queue.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr size_t kBatch = 512;
constexpr size_t kBatchBytes = 1 << 20;  // and at most one item more
// How often a waiting Push or Flush looks for a cancellation.
constexpr std::chrono::milliseconds kLook(50);

// Puts the first items into the request; returns how many.
size_t Fill(const std::deque<ReportQueue::Item>& items, v1::ReportStepsRequest* request) {
  size_t count = 0;
  size_t bytes = 0;
  for (; count < std::min(items.size(), kBatch) && bytes < kBatchBytes; ++count) {
    const ReportQueue::Item& item = items[count];
    bytes += std::visit([](const auto& record) { return record.ByteSizeLong(); }, item);
    if (const auto* step = std::get_if<v1::StepRecord>(&item)) {
      *request->add_records() = *step;
    } else if (const auto* checkpoint = std::get_if<v1::CheckpointRecord>(&item)) {
      *request->add_checkpoints() = *checkpoint;
    } else {
      *request->add_samples() = std::get<v1::SampleRecord>(item);
    }
  }
  return count;
}

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

void ReportQueue::Push(Item item) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (items_.size() >= capacity_ && failed_.ok() && !cancellation_->cancelled()) {
    changed_.wait_for(lock, kLook);
  }
  if (!failed_.ok() || cancellation_->cancelled()) return;
  items_.push_back(std::move(item));
  changed_.notify_all();
}

bool ReportQueue::ShouldHold() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return items_.size() > capacity_ / 2;
}

absl::Status ReportQueue::Flush(absl::Duration timeout) {
  const auto start = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  while (!items_.empty()) {
    if (!failed_.ok()) return failed_;
    if (absl::Status reason = cancellation_->status(); !reason.ok()) return reason;
    if (absl::FromChrono(std::chrono::steady_clock::now() - start) >= timeout) {
      return absl::DeadlineExceededError(
          absl::StrCat(items_.size(), " reports could not be delivered"));
    }
    changed_.wait_for(lock, kLook);
  }
  return failed_;
}

void ReportQueue::Main() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !items_.empty(); });
    if (closing_) return;
    v1::ReportStepsRequest request;
    *request.mutable_fence() = fence_;
    const size_t count = Fill(items_, &request);
    lock.unlock();
    const absl::Status status =
        client_->ReportSteps(request, absl::InfiniteDuration(), cancellation_);
    lock.lock();
    if (status.ok()) {
      items_.erase(items_.begin(), items_.begin() + count);
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
