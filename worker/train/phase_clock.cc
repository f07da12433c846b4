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
  constexpr const char* kNames[] = {"wait for ranks", "wait for stores", "wait for stages"};
  device_->BeginRange(kNames[static_cast<size_t>(kind)]);
  Turn(LabelOf(kind));
}

void PhaseClock::EndWait() {
  Turn(phase_);
  device_->EndRange();
}

void PhaseClock::EndPhase() {
  if (in_phase_) device_->EndRange();
  in_phase_ = false;
}

PhaseClock::Label PhaseClock::LabelOf(WaitKind kind) {
  if (kind == WaitKind::kStages) return kStageWait;
  return static_cast<Label>(kind == WaitKind::kStores ? StepPhase::kOffload
                                                      : StepPhase::kCommunication);
}

void PhaseClock::Charge(Label label, uint64_t nanoseconds) {
  if (label == kStageWait) {
    counters_.pipeline_wait_nanoseconds += nanoseconds;
    label = static_cast<Label>(StepPhase::kCommunication);
  }
  counters_.phase_nanoseconds[static_cast<size_t>(label)] += nanoseconds;
}

void PhaseClock::Turn(Label label) {
  if (laps_ != nullptr) {
    laps_->Begin(label);
    laps_->Collect([this](int of, uint64_t nanoseconds) { Charge(of, nanoseconds); });
  } else {
    const auto now = std::chrono::steady_clock::now();
    Charge(counted_, static_cast<uint64_t>(std::chrono::nanoseconds(now - since_).count()));
    since_ = now;
  }
  counted_ = label;
}

}  // namespace zeroshard
