#include "worker/comm/nccl/launch_order.h"

#include "absl/time/clock.h"

namespace zeroshard {

uint64_t LaunchOrder::Take() {
  absl::MutexLock lock(&mutex_);
  taken_.insert(taken_.end(), next_);
  return next_++;
}

bool LaunchOrder::Reached(uint64_t place) const {
  absl::MutexLock lock(&mutex_);
  return ReachedLocked(place);
}

bool LaunchOrder::ReachedLocked(uint64_t place) const {
  return taken_.empty() || *taken_.begin() >= place;
}

bool LaunchOrder::Await(uint64_t place, absl::Duration limit) const {
  const absl::Time until = absl::Now() + limit;
  absl::MutexLock lock(&mutex_);
  while (!ReachedLocked(place)) {
    if (left_.WaitWithDeadline(&mutex_, until)) return ReachedLocked(place);
  }
  return true;
}

void LaunchOrder::Leave(uint64_t place) {
  absl::MutexLock lock(&mutex_);
  taken_.erase(place);
  left_.SignalAll();
}

}  // namespace zeroshard
