#include "worker/zero/buffer_pool.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace zeroshard {

absl::StatusOr<Buffer> BufferPool::Take(size_t bytes) {
  // A far larger one stays free for whom it was made: the head's must not serve a block.
  const size_t most = most_bytes_.has_value() ? bytes : 2 * bytes;
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->bytes() < bytes || it->bytes() > most) continue;
    if (best == free_.end() || it->bytes() < best->bytes()) best = it;
  }
  Buffer buffer;
  if (best != free_.end()) {
    buffer = std::move(*best);
    free_bytes_ -= buffer.bytes();
    free_.erase(best);
  } else {
    while (most_bytes_.has_value() && !free_.empty() &&
           lent_bytes_ + free_bytes_ + bytes > *most_bytes_) {
      free_bytes_ -= free_.front().bytes();
      free_.pop_front();
    }
    ZS_ASSIGN_OR_RETURN(buffer, device_->Allocate(bytes, MemoryKind::kBuffers));
  }
  lent_bytes_ += buffer.bytes();
  return buffer;
}

void BufferPool::Give(Buffer buffer) {
  if (buffer.bytes() == 0) return;
  lent_bytes_ -= buffer.bytes();
  free_bytes_ += buffer.bytes();
  free_.push_back(std::move(buffer));
}

absl::StatusOr<Buffer> InFlightPool::Take(size_t bytes) {
  while (static_cast<int>(in_flight_.size()) >= limit_) ZS_RETURN_IF_ERROR(RetireOldest());
  return pool_.Take(bytes);
}

absl::StatusOr<bool> InFlightPool::Full() {
  while (static_cast<int>(in_flight_.size()) >= limit_) {
    const std::vector<Event>& events = in_flight_.front().events;
    if (!std::all_of(events.begin(), events.end(), [](const Event& e) { return e.Done(); }))
      return true;
    ZS_RETURN_IF_ERROR(RetireOldest());
  }
  return false;
}

void InFlightPool::GiveAfter(Buffer buffer, std::vector<Event> events,
                             std::function<absl::Status()> last_use) {
  in_flight_.push_back({std::move(buffer), std::move(events), std::move(last_use)});
}

absl::Status InFlightPool::FinishUses() {
  for (InFlight& in_flight : in_flight_) ZS_RETURN_IF_ERROR(FinishUse(&in_flight));
  return absl::OkStatus();
}

absl::Status InFlightPool::FinishUse(InFlight* in_flight) {
  const std::function<absl::Status()> last_use = std::exchange(in_flight->last_use, nullptr);
  return last_use ? last_use() : absl::OkStatus();
}

absl::Status InFlightPool::Drain() {
  while (!in_flight_.empty()) ZS_RETURN_IF_ERROR(RetireOldest());
  return absl::OkStatus();
}

absl::Status InFlightPool::RetireOldest() {
  absl::Status status = FinishUse(&in_flight_.front());
  for (const Event& event : in_flight_.front().events) status.Update(event.Wait());
  pool_.Give(std::move(in_flight_.front().buffer));
  in_flight_.pop_front();
  return status;
}

}  // namespace zeroshard
