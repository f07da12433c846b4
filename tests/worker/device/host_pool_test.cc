#include "worker/device/host_pool.h"

#include <atomic>
#include <limits>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "worker/device/host_event.h"

namespace zeroshard {
namespace {

constexpr size_t kAny = std::numeric_limits<size_t>::max();

class HostPoolTest : public testing::Test {
 protected:
  // One use that lasts until the event is finished; where its memory is.
  char* Use(HostPool* pool, size_t bytes, std::shared_ptr<HostEvent> until) {
    char* at = nullptr;
    pool->Run(bytes, [&](char* host, const absl::Status& earlier) {
      at = host;
      earlier_ = earlier;
      return Event(until);
    });
    return at;
  }
  static std::shared_ptr<HostEvent> Pending() { return std::make_shared<HostEvent>(); }

  std::unique_ptr<Device> device_ = MakeCpuDevice();
  absl::Status earlier_;
};

TEST_F(HostPoolTest, WhatIsInUseIsNobodyElses) {
  HostPool pool(device_.get(), kAny, kAny);
  std::set<char*> seen;
  const auto until = Pending();
  for (int i = 0; i < 5; ++i) seen.insert(Use(&pool, 100, until));
  EXPECT_EQ(seen.size(), 5u);
  until->Finish(absl::OkStatus());
}

TEST_F(HostPoolTest, WhatIsFreeIsUsedAgain) {
  HostPool pool(device_.get(), kAny, kAny);
  char* const large = Use(&pool, 200, nullptr);
  const auto until = Pending();
  EXPECT_EQ(Use(&pool, 100, until), large);
  EXPECT_NE(Use(&pool, 100, nullptr), large);
  EXPECT_EQ(pool.bytes(), 300u);
  until->Finish(absl::OkStatus());
  EXPECT_EQ(Use(&pool, 150, nullptr), large) << "the other is too small";
  EXPECT_EQ(pool.bytes(), 300u);
}

TEST_F(HostPoolTest, OneMoreThanTheBoundWaitsForTheOldest) {
  for (const bool by_bytes : {false, true}) {
    HostPool pool(device_.get(), by_bytes ? kAny : 2, by_bytes ? 250 : kAny);
    const auto first = Pending(), second = Pending();
    char* const oldest = Use(&pool, 100, first);
    Use(&pool, 100, second);
    std::atomic<bool> finished{false};
    std::thread other([&] {
      finished = true;
      first->Finish(absl::OkStatus());
    });
    EXPECT_EQ(Use(&pool, 100, nullptr), oldest);
    EXPECT_TRUE(finished);
    EXPECT_EQ(pool.bytes(), 200u);
    other.join();
    second->Finish(absl::OkStatus());
  }
}

TEST_F(HostPoolTest, WhatIsLargerThanTheBoundHasABufferAloneAndGivesItBack) {
  HostPool pool(device_.get(), kAny, 250);
  Use(&pool, 100, nullptr);
  const auto until = Pending();
  ASSERT_NE(Use(&pool, 1000, until), nullptr);
  EXPECT_EQ(pool.bytes(), 1000u);
  until->Finish(absl::OkStatus());
  Use(&pool, 100, nullptr);
  EXPECT_EQ(pool.bytes(), 100u);
}

TEST_F(HostPoolTest, TellsTheFirstErrorOfUsesThatHaveEnded) {
  HostPool pool(device_.get(), kAny, kAny);
  Use(&pool, 10, nullptr);
  const auto until = Pending();
  Use(&pool, 10, until);
  EXPECT_TRUE(earlier_.ok());
  until->Finish(absl::DataLossError("first"));
  Use(&pool, 10, nullptr);
  EXPECT_EQ(earlier_, absl::DataLossError("first"));
}

TEST_F(HostPoolTest, WithoutMemoryNothingStarts) {
  HostPool pool(device_.get(), kAny, kAny);
  bool started = false;
  const Event event = pool.Run(kAny, [&](char*, const absl::Status&) {
    started = true;
    return Event();
  });
  EXPECT_EQ(event.Wait().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(started);
}

}  // namespace
}  // namespace zeroshard
