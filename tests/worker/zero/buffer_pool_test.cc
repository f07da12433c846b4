#include "worker/zero/buffer_pool.h"

#include <memory>

#include "gtest/gtest.h"

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

}  // namespace
}  // namespace zeroshard
