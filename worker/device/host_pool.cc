#include "worker/device/host_pool.h"

#include <algorithm>
#include <utility>

#include "worker/device/host_event.h"

namespace zeroshard {

HostPool::~HostPool() { Drain(); }

Event HostPool::Run(size_t bytes, const Start& start) {
  std::lock_guard lock(mutex_);
  absl::StatusOr<Buffer> buffer = Take(bytes);
  if (!buffer.ok()) return DoneEvent(buffer.status());
  Event done = start(buffer->as<char>(), error_);
  uses_.push_back({*std::move(buffer), done});
  return done;
}

void HostPool::Drain() {
  std::lock_guard lock(mutex_);
  while (!uses_.empty()) End(0);
}

size_t HostPool::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

absl::StatusOr<Buffer> HostPool::Take(size_t bytes) {
  Collect();
  while (true) {
    auto best = free_.end();  // the smallest that is large enough
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->bytes() < bytes) continue;
      if (best == free_.end() || it->bytes() < best->bytes()) best = it;
    }
    if (best != free_.end()) {
      Buffer taken = std::move(*best);
      free_.erase(best);
      return taken;
    }
    const size_t buffers = uses_.size() + free_.size();
    const bool room =
        buffers < most_buffers_ && bytes <= most_bytes_ - std::min(most_bytes_, bytes_);
    if (room || buffers == 0) {
      absl::StatusOr<Buffer> made = device_->AllocateHost(bytes);
      if (made.ok()) bytes_ += made->bytes();
      return made;
    }
    if (free_.empty()) {
      End(0);
    } else {
      Drop(0);
    }
  }
}

void HostPool::Collect() {
  for (size_t i = 0; i < uses_.size();) {
    if (uses_[i].done.Done()) {
      End(i);
    } else {
      ++i;
    }
  }
}

void HostPool::End(size_t use) {
  error_.Update(uses_[use].done.Wait());
  free_.push_back(std::move(uses_[use].buffer));
  uses_.erase(uses_.begin() + static_cast<std::ptrdiff_t>(use));
  if (bytes_ > most_bytes_) Drop(free_.size() - 1);
}

void HostPool::Drop(size_t free) {
  bytes_ -= free_[free].bytes();
  free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(free));
}

}  // namespace zeroshard
