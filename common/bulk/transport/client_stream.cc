#include "common/bulk/transport/client_stream.h"

#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/checksum.h"
#include "common/grpc_status.h"
#include "common/log.h"
#include "common/security/security.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"

namespace zeroshard::bulk {
namespace {

constexpr char kMethod[] = "/zeroshard.v1.ShardStore/Bulk";
constexpr uint64_t kKnown = uint64_t{1} << 32;

// Copies the payload to `slot`, unless that is null.
uint32_t ChecksumOf(const Outgoing& frame, char* slot) {
  const char* const data = frame.payload.data();
  const size_t bytes = frame.payload.size();
  if (frame.checksum != nullptr) {
    const uint64_t known = frame.checksum->load(std::memory_order_relaxed);
    if (known != 0) {
      if (slot != nullptr) std::memcpy(slot, data, bytes);
      return static_cast<uint32_t>(known);
    }
  }
  const uint32_t crc = slot != nullptr ? CopyWithCrc32c(data, bytes, slot) : Crc32c(data, bytes);
  if (frame.checksum != nullptr) frame.checksum->store(kKnown | crc, std::memory_order_relaxed);
  return crc;
}

bool GoesIntoASlot(const Outgoing& frame) {
  return frame.header.type == FrameType::kPush && frame.payload.size() >= kLeastShared &&
         frame.payload.size() <= kMaxPayload;
}

// Null where there can be none; the first time, says why.
std::shared_ptr<SharedRegion> MakeRegion(const Sharing& sharing) {
  if (!sharing.wanted) return nullptr;
  static const int stale = SharedRegion::RemoveStale();
  if (static std::atomic<bool> told{stale == 0}; !told.exchange(true)) {
    LogInfo("removed ", stale, " regions of shared memory whose processes are gone");
  }
  auto region = SharedRegion::Make(sharing.slots, sharing.folder);
  if (region.ok()) return *std::move(region);
  static std::atomic<bool> warned{false};
  if (!warned.exchange(true)) {
    LogWarning("no shared memory with stores of this host, which makes transfers slower: ",
               region.status().message());
  }
  return nullptr;
}

// gRPC's callback threads end, and are joined, when no channel of the process has made a call on
// them that still exists; but a stream's channel goes on one of them, which cannot join itself
// (seen in gRPC 1.51: an aborted process). So one channel, never connected, is always there.
class Keeper final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  static void Make() {
    // Used, as far as leak checkers are to know.
    [[gnu::used]] static Keeper* const keeper = new Keeper;
  }

 private:
  Keeper()
      : channel_(grpc::CreateChannel("unix:/dev/null/none", grpc::InsecureChannelCredentials())) {
    grpc::GenericStub stub(channel_);
    stub.PrepareBidiStreamingCall(&context_, kMethod, grpc::StubOptions(), this);
    context_.TryCancel();
    StartCall();
  }
  void OnDone(const grpc::Status&) override {}

  const std::shared_ptr<grpc::Channel> channel_;
  grpc::ClientContext context_;
};

}  // namespace

std::shared_ptr<grpc::Channel> MakeBulkChannel(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);  // what an attempt to connect may take
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  for (const auto& [key, value] : BulkArguments()) args.SetInt(key, value);
  args.SetMaxReceiveMessageSize(kMaxMessageBytes);
  return grpc::CreateCustomChannel(
      address, security::ProcessSecurity()->ChannelCredentials(security::Role::kStore), args);
}

std::shared_ptr<ClientStream> ClientStream::Open(const std::string& address,
                                                 const v1::BulkHello& hello, Handler handler,
                                                 const Sharing& sharing) {
  Keeper::Make();
  std::shared_ptr<ClientStream> stream(new ClientStream(std::move(handler)));
  stream->self_ = stream;
  stream->generation_ = hello.generation();
  stream->region_ = MakeRegion(sharing);
  v1::BulkHello offer = hello;
  offer.clear_shared_region();
  if (stream->region_ != nullptr) offer.set_shared_region(stream->region_->name());
  stream->channel_ = MakeBulkChannel(address);
  grpc::GenericStub stub(stream->channel_);
  stub.PrepareBidiStreamingCall(&stream->context_, kMethod, grpc::StubOptions(), stream.get());
  // Writes start outside of gRPC's callbacks: the hold keeps gRPC from ending the stream between
  // the decision to write and the write.
  stream->AddHold();
  stream->StartRead(&stream->incoming_);
  stream->StartCall();
  auto text = std::make_shared<const std::string>(offer.SerializeAsString());
  Outgoing first;
  first.header.type = FrameType::kHello;
  first.header.generation = hello.generation();
  first.payload = *text;
  first.keep = text;
  stream->Send(std::move(first));
  return stream;
}

void ClientStream::Send(Outgoing frame) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (closing_) return;
  queue_.push_back(std::move(frame));
  WriteNext(std::move(lock));
}

void ClientStream::Cancel(absl::Status reason) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (reason_.ok()) reason_ = std::move(reason);
  }
  context_.TryCancel();
}

void ClientStream::WriteNext(std::unique_lock<std::mutex> lock) {
  if (writing_ || closing_) return;
  Outgoing frame;
  std::optional<int> slot;
  bool more = false;
  if (room_) {
    room_ = false;
    frame.header.type = FrameType::kRoom;
    frame.header.generation = generation_;
  } else {
    if (queue_.empty()) return;
    if (shared_ && GoesIntoASlot(queue_.front())) {
      slot = region_->Take();
      if (!slot.has_value())
        return;  // each busy one has an answer to come, and then it is tried again
    }
    frame = std::move(queue_.front());
    queue_.pop_front();
    more = !queue_.empty() && !slot.has_value();
  }
  writing_ = true;
  lock.unlock();
  if (slot.has_value()) {
    frame.header.bytes = static_cast<uint32_t>(frame.payload.size());
    frame.header.payload_crc = ChecksumOf(frame, region_->Slot(*slot));
    frame.header.slot = static_cast<uint16_t>(*slot + 1);
    sending_ = frame.header;
    outgoing_ = MakeSlotFrame(frame.header);
    frame.keep.reset();
  } else {
    frame.header.payload_crc = ChecksumOf(frame, nullptr);
    sending_ = frame.header;
    outgoing_ = MakeFrame(frame.header, frame.payload, std::move(frame.keep));
  }
  grpc::WriteOptions options;
  if (more) options.set_buffer_hint();
  StartWrite(&outgoing_, options);
}

absl::Status ClientStream::TakeWelcome(const ReceivedFrame& frame) {
  v1::BulkWelcome welcome;
  if (!welcome.ParseFromString(frame.Text())) {
    return absl::InvalidArgumentError("the store's welcome cannot be read");
  }
  std::shared_ptr<SharedRegion> unused;  // unmapped without the lock
  SharedRegion* region = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A second one could take the region away from slots that are on their way.
    if (std::exchange(welcomed_, true))
      return absl::InvalidArgumentError("the store said its welcome twice");
    if (welcome.shared() && region_ == nullptr) {
      return absl::InvalidArgumentError("the store says it mapped a region that was not offered");
    }
    shared_ = welcome.shared();
    if (!shared_) unused = std::move(region_);
    region = region_.get();
  }
  if (region != nullptr) region->Unlink();
  return absl::OkStatus();
}

absl::Status ClientStream::TakeFrame(const grpc::ByteBuffer& message) {
  // shared_ and region_ change on this thread alone, but for the end.
  auto frame = ReadFrame(message, shared_ ? region_.get() : nullptr);
  if (!frame.ok()) return frame.status();
  if (frame->header.type == FrameType::kError) return ErrorOf(*frame);
  if (frame->header.type == FrameType::kWelcome) {
    if (absl::Status status = TakeWelcome(*frame); !status.ok()) return status;
  }
  absl::Status status = handler_.on_frame(*frame);
  frame->Release();
  return status;
}

void ClientStream::OnReadDone(bool ok) {
  if (ok) {
    absl::Status status = TakeFrame(incoming_);
    incoming_.Clear();
    if (!status.ok()) Cancel(std::move(status));
    std::unique_lock<std::mutex> lock(mutex_);
    if (shared_) {
      if (region_->TakeWaiting()) room_ = true;
      WriteNext(std::move(lock));
    } else {
      lock.unlock();
    }
    StartRead(&incoming_);
    return;
  }
  bool release = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    release = !writing_;  // else the write's end releases
  }
  if (release) RemoveHold();
}

void ClientStream::OnWriteDone(bool ok) {
  outgoing_.Clear();
  if (ok && handler_.on_sent) handler_.on_sent(sending_);
  std::unique_lock<std::mutex> lock(mutex_);
  writing_ = false;
  if (closing_) {
    lock.unlock();
    RemoveHold();
    return;
  }
  // A failed write means a broken stream; the read that is always open reports it.
  if (ok) WriteNext(std::move(lock));
}

void ClientStream::OnDone(const grpc::Status& status) {
  std::shared_ptr<ClientStream> self;
  std::deque<Outgoing> unsent;
  std::shared_ptr<SharedRegion> region;
  absl::Status reason;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    self = std::move(self_);
    unsent.swap(queue_);
    shared_ = false;
    region = std::move(region_);
    if (reason_.ok()) {
      reason_ = status.ok() ? absl::UnavailableError("the store closed the stream")
                            : FromGrpcStatus(status);
    }
    reason = reason_;
  }
  unsent.clear();
  region.reset();
  channel_.reset();  // and with it the connection, which lets go of what it still had to write
  handler_.on_end(reason);
}

}  // namespace zeroshard::bulk
