#include "common/clock.h"

#include <chrono>

#include "absl/time/clock.h"

namespace zeroshard {

absl::Duration SystemClock::Now() const {
  static const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  return absl::FromChrono(std::chrono::steady_clock::now() - start);
}

absl::Time SystemClock::Wall() const { return absl::Now(); }

SystemClock& SystemClock::Get() {
  static SystemClock* clock = new SystemClock;
  return *clock;
}

absl::Duration ManualClock::Now() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return now_;
}

absl::Time ManualClock::Wall() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return wall_;
}

void ManualClock::Advance(absl::Duration by) {
  std::lock_guard<std::mutex> lock(mutex_);
  now_ += by;
  wall_ += by;
}

void ManualClock::JumpWall(absl::Duration by) {
  std::lock_guard<std::mutex> lock(mutex_);
  wall_ += by;
}

}  // namespace zeroshard
