// The order in which the communicators of one GPU launch: that in which their operations were
// enqueued. A kernel of NCCL's waits on the GPU for its peers. Where it has no room for two of them
// side by side, two ranks that launch them the other way around wait for each other for ever; ranks
// whose programs enqueue in one order launch in one order too.
#pragma once

#include <cstdint>
#include <set>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace zeroshard {

// Thread-safe.
class LaunchOrder {
 public:
  // The place after all that have been taken. It must be left, launched or not.
  uint64_t Take();
  // Whether every place before has been left.
  bool Reached(uint64_t place) const;
  // Waits for that, for so long at most.
  bool Await(uint64_t place, absl::Duration limit) const;
  void Leave(uint64_t place);

 private:
  bool ReachedLocked(uint64_t place) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  mutable absl::CondVar left_;
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::set<uint64_t> taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace zeroshard
