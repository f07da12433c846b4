// What the parts of one CUDA device share. Whatever they hand out (buffers, events) keeps it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/cuda/runtime.h"

namespace zeroshard::cuda {

// Thread-safe.
class Context {
 public:
  // `runtime` outlives the context.
  Context(Runtime* runtime, int ordinal, DeviceProperties properties);
  // Destroys its native events.
  ~Context();

  Runtime* runtime() const { return runtime_; }
  int ordinal() const { return ordinal_; }
  const DeviceProperties& properties() const { return properties_; }
  const std::string& name() const { return name_; }  // "cuda:0"

  // Every call's result goes through here (ZS_CUDA_STATUS). A sticky error makes the device
  // unusable: it is kept, and the message says so.
  absl::Status Check(Error error, const char* call, const char* file, int line);
  // OK while the device is usable, else what made it unusable, with its own code.
  absl::Status Broken() const;
  // The same as FAILED_PRECONDITION, for what is asked of the device afterwards.
  absl::Status Usable() const;
  // Makes the device the calling thread's. FAILED_PRECONDITION where it is unusable.
  absl::Status Enter();

  // Native events, kept for reuse: making one is a call of the driver, and a step takes hundreds.
  absl::StatusOr<EventHandle> TakeEvent();
  void GiveEvent(EventHandle event);

  // Every stream of the device but `compute`: what is enqueued on them after OrderAllAfter, also on
  // those that are added later, runs after what is on `compute` now.
  absl::Status AddStream(StreamHandle stream);
  void RemoveStream(StreamHandle stream);
  absl::Status OrderAllAfter(StreamHandle compute);

 private:
  Runtime* const runtime_;
  const int ordinal_;
  const DeviceProperties properties_;
  const std::string name_;

  mutable std::mutex mutex_;
  absl::Status broken_;
  std::vector<EventHandle> events_;

  // Held while work is enqueued, so that a stream cannot be destroyed meanwhile.
  std::mutex streams_mutex_;
  std::vector<StreamHandle> streams_;
  EventHandle ordered_ = nullptr;  // the last OrderAllAfter
};

}  // namespace zeroshard::cuda

// `call` is an Error of context->runtime(): ZS_CUDA_STATUS(context, runtime->SetDevice(0)).
#define ZS_CUDA_STATUS(context, call) (context)->Check((call), #call, __FILE__, __LINE__)
