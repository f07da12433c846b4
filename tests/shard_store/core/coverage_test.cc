#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "shard_store/core/staging.h"

namespace zeroshard::store {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(Coverage, IsCompleteWhenRangesInAnyOrderTileTheRun) {
  Coverage run(100);
  EXPECT_EQ(run.FirstGap(), 0u);
  EXPECT_TRUE(run.Add(50, 50).ok());
  EXPECT_TRUE(run.Add(0, 20).ok());
  EXPECT_EQ(run.FirstGap(), 20u);
  EXPECT_EQ(run.covered(), 70u);
  EXPECT_FALSE(run.complete());
  EXPECT_TRUE(run.Add(20, 30).ok());
  EXPECT_TRUE(run.complete());
  EXPECT_EQ(run.FirstGap(), 100u);
}

TEST(Coverage, ARangeSaidAgainCountsOnce) {
  Coverage run(10);
  EXPECT_TRUE(run.Add(2, 3).ok());
  EXPECT_TRUE(run.Add(2, 3).ok());
  EXPECT_EQ(run.covered(), 3u);
}

TEST(Coverage, IsMadeOfABoundedNumberOfRanges) {
  const uint64_t size = 1 << 20;
  Coverage run(size);
  uint64_t taken = 0;
  absl::Status status;
  for (; taken < size && status.ok(); ++taken) status = run.Add(taken, 1);
  EXPECT_EQ(taken - 1, size / 64);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.message(), AllOf(HasSubstr("elements 16384 to 16384"),
                                      HasSubstr("made of 16384"), HasSubstr("larger pieces")));
  EXPECT_TRUE(run.Add(0, 1).ok());  // one that is here is none more
  EXPECT_EQ(run.covered(), size / 64);
  run.Clear();
  EXPECT_TRUE(run.Add(0, size).ok());

  Coverage small(1000);  // in any pieces
  for (uint64_t i = 0; i < 1000; ++i) ASSERT_TRUE(small.Add(i, 1).ok());
  EXPECT_TRUE(small.complete());
}

TEST(Coverage, RefusesEveryOverlapThatIsNotTheSameRange) {
  Coverage run(100);
  ASSERT_TRUE(run.Add(20, 20).ok());
  const struct {
    uint64_t begin, count;
  } cases[] = {{20, 10}, {30, 10}, {25, 5}, {10, 11}, {39, 1}, {20, 21}, {0, 100}, {19, 2}};
  for (const auto& [begin, count] : cases) {
    const absl::Status status = run.Add(begin, count);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << begin << " " << count;
    EXPECT_THAT(status.message(), HasSubstr("elements 20 to 39"));
  }
  EXPECT_EQ(run.covered(), 20u);
  EXPECT_TRUE(run.Add(0, 20).ok());
  EXPECT_TRUE(run.Add(40, 60).ok());
  EXPECT_TRUE(run.complete());
}

TEST(Coverage, RefusesWhatIsEmptyOrOutsideAlsoWhereSumsWouldOverflow) {
  Coverage run(10);
  EXPECT_TRUE(absl::IsInvalidArgument(run.Add(0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(run.Add(10, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(run.Add(9, 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(run.Add(5, ~uint64_t{0})));
  EXPECT_TRUE(absl::IsInvalidArgument(run.Add(~uint64_t{0}, 2)));
  EXPECT_EQ(run.covered(), 0u);
}

TEST(Coverage, OfOneElementAndOfNone) {
  Coverage one(1);
  EXPECT_FALSE(one.complete());
  EXPECT_TRUE(one.Add(0, 1).ok());
  EXPECT_TRUE(one.complete());
  one.Clear();
  EXPECT_EQ(one.covered(), 0u);
  EXPECT_FALSE(one.complete());
  EXPECT_TRUE(Coverage(0).complete());
}

}  // namespace
}  // namespace zeroshard::store
