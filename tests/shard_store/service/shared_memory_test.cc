// Bulk streams whose payloads go through memory that both ends share: what arrives is what arrives
// without it, and whatever goes wrong with the memory, payloads travel in their frames.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "common/bulk/transport/client_stream.h"
#include "common/checksum.h"
#include "grpcpp/generic/async_generic_service.h"
#include "grpcpp/server.h"
#include "grpcpp/server_builder.h"
#include "shard_store/service/bulk_stream.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/service/fake_store.h"

namespace zeroshard::store {
namespace {

using bulk::FrameType;
using bulk::Header;
using ::testing::HasSubstr;

std::string Bytes(size_t size, unsigned seed) {
  std::mt19937 generator(seed);
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(generator());
  return bytes;
}

// A rank that remembers what comes back.
class Peer {
 public:
  struct Frame {
    Header header;
    std::string payload;
  };

  explicit Peer(const std::string& address, bulk::Sharing sharing = {}) {
    v1::BulkHello hello;
    hello.set_run_id("run-1");
    hello.set_generation(3);
    bulk::ClientStream::Handler handler;
    handler.on_frame = [this](const bulk::ReceivedFrame& frame) {
      std::unique_lock<std::mutex> lock(mutex_);
      frames_.push_back({frame.header, frame.Text()});
      changed_.notify_all();
      changed_.wait(lock, [this] { return !deaf_; });
      return absl::OkStatus();
    };
    handler.on_sent = [this](const Header& header) {
      if (header.slot != 0) ++sent_in_slots_;
    };
    handler.on_end = [this](const absl::Status& status) {
      std::lock_guard<std::mutex> lock(mutex_);
      end_ = status;
      changed_.notify_all();
    };
    stream_ = bulk::ClientStream::Open(address, hello, handler, sharing);
    // What is sent before the welcome goes without.
    EXPECT_TRUE(Await([](const auto& frames) { return !frames.empty(); }));
  }
  ~Peer() {
    Deaf(false);
    stream_->Cancel(absl::CancelledError("the test is over"));
    (void)AwaitEnd();
  }

  void Push(uint32_t begin, std::shared_ptr<const std::string> bytes, uint32_t tag) {
    bulk::Outgoing out;
    out.header.type = FrameType::kPush;
    out.header.dtype = DType::kU8;
    out.header.generation = 3;
    out.header.step = 5;
    out.header.begin = begin;
    out.header.count = static_cast<uint32_t>(bytes->size());
    out.header.tag = tag;
    out.payload = *bytes;
    out.keep = std::move(bytes);
    stream_->Send(std::move(out));
  }
  // Of values of two bytes.
  void Pull(uint32_t begin, uint32_t count, uint32_t tag) {
    bulk::Outgoing out;
    out.header.type = FrameType::kPull;
    out.header.dtype = DType::kBF16;
    out.header.generation = 3;
    out.header.step = 4;
    out.header.chunk = 1;
    out.header.begin = begin;
    out.header.count = count;
    out.header.tag = tag;
    stream_->Send(std::move(out));
  }
  void SendHeader(const Header& header) {
    bulk::Outgoing out;
    out.header = header;
    stream_->Send(std::move(out));
  }
  void Deaf(bool deaf) {
    std::lock_guard<std::mutex> lock(mutex_);
    deaf_ = deaf;
    changed_.notify_all();
  }
  bool Await(const std::function<bool(const std::vector<Frame>&)>& holds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, FakeStore::kPatience, [&] {
      return holds(frames_) || !end_.ok();
    }) && holds(frames_);
  }
  bool AwaitAck(uint32_t tag) {
    return Await([tag](const auto& frames) {
      return frames.back().header.type == FrameType::kAck && frames.back().header.tag == tag;
    });
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
  bool welcomed_as_shared() {
    v1::BulkWelcome welcome;
    EXPECT_TRUE(welcome.ParseFromString(frames().front().payload));
    return welcome.shared();
  }
  int sent_in_slots() const { return sent_in_slots_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Frame> frames_;
  absl::Status end_;
  bool deaf_ = false;
  std::atomic<int> sent_in_slots_{0};
  std::shared_ptr<bulk::ClientStream> stream_;
};

bulk::Sharing With(bool wanted, int slots = 2) {
  bulk::Sharing sharing;
  sharing.wanted = wanted;
  sharing.slots = slots;
  return sharing;
}

// How many regions this process has mapped.
size_t Mapped() {
  const std::string maps = Contents("/proc/self/maps");
  size_t count = 0;
  for (size_t at = 0; (at = maps.find("/dev/shm/zeroshard-", at)) != std::string::npos; ++at) {
    ++count;
  }
  return count;
}

// How many have a name that this process holds: its lock's descriptor is open until the name goes.
size_t Named() {
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error);
    if (!error && target.string().find("/dev/shm/zeroshard-") == 0) ++count;
  }
  return count;
}

class SharedMemoryTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Ways, SharedMemoryTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Shared" : "Inline"; });

TEST_P(SharedMemoryTest, WhatIsPushedIsStagedWhicheverWayItGoes) {
  FakeStore store;
  Peer peer(store.address(), With(GetParam()));
  EXPECT_EQ(peer.welcomed_as_shared(), GetParam());
  std::map<uint32_t, std::string> wanted;
  uint32_t begin = 0, tag = 0;
  // Far more than the slots hold, with small ones between, up to the largest.
  for (int i = 0; i < 20; ++i) {
    for (const size_t size :
         {bulk::kMaxPayload, bulk::kLeastShared, bulk::kLeastShared - 1, size_t{3}}) {
      auto bytes = std::make_shared<const std::string>(Bytes(size, ++tag));
      wanted[begin] = *bytes;
      peer.Push(begin, std::move(bytes), tag);
      begin += static_cast<uint32_t>(size);
    }
  }
  ASSERT_TRUE(peer.AwaitAck(tag));
  store.With([&](auto& state) { EXPECT_TRUE((state.pushed[{5, 0}] == wanted)); });
  EXPECT_EQ(peer.sent_in_slots(), GetParam() ? 40 : 0);
}

TEST_P(SharedMemoryTest, WhatIsPulledIsWhatTheStoreHasWhicheverWayItGoes) {
  FakeStore store;
  const std::string values = Bytes(5 << 19, 1);  // 2.5 MiB
  store.Publish(4, 1, values);
  Peer peer(store.address(), With(GetParam()));
  constexpr int kTimes = 20;
  const auto count = static_cast<uint32_t>(values.size() / 2);
  for (uint32_t i = 0; i < kTimes; ++i) peer.Pull(0, count, i);
  ASSERT_TRUE(peer.Await([&](const auto& frames) { return frames.size() == 1 + 3 * kTimes; }));
  std::vector<std::string> pulled(kTimes);
  int in_slots = 0;
  const auto frames = peer.frames();
  for (size_t i = 1; i < frames.size(); ++i) {
    ASSERT_EQ(frames[i].header.type, FrameType::kData);
    EXPECT_EQ(frames[i].header.begin * size_t{2}, pulled[frames[i].header.tag].size());
    pulled[frames[i].header.tag] += frames[i].payload;
    if (frames[i].header.slot != 0) ++in_slots;
  }
  for (const std::string& each : pulled) EXPECT_TRUE(each == values);
  EXPECT_EQ(in_slots, GetParam() ? 3 * kTimes : 0);
}

TEST_P(SharedMemoryTest, PushesAndPullsOnOneStreamDoNotHoldEachOtherUp) {
  FakeStore store;
  const std::string values = Bytes(2 << 20, 2);
  store.Publish(4, 1, values);
  Peer peer(store.address(), With(GetParam(), 1));
  constexpr uint32_t kTimes = 30;
  const auto bytes = std::make_shared<const std::string>(Bytes(bulk::kMaxPayload, 3));
  for (uint32_t i = 1; i <= kTimes; ++i) {
    peer.Push(i, bytes, i);
    peer.Pull(0, 1 << 20, i);
  }
  size_t data = 0;
  ASSERT_TRUE(peer.Await([&](const auto& frames) {
    data = 0;
    uint32_t acknowledged = 0;
    for (const auto& frame : frames) {
      if (frame.header.type == FrameType::kData) data += frame.payload.size();
      if (frame.header.type == FrameType::kAck) acknowledged = frame.header.tag;
    }
    return data >= kTimes * values.size() && acknowledged == kTimes;
  }));
  EXPECT_EQ(data, kTimes * values.size());
  store.With([&](auto& state) {
    for (uint32_t i = 1; i <= kTimes; ++i) {
      EXPECT_TRUE((state.pushed[{5, 0}][i] == *bytes)) << i;
    }
  });
}

TEST_P(SharedMemoryTest, APushThatIsTooEarlyHoldsUpNothingButWhatComesAfterIt) {
  FakeStore store;
  const std::string values = Bytes(4 << 20, 4);
  store.Publish(4, 1, values);
  store.With([](auto& state) { state.hold_pushes = true; });
  Peer peer(store.address(), With(GetParam(), 2));
  const auto bytes = std::make_shared<const std::string>(Bytes(bulk::kMaxPayload, 5));
  peer.Pull(0, 2 << 20, 1);  // four frames, more than there are slots
  for (uint32_t i = 1; i <= 5; ++i) peer.Push(i, bytes, i);
  ASSERT_TRUE(store.Await([](const auto& state) { return state.early.size() == 1; }));
  ASSERT_TRUE(peer.Await([](const auto& frames) { return frames.size() == 5; }));
  store.Release();
  ASSERT_TRUE(peer.AwaitAck(5));
  store.With([&](auto& state) {
    for (uint32_t i = 1; i <= 5; ++i) EXPECT_TRUE((state.pushed[{5, 0}][i] == *bytes)) << i;
  });
}

TEST(SharedMemoryStreamTest, APeerThatDoesNotReadHoldsItsSlotsAndIsServedWhenItDoes) {
  FakeStore store;
  const std::string values = Bytes(2 << 20, 6);
  store.Publish(4, 1, values);
  Peer peer(store.address(), With(true, 1));
  peer.Deaf(true);
  constexpr uint32_t kTimes = 2 * BulkStream::kMostPulls;
  for (uint32_t i = 0; i < kTimes; ++i) peer.Pull(0, 1 << 20, i);
  // The store's bound is reached: it hears of no room, and sends what it has in frames.
  ASSERT_TRUE(store.Await([](const auto& state) { return state.pulls >= BulkStream::kMostPulls; }));
  peer.Deaf(false);
  ASSERT_TRUE(peer.Await([](const auto& frames) { return frames.size() == 1 + 2 * kTimes; }));
  for (const auto& frame : peer.frames()) {
    if (frame.header.type != FrameType::kData) continue;
    EXPECT_TRUE(
        values.compare(frame.header.begin * size_t{2}, frame.payload.size(), frame.payload) == 0);
  }
}

TEST(SharedMemoryStreamTest, WhereNoRegionCanBeMadePayloadsTravelInTheirFrames) {
  FakeStore store;
  TempFolder folder;
  bulk::Sharing sharing;
  sharing.folder = folder / "none";
  Peer peer(store.address(), sharing);
  EXPECT_FALSE(peer.welcomed_as_shared());
  const auto bytes = std::make_shared<const std::string>(Bytes(bulk::kMaxPayload, 7));
  peer.Push(0, bytes, 1);
  ASSERT_TRUE(peer.AwaitAck(1));
  EXPECT_EQ(peer.sent_in_slots(), 0);
}

TEST(SharedMemoryStreamTest, WhereTheStoreDoesNotFindItPayloadsTravelInTheirFramesAndItIsGone) {
  FakeStore store;
  MemoryFolder folder;  // not where the store looks, as on another host
  bulk::Sharing sharing;
  sharing.folder = folder.path();
  Peer peer(store.address(), sharing);
  EXPECT_FALSE(peer.welcomed_as_shared());
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  const auto bytes = std::make_shared<const std::string>(Bytes(bulk::kMaxPayload, 8));
  peer.Push(0, bytes, 1);
  ASSERT_TRUE(peer.AwaitAck(1));
  EXPECT_EQ(peer.sent_in_slots(), 0);
}

TEST(SharedMemoryStreamTest, NoNameStaysAfterTheWelcomeOrARefusalAndNoMappingAfterTheEnd) {
  FakeStore store;
  {
    Peer peer(store.address());
    EXPECT_TRUE(peer.welcomed_as_shared());
    EXPECT_EQ(Named(), 0u);
    EXPECT_EQ(Mapped(), 2u);  // this process is both ends
  }
  ASSERT_TRUE(store.Await([](const auto& state) { return state.sessions == 0; }));
  store.With([](auto& state) {
    state.refuse = [](const v1::BulkHello&) { return absl::FailedPreconditionError("no"); };
  });
  v1::BulkHello hello;
  std::mutex mutex;
  std::condition_variable changed;
  bool ended = false;
  const auto stream = bulk::ClientStream::Open(
      store.address(), hello,
      {[](const bulk::ReceivedFrame&) { return absl::OkStatus(); }, nullptr,
       [&](const absl::Status&) {
         std::lock_guard<std::mutex> lock(mutex);
         ended = true;
         changed.notify_all();
       }});
  std::unique_lock<std::mutex> lock(mutex);
  ASSERT_TRUE(changed.wait_for(lock, FakeStore::kPatience, [&] { return ended; }));
  EXPECT_EQ(Named(), 0u);
  store.Stop();
  EXPECT_EQ(Mapped(), 0u);
}

// A store that says its welcome twice.
class WelcomesTwice final : public grpc::CallbackGenericService {
 public:
  WelcomesTwice() {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
    builder.RegisterCallbackGenericService(this);
    server_ = builder.BuildAndStart();
  }
  ~WelcomesTwice() override { server_->Shutdown(std::chrono::system_clock::now()); }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

 private:
  class Call final : public grpc::ServerGenericBidiReactor {
   public:
    Call() { StartRead(&in_); }
    void OnReadDone(bool ok) override {
      if (ok) Welcome();
    }
    void OnWriteDone(bool ok) override {
      if (ok && ++written_ < 2) Welcome();
    }
    void OnCancel() override { Finish(grpc::Status::CANCELLED); }
    void OnDone() override { delete this; }

   private:
    void Welcome() {
      Header header;
      header.type = FrameType::kWelcome;
      header.generation = 3;
      out_ = bulk::MakeFrame(header, v1::BulkWelcome().SerializeAsString());
      StartWrite(&out_);
    }
    grpc::ByteBuffer in_, out_;
    int written_ = 0;
  };
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override {
    return new Call;
  }

  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

TEST(SharedMemoryStreamTest, ASecondWelcomeEndsTheStream) {
  WelcomesTwice store;
  Peer peer(store.address());
  const absl::Status end = peer.AwaitEnd();
  EXPECT_TRUE(absl::IsInvalidArgument(end)) << end;
  EXPECT_THAT(std::string(end.message()), HasSubstr("welcome twice"));
}

TEST(SharedMemoryFrameTest, AFrameInASlotThatIsNotThereOrNotSentOrStillReadIsRefusedByName) {
  auto region = bulk::SharedRegion::Make(2);
  ASSERT_TRUE(region.ok()) << region.status();
  const auto read = [&](int slot) {
    Header header;
    header.type = FrameType::kPush;
    header.dtype = DType::kU8;
    header.generation = 3;
    header.count = header.bytes = static_cast<uint32_t>(bulk::kLeastShared);
    header.slot = static_cast<uint16_t>(slot + 1);
    header.payload_crc = Crc32c((*region)->Slot(0), header.bytes);
    return bulk::ReadFrame(bulk::MakeSlotFrame(header), region->get());
  };
  const auto refused = [&](int slot) {
    const absl::Status status = read(slot).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refused(2), HasSubstr("slot 2 of a region that has 2"));
  EXPECT_THAT(refused(0), HasSubstr("slot 0, which is free"));
  ASSERT_EQ((*region)->Take(), 0);
  auto frame = read(0);
  ASSERT_TRUE(frame.ok()) << frame.status();
  EXPECT_THAT(refused(0), HasSubstr("slot 0, whose last frame is still being read"));
  frame->Release();
  EXPECT_THAT(refused(0), HasSubstr("slot 0, which is free"));
}

}  // namespace
}  // namespace zeroshard::store
