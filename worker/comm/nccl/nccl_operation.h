// One operation of a communicator, from the call to its end.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "worker/comm/nccl/nccl_api.h"
#include "worker/device/device.h"

namespace zeroshard {

class NcclQueue;

// Thread-safe. Ends with the queue at the latest, and may outlive it.
class NcclOperation : public Event::State {
 public:
  // `what` names it in messages. `body` puts it on the stream; `succeeded` is called once where it
  // ends well (both may be null).
  NcclOperation(NcclQueue* queue, std::shared_ptr<NcclApi> api, std::string what, Event after,
                std::function<absl::Status()> body, std::function<void()> succeeded);
  ~NcclOperation() override;

  bool Done() const override;
  // Looks at the GPU itself, so that it does not wait for the watcher's next look.
  absl::Status Wait() override;

  // Whether AwaitLaunched returns at once.
  bool Launched() const;
  // Waits until the operation is on the stream, or ended without. The mark at its end, which lives
  // as long as this object; null where it never came onto the stream.
  NcclMark* AwaitLaunched();

  const std::string& what() const { return what_; }
  Event after() const;

 private:
  friend class NcclQueue;

  // Ends it with OK where the GPU has done it and nothing is wrong.
  void Look() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SetLaunched(NcclMark* begin, NcclMark* end);
  void Finish(const absl::Status& status);
  void FinishLocked(const absl::Status& status) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string what_;
  uint64_t place_ = 0;  // in the GPU's LaunchOrder; set before the operation is in the queue

  mutable absl::Mutex mutex_;
  mutable absl::CondVar changed_;
  NcclQueue* const queue_;  // there until finished_
  const std::shared_ptr<NcclApi> api_;
  mutable Event after_ ABSL_GUARDED_BY(mutex_);
  mutable std::function<absl::Status()> body_;  // the launching thread's until launched
  mutable std::function<void()> succeeded_ ABSL_GUARDED_BY(mutex_);
  NcclMark* begin_ ABSL_GUARDED_BY(mutex_) = nullptr;
  NcclMark* end_ ABSL_GUARDED_BY(mutex_) = nullptr;
  mutable bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  mutable absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

// Waits that grow with the time waited already: short ones cost no latency, long ones no CPU.
class Backoff {
 public:
  absl::Duration Next() {
    const absl::Duration now = next_;
    next_ = std::min(next_ * 1.5, absl::Microseconds(500));
    return now;
  }

 private:
  absl::Duration next_ = absl::Microseconds(10);
};

}  // namespace zeroshard
