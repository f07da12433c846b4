#include "common/spec/schedule.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

v1::JobSpec Scheduled(const std::string& scheduler, const std::string& lr = "0.8") {
  return Normalised(
      {absl::StrCat("optimizer.params.lr=", lr), absl::StrCat("scheduler=", scheduler)});
}

TEST(LearningRate, ConstantIsConstantAfterItsWarmup) {
  const v1::JobSpec spec = Scheduled("{type: constant, params: {warmup_steps: 4}}");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 1), 0.2);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 2), 0.4);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 4), 0.8);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 5), 0.8);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 1'000'000), 0.8);
  EXPECT_DOUBLE_EQ(LearningRate(Scheduled("{type: constant}"), 1), 0.8);
}

TEST(LearningRate, LinearFallsToItsMinimumAndStaysThere) {
  // Ten steps of warm-up, ninety from 0.8 down to 0.2: 0.6 / 90 a step.
  const v1::JobSpec spec = Scheduled("{type: linear, params: {warmup_steps: 10, min_lr: 0.2}}");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 1), 0.08);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 10), 0.8);
  EXPECT_NEAR(LearningRate(spec, 25), 0.7, 1e-15);
  EXPECT_NEAR(LearningRate(spec, 55), 0.5, 1e-15);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 100), 0.2);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 5000), 0.2);
}

TEST(LearningRate, CosineFallsByHalfACosine) {
  const v1::JobSpec spec = Scheduled("{type: cosine, params: {warmup_steps: 40, min_lr: 0.2}}");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 20), 0.4);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 40), 0.8);
  // A third, half and two thirds of the way: cos is 1/2, 0 and -1/2.
  EXPECT_NEAR(LearningRate(spec, 60), 0.2 + 0.3 * 1.5, 1e-15);
  EXPECT_NEAR(LearningRate(spec, 70), 0.5, 1e-15);
  EXPECT_NEAR(LearningRate(spec, 80), 0.2 + 0.3 * 0.5, 1e-15);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 100), 0.2);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 101), 0.2);
}

TEST(LearningRate, TotalStepsMayDifferFromTheJobs) {
  const v1::JobSpec spec = Scheduled("{type: linear, params: {total_steps: 10}}");
  EXPECT_NEAR(LearningRate(spec, 5), 0.4, 1e-15);
  EXPECT_EQ(LearningRate(spec, 10), 0.0);
  EXPECT_EQ(LearningRate(spec, 60), 0.0);
}

TEST(LearningRate, WarmupOverTheWholeScheduleNeverDividesByZero) {
  const v1::JobSpec spec = Scheduled("{type: cosine, params: {warmup_steps: 100, min_lr: 0.1}}");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 100), 0.8);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 101), 0.1);
}

// DeepSpeed steps its scheduler after the optimizer, and the scheduler counts from -1: optimizer
// step s sees last_batch_iteration s - 2, and the first the value that the constructor sets.
TEST(LearningRate, WarmupLRWarmsUpByLogarithm) {
  const v1::JobSpec spec = Scheduled(
      "{type: WarmupLR, params: {warmup_min_lr: 0.1, warmup_max_lr: 0.5, warmup_num_steps: 8}}");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 1), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 2), 0.1);  // log 1 = 0
  // log_8 of 2, 4 and 8 are 1/3, 2/3 and 1.
  EXPECT_NEAR(LearningRate(spec, 3), 0.1 + 0.4 / 3, 1e-15);
  EXPECT_NEAR(LearningRate(spec, 5), 0.1 + 0.8 / 3, 1e-15);
  EXPECT_NEAR(LearningRate(spec, 9), 0.5, 1e-15);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 10), 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 10'000), 0.5);
}

TEST(LearningRate, WarmupLRWarmsUpAlongALine) {
  const v1::JobSpec spec =
      Scheduled("{type: WarmupLR, params: {warmup_num_steps: 4, warmup_type: linear}}");
  EXPECT_EQ(LearningRate(spec, 1), 0.0);
  EXPECT_EQ(LearningRate(spec, 2), 0.0);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 3), 0.2);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 5), 0.6);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 6), 0.8);
}

TEST(LearningRate, WarmupLROfOneStepTakesTwo) {
  const v1::JobSpec spec = Scheduled("{type: WarmupLR, params: {warmup_num_steps: 1}}");
  EXPECT_EQ(LearningRate(spec, 2), 0.0);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 3), 0.8);  // log 2 / log 2
}

TEST(LearningRate, WarmupDecayLRFallsToItsMinimum) {
  const v1::JobSpec spec = Scheduled(
      "{type: WarmupDecayLR, params: {total_num_steps: 14, warmup_min_lr: 0.1, warmup_max_lr: 0.5, "
      "warmup_num_steps: 4, warmup_type: linear}}");
  EXPECT_DOUBLE_EQ(LearningRate(spec, 1), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 4), 0.1 + 0.4 * 0.5);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 6), 0.5);                 // iteration 4: (14 - 4) / 10
  EXPECT_NEAR(LearningRate(spec, 11), 0.1 + 0.4 * 0.5, 1e-15);  // iteration 9
  EXPECT_NEAR(LearningRate(spec, 15), 0.1 + 0.4 * 0.1, 1e-15);  // iteration 13
  EXPECT_DOUBLE_EQ(LearningRate(spec, 16), 0.1);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 99), 0.1);
}

TEST(LearningRate, WarmupCosineLRFallsToItsRatio) {
  const v1::JobSpec spec = Scheduled(
      "{type: WarmupCosineLR, params: {total_num_steps: 10, warmup_min_ratio: 0.25, "
      "warmup_num_steps: 4, cos_min_ratio: 0.1, warmup_type: linear}}");
  EXPECT_EQ(LearningRate(spec, 1), 0.0);  // before its first step it gives 0, not the minimum
  EXPECT_DOUBLE_EQ(LearningRate(spec, 2), 0.8 * 0.25);
  EXPECT_DOUBLE_EQ(LearningRate(spec, 4), 0.8 * (0.25 + 0.75 * 0.5));
  // Iteration 5 is (5 - 4 + 1) / 6 of the way, a third; 6 is half; 9 is the end.
  EXPECT_NEAR(LearningRate(spec, 7), 0.8 * (0.1 + 0.9 * 0.75), 1e-15);
  EXPECT_NEAR(LearningRate(spec, 8), 0.8 * (0.1 + 0.9 * 0.5), 1e-15);
  EXPECT_NEAR(LearningRate(spec, 11), 0.8 * 0.1, 1e-15);
  EXPECT_NEAR(LearningRate(spec, 500), 0.8 * 0.1, 1e-15);
}

TEST(LearningRate, DeepSpeedSchedulesShorterThanTheirWarmupStayFinite) {
  for (const char* type : {"WarmupDecayLR", "WarmupCosineLR"}) {
    const v1::JobSpec spec = Scheduled(
        absl::StrCat("{type: ", type, ", params: {total_num_steps: 2, warmup_num_steps: 10}}"));
    for (uint64_t step = 1; step < 30; ++step) {
      const double lr = LearningRate(spec, step);
      EXPECT_TRUE(std::isfinite(lr) && lr >= 0 && lr <= 0.8) << type << " " << step << " " << lr;
    }
  }
}

}  // namespace
}  // namespace zeroshard
