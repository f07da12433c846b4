#include "common/presence.h"

#include <gtest/gtest.h>

namespace zeroshard {
namespace {

using std::chrono::seconds;

class PresenceTest : public testing::Test {
 protected:
  static Presence::Clock::time_point At(int second) {
    return Presence::Clock::time_point(seconds(1000 + second));
  }
  void Heard(int second) { presence_.Heard(At(second), seconds(3)); }
  seconds Counted(int start) const {
    return std::chrono::duration_cast<seconds>(presence_.Counted(At(start)));
  }
  Presence presence_{seconds(5)};
};

TEST_F(PresenceTest, NothingCountsBeforeTheCoordinatorWasEverThere) {
  EXPECT_EQ(Counted(-900), seconds(0));
}

TEST_F(PresenceTest, TimeCountsUpToTheCoordinatorsLastWord) {
  for (int second = 0; second <= 30; second += 3) Heard(second);
  EXPECT_EQ(Counted(10), seconds(20));
  EXPECT_EQ(Counted(30), seconds(0));
  EXPECT_EQ(Counted(31), seconds(0)) << "nothing was heard since";
}

TEST_F(PresenceTest, WhatALostCoordinatorCostsDoesNotCount) {
  for (int second = 0; second <= 30; second += 3) Heard(second);
  presence_.Lost();
  EXPECT_EQ(Counted(20), seconds(10)) << "as it was";
  Heard(31);  // back at once, as another process
  EXPECT_EQ(Counted(20), seconds(0));
  for (int second = 33; second <= 60; second += 3) Heard(second);
  EXPECT_EQ(Counted(20), seconds(60 - 31 - 5)) << "anew from when the others have found it too";
  EXPECT_EQ(Counted(50), seconds(10));
}

TEST_F(PresenceTest, ASilentCoordinatorIsAwayThoughTheConnectionStands) {
  for (int second = 0; second <= 30; second += 3) Heard(second);
  Heard(60);
  EXPECT_EQ(Counted(31), seconds(0));
  for (int second = 63; second <= 72; second += 3) Heard(second);
  EXPECT_EQ(Counted(31), seconds(72 - 60 - 5));
}

TEST(PresenceOfNobodyTest, AllTimeCounts) {
  const auto start = Presence::Clock::now() - seconds(7);
  EXPECT_GE(Counted(nullptr, start), seconds(7));
}

}  // namespace
}  // namespace zeroshard
