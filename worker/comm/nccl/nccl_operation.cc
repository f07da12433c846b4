#include "worker/comm/nccl/nccl_operation.h"

#include <utility>

#include "worker/comm/nccl/nccl_queue.h"

namespace zeroshard {

NcclOperation::NcclOperation(NcclQueue* queue, std::shared_ptr<NcclApi> api, std::string what,
                             Event after, std::function<absl::Status()> body,
                             std::function<void()> succeeded)
    : what_(std::move(what)),
      queue_(queue),
      api_(std::move(api)),
      after_(std::move(after)),
      body_(std::move(body)),
      succeeded_(std::move(succeeded)) {}

NcclOperation::~NcclOperation() {
  for (NcclMark* mark : {begin_, end_}) {
    if (mark != nullptr) api_->FreeMark(mark);
  }
}

bool NcclOperation::Done() const {
  absl::MutexLock lock(&mutex_);
  Look();
  return finished_;
}

absl::Status NcclOperation::Wait() {
  absl::MutexLock lock(&mutex_);
  for (Backoff backoff;;) {
    Look();
    if (finished_) return status_;
    changed_.WaitWithTimeout(&mutex_, backoff.Next());
  }
}

bool NcclOperation::Launched() const {
  absl::MutexLock lock(&mutex_);
  return end_ != nullptr || finished_;
}

NcclMark* NcclOperation::AwaitLaunched() {
  absl::MutexLock lock(&mutex_);
  while (end_ == nullptr && !finished_) changed_.Wait(&mutex_);
  return end_;
}

Event NcclOperation::after() const {
  absl::MutexLock lock(&mutex_);
  return after_;
}

void NcclOperation::Look() const {
  if (finished_ || end_ == nullptr || !queue_->Succeeded(end_, after_)) return;
  queue_->CountBusy(begin_, end_);
  if (succeeded_) succeeded_();
  FinishLocked(absl::OkStatus());
}

void NcclOperation::SetLaunched(NcclMark* begin, NcclMark* end) {
  absl::MutexLock lock(&mutex_);
  begin_ = begin;
  end_ = end;
  changed_.SignalAll();
}

void NcclOperation::Finish(const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (!finished_) FinishLocked(status);
}

void NcclOperation::FinishLocked(const absl::Status& status) const {
  finished_ = true;
  status_ = status;
  after_ = Event();
  body_ = nullptr;
  succeeded_ = nullptr;
  changed_.SignalAll();
}

}  // namespace zeroshard
