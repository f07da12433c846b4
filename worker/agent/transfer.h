// What the offload client does for one call of Push or Pull, from the call to its event.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "absl/status/status.h"
#include "worker/device/device.h"

namespace zeroshard {

// An event that is done when it is told so. Thread-safe.
class TransferEvent : public Event::State {
 public:
  bool Done() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  absl::Status Wait() override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    return status_;
  }
  void Set(absl::Status status) {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    status_ = std::move(status);
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  absl::Status status_;
};

// Shared by everything that still reads from or writes into the caller's memory, gRPC's slices
// among them: the event is done when the last of them has let go. Thread-safe.
class Transfer {
 public:
  // `elements`: that must be told of as done for the transfer to end well.
  explicit Transfer(int64_t elements)
      : event_(std::make_shared<TransferEvent>()), left_(elements) {}
  ~Transfer() {
    if (status_.ok() && left_ != 0) status_ = absl::AbortedError("the transfer was given up");
    event_->Set(std::move(status_));
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
  const std::shared_ptr<TransferEvent> event_;
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
