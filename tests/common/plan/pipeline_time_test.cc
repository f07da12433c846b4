#include "common/plan/pipeline_time.h"

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/plan/schedule_checker.h"

namespace zeroshard {
namespace {

PipelineTime Timed(int p, int v, int64_t m, const std::vector<StageTime>& times) {
  return TimeOf({.stages = p, .virtual_stages = v, .micro_batches = m}, times);
}

std::vector<StageTime> Equal(int count) {
  return std::vector<StageTime>(static_cast<size_t>(count));
}

TEST(PipelineTimeTest, TheBubbleOfEqualStagesIsThatOfTheFormula) {
  for (int p = 1; p <= 8; ++p) {
    for (int v = 1; v <= 3; ++v) {
      for (int64_t m = 1; m <= 16; ++m) {
        if (v > 1 && m % p != 0) continue;
        const PipelineTime time = Timed(p, v, m, Equal(p * v));
        const double slots = static_cast<double>(v * m + p - 1);
        EXPECT_EQ(time.total, 3 * slots);
        EXPECT_DOUBLE_EQ(time.Bubble(), (p - 1) / slots) << p << " " << v << " " << m;
      }
    }
  }
}

// Against the checker, which runs the lists in whole numbers with streams in order and few buffers.
TEST(PipelineTimeTest, IsTheCheckersTimeForEveryShape) {
  for (const int64_t backward : {1, 4, 5}) {
    for (int p = 1; p <= 6; ++p) {
      for (int v = 1; v <= 3; ++v) {
        for (int64_t m = 1; m <= 9; ++m) {
          const PipelineShape shape{.stages = p, .virtual_stages = v, .micro_batches = m};
          const auto schedules = MakePipelineSchedule(shape);
          ASSERT_TRUE(schedules.ok());
          ScheduleChecker checker(*schedules, 2, backward);
          ASSERT_EQ(checker.Check(), "");
          const std::vector<StageTime> times(
              static_cast<size_t>(p * v),
              {.forward = 2, .backward = static_cast<double>(backward)});
          const PipelineTime time = TimeOf(shape, times);
          // Those may make a step longer, never shorter; not at the speeds they are made for.
          EXPECT_LE(time.total, static_cast<double>(checker.makespan()));
          if (backward == 4) {
            EXPECT_EQ(time.total, static_cast<double>(checker.makespan()));
          }
          for (const double busy : time.busy)
            EXPECT_DOUBLE_EQ(busy, static_cast<double>(v * m * (2 + backward)));
        }
      }
    }
  }
}

// By hand: two stages, one micro-batch: 1 + 4 forward, 6 + 2 back; each idle while the other works.
TEST(PipelineTimeTest, OneMicroBatchGoesThroughAllStagesAlone) {
  const PipelineTime time =
      Timed(2, 1, 1, {{.forward = 1, .backward = 2}, {.forward = 4, .backward = 6}});
  EXPECT_EQ(time.total, 13);
  EXPECT_EQ(time.busy, (std::vector<double>{3, 10}));
  EXPECT_EQ(time.Bubble(), 0.5);
}

// With many micro-batches the slowest stage sets the pace and the bubble is what the others wait.
TEST(PipelineTimeTest, ManyMicroBatchesGoAtThePaceOfTheSlowestStage) {
  const std::vector<StageTime> times = {
      {.forward = 1, .backward = 2}, {.forward = 2, .backward = 4}, {.forward = 1, .backward = 2}};
  const PipelineTime time = Timed(3, 1, 100000, times);
  EXPECT_NEAR(time.total / (6.0 * 100000), 1, 1e-4);
  EXPECT_NEAR(time.Bubble(), 1.0 / 3, 1e-4);
}

// By the checker, which goes through all of them.
TEST(PipelineTimeTest, ManyMicroBatchesTakeWhatTheirScheduleTakes) {
  for (int p = 1; p <= 5; ++p) {
    for (int v = 1; v <= 2; ++v) {
      for (int64_t m = 4 * p - 1; m <= 7 * p + 1; ++m) {
        const auto schedules =
            MakePipelineSchedule({.stages = p, .virtual_stages = v, .micro_batches = m});
        ASSERT_TRUE(schedules.ok());
        ScheduleChecker checker(*schedules);
        ASSERT_EQ(checker.Check(), "");
        EXPECT_EQ(Timed(p, v, m, Equal(p * v)).total, static_cast<double>(checker.makespan()))
            << absl::StrCat(p, " ", v, " ", m);
      }
    }
  }
}

TEST(PipelineTimeTest, AHugeStepIsTimedAtOnce) {
  constexpr int64_t kMany = int64_t{1} << 31;
  EXPECT_DOUBLE_EQ(Timed(64, 1, kMany, Equal(64)).total, 3 * (static_cast<double>(kMany) + 63));
}

}  // namespace
}  // namespace zeroshard
