// Where the time of a rank goes, by phase of the step, and the same stretches as ranges for the
// device's profiler: "step 12", in it "forward blocks.3", in that "wait for ranks".
//
// Where the compute stream runs on the training thread, phases are that thread's time. On a device
// whose work is done later they are the compute stream's own (LapTimer): what it computed for a
// phase, and how long it stood still there. Either way every moment counts for one phase, and what
// is waited for counts for communication or offload instead of the phase around it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "worker/comm/waiting.h"
#include "worker/device/device.h"
#include "worker/train/trainer.h"

namespace zeroshard {

// Not thread-safe. Begins in the data phase; ends its ranges when it goes.
class PhaseClock : public WaitObserver {
 public:
  // Both outlive it.
  PhaseClock(TrainCounters* counters, Device* device);
  ~PhaseClock() override;
  PhaseClock(const PhaseClock&) = delete;
  PhaseClock& operator=(const PhaseClock&) = delete;

  void BeginStep(uint64_t step);
  // `what`: the unit, or else what the phase is about.
  void Enter(StepPhase phase, const std::string& what);
  void BeginWait(WaitKind kind) override;
  void EndWait() override;

 private:
  // What a stretch of time counts for: a phase, or waiting for other stages, which counts for
  // communication and apart.
  using Label = int;
  static constexpr Label kStageWait = kStepPhases;
  static Label LabelOf(WaitKind kind);
  // What follows counts for `label`.
  void Turn(Label label);
  void Turn(StepPhase phase) { Turn(static_cast<Label>(phase)); }
  void Charge(Label label, uint64_t nanoseconds);
  void EndPhase();

  TrainCounters& counters_;
  Device* const device_;
  const std::unique_ptr<LapTimer> laps_;  // null: the host's clock
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  Label counted_ = static_cast<Label>(StepPhase::kData);  // now
  StepPhase phase_ = StepPhase::kData;                    // apart from waits
  bool in_step_ = false, in_phase_ = false;
};

}  // namespace zeroshard
