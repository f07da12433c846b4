// Time as an argument: code that waits or measures takes a Clock, so that tests move time
// themselves.
#pragma once

#include <mutex>

#include "absl/time/time.h"

namespace zeroshard {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  // Monotonic: never goes back, unrelated to the date. Only differences mean something; the first
  // reading of a process is small and not negative.
  virtual absl::Duration Now() const = 0;

  // The date, for people and file names only; may jump.
  virtual absl::Time Wall() const = 0;
};

class SystemClock : public Clock {
 public:
  absl::Duration Now() const override;
  absl::Time Wall() const override;

  // One for the whole process; never destroyed.
  static SystemClock& Get();
};

// Stands still until told otherwise.
class ManualClock : public Clock {
 public:
  explicit ManualClock(absl::Time wall = absl::UnixEpoch() + absl::Hours(24 * 365 * 56))
      : wall_(wall) {}

  absl::Duration Now() const override;
  absl::Time Wall() const override;

  // Moves both readings; `by` is not negative.
  void Advance(absl::Duration by);
  // Moves the date alone, as an administrator or NTP might.
  void JumpWall(absl::Duration by);

 private:
  mutable std::mutex mutex_;
  absl::Duration now_ = absl::ZeroDuration();
  absl::Time wall_;
};

}  // namespace zeroshard
