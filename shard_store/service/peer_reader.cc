#include "shard_store/service/peer_reader.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bulk/transport/client_stream.h"
#include "common/status_macros.h"

namespace zeroshard::store {
namespace {

using bulk::FrameType;
using bulk::Header;
using Steady = std::chrono::steady_clock;

constexpr uint32_t kMostElements = bulk::kMaxPayload / sizeof(float);
constexpr absl::Duration kPause = absl::Milliseconds(50);

// What the stream's callbacks and the reading thread share.
struct Reading {
  std::mutex mutex;
  std::condition_variable changed;
  bool welcomed = false;
  absl::Status ended;
  uint64_t moved = 0;  // frames so far
  // The read under way.
  uint32_t tag = 0;
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
};

class BulkPeerReader : public PeerReader {
 public:
  BulkPeerReader(std::string name, uint64_t generation, absl::Duration timeout)
      : name_(std::move(name)), generation_(generation), timeout_(timeout) {}
  ~BulkPeerReader() override { Close(); }

  // One attempt.
  absl::Status Open(const std::string& address, const v1::BulkHello& hello,
                    absl::Duration timeout) {
    Close();
    reading_ = std::make_shared<Reading>();
    bulk::ClientStream::Handler handler;
    handler.on_frame = [reading = reading_](const auto& frame) { return reading->Take(frame); };
    handler.on_end = [reading = reading_](const absl::Status& status) {
      std::lock_guard<std::mutex> lock(reading->mutex);
      reading->ended = status;
      reading->changed.notify_all();
    };
    stream_ = bulk::ClientStream::Open(address, hello, std::move(handler));
    std::unique_lock<std::mutex> lock(reading_->mutex);
    reading_->changed.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                               [this] { return reading_->welcomed || !reading_->ended.ok(); });
    if (!reading_->ended.ok()) return Named(reading_->ended);
    if (!reading_->welcomed) return Late(timeout, "for its welcome");
    return absl::OkStatus();
  }

  absl::Status Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind, int64_t begin,
                    absl::Span<float> values) override {
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::lock_guard<std::mutex> lock(reading_->mutex);
      if (!reading_->ended.ok()) return Named(reading_->ended);
      reading_->chunk = chunk;
      reading_->begin = static_cast<uint32_t>(begin);
      reading_->to = values.data();
      reading_->left = values.size();
    }
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
    std::unique_lock<std::mutex> lock(reading_->mutex);
    while (reading_->left > 0 && reading_->ended.ok()) {
      const uint64_t seen = reading_->moved;
      const bool moved = reading_->changed.wait_for(lock, absl::ToChronoNanoseconds(timeout_), [&] {
        return reading_->moved != seen || !reading_->ended.ok() || reading_->left == 0;
      });
      if (!moved) {
        reading_->left = 0;  // nothing is written to `values` any more
        return Late(timeout_, absl::StrCat("for chunk ", chunk, " after step ", version.step()));
      }
    }
    if (reading_->left > 0) {
      reading_->left = 0;
      return Named(reading_->ended);
    }
    return absl::OkStatus();
  }

 private:
  void Close() {
    if (stream_ != nullptr) stream_->Cancel(absl::CancelledError("closed"));
    stream_.reset();
  }
  absl::Status Named(const absl::Status& status) const {
    return absl::Status(status.code(), absl::StrCat(name_, ": ", status.message()));
  }
  absl::Status Late(absl::Duration timeout, const std::string& what) const {
    return absl::DeadlineExceededError(
        absl::StrCat(name_, ": waited ", absl::FormatDuration(timeout), " ", what));
  }

  const std::string name_;
  const uint64_t generation_;
  const absl::Duration timeout_;
  std::mutex turn_;
  std::shared_ptr<Reading> reading_;
  std::shared_ptr<bulk::ClientStream> stream_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PeerReader>> ConnectPeer(const v1::StoreMap::Store& peer,
                                                        const v1::BulkHello& hello,
                                                        absl::Duration timeout) {
  auto reader = std::make_unique<BulkPeerReader>(
      absl::StrCat("store ", peer.member(), " at ", peer.address()), hello.generation(), timeout);
  const auto begun = Steady::now();
  while (true) {
    const absl::Duration left = timeout - absl::FromChrono(Steady::now() - begun);
    const absl::Status opened =
        reader->Open(peer.address(), hello, std::max(left, absl::ZeroDuration()));
    if (opened.ok()) return reader;
    if (!absl::IsUnavailable(opened) || left <= kPause) return opened;
    std::this_thread::sleep_for(absl::ToChronoMilliseconds(kPause));
  }
}

}  // namespace zeroshard::store
