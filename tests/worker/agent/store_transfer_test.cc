// The bulk path between a rank and a store at the limits of gRPC and of the network between them:
// large payloads, pings, packets that are dropped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/bulk/transport/frame_buffer.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/security/credentials.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "tests/shard_store/service/fake_store.h"
#include "tests/worker/agent/tcp_proxy.h"
#include "worker/agent/store_client.h"

namespace zeroshard {
namespace {

using store::FakeStore;
using ::testing::HasSubstr;

// One unit of fp32 elements, all of its chunks on one store.
StoreClientOptions Options(const std::string& address, int64_t elements) {
  StoreClientOptions options;
  options.fence.set_member("worker-0");
  options.fence.set_run_id("run-1");
  options.fence.set_generation(3);
  options.base.set_step(10);
  options.dtype = DType::kF32;
  auto* entry = options.map.add_stores();
  entry->set_member("store-0");
  entry->set_address(address);
  options.map.set_replicas(1);
  for (int64_t begin = 0; begin < elements; begin += kChunkElements) {
    options.chunks.chunks.push_back({0, begin, std::min(elements, begin + kChunkElements), true});
    options.map.add_placement(0);
  }
  options.chunks.first = {0, static_cast<int>(options.chunks.chunks.size())};
  options.most_pushed = options.most_pulled = 4 * kChunkElements;
  options.open_timeout = absl::Seconds(30);
  return options;
}

std::vector<uint32_t> Values(int64_t elements) {
  std::vector<uint32_t> values(static_cast<size_t>(elements));
  uint32_t state = 1;
  for (uint32_t& value : values) value = state = state * 1664525u + 1013904223u;
  return values;
}

std::string Bytes(const std::vector<uint32_t>& values, const Chunk& chunk) {
  std::string bytes(static_cast<size_t>(chunk.size()) * sizeof(uint32_t), '\0');
  std::memcpy(bytes.data(), values.data() + chunk.begin, bytes.size());
  return bytes;
}

// --- sizes ------------------------------------------------------------------------------------

class TransferSize : public ::testing::TestWithParam<std::tuple<int64_t, bool>> {};
// gRPC refuses messages of more than 4 MiB unless told otherwise.
INSTANTIATE_TEST_SUITE_P(Of, TransferSize,
                         ::testing::Combine(::testing::Values((4 << 20) - 4, 4 << 20, (4 << 20) + 4,
                                                              200'000'000),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return absl::StrFormat("%dBytes%s", std::get<0>(info.param),
                                                  std::get<1>(info.param) ? "Shared" : "Inline");
                         });

TEST_P(TransferSize, ArrivesWholeInBothDirections) {
  const int64_t elements = std::get<0>(GetParam()) / 4;
  FakeStore store;
  StoreClientOptions options = Options(store.address(), elements);
  options.shared_memory = std::get<1>(GetParam());
  const ChunkTable chunks = options.chunks;
  const auto client = StoreClient::Open(std::move(options));
  ASSERT_TRUE(client.ok()) << client.status();
  const std::vector<uint32_t> values = Values(elements);
  const absl::Status pushed = (*client)->Push(11, 0, 0, elements, values.data()).Wait();
  ASSERT_TRUE(pushed.ok()) << pushed;
  for (uint32_t c = 0; c < chunks.chunks.size(); ++c) {
    const std::string wanted = Bytes(values, chunks.chunks[c]);
    std::string staged;
    store.With([&](auto& state) {
      for (auto& [at, part] : state.pushed[{11, c}]) {
        EXPECT_EQ(at * sizeof(uint32_t), staged.size());
        staged += part;
      }
      state.pushed.erase({11, c});
    });
    ASSERT_TRUE(staged == wanted) << "chunk " << c;
    store.Publish(11, c, std::move(staged));
  }
  std::vector<uint32_t> out(values.size());
  const absl::Status pulled = (*client)->Pull(11, 0, 0, elements, out.data()).Wait();
  ASSERT_TRUE(pulled.ok()) << pulled;
  EXPECT_TRUE(out == values);
  EXPECT_EQ((*client)->counters().pushed, static_cast<uint64_t>(std::get<0>(GetParam())));
  EXPECT_EQ((*client)->counters().pulled, static_cast<uint64_t>(std::get<0>(GetParam())));
}

// --- pings --------------------------------------------------------------------------------------

// Pings every second, which is as often as gRPC lets a client, also while there is no call.
std::shared_ptr<grpc::Channel> MakePingingChannel(const std::string& address) {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 1000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 30000);
  args.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  args.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  for (const auto& [key, value] : bulk::BulkArguments()) args.SetInt(key, value);
  args.SetMaxReceiveMessageSize(bulk::kMaxMessageBytes);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
}

bool Connect(grpc::Channel* channel) {
  return channel->WaitForConnected(std::chrono::system_clock::now() + FakeStore::kPatience);
}

// A stream on a channel of the test's, one message at a time.
class SlowStream {
 public:
  explicit SlowStream(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {
    context_.set_deadline(std::chrono::system_clock::now() + 4 * FakeStore::kPatience);
    call_ = stub_.PrepareCall(&context_, "/zeroshard.v1.ShardStore/Bulk", &queue_);
    call_->StartCall(this);
  }
  ~SlowStream() {
    context_.TryCancel();
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }
  bool Started() { return Next(); }
  bool Write(const bulk::Header& header, const std::string& payload) {
    call_->Write(bulk::MakeFrame(header, payload), this);
    return Next();
  }
  // The type of the next frame; the stream's status once it has ended.
  absl::StatusOr<bulk::FrameType> Read() {
    grpc::ByteBuffer message;
    call_->Read(&message, this);
    if (Next()) {
      const auto frame = bulk::ReadFrame(message);
      if (!frame.ok()) return frame.status();
      return frame->header.type;
    }
    grpc::Status status;
    call_->Finish(&status, this);
    Next();
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }

 private:
  bool Next() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
};

// Beside a server as gRPC has it, which shows that there are pings and how soon they are too many.
TEST(StorePingsTest, AreNeverTooManyWhileNothingAndWhileMuchIsOnItsWay) {
  FakeStore store;
  v1::ShardStore::Service nothing;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&nothing);
  const std::unique_ptr<grpc::Server> strict_server = builder.BuildAndStart();
  const auto strict = MakePingingChannel(absl::StrCat("127.0.0.1:", port));
  const auto idle = MakePingingChannel(store.address());
  const auto quiet = MakePingingChannel(store.address());
  const auto busy = MakePingingChannel(store.address());
  for (const auto& channel : {idle, quiet, busy, strict}) ASSERT_TRUE(Connect(channel.get()));

  bulk::Header header;
  header.type = bulk::FrameType::kHello;
  header.generation = 3;
  v1::BulkHello hello;
  hello.set_run_id("run-1");
  hello.set_generation(3);
  SlowStream waiting(quiet), pushing(busy);
  for (SlowStream* stream : {&waiting, &pushing}) {
    ASSERT_TRUE(stream->Started());
    ASSERT_TRUE(stream->Write(header, hello.SerializeAsString()));
    const auto welcome = stream->Read();
    ASSERT_TRUE(welcome.ok()) << welcome.status();
    ASSERT_EQ(*welcome, bulk::FrameType::kWelcome);
  }
  const std::string payload(bulk::kMaxPayload, 'x');
  header.type = bulk::FrameType::kPush;
  header.dtype = DType::kF32;
  header.step = 11;
  header.count = bulk::kMaxPayload / 4;
  int pushes = 0;
  const absl::Time until = absl::Now() + absl::FromChrono(FakeStore::kPatience);
  while (strict->GetState(false) == GRPC_CHANNEL_READY && absl::Now() < until) {
    header.tag = static_cast<uint32_t>(++pushes);
    ASSERT_TRUE(pushing.Write(header, payload)) << "cut after " << pushes << " pushes";
    const auto acknowledged = pushing.Read();
    ASSERT_TRUE(acknowledged.ok()) << acknowledged.status() << " after " << pushes << " pushes";
    ASSERT_EQ(*acknowledged, bulk::FrameType::kAck);
  }
  ASSERT_NE(strict->GetState(false), GRPC_CHANNEL_READY) << "there were no pings to speak of";
  EXPECT_GT(pushes, 10);
  for (const auto& channel : {idle, quiet, busy})
    EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
  // The stream that was quiet is the one of the hello.
  header.tag = 1;
  ASSERT_TRUE(waiting.Write(header, payload));
  const auto acknowledged = waiting.Read();
  ASSERT_TRUE(acknowledged.ok()) << acknowledged.status();
  store.With([](auto& state) { EXPECT_EQ(state.hellos.size(), 2u); });
  strict_server->Shutdown(std::chrono::system_clock::now());
}

// --- packets that are dropped --------------------------------------------------------------------

constexpr absl::Duration kStall = absl::Seconds(1);

class BrokenNetwork : public ::testing::TestWithParam<std::tuple<TcpProxy::Fault, const char*>> {};
INSTANTIATE_TEST_SUITE_P(
    In, BrokenNetwork,
    ::testing::Combine(::testing::Values(TcpProxy::Fault::kSilence, TcpProxy::Fault::kClose),
                       ::testing::Values("Push", "Pull")),
    [](const auto& info) {
      return absl::StrCat(std::get<0>(info.param) == TcpProxy::Fault::kClose ? "Closed" : "Silent",
                          std::get<1>(info.param));
    });

TEST_P(BrokenNetwork, EndsATransferInItsMiddleWithTheStoresName) {
  const auto [fault, direction] = GetParam();
  const bool push = direction == std::string("Push");
  constexpr int64_t kElements = 8 * kChunkElements;
  FakeStore store;
  TcpProxy network(store.address());
  StoreClientOptions options = Options(network.address(), kElements);
  options.shared_memory = false;  // the network carries it
  options.stall_timeout = kStall;
  const ChunkTable chunks = options.chunks;
  auto client = StoreClient::Open(std::move(options));
  ASSERT_TRUE(client.ok()) << client.status();
  const std::vector<uint32_t> values = Values(kElements);
  for (uint32_t c = 0; c < chunks.chunks.size(); ++c)
    store.Publish(11, c, Bytes(values, chunks.chunks[c]));
  // All is well before.
  std::vector<uint32_t> out(values.size());
  ASSERT_TRUE((*client)->Push(11, 0, 0, kChunkElements, values.data()).Wait().ok());
  ASSERT_TRUE((*client)->Pull(11, 0, 0, kChunkElements, out.data()).Wait().ok());

  network.FailAfter(fault, /*from_callers=*/push, 3 * kChunkElements * 4);
  const absl::Time start = absl::Now();
  const Event event = push ? (*client)->Push(12, 0, 0, kElements, values.data())
                           : (*client)->Pull(11, 0, 0, kElements, out.data());
  const absl::Status status = event.Wait();
  const absl::Duration taken = absl::Now() - start;
  EXPECT_TRUE(network.failed());
  EXPECT_EQ(status.code(), fault == TcpProxy::Fault::kClose ? absl::StatusCode::kUnavailable
                                                            : absl::StatusCode::kDeadlineExceeded)
      << status;
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("store store-0 at ", network.address(), ": ")));
  if (fault == TcpProxy::Fault::kSilence) {
    EXPECT_GE(taken, kStall);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(push ? "gradients of step 12, chunk " : "parameters of step 11, chunk "));
  }
  // Far below what a lost connection takes to be noticed by pings, or by the kernel.
  EXPECT_LE(taken, kStall + absl::Seconds(8));
  // Nothing else is waited for: what comes later, and the end.
  EXPECT_EQ((*client)->Pull(11, 0, 0, 1, out.data()).Wait(), status);
  const absl::Time end = absl::Now();
  client->reset();
  EXPECT_LE(absl::Now() - end, absl::Seconds(8));
}

}  // namespace
}  // namespace zeroshard
