#include "common/member/backoff.h"

#include <gtest/gtest.h>

namespace zeroshard {
namespace {

TEST(BackoffTest, DoublesUpToTheMostAndJittersWithinTheUpperHalf) {
  Backoff backoff(absl::Milliseconds(100), absl::Milliseconds(700), 1);
  for (const int whole : {100, 200, 400, 700, 700, 700}) {
    const absl::Duration pause = backoff.Next();
    EXPECT_GE(pause, absl::Milliseconds(whole) / 2);
    EXPECT_LE(pause, absl::Milliseconds(whole));
  }
  backoff.Reset();
  EXPECT_LE(backoff.Next(), absl::Milliseconds(100));
}

TEST(BackoffTest, MembersWithDifferentSeedsDoNotReturnTogether) {
  Backoff one(absl::Seconds(1), absl::Seconds(1), 1);
  Backoff two(absl::Seconds(1), absl::Seconds(1), 2);
  EXPECT_NE(one.Next(), two.Next());
}

}  // namespace
}  // namespace zeroshard
