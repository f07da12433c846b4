#include "common/plan/nearest.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(NearestTest, DistanceCountsSingleCharacterEdits) {
  EXPECT_EQ(EditDistance("", ""), 0u);
  EXPECT_EQ(EditDistance("", "abc"), 3u);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
  EXPECT_EQ(EditDistance("sitting", "kitten"), 3u);
  EXPECT_EQ(EditDistance("gradient_clipp1ng", "gradient_clipping"), 1u);
}

TEST(NearestTest, TheNearestComeFirstAndTiesKeepTheirOrder) {
  const std::vector<std::string> names = {"beta", "alpha", "betas", "meta"};
  EXPECT_THAT(NearestNames("beta", names, 3), ElementsAre("beta", "betas", "meta"));
  EXPECT_THAT(NearestNames("x", {"bb", "aa"}, 5), ElementsAre("bb", "aa"));
  EXPECT_THAT(NearestNames("x", {}, 3), IsEmpty());
}

}  // namespace
}  // namespace zeroshard
