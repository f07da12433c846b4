// Transient device buffers that are handed out again instead of being freed, so that a step
// allocates nothing once it has run. Not thread-safe.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/device/device.h"

namespace zeroshard {

class BufferPool {
 public:
  explicit BufferPool(Device* device) : device_(device) {}
  // Free buffers go rather than that lent and free ones together take more than `most_bytes`, and
  // none is lent for less than it is.
  BufferPool(Device* device, size_t most_bytes) : device_(device), most_bytes_(most_bytes) {}

  // A free buffer of `bytes` to twice as many, or a new one. Contents undefined.
  absl::StatusOr<Buffer> Take(size_t bytes);
  void Give(Buffer buffer);

 private:
  Device* device_;
  const std::optional<size_t> most_bytes_;
  size_t lent_bytes_ = 0, free_bytes_ = 0;
  std::deque<Buffer> free_;
};

// At most `limit` buffers at once, each in use until the events that read it are done: taking one
// more waits for the oldest. Gradients on their way out.
class InFlightPool {
 public:
  InFlightPool(Device* device, int limit) : pool_(device), limit_(limit) {}

  absl::StatusOr<Buffer> Take(size_t bytes);
  // Whether Take would wait. The error of a buffer that came back meanwhile.
  absl::StatusOr<bool> Full();
  // The buffer is free again when every event is complete. `last_use`, which may be null, asks for
  // what the compute stream still reads there; it is called before anybody else gets the buffer.
  void GiveAfter(Buffer buffer, std::vector<Event> events,
                 std::function<absl::Status()> last_use = nullptr);
  // Calls every last use that is left, in order; the first error. The buffers stay in flight.
  absl::Status FinishUses();
  // Waits for everything in flight; the first error.
  absl::Status Drain();

 private:
  struct InFlight {
    Buffer buffer;
    std::vector<Event> events;
    std::function<absl::Status()> last_use;
  };
  static absl::Status FinishUse(InFlight* in_flight);
  absl::Status RetireOldest();

  BufferPool pool_;
  const int limit_;
  std::deque<InFlight> in_flight_;
};

}  // namespace zeroshard
