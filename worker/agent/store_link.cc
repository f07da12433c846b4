#include "worker/agent/store_link.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/crash_point.h"

namespace zeroshard {
namespace {

using bulk::FrameType;
using bulk::Header;

uint32_t ElementsOfFrame(DType dtype) {
  return static_cast<uint32_t>(bulk::kMaxPayload / SizeOf(dtype));
}

// A store reads no further while it has 64 pulls to answer, and then does not hear that there is
// room in shared memory.
constexpr size_t kMostAsked = 48;

// What gRPC says when a process at the other end went away.
bool IsLoss(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsCancelled(status) || absl::IsUnknown(status);
}

}  // namespace

size_t FramesOf(uint32_t count, DType dtype) {
  return (size_t{count} + ElementsOfFrame(dtype) - 1) / ElementsOfFrame(dtype);
}

std::string StoreLink::name() const {
  return absl::StrCat("store ", options_.store.member(), " at ", options_.store.address());
}

absl::Status StoreLink::Named(const absl::Status& status) const {
  return absl::Status(IsLoss(status) ? absl::StatusCode::kUnavailable : status.code(),
                      absl::StrCat(name(), ": ", status.message()));
}

// --- opening ---------------------------------------------------------------------------------

void StoreLink::StartOpening() {
  for (const bool pull : {false, true}) {
    Stream& side = pull ? pull_ : push_;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_ || side.open || side.opening) continue;
      side.opening = true;
      side.ended = absl::OkStatus();
    }
    std::shared_ptr<bulk::ClientStream> stream = Connect(pull);
    bool late = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      late = closed_;
      if (!late && (side.opening || side.open)) side.stream = stream;
    }
    if (late) stream->Cancel(absl::AbortedError("closed"));
  }
}

std::shared_ptr<bulk::ClientStream> StoreLink::Connect(bool pull) {
  std::weak_ptr<StoreLink> weak = weak_from_this();
  bulk::ClientStream::Handler handler;
  handler.on_frame = [weak, pull](const bulk::ReceivedFrame& frame) {
    const auto link = weak.lock();
    return link == nullptr ? absl::AbortedError("the run is over") : link->OnFrame(pull, frame);
  };
  handler.on_end = [weak, pull](const absl::Status& status) {
    if (const auto link = weak.lock(); link != nullptr) link->OnEnd(pull, status);
  };
  if (!pull) {
    handler.on_sent = [weak](const Header& header) {
      const auto link = weak.lock();
      if (link == nullptr) return;
      if (header.slot != 0) link->options_.counters->pushed_shared += header.bytes;
      std::lock_guard<std::mutex> lock(link->mutex_);
      link->Moved();
    };
  }
  bulk::Sharing sharing;
  sharing.wanted = options_.shared_memory;
  return bulk::ClientStream::Open(options_.store.address(), options_.hello, std::move(handler),
                                  sharing);
}

std::optional<absl::Status> StoreLink::Opened(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                    [this] { return !push_.opening && !pull_.opening; });
  for (const Stream* side : {&push_, &pull_}) {
    if (!side->open && !side->opening) return Named(side->ended);
  }
  if (push_.open && pull_.open) return absl::OkStatus();
  return std::nullopt;
}

// --- sending ---------------------------------------------------------------------------------

void StoreLink::Push(const std::shared_ptr<TransferPiece>& piece, const Checksums& checksums) {
  const uint32_t most = ElementsOfFrame(options_.dtype);
  const size_t size = SizeOf(options_.dtype);
  size_t frame = 0;
  for (uint32_t at = 0; at < piece->count; at += most, ++frame) {
    bulk::Outgoing out;
    out.header.type = FrameType::kPush;
    out.header.dtype = options_.dtype;
    out.header.generation = options_.hello.generation();
    out.header.epoch = options_.epoch;
    out.header.step = piece->step;
    out.header.chunk = piece->chunk;
    out.header.begin = piece->begin + at;
    out.header.count = std::min(most, piece->count - at);
    out.payload = absl::MakeConstSpan(piece->from + at * size, out.header.count * size);
    out.keep = piece;
    if (frame < checksums.size()) out.checksum = checksums[frame];
    std::shared_ptr<bulk::ClientStream> stream;
    absl::Status ended;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stream = push_.stream;
      if (stream == nullptr) {
        ended = push_.ended;
      } else {
        if (pushes_.empty() && pulls_.empty()) Moved();
        out.header.tag = next_tag_++;
        pushes_.push_back({out.header.tag, static_cast<uint32_t>(out.payload.size()), piece});
      }
    }
    if (stream == nullptr) {
      piece->transfer->Fail(ended);
      return;
    }
    // Pushes come from one thread: tags are sent in order.
    stream->Send(std::move(out));
  }
}

void StoreLink::Pull(std::shared_ptr<TransferPiece> piece) {
  bulk::Outgoing out;
  out.header.type = FrameType::kPull;
  out.header.dtype = options_.dtype;
  out.header.generation = options_.hello.generation();
  out.header.epoch = options_.epoch;
  out.header.step = piece->step;
  out.header.chunk = piece->chunk;
  out.header.begin = piece->begin;
  out.header.count = piece->count;
  std::shared_ptr<bulk::ClientStream> stream;
  absl::Status ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stream = pull_.stream;
    if (stream == nullptr) {
      ended = pull_.ended;
    } else {
      if (pushes_.empty() && pulls_.empty()) Moved();
      out.header.tag = next_tag_++;
      pulls_.emplace(out.header.tag, std::move(piece));
      if (pulls_.size() > kMostAsked) {
        later_.push_back(std::move(out));
        return;
      }
    }
  }
  if (stream == nullptr) {
    piece->transfer->Fail(ended);
    return;
  }
  stream->Send(std::move(out));
}

// --- receiving -------------------------------------------------------------------------------

absl::Status StoreLink::OnFrame(bool pull, const bulk::ReceivedFrame& frame) {
  switch (frame.header.type) {
    case FrameType::kWelcome: {
      std::lock_guard<std::mutex> lock(mutex_);
      Stream& side = pull ? pull_ : push_;
      side.opening = false;
      side.open = true;
      changed_.notify_all();
      return absl::OkStatus();
    }
    case FrameType::kAck:
      if (!pull) return OnAcknowledged(frame.header);
      break;
    case FrameType::kData:
      if (pull) return OnData(frame);
      break;
    default:
      break;
  }
  return absl::InternalError(absl::StrCat("a frame of type ", static_cast<int>(frame.header.type),
                                          " that nobody asked for"));
}

absl::Status StoreLink::OnAcknowledged(const Header& header) {
  if (header.code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(header.code), "refused what was pushed");
  }
  std::vector<Unacknowledged> done;  // let go of without the lock
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = std::find_if(pushes_.begin(), pushes_.end(),
                                 [&](const auto& push) { return push.tag == header.tag; });
    if (at == pushes_.end()) {
      if (closed_) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat("acknowledged push ", header.tag, ", which is not on its way"));
    }
    done.assign(std::make_move_iterator(pushes_.begin()), std::make_move_iterator(at + 1));
    pushes_.erase(pushes_.begin(), at + 1);
    Moved();
  }
  for (const Unacknowledged& push : done) {
    options_.counters->pushed += push.bytes;
    if (--push.piece->unacknowledged != 0) continue;
    CrashPoint("worker.mid_push", push.piece->step, options_.hello.rank());
    push.piece->transfer->Finish(push.piece->count);
  }
  return absl::OkStatus();
}

absl::Status StoreLink::OnData(const bulk::ReceivedFrame& frame) {
  const Header& header = frame.header;
  std::shared_ptr<TransferPiece> piece;  // while it lives, so does the memory copied to
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto at = pulls_.find(header.tag);
    if (at == pulls_.end()) {
      if (closed_) return absl::OkStatus();
      return absl::InternalError(
          absl::StrCat("sent data for pull ", header.tag, ", which is not on its way"));
    }
    piece = at->second;
  }
  const uint32_t left = piece->count - piece->received;
  if (header.chunk != piece->chunk || header.step != piece->step ||
      header.dtype != options_.dtype || header.begin != piece->begin + piece->received ||
      header.count == 0 || header.count > left) {
    return absl::InternalError(absl::StrCat(
        "step ", piece->step, ", chunk ", piece->chunk, ": wanted ", left, " elements of ",
        NameOf(options_.dtype), " from ", piece->begin + piece->received, " on, got ", header.count,
        " of ", NameOf(header.dtype), " from ", header.begin, " on of chunk ", header.chunk,
        " after step ", header.step));
  }
  bulk::CopyTo(frame.parts, piece->to + size_t{piece->received} * SizeOf(options_.dtype));
  piece->received += header.count;
  options_.counters->pulled += header.bytes;
  if (header.slot != 0) options_.counters->pulled_shared += header.bytes;
  if (piece->received == piece->count) {
    CrashPoint("worker.after_pull", piece->step, options_.hello.rank());
    piece->transfer->Finish(piece->count);
  }
  std::optional<bulk::Outgoing> next;
  std::shared_ptr<bulk::ClientStream> stream;
  std::unique_lock<std::mutex> lock(mutex_);
  Moved();
  if (const auto at = pulls_.find(header.tag);
      piece->received == piece->count && at != pulls_.end()) {
    pulls_.erase(at);  // `piece` still holds it: nothing is told under the lock
    if (!later_.empty()) {
      next = std::move(later_.front());
      later_.pop_front();
      stream = pull_.stream;
    }
  }
  lock.unlock();
  if (stream != nullptr) stream->Send(*std::move(next));
  return absl::OkStatus();
}

// --- the end ---------------------------------------------------------------------------------

void StoreLink::OnEnd(bool pull, const absl::Status& status) {
  std::shared_ptr<bulk::ClientStream> stream;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Stream& side = pull ? pull_ : push_;
    stream = std::move(side.stream);
    if (closed_) return;
    if (side.opening) {
      side.opening = false;
      side.ended = status;
      changed_.notify_all();
      return;
    }
    side.open = false;
    side.ended = Named(status);
  }
  options_.on_fail(Named(status));
}

void StoreLink::Close(const absl::Status& reason) {
  std::deque<Unacknowledged> pushes;
  std::map<uint32_t, std::shared_ptr<TransferPiece>> pulls;
  std::shared_ptr<bulk::ClientStream> streams[2];
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    push_.opening = pull_.opening = push_.open = pull_.open = false;
    push_.ended = pull_.ended = reason;
    pushes.swap(pushes_);
    pulls.swap(pulls_);
    later_.clear();
    streams[0] = std::move(push_.stream);
    streams[1] = std::move(pull_.stream);
    changed_.notify_all();
  }
  for (const auto& push : pushes) push.piece->transfer->Fail(reason);
  for (const auto& [tag, piece] : pulls) piece->transfer->Fail(reason);
  for (const auto& stream : streams) {
    if (stream != nullptr) stream->Cancel(reason);
  }
}

std::optional<StoreLink::Stalled> StoreLink::Oldest() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const TransferPiece* piece = nullptr;
  Stalled stalled;
  if (!pushes_.empty()) {
    piece = pushes_.front().piece.get();
  } else if (!pulls_.empty()) {
    piece = pulls_.begin()->second.get();
    stalled.pull = true;
  }
  if (piece == nullptr) return std::nullopt;
  stalled.moved = moved_;
  stalled.step = piece->step;
  stalled.chunk = piece->chunk;
  return stalled;
}

void StoreLink::Moved() { moved_ = Steady::now(); }

}  // namespace zeroshard
