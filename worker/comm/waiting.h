// Tells whoever measures it that the training thread, or on a device the compute stream, waits.
#pragma once

#include <cstdint>

namespace zeroshard {

// What is waited for: other ranks, the shard stores, or other stages of a pipeline.
enum class WaitKind : uint8_t { kRanks, kStores, kStages };

// Called on the training thread. Waits do not nest.
class WaitObserver {
 public:
  virtual ~WaitObserver() = default;
  virtual void BeginWait(WaitKind kind) = 0;
  virtual void EndWait() = 0;
};

// A wait for as long as it lives. `observer` may be null.
class Waiting {
 public:
  Waiting(WaitObserver* observer, WaitKind kind) : observer_(observer) {
    if (observer_ != nullptr) observer_->BeginWait(kind);
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting() {
    if (observer_ != nullptr) observer_->EndWait();
  }

 private:
  WaitObserver* const observer_;
};

}  // namespace zeroshard
