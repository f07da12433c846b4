// Events that the host completes, and events made of others.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "worker/device/device.h"

namespace zeroshard {

// Done when Finish is called, once. Thread-safe.
class HostEvent : public Event::State {
 public:
  bool Done() const override {
    std::lock_guard lock(mutex_);
    return done_;
  }
  absl::Status Wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return status_;
  }
  void Finish(absl::Status status) {
    std::lock_guard lock(mutex_);
    status_ = std::move(status);
    done_ = true;
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
};

// Done already, with this status.
Event DoneEvent(absl::Status status);

// Done when all of them are; its status is that of the first in the list that failed. Of one event
// that is not empty it is that event itself.
Event AllOf(std::vector<Event> events);

}  // namespace zeroshard
