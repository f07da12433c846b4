#include "worker/train/step_meter.h"

#include <utility>

namespace zeroshard {

StepTraffic StepMeter::Read() const {
  StepTraffic read;
  for (const TrafficCounters* traffic : traffic_) {
    for (const auto& op : traffic->bytes) {
      for (const auto& bytes : op) read.sent += bytes.load();
    }
  }
  if (offload_ != nullptr) {
    read.pushed = offload_->pushed.load();
    read.pulled = offload_->pulled.load();
  }
  return read;
}

void StepMeter::Mark(uint64_t step) {
  const StepTraffic now = Read();
  if (std::exchange(plain_, true)) {
    std::lock_guard<std::mutex> lock(mutex_);
    last_ = {step, now.sent - base_.sent, now.pushed - base_.pushed, now.pulled - base_.pulled};
  }
  base_ = now;
}

StepTraffic StepMeter::last() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

}  // namespace zeroshard
