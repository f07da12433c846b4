#include "shard_store/service/stream_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

v1::BulkHello Hello(const std::string& run_id, uint32_t rank, uint64_t generation,
                    bool store = false) {
  v1::BulkHello hello;
  hello.set_run_id(run_id);
  hello.set_rank(rank);
  hello.set_generation(generation);
  hello.set_store(store);
  return hello;
}

TEST(StreamLimitsTest, APeerHasABoundedNumberOfStreamsWhateverOthersHave) {
  const auto limits = StreamLimits::Make({.of_peer = 2});
  std::vector<absl::StatusOr<StreamLimits::Place>> open;
  for (const auto& hello : {Hello("run-1", 3, 7), Hello("run-1", 4, 7), Hello("run-1", 3, 8),
                            Hello("run-2", 3, 7), Hello("run-1", 3, 7, true)}) {
    for (int i = 0; i < 2; ++i) {
      open.push_back(limits->Take(hello));
      EXPECT_TRUE(open.back().ok()) << open.back().status();
    }
  }
  const absl::Status refused = limits->Take(Hello("run-1", 3, 7)).status();
  EXPECT_EQ(refused, absl::ResourceExhaustedError(
                         "rank 3 of run-1 has 2 streams open to this store in generation 7 and "
                         "asks for one more; at most 2 are served"));
  EXPECT_THAT(std::string(limits->Take(Hello("run-1", 3, 7, true)).status().message()),
              HasSubstr("store 3 of run-1"));
  open.erase(open.begin());
  EXPECT_TRUE(limits->Take(Hello("run-1", 3, 7)).ok());
}

TEST(StreamLimitsTest, ARunHasABoundedNumberOfStreams) {
  const auto limits = StreamLimits::Make({.of_run = 3});
  std::vector<absl::StatusOr<StreamLimits::Place>> open;
  for (uint32_t rank = 0; rank < 3; ++rank) open.push_back(limits->Take(Hello("run-1", rank, 7)));
  const absl::Status refused = limits->Take(Hello("run-1", 3, 8)).status();
  EXPECT_EQ(refused, absl::ResourceExhaustedError(
                         "run-1 has 3 streams open to this store; at most 3 are served"));
  EXPECT_TRUE(limits->Take(Hello("run-2", 3, 8)).ok());
  open.pop_back();
  EXPECT_TRUE(limits->Take(Hello("run-1", 3, 8)).ok());
}

TEST(StreamLimitsTest, FewAreSilentAndAPlaceMayOutliveTheLimits) {
  auto limits = StreamLimits::Make({.silent = 1});
  absl::StatusOr<StreamLimits::Place> first = limits->TakeSilent();
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsUnavailable(limits->TakeSilent().status()));
  first = absl::CancelledError();
  first = limits->TakeSilent();
  EXPECT_TRUE(first.ok());
  limits = nullptr;
}

}  // namespace
}  // namespace zeroshard::store
