// Host memory through which data of a device passes on its way to or from something that knows only
// host memory: kept from one use to the next, and bounded.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "worker/device/device.h"

namespace zeroshard {

// Thread-safe. The device must outlive it.
class HostPool {
 public:
  // At most so many buffers and bytes at a time; what alone is larger than `most_bytes` gets a
  // buffer of its own, which is given back after it.
  HostPool(Device* device, size_t most_buffers, size_t most_bytes)
      : device_(device), most_buffers_(most_buffers), most_bytes_(most_bytes) {}
  // Drains.
  ~HostPool();

  // Calls `start` with at least `bytes` of host memory, which is nobody else's until the event that
  // it returns, and Run returns, is done. One call at a time, in order. Where the bound is reached
  // the oldest use is waited for first: those events must not depend on what the caller does next.
  // `earlier`: the first error of the uses before that are known to have ended.
  // The event has RESOURCE_EXHAUSTED where the host has no memory; `start` is not called then.
  using Start = std::function<Event(char* host, const absl::Status& earlier)>;
  Event Run(size_t bytes, const Start& start);

  // Waits for every use that has begun.
  void Drain();
  // Of all buffers now.
  size_t bytes() const;

 private:
  struct Use {
    Buffer buffer;
    Event done;
  };
  absl::StatusOr<Buffer> Take(size_t bytes);
  void Collect();
  // Waits for it.
  void End(size_t use);
  void Drop(size_t free);

  Device* const device_;
  const size_t most_buffers_, most_bytes_;
  mutable std::mutex mutex_;
  std::deque<Use> uses_;  // from the oldest
  std::vector<Buffer> free_;
  size_t bytes_ = 0;  // of both
  absl::Status error_;
};

}  // namespace zeroshard
