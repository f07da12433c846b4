// Laps of a CUDA stream, told apart by events with timing.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/device/cuda/context.h"
#include "worker/device/device.h"

namespace zeroshard::cuda {

// Measures no more after an error: whoever uses the device is told of that.
class CudaLapTimer : public LapTimer {
 public:
  // `stream` outlives it.
  CudaLapTimer(std::shared_ptr<Context> context, StreamHandle stream)
      : context_(std::move(context)), stream_(stream) {}
  ~CudaLapTimer() override;

  void Begin(int label) override;
  void Collect(const std::function<void(int label, uint64_t nanoseconds)>& add) override;

 private:
  struct Mark {
    EventHandle event = nullptr;
    int label = 0;  // of the lap that begins here
  };
  absl::StatusOr<EventHandle> Take();

  const std::shared_ptr<Context> context_;
  const StreamHandle stream_;
  bool broken_ = false;
  std::deque<Mark> marks_;
  std::vector<EventHandle> free_;  // making one is a call of the driver
};

}  // namespace zeroshard::cuda
