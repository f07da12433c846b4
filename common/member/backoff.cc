#include "common/member/backoff.h"

#include <algorithm>

namespace zeroshard {

Backoff::Backoff(absl::Duration first, absl::Duration most, uint64_t seed)
    : first_(first), most_(most), current_(first), random_(seed) {}

absl::Duration Backoff::Next() {
  const absl::Duration whole = std::min(current_, most_);
  current_ = std::min(current_ * 2, most_);
  return whole * std::uniform_real_distribution<double>(0.5, 1.0)(random_);
}

uint64_t RandomSeed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace zeroshard
