#include "worker/zero/buffer_pool.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace zeroshard {

absl::StatusOr<Buffer> BufferPool::Take(size_t bytes) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    // A far larger one stays free for whom it was made: the head's must not serve a block.
    if (it->bytes() < bytes || it->bytes() > 2 * bytes) continue;
    if (best == free_.end() || it->bytes() < best->bytes()) best = it;
  }
  if (best == free_.end()) return device_->Allocate(bytes, MemoryKind::kBuffers);
  Buffer buffer = std::move(*best);
  free_.erase(best);
  return buffer;
}

void BufferPool::Give(Buffer buffer) {
  if (buffer.bytes() > 0) free_.push_back(std::move(buffer));
}

absl::StatusOr<Buffer> InFlightPool::Take(size_t bytes) {
  while (static_cast<int>(in_flight_.size()) >= limit_) ZS_RETURN_IF_ERROR(RetireOldest());
  return pool_.Take(bytes);
}

void InFlightPool::GiveAfter(Buffer buffer, std::vector<Event> events) {
  in_flight_.push_back({std::move(buffer), std::move(events)});
}

absl::Status InFlightPool::Drain() {
  while (!in_flight_.empty()) ZS_RETURN_IF_ERROR(RetireOldest());
  return absl::OkStatus();
}

absl::Status InFlightPool::RetireOldest() {
  absl::Status status;
  for (const Event& event : in_flight_.front().events) status.Update(event.Wait());
  pool_.Give(std::move(in_flight_.front().buffer));
  in_flight_.pop_front();
  return status;
}

}  // namespace zeroshard
