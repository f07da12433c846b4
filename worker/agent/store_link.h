// One shard store as a rank sees it: a stream that pushes and a stream that pulls, each with a
// connection of its own, and what is on its way on them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/bulk/transport/client_stream.h"
#include "common/member/cancellation.h"
#include "common/types.h"
#include "worker/agent/transfer.h"
#include "worker/zero/state_store.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard {

// Thread-safe. Nothing is called while a lock is held.
class StoreLink : public std::enable_shared_from_this<StoreLink> {
 public:
  struct Options {
    v1::StoreMap::Store store;
    v1::BulkHello hello;
    uint64_t epoch = 0;
    DType dtype = DType::kF32;
    std::shared_ptr<OffloadCounters> counters;
    bool shared_memory = true;
    // A stream that had been opened has ended, or the store said what cannot be. May come more
    // than once.
    std::function<void(const absl::Status&)> on_fail;
  };

  static std::shared_ptr<StoreLink> Make(Options options) {
    return std::shared_ptr<StoreLink>(new StoreLink(std::move(options)));
  }

  // Connects both streams in the background. Call it again after UNAVAILABLE.
  void StartOpening();
  // OK once both are open; nothing while that may still be.
  std::optional<absl::Status> Opened(absl::Duration timeout);

  // Sends a piece; `checksums` is shared by the replicas: one for each of its frames, or empty.
  using Checksums = std::vector<std::shared_ptr<std::atomic<uint64_t>>>;
  void Push(const std::shared_ptr<TransferPiece>& piece, const Checksums& checksums);
  void Pull(std::shared_ptr<TransferPiece> piece);

  // Ends both streams; what is on its way fails with `reason`.
  void Close(const absl::Status& reason);

  using Steady = std::chrono::steady_clock;
  // What has waited longest, and since when nothing moved.
  struct Stalled {
    Steady::time_point moved;
    uint64_t step = 0;
    uint32_t chunk = 0;
    bool pull = false;
  };
  std::optional<Stalled> Oldest() const;

  std::string name() const;  // for messages: "store store-0 at 10.0.0.7:7072"

 private:
  struct Stream {
    std::shared_ptr<bulk::ClientStream> stream;
    bool opening = false, open = false;
    absl::Status ended;  // of the attempt to open
  };

  explicit StoreLink(Options options) : options_(std::move(options)) {}
  std::shared_ptr<bulk::ClientStream> Connect(bool pull);
  absl::Status OnFrame(bool pull, const bulk::ReceivedFrame& frame);
  absl::Status OnAcknowledged(const bulk::Header& header);
  absl::Status OnData(const bulk::ReceivedFrame& frame);
  void OnEnd(bool pull, const absl::Status& status);
  absl::Status Named(const absl::Status& status) const;
  void Moved();  // with the lock

  const Options options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Stream push_, pull_;
  bool closed_ = false;
  uint32_t next_tag_ = 1;
  struct Unacknowledged {
    uint32_t tag = 0;
    uint32_t bytes = 0;
    std::shared_ptr<TransferPiece> piece;
  };
  std::deque<Unacknowledged> pushes_;                         // in the order sent
  std::map<uint32_t, std::shared_ptr<TransferPiece>> pulls_;  // by tag
  std::deque<bulk::Outgoing> later_;                          // of them, those not asked for yet
  Steady::time_point moved_ = Steady::now();
};

// The number of frames that a push of so many elements takes.
size_t FramesOf(uint32_t count, DType dtype);

}  // namespace zeroshard
