#include "worker/device/cuda/context.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/status_macros.h"
#include "worker/device/cuda/errors.h"

namespace zeroshard::cuda {

Context::Context(Runtime* runtime, int ordinal, DeviceProperties properties)
    : runtime_(runtime),
      ordinal_(ordinal),
      properties_(std::move(properties)),
      name_(absl::StrCat("cuda:", ordinal)) {}

Context::~Context() {
  if (ordered_ != nullptr) events_.push_back(ordered_);
  if (events_.empty() || runtime_->SetDevice(ordinal_) != Error::kOk) return;
  for (EventHandle event : events_) runtime_->DestroyEvent(event);
}

absl::Status Context::Check(Error error, const char* call, const char* file, int line) {
  if (error == Error::kOk) return absl::OkStatus();
  absl::string_view what = call;  // the function, without the object it is called on
  if (const size_t arrow = what.substr(0, what.find('(')).rfind("->"); arrow != what.npos) {
    what.remove_prefix(arrow + 2);
  }
  absl::Status status = ErrorStatus(runtime_, error, what, file, line);
  if (!IsSticky(error)) return status;
  status = absl::Status(status.code(), absl::StrCat(status.message(), ". ", name_,
                                                    " is unusable in this process from here on"));
  std::lock_guard lock(mutex_);
  if (broken_.ok()) broken_ = status;
  return status;
}

absl::Status Context::Broken() const {
  std::lock_guard lock(mutex_);
  return broken_;
}

absl::Status Context::Usable() const {
  const absl::Status broken = Broken();
  if (broken.ok()) return broken;
  return absl::FailedPreconditionError(absl::StrCat(
      name_,
      " is unusable since an earlier error; restart the worker. It was: ", broken.message()));
}

absl::Status Context::Enter() {
  ZS_RETURN_IF_ERROR(Usable());
  return ZS_CUDA_STATUS(this, runtime_->SetDevice(ordinal_));
}

absl::StatusOr<EventHandle> Context::TakeEvent() {
  {
    std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      EventHandle event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  EventHandle event = nullptr;
  ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(this, runtime_->CreateEvent(&event)));
  return event;
}

void Context::GiveEvent(EventHandle event) {
  std::lock_guard lock(mutex_);
  events_.push_back(event);
}

absl::Status Context::AddStream(StreamHandle stream) {
  std::lock_guard lock(streams_mutex_);
  streams_.push_back(stream);
  if (ordered_ == nullptr) return absl::OkStatus();
  return ZS_CUDA_STATUS(this, runtime_->WaitEvent(stream, ordered_));
}

void Context::RemoveStream(StreamHandle stream) {
  std::lock_guard lock(streams_mutex_);
  streams_.erase(std::remove(streams_.begin(), streams_.end(), stream), streams_.end());
}

absl::Status Context::OrderAllAfter(StreamHandle compute) {
  std::lock_guard lock(streams_mutex_);
  if (ordered_ == nullptr) {
    ZS_ASSIGN_OR_RETURN(ordered_, TakeEvent());
  }
  ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(this, runtime_->RecordEvent(ordered_, compute)));
  for (StreamHandle stream : streams_) {
    if (stream == compute) continue;
    ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(this, runtime_->WaitEvent(stream, ordered_)));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard::cuda
