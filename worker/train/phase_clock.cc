#include "worker/train/phase_clock.h"

#include "absl/strings/str_cat.h"

namespace zeroshard {

PhaseClock::PhaseClock(TrainCounters* counters, Device* device)
    : counters_(*counters), device_(device), laps_(device->NewLapTimer()) {
  Turn(StepPhase::kData);
}

PhaseClock::~PhaseClock() {
  Turn(counted_);
  EndPhase();
  if (in_step_) device_->EndRange();
}

void PhaseClock::BeginStep(uint64_t step) {
  EndPhase();
  if (in_step_) device_->EndRange();
  device_->BeginRange(absl::StrCat("step ", step));
  in_step_ = true;
}

void PhaseClock::Enter(StepPhase phase, const std::string& what) {
  EndPhase();
  device_->BeginRange(what.empty() ? NameOf(phase) : absl::StrCat(NameOf(phase), " ", what));
  in_phase_ = true;
  phase_ = phase;
  Turn(phase);
}

void PhaseClock::BeginWait(WaitKind kind) {
  const bool ranks = kind == WaitKind::kRanks;
  device_->BeginRange(ranks ? "wait for ranks" : "wait for stores");
  Turn(ranks ? StepPhase::kCommunication : StepPhase::kOffload);
}

void PhaseClock::EndWait() {
  Turn(phase_);
  device_->EndRange();
}

void PhaseClock::EndPhase() {
  if (in_phase_) device_->EndRange();
  in_phase_ = false;
}

void PhaseClock::Turn(StepPhase phase) {
  if (laps_ != nullptr) {
    laps_->Begin(static_cast<int>(phase));
    laps_->Collect([this](int label, uint64_t nanoseconds) {
      Charge(static_cast<StepPhase>(label), nanoseconds);
    });
  } else {
    const auto now = std::chrono::steady_clock::now();
    Charge(counted_, static_cast<uint64_t>(std::chrono::nanoseconds(now - since_).count()));
    since_ = now;
  }
  counted_ = phase;
}

}  // namespace zeroshard
