// The store's side of a Bulk stream, spoken to frame by frame.
#include "shard_store/service/bulk_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "common/bulk/transport/client_stream.h"
#include "common/checksum.h"
#include "grpcpp/generic/generic_stub.h"
#include "shard_store/service/bulk_stream.h"
#include "tests/shard_store/service/fake_store.h"

namespace zeroshard::store {
namespace {

using bulk::FrameType;
using bulk::Header;
using ::testing::HasSubstr;

// A rank that sends what the test says and remembers what comes back.
class Peer {
 public:
  struct Frame {
    Header header;
    std::string payload;
  };

  explicit Peer(const std::string& address, uint64_t generation = 3) {
    v1::BulkHello hello;
    hello.set_run_id("run-1");
    hello.set_generation(generation);
    generation_ = generation;
    bulk::ClientStream::Handler handler;
    handler.on_frame = [this](const bulk::ReceivedFrame& frame) {
      std::unique_lock<std::mutex> lock(mutex_);
      frames_.push_back({frame.header, frame.Text()});
      changed_.notify_all();
      changed_.wait(lock, [this] { return !deaf_; });
      return absl::OkStatus();
    };
    handler.on_end = [this](const absl::Status& status) {
      std::lock_guard<std::mutex> lock(mutex_);
      end_ = status;
      changed_.notify_all();
    };
    stream_ = bulk::ClientStream::Open(address, hello, handler);
  }
  ~Peer() {
    Deaf(false);
    stream_->Cancel(absl::CancelledError("the test is over"));
    (void)AwaitEnd();
  }

  void Send(Header header, std::string payload = "") {
    if (header.generation == 0) header.generation = generation_;
    auto kept = std::make_shared<const std::string>(std::move(payload));
    bulk::Outgoing out;
    out.header = header;
    out.payload = *kept;
    out.keep = kept;
    stream_->Send(std::move(out));
  }
  void Push(uint64_t step, uint32_t chunk, uint32_t begin, const std::string& bytes, uint32_t tag) {
    Header header;
    header.type = FrameType::kPush;
    header.dtype = DType::kU8;
    header.step = step;
    header.chunk = chunk;
    header.begin = begin;
    header.count = static_cast<uint32_t>(bytes.size());
    header.tag = tag;
    Send(header, bytes);
  }
  void Pull(uint64_t step, uint32_t chunk, uint32_t begin, uint32_t count, uint32_t tag) {
    Header header;
    header.type = FrameType::kPull;
    header.dtype = DType::kBF16;
    header.step = step;
    header.chunk = chunk;
    header.begin = begin;
    header.count = count;
    header.tag = tag;
    Send(header);
  }
  // Stops taking frames.
  void Deaf(bool deaf) {
    std::lock_guard<std::mutex> lock(mutex_);
    deaf_ = deaf;
    changed_.notify_all();
  }
  void Cancel() { stream_->Cancel(absl::CancelledError("gone")); }

  bool Await(const std::function<bool(const std::vector<Frame>&)>& holds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, FakeStore::kPatience, [&] { return holds(frames_); });
  }
  absl::Status AwaitEnd() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, FakeStore::kPatience, [&] { return !end_.ok(); });
    return end_;
  }
  std::vector<Frame> frames() {
    std::lock_guard<std::mutex> lock(mutex_);
    return frames_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Frame> frames_;
  absl::Status end_;
  bool deaf_ = false;
  uint64_t generation_ = 0;
  std::shared_ptr<bulk::ClientStream> stream_;
};

// Says hello and pulls, and reads nothing, without holding a thread of gRPC, which this process
// shares with the store.
class DeafPeer {
 public:
  explicit DeafPeer(const std::string& address) : stub_(bulk::MakeBulkChannel(address)) {
    calls_.push_back(std::make_unique<Call>(&stub_, &queue_));
    SayHello();
  }
  ~DeafPeer() {
    // The end comes after what was not read.
    for (const auto& call : calls_) {
      call->context.TryCancel();
      Finish(call.get());
    }
    queue_.Shutdown();
    void* tag = nullptr;
    bool ok = false;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  void Pull(uint64_t step, uint32_t chunk, uint32_t count) {
    Header header;
    header.type = FrameType::kPull;
    header.dtype = DType::kBF16;
    header.generation = kGeneration;
    header.step = step;
    header.chunk = chunk;
    header.count = count;
    header.tag = tag_++;
    Write(bulk::MakeFrame(header, {}, nullptr));
  }
  void HalfClose() {
    calls_.back()->stream->WritesDone(this);
    AwaitOne();
  }
  // Of the first stream, how it ends.
  grpc::Status ReadToTheEnd() {
    void* tag = nullptr;
    bool ok = true;
    while (ok) {
      grpc::ByteBuffer frame;
      calls_.front()->stream->Read(&frame, this);
      EXPECT_TRUE(queue_.Next(&tag, &ok));
    }
    return Finish(calls_.front().get());
  }
  // A stream beside it, on the same connection.
  void OpenAnother() {
    calls_.push_back(std::make_unique<Call>(&stub_, &queue_));
    SayHello();
  }

 private:
  static constexpr uint64_t kGeneration = 3;
  struct Call {
    Call(grpc::GenericStub* stub, grpc::CompletionQueue* queue) {
      context.set_deadline(std::chrono::system_clock::now() + 2 * FakeStore::kPatience);
      stream = stub->PrepareCall(&context, "/zeroshard.v1.ShardStore/Bulk", queue);
      stream->StartCall(this);
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream;
    std::optional<grpc::Status> end;
  };

  grpc::Status Finish(Call* call) {
    if (call->end) return *call->end;
    call->end.emplace();
    call->stream->Finish(&*call->end, this);
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok));
    return *call->end;
  }
  void AwaitOne() {
    void* tag = nullptr;
    bool ok = false;
    EXPECT_TRUE(queue_.Next(&tag, &ok) && ok);
  }
  void Write(const grpc::ByteBuffer& frame) {
    calls_.back()->stream->Write(frame, this);
    AwaitOne();
  }
  void SayHello() {
    AwaitOne();  // the call has begun
    v1::BulkHello hello;
    hello.set_run_id("run-1");
    hello.set_generation(kGeneration);
    Header header;
    header.type = FrameType::kHello;
    header.generation = kGeneration;
    Write(bulk::MakeFrame(header, hello.SerializeAsString()));
  }

  grpc::GenericStub stub_;
  grpc::CompletionQueue queue_;
  std::vector<std::unique_ptr<Call>> calls_;
  uint32_t tag_ = 0;
};

bool HasAck(const std::vector<Peer::Frame>& frames, uint32_t tag) {
  return std::any_of(frames.begin(), frames.end(), [&](const Peer::Frame& frame) {
    return frame.header.type == FrameType::kAck && frame.header.tag == tag;
  });
}

TEST(BulkServiceTest, AHelloIsAnsweredAndReachesTheStore) {
  FakeStore store;
  Peer peer(store.address());
  ASSERT_TRUE(peer.Await([](const auto& frames) { return !frames.empty(); }));
  EXPECT_EQ(peer.frames()[0].header.type, FrameType::kWelcome);
  store.With([](auto& state) {
    ASSERT_EQ(state.hellos.size(), 1u);
    EXPECT_EQ(state.hellos[0].run_id(), "run-1");
    EXPECT_EQ(state.hellos[0].generation(), 3u);
  });
}

TEST(BulkServiceTest, ARefusedHelloEndsTheStreamWithTheStoresWords) {
  FakeStore store;
  store.With([](auto& state) {
    state.refuse = [](const v1::BulkHello&) {
      return absl::FailedPreconditionError("generation 3 is over; 4 is open");
    };
  });
  Peer peer(store.address());
  EXPECT_EQ(peer.AwaitEnd(), absl::FailedPreconditionError("generation 3 is over; 4 is open"));
}

TEST(BulkServiceTest, APushIsStagedAsItWasSentAndAcknowledged) {
  FakeStore store;
  Peer peer(store.address());
  std::string bytes(bulk::kMaxPayload, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7 + i / 255);
  peer.Push(5, 2, 64, bytes, 1);
  ASSERT_TRUE(peer.Await([](const auto& frames) { return HasAck(frames, 1); }));
  store.With([&](auto& state) { EXPECT_EQ(state.pushed.at({5, 2}).at(64), bytes); });
}

TEST(BulkServiceTest, TheLastPushIsAcknowledgedHoweverManyThereAre) {
  FakeStore store;
  Peer peer(store.address());
  for (uint32_t tag = 1; tag <= 300; ++tag) peer.Push(5, 2, tag, "x", tag);
  ASSERT_TRUE(peer.Await([](const auto& frames) { return HasAck(frames, 300); }));
  uint32_t last = 0;
  for (const auto& frame : peer.frames()) {
    if (frame.header.type != FrameType::kAck) continue;
    EXPECT_GT(frame.header.tag, last);
    last = frame.header.tag;
  }
  store.With([](auto& state) { EXPECT_EQ(state.push_frames, 300); });
}

TEST(BulkServiceTest, ARefusedPushEndsTheStreamWithTheStoresWords) {
  FakeStore store;
  store.With([](auto& state) {
    state.on_push = [](const Header& header) {
      return absl::FailedPreconditionError(absl::StrCat("step ", header.step, " is decided"));
    };
  });
  Peer peer(store.address());
  peer.Push(5, 2, 0, "abc", 1);
  EXPECT_EQ(peer.AwaitEnd(), absl::FailedPreconditionError("step 5 is decided"));
  for (const auto& frame : peer.frames()) EXPECT_NE(frame.header.type, FrameType::kAck);
}

TEST(BulkServiceTest, ADamagedPayloadIsNeverStaged) {
  FakeStore store;
  Peer peer(store.address());
  Header header;
  header.type = FrameType::kPush;
  header.dtype = DType::kU8;
  header.generation = 3;
  header.step = 5;
  header.count = 3;
  // The checksum is taken when the frame is sent: damage comes by way of the shared one.
  auto kept = std::make_shared<const std::string>("abc");
  bulk::Outgoing out;
  out.header = header;
  out.payload = *kept;
  out.keep = kept;
  out.checksum = std::make_shared<std::atomic<uint64_t>>((uint64_t{1} << 32) | 12345);
  ASSERT_NE(Crc32c("abc", 3), 12345u);
  // Peer's own Send computes the right one.
  v1::BulkHello hello;
  hello.set_generation(3);
  std::mutex mutex;
  std::condition_variable changed;
  absl::Status end;
  auto stream = bulk::ClientStream::Open(
      store.address(), hello,
      {[](const bulk::ReceivedFrame&) { return absl::OkStatus(); }, nullptr,
       [&](const absl::Status& status) {
         std::lock_guard<std::mutex> lock(mutex);
         end = status;
         changed.notify_all();
       }});
  stream->Send(std::move(out));
  std::unique_lock<std::mutex> lock(mutex);
  ASSERT_TRUE(changed.wait_for(lock, FakeStore::kPatience, [&] { return !end.ok(); }));
  EXPECT_EQ(end.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(end.message(), HasSubstr("step 5, chunk 0"));
  store.With([](auto& state) { EXPECT_EQ(state.push_frames, 0); });
}

TEST(BulkServiceTest, APushThatIsTooEarlyIsStagedLaterAndNothingIsReadMeanwhile) {
  FakeStore store;
  store.With([](auto& state) { state.hold_pushes = true; });
  Peer peer(store.address());
  peer.Push(5, 2, 0, "abc", 1);
  peer.Push(5, 2, 3, "def", 2);
  ASSERT_TRUE(store.Await([](const auto& state) { return state.early.size() == 1; }));
  store.With([](auto& state) {
    EXPECT_EQ(state.push_frames, 0);
    EXPECT_EQ(state.early.size(), 1u);
  });
  store.Release();
  ASSERT_TRUE(peer.Await([](const auto& frames) { return HasAck(frames, 2); }));
  store.With([](auto& state) {
    EXPECT_EQ(state.pushed.at({5, 2}).at(0), "abc");
    EXPECT_EQ(state.pushed.at({5, 2}).at(3), "def");
  });
}

TEST(BulkServiceTest, APushIsTriedAgainAsOftenAsItTakesWithoutGoingDeeper) {
  FakeStore store;
  store.With([](auto& state) {
    state.on_push = [tries = 0](const Header&) mutable {
      return ++tries < 300000 ? TooEarly("nearly") : absl::OkStatus();
    };
  });
  Peer peer(store.address());
  peer.Push(5, 2, 0, "abc", 1);
  ASSERT_TRUE(peer.Await([](const auto& frames) { return HasAck(frames, 1); }));
}

TEST(BulkServiceTest, APushThatIsUnavailableForAnotherReasonEndsTheStream) {
  FakeStore store;
  store.With([](auto& state) {
    state.on_push = [](const Header&) { return absl::UnavailableError("the state is lost"); };
  });
  Peer peer(store.address());
  peer.Push(5, 2, 0, "abc", 1);
  EXPECT_EQ(peer.AwaitEnd(), absl::UnavailableError("the state is lost"));
}

TEST(BulkServiceTest, APushThatWaitsWhenItsPeerGoesHarmsNobody) {
  FakeStore store;
  store.With([](auto& state) { state.hold_pushes = true; });
  {
    Peer peer(store.address());
    peer.Push(5, 2, 0, "abc", 1);
    ASSERT_TRUE(store.Await([](const auto& state) { return state.early.size() == 1; }));
  }
  ASSERT_TRUE(store.Await([](const auto& state) { return state.sessions == 0; }));
  store.Release();
  store.With([](auto& state) { EXPECT_EQ(state.push_frames, 0); });
}

TEST(BulkServiceTest, APullIsAnsweredInFramesThatCoverItsRangeInOrder) {
  FakeStore store;
  std::string bytes(3 * bulk::kMaxPayload, '\0');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 13 + i / 251);
  store.Publish(4, 7, bytes);
  Peer peer(store.address());
  const uint32_t begin = 100, count = (5 << 20) / 4;  // 2.5 MiB of two bytes each
  peer.Pull(4, 7, begin, count, 9);
  std::string got;
  ASSERT_TRUE(peer.Await([&](const auto& frames) {
    size_t total = 0;
    for (const auto& frame : frames)
      if (frame.header.type == FrameType::kData) total += frame.payload.size();
    return total == count * 2;
  }));
  uint32_t next = begin;
  for (const auto& frame : peer.frames()) {
    if (frame.header.type != FrameType::kData) continue;
    EXPECT_EQ(frame.header.tag, 9u);
    EXPECT_EQ(frame.header.chunk, 7u);
    EXPECT_EQ(frame.header.step, 4u);
    EXPECT_EQ(frame.header.begin, next);
    EXPECT_LE(frame.payload.size(), bulk::kMaxPayload);
    EXPECT_EQ(frame.header.dtype, DType::kBF16);
    next += frame.header.count;
    got += frame.payload;
  }
  EXPECT_EQ(got, bytes.substr(begin * 2, count * 2));
}

TEST(BulkServiceTest, APullThatMustWaitDoesNotHoldUpOthers) {
  FakeStore store;
  store.Publish(4, 1, "ab");
  Peer peer(store.address());
  peer.Pull(5, 1, 0, 1, 1);
  peer.Pull(4, 1, 0, 1, 2);
  ASSERT_TRUE(peer.Await(
      [](const auto& frames) { return frames.size() == 2 && frames[1].header.tag == 2; }));
  store.Publish(5, 1, "cd");
  ASSERT_TRUE(peer.Await([](const auto& frames) {
    return frames.size() == 3 && frames[2].header.tag == 1 && frames[2].payload == "cd";
  }));
}

TEST(BulkServiceTest, AStreamHasABoundedNumberOfPullsWaiting) {
  FakeStore store;
  Peer peer(store.address());
  const int more = BulkStream::kMostPulls + 20;
  for (int i = 0; i < more; ++i) peer.Pull(5, 1, 0, 1, static_cast<uint32_t>(i));
  ASSERT_TRUE(store.Await([](const auto& state) { return state.pulls == BulkStream::kMostPulls; }));
  // Another stream is served meanwhile, and what it brings about comes after anything that the
  // first could have.
  Peer other(store.address());
  other.Push(5, 2, 0, "abc", 1);
  ASSERT_TRUE(other.Await([](const auto& frames) { return HasAck(frames, 1); }));
  store.With([](auto& state) { EXPECT_EQ(state.pulls, BulkStream::kMostPulls); });
  store.Publish(5, 1, "ab");
  ASSERT_TRUE(peer.Await([&](const auto& frames) {
    return frames.size() == static_cast<size_t>(more) + 1;  // the welcome
  }));
}

TEST(BulkServiceTest, APeerThatDoesNotReadIsNotBufferedForWithoutEnd) {
  FakeStore store;
  store.Publish(4, 1, std::string(2 << 20, 'x'));
  Peer peer(store.address());
  ASSERT_TRUE(peer.Await([](const auto& frames) { return !frames.empty(); }));
  peer.Deaf(true);
  for (uint32_t i = 0; i < 400; ++i) peer.Pull(4, 1, 0, 1 << 20, i);
  ASSERT_TRUE(store.Await([](const auto& state) { return state.pulls >= BulkStream::kMostPulls; }));
  Peer other(store.address());
  other.Push(5, 2, 0, "abc", 1);
  ASSERT_TRUE(other.Await([](const auto& frames) { return HasAck(frames, 1); }));
  // What the transport took (a few MiB) has been answered; the rest has not been asked for.
  store.With([](auto& state) { EXPECT_LT(state.pulls, BulkStream::kMostPulls + 30); });
  peer.Deaf(false);
  ASSERT_TRUE(peer.Await([](const auto& frames) { return frames.size() == 2 * 400 + 1; }));
}

TEST(BulkServiceTest, TheStoreEndsStreamsOfAnOldGeneration) {
  FakeStore store;
  Peer peer(store.address());
  peer.Pull(5, 1, 0, 1, 1);
  ASSERT_TRUE(store.Await([](const auto& state) { return state.pulls == 1; }));
  store.EndStreams(absl::AbortedError("generation 4 has begun"));
  EXPECT_EQ(peer.AwaitEnd(), absl::AbortedError("generation 4 has begun"));
  EXPECT_TRUE(store.Await([](const auto& state) { return state.sessions == 0; }));
}

TEST(BulkServiceTest, AnEndedStreamLetsGoOfWhatAHungPeerDoesNotRead) {
  FakeStore store;
  const auto freed = std::make_shared<std::atomic<bool>>(false);
  auto* const bytes = new std::string(2 << 20, 'x');
  std::weak_ptr<const std::string> alive;
  store.With([&](auto& state) {
    const std::shared_ptr<const std::string> parameters(bytes, [&store, freed](const auto* gone) {
      delete gone;
      *freed = true;
      store.With([](auto&) {});  // wakes who waits
    });
    alive = parameters;
    state.parameters[{4, 1}] = parameters;
  });
  DeafPeer peer(store.address());
  for (uint32_t i = 0; i < BulkStream::kMostPulls + 10; ++i) peer.Pull(4, 1, 1 << 20);
  ASSERT_TRUE(store.Await([](const auto& state) { return state.pulls > BulkStream::kMostPulls; }));
  ASSERT_GT(alive.use_count(), BulkStream::kMostPulls / 2);
  store.EndStreams(absl::AbortedError("generation 4 has begun"));
  // The map's, that of the answer that is being written, and those of frames on their way.
  EXPECT_LE(alive.use_count(), 6);
  std::shared_ptr<const std::string> last;  // let go of without the lock
  store.With([&](auto& state) {
    last = std::move(state.parameters[{4, 1}]);
    state.parameters.clear();
  });
  last.reset();
  EXPECT_TRUE(store.Await([&](const auto&) { return freed->load(); }));
  EXPECT_TRUE(store.Await([](const auto& state) { return state.sessions == 0; }));
}

// gRPC's call may never end where it is finished while frames wait for its peer. What it was
// finished with first is what a peer hears that reads after all.
TEST(BulkServiceTest, AStreamWhosePeerReadsNothingIsCancelledBeforeItIsFinished) {
  enum class Peer { kMaySayMore, kHasSaidAll, kWasAnsweredAll };
  for (const Peer what : {Peer::kMaySayMore, Peer::kHasSaidAll, Peer::kWasAnsweredAll}) {
    SCOPED_TRACE(static_cast<int>(what));
    FakeStore store;
    store.Publish(4, 1, "ab");
    DeafPeer peer(store.address());
    peer.Pull(what == Peer::kWasAnsweredAll ? 4 : 5, 1, 1);
    if (what != Peer::kMaySayMore) peer.HalfClose();
    // Of a connection, frames are heard in order: what came before that was heard.
    peer.OpenAnother();
    ASSERT_TRUE(store.Await(
        [](const auto& state) { return state.pulls == 1 && state.hellos.size() == 2; }));
    store.EndStreams(absl::AbortedError("generation 4 has begun"));
    EXPECT_TRUE(store.Await([](const auto& state) { return state.sessions == 0; }));
    EXPECT_EQ(peer.ReadToTheEnd().error_code(), grpc::StatusCode::CANCELLED);
  }
}

TEST(BulkServiceTest, AStreamWhosePeerIsGoneEnds) {
  FakeStore store;
  {
    Peer peer(store.address());
    peer.Pull(5, 1, 0, 1, 1);
    ASSERT_TRUE(store.Await([](const auto& state) { return state.pulls == 1; }));
  }
  ASSERT_TRUE(store.Await([](const auto& state) { return state.sessions == 0; }));
  store.Publish(5, 1, "ab");  // nobody is there to hear it
}

TEST(BulkServiceTest, AFrameOfAnotherGenerationIsRefused) {
  FakeStore store;
  Peer peer(store.address(), 3);
  Header header;
  header.type = FrameType::kPull;
  header.generation = 2;
  header.count = 1;
  peer.Send(header);
  const absl::Status end = peer.AwaitEnd();
  EXPECT_EQ(end.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(end.message(), HasSubstr("generation 2"));
  store.With([](auto& state) { EXPECT_EQ(state.pulls, 0); });
}

TEST(BulkServiceTest, ARankHasABoundedNumberOfStreams) {
  FakeStore store;
  std::vector<std::unique_ptr<Peer>> peers;
  for (int i = 0; i < StreamLimits::Most().of_peer; ++i) {
    peers.push_back(std::make_unique<Peer>(store.address()));
    ASSERT_TRUE(peers.back()->Await([](const auto& frames) { return !frames.empty(); }));
  }
  Peer more(store.address());
  const absl::Status refused = more.AwaitEnd();
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(refused.message(), HasSubstr("rank 0 of run-1 has 8 streams"));
  // Those of an older generation, which may still be ending, are none of a newer one's.
  Peer newer(store.address(), 4);
  EXPECT_TRUE(newer.Await([](const auto& frames) { return !frames.empty(); }));
  peers.pop_back();
  ASSERT_TRUE(store.Await([](const auto& state) { return state.sessions == 8; }));
  Peer again(store.address());
  EXPECT_TRUE(again.Await([](const auto& frames) { return !frames.empty(); }));
}

TEST(BulkServiceTest, AmongSilentStreamsThoseThatAreTooManyAreSentAway) {
  FakeStore store({.silent = 2});
  grpc::GenericStub stub(bulk::MakeBulkChannel(store.address()));
  grpc::CompletionQueue queue;
  grpc::ClientContext contexts[3];
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> calls[3];
  grpc::ByteBuffer answers[3];
  char started[3];
  void* tag = nullptr;
  bool ok = false;
  for (int i = 0; i < 3; ++i) {
    contexts[i].set_deadline(std::chrono::system_clock::now() + FakeStore::kPatience);
    calls[i] = stub.PrepareCall(&contexts[i], "/zeroshard.v1.ShardStore/Bulk", &queue);
    calls[i]->StartCall(&started[i]);
    ASSERT_TRUE(queue.Next(&tag, &ok) && ok);
    calls[i]->Read(&answers[i], calls[i].get());
  }
  // One of the three hears something: that its call is over.
  ASSERT_TRUE(queue.Next(&tag, &ok));
  EXPECT_FALSE(ok);
  grpc::Status status;
  static_cast<grpc::GenericClientAsyncReaderWriter*>(tag)->Finish(&status, &status);
  ASSERT_TRUE(queue.Next(&tag, &ok));
  ASSERT_EQ(tag, &status);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(status.error_message(), HasSubstr("2 streams have not said hello"));
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

TEST(BulkServiceTest, AStreamThatDoesNotBeginWithAHelloIsRefused) {
  FakeStore store;
  grpc::GenericStub stub(bulk::MakeBulkChannel(store.address()));
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  context.set_deadline(std::chrono::system_clock::now() + FakeStore::kPatience);
  auto call = stub.PrepareCall(&context, "/zeroshard.v1.ShardStore/Bulk", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  call->StartCall(&context);
  ASSERT_TRUE(next());
  const grpc::Slice slice("this is no frame");
  call->Write(grpc::ByteBuffer(&slice, 1), &context);
  ASSERT_TRUE(next());
  grpc::ByteBuffer answer;
  call->Read(&answer, &context);  // the error's frame
  ASSERT_TRUE(next());
  call->Read(&answer, &context);
  EXPECT_FALSE(next());
  grpc::Status status;
  call->Finish(&status, &context);
  ASSERT_TRUE(next());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("another protocol"));
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

}  // namespace
}  // namespace zeroshard::store
