#include "client/stop_token.h"

namespace zeroshard {

void StopToken::Stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  if (call_ != nullptr) call_->TryCancel();
  changed_.notify_all();
}

bool StopToken::stopped() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stopped_;
}

bool StopToken::SleepFor(absl::Duration duration) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, absl::ToChronoNanoseconds(duration), [this] { return stopped_; });
}

StopToken::Call::Call(StopToken* token, grpc::ClientContext* context) : token_(token) {
  const std::lock_guard<std::mutex> lock(token_->mutex_);
  token_->call_ = context;
  if (token_->stopped_) context->TryCancel();
}

StopToken::Call::~Call() {
  const std::lock_guard<std::mutex> lock(token_->mutex_);
  token_->call_ = nullptr;
}

}  // namespace zeroshard
