#include "common/bulk/transport/client_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/checksum.h"
#include "common/grpc_status.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"

namespace zeroshard::bulk {
namespace {

constexpr char kMethod[] = "/zeroshard.v1.ShardStore/Bulk";
constexpr uint64_t kKnown = uint64_t{1} << 32;

uint32_t ChecksumOf(const Outgoing& frame) {
  if (frame.checksum != nullptr) {
    const uint64_t known = frame.checksum->load(std::memory_order_relaxed);
    if (known != 0) return static_cast<uint32_t>(known);
  }
  const uint32_t crc = Crc32c(frame.payload.data(), frame.payload.size());
  if (frame.checksum != nullptr) frame.checksum->store(kKnown | crc, std::memory_order_relaxed);
  return crc;
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
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
}

std::shared_ptr<ClientStream> ClientStream::Open(const std::string& address,
                                                 const v1::BulkHello& hello, Handler handler) {
  Keeper::Make();
  std::shared_ptr<ClientStream> stream(new ClientStream(std::move(handler)));
  stream->self_ = stream;
  stream->channel_ = MakeBulkChannel(address);
  grpc::GenericStub stub(stream->channel_);
  stub.PrepareBidiStreamingCall(&stream->context_, kMethod, grpc::StubOptions(), stream.get());
  // Writes start outside of gRPC's callbacks: the hold keeps gRPC from ending the stream between
  // the decision to write and the write.
  stream->AddHold();
  stream->StartRead(&stream->incoming_);
  stream->StartCall();
  auto text = std::make_shared<const std::string>(hello.SerializeAsString());
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
  if (writing_ || closing_ || queue_.empty()) return;
  writing_ = true;
  Outgoing frame = std::move(queue_.front());
  queue_.pop_front();
  const bool more = !queue_.empty();
  lock.unlock();
  frame.header.payload_crc = ChecksumOf(frame);
  sending_ = frame.header;
  outgoing_ = MakeFrame(frame.header, frame.payload, std::move(frame.keep));
  grpc::WriteOptions options;
  if (more) options.set_buffer_hint();
  StartWrite(&outgoing_, options);
}

void ClientStream::OnReadDone(bool ok) {
  if (ok) {
    absl::Status status;
    if (auto frame = ReadFrame(incoming_); !frame.ok()) {
      status = frame.status();
    } else if (frame->header.type == FrameType::kError) {
      status = ErrorOf(*frame);
    } else {
      status = handler_.on_frame(*frame);
    }
    incoming_.Clear();
    if (!status.ok()) Cancel(std::move(status));
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
  absl::Status reason;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    self = std::move(self_);
    unsent.swap(queue_);
    if (reason_.ok()) {
      reason_ = status.ok() ? absl::UnavailableError("the store closed the stream")
                            : FromGrpcStatus(status);
    }
    reason = reason_;
  }
  unsent.clear();
  channel_.reset();  // and with it the connection, which lets go of what it still had to write
  handler_.on_end(reason);
}

}  // namespace zeroshard::bulk
