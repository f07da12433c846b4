// Events of a CUDA device. Between streams they cost a wait on the GPU and none on the host.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/cuda/context.h"
#include "worker/device/device.h"

namespace zeroshard::cuda {

// An event that streams wait for on the GPU. Others who enqueue on the GPU (a communicator) derive
// theirs from it, so that waiting for them holds up no host thread. Thread-safe.
class GpuEvent : public Event::State {
 public:
  // Whether AwaitRecorded returns at once.
  virtual bool Recorded() const = 0;
  // The recorded native event, which lives as long as this object; null where there is nothing to
  // wait for. Waits while the work before it is itself held back on the host. The error of work
  // that was never enqueued.
  virtual absl::StatusOr<EventHandle> AwaitRecorded() = 0;
  // The error that it will end with, where that is known already.
  virtual absl::Status KnownError() { return Done() ? Wait() : absl::OkStatus(); }
};

// Null where the event is empty or the host's.
GpuEvent* AsGpuEvent(const Event& event);
// The events that may still make `event` fail after its work was enqueued: none of a CudaEvent that
// follows only its device's own work, since an error of that is the whole device's.
std::vector<Event> SourcesOf(const Event& event);

// The event of work of a CudaStream: promised, then either recorded or failed.
class CudaEvent : public GpuEvent {
 public:
  explicit CudaEvent(std::shared_ptr<Context> context) : context_(std::move(context)) {}
  ~CudaEvent() override;

  bool Done() const override;
  absl::Status Wait() override;
  bool Recorded() const override;
  absl::StatusOr<EventHandle> AwaitRecorded() override;
  absl::Status KnownError() override;

  // One of the two, once. `native` was recorded, and belongs to this object from here on; `status`
  // is the first error of the work before it as far as it is known; `sources` are events whose
  // errors are this one's too.
  void SetRecorded(EventHandle native, absl::Status status, std::vector<Event> sources);
  void SetFailed(absl::Status status) { SetRecorded(nullptr, std::move(status), {}); }

  std::vector<Event> Sources() const;

 private:
  const std::shared_ptr<Context> context_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool recorded_ = false;
  EventHandle native_ = nullptr;
  absl::Status status_;
  std::vector<Event> sources_;
  mutable bool native_done_ = false;  // seen by Done or Wait
};

// Records a new native event on `stream` (a cudaStream_t of the device).
absl::StatusOr<Event> RecordOn(const std::shared_ptr<Context>& context, StreamHandle stream);

}  // namespace zeroshard::cuda
