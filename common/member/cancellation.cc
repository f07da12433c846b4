#include "common/member/cancellation.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace zeroshard {

void Cancellation::Cancel(absl::Status reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!status_.ok()) return;
  status_ = std::move(reason);
  for (grpc::ClientContext* context : contexts_) context->TryCancel();
  changed_.notify_all();
}

absl::Status Cancellation::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

bool Cancellation::Wait(absl::Duration timeout) const {
  const absl::Duration bounded = std::min(timeout, absl::Hours(24 * 365));
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(bounded),
                           [this] { return !status_.ok(); });
}

Cancellation::Scope::Scope(Cancellation* cancellation, grpc::ClientContext* context)
    : cancellation_(cancellation), context_(context) {
  if (cancellation_ == nullptr) return;
  std::lock_guard<std::mutex> lock(cancellation_->mutex_);
  if (!cancellation_->status_.ok()) context_->TryCancel();
  cancellation_->contexts_.insert(context_);
}

Cancellation::Scope::~Scope() {
  if (cancellation_ == nullptr) return;
  std::lock_guard<std::mutex> lock(cancellation_->mutex_);
  cancellation_->contexts_.erase(context_);
}

}  // namespace zeroshard
