// What the offload client does for one call of Push or Pull, from the call to its event.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "worker/device/device.h"
#include "worker/device/host_event.h"

namespace zeroshard {

// Shared by everything that still reads from or writes into the caller's memory, gRPC's slices
// among them: the event is done when the last of them has let go. Thread-safe.
class Transfer {
 public:
  // `elements`: that must be told of as done for the transfer to end well.
  explicit Transfer(int64_t elements) : event_(std::make_shared<HostEvent>()), left_(elements) {}
  ~Transfer() {
    if (status_.ok() && left_ != 0) status_ = absl::AbortedError("the transfer was given up");
    event_->Finish(std::move(status_));
  }
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  Event event() const { return Event(event_); }
  // The first error stays.
  void Fail(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (status_.ok()) status_ = status;
  }
  void Finish(int64_t elements) {
    std::lock_guard<std::mutex> lock(mutex_);
    left_ -= elements;
  }

 private:
  const std::shared_ptr<HostEvent> event_;
  std::mutex mutex_;
  int64_t left_;
  absl::Status status_;
};

// A part of a transfer within one chunk. Counts against what may be on its way until the last
// reference is gone, then says so.
struct TransferPiece {
  TransferPiece(std::shared_ptr<Transfer> of, std::function<void(int64_t)> given_back)
      : transfer(std::move(of)), on_gone(std::move(given_back)) {}
  ~TransferPiece() {
    transfer.reset();
    if (on_gone) on_gone(count);
  }
  TransferPiece(const TransferPiece&) = delete;
  TransferPiece& operator=(const TransferPiece&) = delete;

  std::shared_ptr<Transfer> transfer;
  const std::function<void(int64_t)> on_gone;
  uint64_t step = 0;
  uint32_t chunk = 0;
  uint32_t begin = 0, count = 0;          // elements from the chunk's begin
  const char* from = nullptr;             // pushes
  char* to = nullptr;                     // pulls
  uint32_t received = 0;                  // elements; pulls
  std::atomic<size_t> unacknowledged{0};  // frames, of all replicas; pushes
};

}  // namespace zeroshard
