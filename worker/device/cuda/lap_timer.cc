#include "worker/device/cuda/lap_timer.h"

#include <utility>

#include "common/status_macros.h"

namespace zeroshard::cuda {

CudaLapTimer::~CudaLapTimer() {
  if (!context_->Enter().ok()) return;  // nothing can be given back any more
  for (const Mark& mark : marks_) free_.push_back(mark.event);
  for (EventHandle event : free_) context_->runtime()->DestroyEvent(event);
}

absl::StatusOr<EventHandle> CudaLapTimer::Take() {
  ZS_RETURN_IF_ERROR(context_->Enter());
  EventHandle event = nullptr;
  if (free_.empty()) {
    ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(context_, context_->runtime()->CreateTimedEvent(&event)));
  } else {
    event = free_.back();
    free_.pop_back();
  }
  return event;
}

void CudaLapTimer::Begin(int label) {
  if (broken_) return;
  const absl::StatusOr<EventHandle> event = Take();
  broken_ = !event.ok();
  if (broken_) return;
  marks_.push_back({*event, label});
  Runtime* const runtime = context_->runtime();
  broken_ = !ZS_CUDA_STATUS(context_, runtime->RecordEvent(*event, stream_)).ok();
}

void CudaLapTimer::Collect(const std::function<void(int label, uint64_t nanoseconds)>& add) {
  Runtime* const runtime = context_->runtime();
  while (!broken_ && marks_.size() > 1) {
    if (runtime->QueryEvent(marks_[1].event) != Error::kOk) return;
    float milliseconds = 0;
    broken_ = !ZS_CUDA_STATUS(context_,
                              runtime->ElapsedTime(marks_[0].event, marks_[1].event, &milliseconds))
                   .ok();
    if (broken_) return;
    add(marks_[0].label, static_cast<uint64_t>(1e6 * static_cast<double>(milliseconds)));
    free_.push_back(marks_.front().event);
    marks_.pop_front();
  }
}

}  // namespace zeroshard::cuda
