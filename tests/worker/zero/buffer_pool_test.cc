#include "worker/zero/buffer_pool.h"

#include <memory>
#include <mutex>

#include "gtest/gtest.h"
#include "worker/device/host_stream.h"

namespace zeroshard {
namespace {

class ManualEvent : public Event::State {
 public:
  explicit ManualEvent(absl::Status status) : status_(std::move(status)) {}
  bool Done() const override { return waits > 0; }
  absl::Status Wait() override {
    ++waits;
    return status_;
  }
  int waits = 0;

 private:
  absl::Status status_;
};

TEST(BufferPoolTest, HandsOutWhatFitsAndKeepsLargeOnesForLargeNeeds) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  BufferPool pool(device.get());
  auto large = pool.Take(1000);
  ASSERT_TRUE(large.ok());
  void* const large_data = large->data();
  pool.Give(*std::move(large));
  auto small = pool.Take(100);
  ASSERT_TRUE(small.ok());
  EXPECT_NE(small->data(), large_data) << "more than twice as large";
  auto again = pool.Take(600);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->data(), large_data);
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kBuffers), 1100);
}

TEST(InFlightPoolTest, TheLastUseOfABufferIsAskedForOnceAndBeforeTheNext) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  InFlightPool pool(device.get(), 2);
  std::vector<int> used;
  const auto give = [&](int i, Event event) {
    auto buffer = pool.Take(64);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    pool.GiveAfter(*std::move(buffer), {std::move(event)}, [&used, i] {
      used.push_back(i);
      return absl::OkStatus();
    });
  };
  give(0, {});
  give(1, {});
  EXPECT_EQ(used, std::vector<int>({}));
  give(2, {});
  EXPECT_EQ(used, std::vector<int>({0}));
  const auto held = std::make_shared<ManualEvent>(absl::OkStatus());
  give(3, Event(held));
  ASSERT_TRUE(pool.FinishUses().ok());
  EXPECT_EQ(used, std::vector<int>({0, 1, 2, 3}));
  EXPECT_EQ(held->waits, 0) << "what else reads the buffers is not waited for";
  ASSERT_TRUE(pool.Drain().ok());
  EXPECT_EQ(used.size(), 4u);
  pool.GiveAfter(*pool.Take(64), {}, [] { return absl::AbortedError("no sums"); });
  EXPECT_EQ(pool.Drain(), absl::AbortedError("no sums"));
}

TEST(InFlightPoolTest, OneMoreThanTheLimitWaitsForTheOldest) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  InFlightPool pool(device.get(), 2);
  std::vector<std::shared_ptr<ManualEvent>> events;
  std::vector<void*> data;
  for (int i = 0; i < 2; ++i) {
    auto buffer = pool.Take(64);
    ASSERT_TRUE(buffer.ok());
    data.push_back(buffer->data());
    events.push_back(std::make_shared<ManualEvent>(absl::OkStatus()));
    pool.GiveAfter(*std::move(buffer), {Event(events.back())});
  }
  auto third = pool.Take(64);
  ASSERT_TRUE(third.ok());
  EXPECT_EQ(third->data(), data[0]);
  EXPECT_EQ(events[0]->waits, 1);
  EXPECT_EQ(events[1]->waits, 0);
}

TEST(InFlightPoolTest, AFailureIsReportedOnceAndNothingIsLeftBehind) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  InFlightPool pool(device.get(), 4);
  auto failed = std::make_shared<ManualEvent>(absl::UnavailableError("rank 1 is gone"));
  auto fine = std::make_shared<ManualEvent>(absl::OkStatus());
  for (const auto& event : {failed, fine}) {
    auto buffer = pool.Take(64);
    ASSERT_TRUE(buffer.ok());
    pool.GiveAfter(*std::move(buffer), {Event(event), Event(fine)});
  }
  EXPECT_EQ(pool.Drain(), absl::UnavailableError("rank 1 is gone"));
  EXPECT_EQ(pool.Drain(), absl::OkStatus());
  EXPECT_EQ(failed->waits, 1);
}

TEST(BufferPoolTest, ABoundedPoolLetsFreeBuffersGoBeforeItGrowsBeyondIt) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  BufferPool pool(device.get(), 1000);
  Buffer a = *pool.Take(400), b = *pool.Take(400);
  pool.Give(std::move(a));
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kBuffers), 800);
  Buffer c = *pool.Take(300);  // 400 lent, 400 free
  EXPECT_EQ(c.bytes(), 300u) << "none is lent for less than it is";
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kBuffers), 700) << "the free one went";
  Buffer d = *pool.Take(600);
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kBuffers), 1300) << "what is needed is there";
  pool.Give(std::move(d));
  Buffer again = *pool.Take(600);
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kBuffers), 1300) << "and is used again";
}

TEST(InFlightPoolTest, IsFullWhileItsOldestBufferIsBeingRead) {
  std::unique_ptr<Device> device = MakeCpuDevice();
  InFlightPool pool(device.get(), 1);
  std::unique_ptr<HostStream> stream = MakeHostStream("reader");
  std::mutex mutex;
  Event read;
  {
    std::lock_guard<std::mutex> lock(mutex);
    read = stream->Enqueue([&] {
      std::lock_guard<std::mutex> until_released(mutex);
      return absl::OkStatus();
    });
    ASSERT_FALSE(*pool.Full());
    pool.GiveAfter(*pool.Take(64), {read});
    EXPECT_TRUE(*pool.Full());
  }
  ASSERT_TRUE(read.Wait().ok());
  EXPECT_FALSE(*pool.Full());
  pool.GiveAfter(*pool.Take(64), {stream->Enqueue([] { return absl::DataLossError("bad"); })});
  absl::StatusOr<bool> full = true;
  while (full.ok() && *full) full = pool.Full();
  EXPECT_EQ(full.status(), absl::DataLossError("bad"));
}

}  // namespace
}  // namespace zeroshard
