#include "shard_store/service/peer_reader.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bulk/transport/client_stream.h"

namespace zeroshard::store {
namespace {

using bulk::FrameType;
using bulk::Header;

constexpr uint32_t kMostElements = bulk::kMaxPayload / sizeof(float);

// What the stream's callbacks and the reading thread share.
struct Reading {
  std::mutex mutex;
  std::condition_variable changed;
  bool welcomed = false;
  absl::Status ended;
  uint64_t moved = 0;  // frames so far
  // The read under way.
  uint32_t chunk = 0;
  uint32_t begin = 0;  // of the next frame, elements from the chunk's begin
  float* to = nullptr;
  size_t left = 0;

  absl::Status Take(const bulk::ReceivedFrame& frame) {
    std::lock_guard<std::mutex> lock(mutex);  // the memory copied to is the reading thread's
    ++moved;
    changed.notify_all();
    if (frame.header.type == FrameType::kWelcome) {
      welcomed = true;
      return absl::OkStatus();
    }
    const Header& header = frame.header;
    if (header.type != FrameType::kData || header.dtype != DType::kF32 || header.chunk != chunk ||
        header.begin != begin || header.count == 0 || header.count > left) {
      return absl::InternalError(absl::StrCat("chunk ", chunk, ": wanted ", left, " elements from ",
                                              begin, " on, got ", header.count, " of chunk ",
                                              header.chunk, " from ", header.begin, " on"));
    }
    bulk::CopyTo(frame.parts, reinterpret_cast<char*>(to));
    to += header.count;
    begin += header.count;
    left -= header.count;
    return absl::OkStatus();
  }
  void End(const absl::Status& status) {
    std::lock_guard<std::mutex> lock(mutex);
    if (ended.ok()) ended = status;
    changed.notify_all();
  }
};

class BulkPeerReader : public PeerReader {
 public:
  BulkPeerReader(const v1::StoreMap::Store& peer, const v1::BulkHello& hello,
                 absl::Duration timeout)
      : name_(absl::StrCat("store ", peer.member(), " at ", peer.address())),
        generation_(hello.generation()),
        timeout_(timeout),
        reading_(std::make_shared<Reading>()) {
    bulk::ClientStream::Handler handler;
    handler.on_frame = [reading = reading_](const auto& frame) { return reading->Take(frame); };
    handler.on_end = [reading = reading_](const absl::Status& status) { reading->End(status); };
    // Stores are on different hosts, as a rule, and one that does not answer is tried again 20
    // times a second: no region of 4 MiB is made for each try.
    bulk::Sharing sharing;
    sharing.wanted = false;
    stream_ = bulk::ClientStream::Open(peer.address(), hello, std::move(handler), sharing);
  }
  ~BulkPeerReader() override { Cancel(); }

  absl::Status Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind, int64_t begin,
                    absl::Span<float> values) override {
    std::lock_guard<std::mutex> turn(turn_);
    std::unique_lock<std::mutex> lock(reading_->mutex);
    while (!reading_->welcomed && reading_->ended.ok()) {
      if (!Wait(&lock)) return Late("for its welcome");
    }
    if (!reading_->ended.ok()) return Named(reading_->ended);
    reading_->chunk = chunk;
    reading_->begin = static_cast<uint32_t>(begin);
    reading_->to = values.data();
    reading_->left = values.size();
    lock.unlock();
    for (size_t at = 0; at < values.size(); at += kMostElements) {
      bulk::Outgoing out;
      out.header.type = FrameType::kState;
      out.header.generation = generation_;
      out.header.epoch = version.epoch();
      out.header.step = version.step();
      out.header.chunk = chunk;
      out.header.begin = static_cast<uint32_t>(begin + static_cast<int64_t>(at));
      out.header.count = static_cast<uint32_t>(std::min<size_t>(kMostElements, values.size() - at));
      out.header.code = static_cast<uint32_t>(kind);
      stream_->Send(std::move(out));
    }
    lock.lock();
    bool in_time = true;
    while (in_time && reading_->left > 0 && reading_->ended.ok()) in_time = Wait(&lock);
    const bool complete = reading_->left == 0;
    reading_->left = 0;  // nothing is written to `values` any more
    if (complete) return absl::OkStatus();
    if (!in_time) return Late(absl::StrCat("for chunk ", chunk, " after step ", version.step()));
    return Named(reading_->ended);
  }

  void Cancel() override {
    const absl::Status closed = absl::CancelledError("no more is wanted of it");
    reading_->End(closed);  // the transport may take its time
    stream_->Cancel(closed);
  }

 private:
  // Until a frame comes or the stream ends. False: neither within the time.
  bool Wait(std::unique_lock<std::mutex>* lock) {
    return reading_->changed.wait_for(*lock, absl::ToChronoNanoseconds(timeout_),
                                      [this, seen = reading_->moved] {
                                        return reading_->moved != seen || !reading_->ended.ok();
                                      });
  }
  absl::Status Named(const absl::Status& status) const {
    return absl::Status(status.code(), absl::StrCat(name_, ": ", status.message()));
  }
  absl::Status Late(const std::string& what) const {
    return absl::DeadlineExceededError(
        absl::StrCat(name_, ": waited ", absl::FormatDuration(timeout_), " ", what));
  }

  const std::string name_;
  const uint64_t generation_;
  const absl::Duration timeout_;
  std::mutex turn_;
  const std::shared_ptr<Reading> reading_;
  std::shared_ptr<bulk::ClientStream> stream_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PeerReader>> ConnectPeer(const v1::StoreMap::Store& peer,
                                                        const v1::BulkHello& hello,
                                                        absl::Duration timeout) {
  return std::make_unique<BulkPeerReader>(peer, hello, timeout);
}

}  // namespace zeroshard::store
