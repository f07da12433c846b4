#include "worker/device/cuda/event.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace zeroshard::cuda {

GpuEvent* AsGpuEvent(const Event& event) { return dynamic_cast<GpuEvent*>(event.state().get()); }

std::vector<Event> SourcesOf(const Event& event) {
  if (auto* own = dynamic_cast<CudaEvent*>(event.state().get())) return own->Sources();
  if (AsGpuEvent(event) != nullptr) return {event};
  return {};
}

CudaEvent::~CudaEvent() {
  if (native_ != nullptr) context_->GiveEvent(native_);
}

bool CudaEvent::Recorded() const {
  std::lock_guard lock(mutex_);
  return recorded_;
}

absl::StatusOr<EventHandle> CudaEvent::AwaitRecorded() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return recorded_; });
  if (native_ == nullptr && !status_.ok()) return status_;
  return native_;
}

void CudaEvent::SetRecorded(EventHandle native, absl::Status status, std::vector<Event> sources) {
  std::lock_guard lock(mutex_);
  native_ = native;
  status_ = std::move(status);
  sources_ = std::move(sources);
  native_done_ = native == nullptr;
  recorded_ = true;
  changed_.notify_all();
}

bool CudaEvent::Done() const {
  std::vector<Event> sources;
  EventHandle native = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!recorded_) return false;
    if (!native_done_) native = native_;
    sources = sources_;
  }
  if (native != nullptr) {
    // On a thread without a device the runtime would make a context on GPU 0.
    context_->Enter().IgnoreError();
    // An error is an end too: Wait tells it.
    if (context_->runtime()->QueryEvent(native) == Error::kNotReady) return false;
    std::lock_guard lock(mutex_);
    native_done_ = true;
  }
  return std::all_of(sources.begin(), sources.end(), [](const Event& e) { return e.Done(); });
}

absl::Status CudaEvent::KnownError() {
  std::vector<Event> sources;
  {
    std::lock_guard lock(mutex_);
    if (!status_.ok()) return status_;
    sources = sources_;
  }
  for (const Event& source : sources) {
    if (absl::Status status = AsGpuEvent(source)->KnownError(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CudaEvent::Wait() {
  const absl::StatusOr<EventHandle> native = AwaitRecorded();
  if (!native.ok()) return native.status();
  absl::Status status;
  if (*native != nullptr) {
    Runtime* const runtime = context_->runtime();
    context_->Enter().IgnoreError();
    status = ZS_CUDA_STATUS(context_, runtime->SynchronizeEvent(*native));
  }
  for (const Event& source : Sources()) status.Update(source.Wait());
  std::lock_guard lock(mutex_);
  native_done_ = true;
  if (status_.ok()) status_ = std::move(status);
  sources_.clear();
  return status_;
}

std::vector<Event> CudaEvent::Sources() const {
  std::lock_guard lock(mutex_);
  return sources_;
}

absl::StatusOr<Event> RecordOn(const std::shared_ptr<Context>& context, StreamHandle stream) {
  ZS_RETURN_IF_ERROR(context->Enter());
  ZS_ASSIGN_OR_RETURN(EventHandle native, context->TakeEvent());
  const absl::Status status =
      ZS_CUDA_STATUS(context, context->runtime()->RecordEvent(native, stream));
  auto event = std::make_shared<CudaEvent>(context);
  event->SetRecorded(native, absl::OkStatus(), {});
  if (!status.ok()) return status;
  return Event(std::move(event));
}

}  // namespace zeroshard::cuda
