#include "worker/train/step_meter.h"

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

class StepMeterTest : public testing::Test {
 protected:
  void Move(uint64_t sent, uint64_t pushed, uint64_t pulled) {
    traffic_.bytes[0][1] += sent / 2;
    traffic_.bytes[4][2] += sent - sent / 2;
    offload_.pushed += pushed;
    offload_.pulled += pulled;
  }
  void ExpectLast(uint64_t step, uint64_t sent, uint64_t pushed, uint64_t pulled) {
    const StepTraffic last = meter_.last();
    EXPECT_EQ(last.step, step);
    EXPECT_EQ(last.sent, sent);
    EXPECT_EQ(last.pushed, pushed);
    EXPECT_EQ(last.pulled, pulled);
  }

  TrafficCounters traffic_;
  OffloadCounters offload_;
  StepMeter meter_{&traffic_, &offload_};
};

TEST_F(StepMeterTest, CountsFromMarkToMarkAndNotWhatCameBeforeTheFirst) {
  Move(1000, 100, 10);
  ExpectLast(0, 0, 0, 0);
  meter_.Mark(5);
  ExpectLast(0, 0, 0, 0);
  Move(301, 20, 7);
  meter_.Mark(6);
  ExpectLast(6, 301, 20, 7);
}

TEST_F(StepMeterTest, AStepBesideWhichMoreTravelledIsNotShown) {
  meter_.Mark(1);
  Move(300, 0, 0);
  meter_.Mark(2);
  Move(900, 0, 0);
  meter_.Spoil();
  meter_.Mark(3);
  ExpectLast(2, 300, 0, 0);
  Move(299, 0, 0);
  meter_.Mark(4);
  ExpectLast(4, 299, 0, 0);
}

TEST_F(StepMeterTest, ARankWithoutStoresMovesNothingThere) {
  StepMeter alone(&traffic_, nullptr);
  alone.Mark(1);
  Move(3, 5, 7);
  alone.Mark(2);
  EXPECT_EQ(alone.last().sent, 3u);
  EXPECT_EQ(alone.last().pushed, 0u);
}

}  // namespace
}  // namespace zeroshard
