// How long to wait before the next try: doubling, with jitter, so that a thousand members do not
// come back to a restarted coordinator in the same instant.
#pragma once

#include <cstdint>
#include <random>

#include "absl/time/time.h"

namespace zeroshard {

// Not thread-safe.
class Backoff {
 public:
  Backoff(absl::Duration first, absl::Duration most, uint64_t seed);

  // The n-th call since Reset returns between half and all of min(most, first * 2^(n-1)).
  absl::Duration Next();
  void Reset() { current_ = first_; }

 private:
  const absl::Duration first_;
  const absl::Duration most_;
  absl::Duration current_;
  std::mt19937_64 random_;
};

// A seed from the system, different in each process.
uint64_t RandomSeed();

}  // namespace zeroshard
