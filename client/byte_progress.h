// How far a command is that reads or writes many bytes: a live line with bar, rate and time left.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "client/console.h"
#include "common/clock.h"

namespace zeroshard {

// Not thread-safe. Draws ten times a second at most, and on a terminal alone.
class ByteProgress {
 public:
  ByteProgress(Console* console, std::string name, uint64_t total)
      : console_(console), name_(std::move(name)), total_(total) {}

  void Add(uint64_t bytes) { Set(done_ + bytes); }
  void Set(uint64_t done);

  uint64_t done() const { return done_; }
  double seconds() const { return absl::ToDoubleSeconds(SystemClock::Get().Now() - begun_); }

 private:
  Console* const console_;
  const std::string name_;
  const uint64_t total_;
  const absl::Duration begun_ = SystemClock::Get().Now();
  absl::Duration drawn_ = begun_;
  uint64_t done_ = 0;
};

}  // namespace zeroshard
