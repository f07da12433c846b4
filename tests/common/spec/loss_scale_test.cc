#include "common/spec/loss_scale.h"

#include <gmock/gmock.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/spec/decision.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

using testing::ElementsAre;

v1::JobSpec Fp16(std::vector<std::string> more = {}) {
  more.insert(more.begin(), "fp16.enabled=true");
  return Normalised(more);
}

// The scales after each step of `steps`: 'o' an overflow, '.' a good step.
std::vector<double> ScalesAfter(const v1::JobSpec& spec, const std::string& steps) {
  v1::LossScale now = InitialLossScale(spec);
  std::vector<double> scales;
  for (const char step : steps) {
    now = NextLossScale(spec, now, step == 'o');
    scales.push_back(now.scale());
  }
  return scales;
}

TEST(LossScaleTest, BeginsAtTheInitialPowerOrAtTheFixedScale) {
  EXPECT_EQ(InitialLossScale(Fp16()).scale(), 65536);
  EXPECT_EQ(InitialLossScale(Fp16({"fp16.initial_scale_power=5"})).scale(), 32);
  EXPECT_EQ(InitialLossScale(Fp16({"fp16.loss_scale=100.5"})).scale(), 100.5);
  EXPECT_EQ(InitialLossScale(Fp16({"fp16.loss_scale=0"})).scale(), 65536);
}

TEST(LossScaleTest, TheHysteresisIsUsedUpBeforeTheScaleFallsAndStaysSo) {
  const v1::JobSpec spec = Fp16({"fp16.hysteresis=3"});
  EXPECT_THAT(ScalesAfter(spec, "oo.oo"), ElementsAre(65536, 65536, 65536, 32768, 16384));
}

TEST(LossScaleTest, ByDefaultTheSecondOverflowHalvesTheScale) {
  EXPECT_THAT(ScalesAfter(Fp16(), "ooo"), ElementsAre(65536, 32768, 16384));
}

TEST(LossScaleTest, AWindowOfGoodStepsDoublesTheScaleAndGivesTheHysteresisBack) {
  const v1::JobSpec spec =
      Fp16({"fp16.initial_scale_power=4", "fp16.loss_scale_window=3", "fp16.hysteresis=2"});
  // Two good ones are no window; an overflow starts it anew.
  EXPECT_THAT(ScalesAfter(spec, "..o..."), ElementsAre(16, 16, 16, 16, 16, 32));
  EXPECT_THAT(ScalesAfter(spec, "oo...oo......"),
              ElementsAre(16, 8, 8, 8, 16, 16, 8, 8, 8, 16, 16, 16, 32));
}

TEST(LossScaleTest, WithConsecutiveHysteresisOneGoodStepGivesItBack) {
  const v1::JobSpec spec = Fp16({"fp16.consecutive_hysteresis=true"});
  EXPECT_THAT(ScalesAfter(spec, "o.o.oo"), ElementsAre(65536, 65536, 65536, 65536, 65536, 32768));
  EXPECT_THAT(ScalesAfter(Fp16(), "o.o.oo"), ElementsAre(65536, 65536, 32768, 32768, 16384, 8192));
}

TEST(LossScaleTest, AtTheLeastScaleOneMoreOverflowEndsTheJob) {
  const v1::JobSpec spec =
      Fp16({"fp16.initial_scale_power=3", "fp16.hysteresis=2", "fp16.min_loss_scale=3"});
  v1::LossScale now = InitialLossScale(spec);
  for (const double wanted : {8.0, 4.0, 3.0}) {
    EXPECT_FALSE(OverflowFails(spec, now));
    now = NextLossScale(spec, now, true);
    EXPECT_EQ(now.scale(), wanted);
  }
  EXPECT_TRUE(OverflowFails(spec, now));
  EXPECT_EQ(now.skipped_steps(), 3u);
}

TEST(LossScaleTest, AtTheLeastScaleTheHysteresisStillCounts) {
  const v1::JobSpec spec = Fp16({"fp16.initial_scale_power=0"});
  v1::LossScale now = InitialLossScale(spec);
  EXPECT_FALSE(OverflowFails(spec, now));
  now = NextLossScale(spec, now, true);
  EXPECT_EQ(now.scale(), 1);
  EXPECT_TRUE(OverflowFails(spec, now));
}

// Runs of overflows and good steps through DeepSpeed's own class (tests/reference/make_fp16.py).
TEST(LossScaleTest, IsDeepSpeedsOverRunsOfStepsUntilBothGiveUp) {
  std::ifstream file(ZEROSHARD_REFERENCE_DIR "/loss_scale.json");
  const auto json = nlohmann::json::parse(file);
  int fails = 0;
  for (const auto& c : json.at("cases")) {
    v1::JobSpec spec = Fp16();
    const auto& fp16 = c.at("fp16");
    v1::Fp16Spec* const ours = spec.mutable_fp16();
    ours->set_initial_scale_power(fp16.at("initial_scale_power").get<uint32_t>());
    ours->set_loss_scale_window(fp16.at("loss_scale_window").get<uint32_t>());
    ours->set_hysteresis(fp16.at("hysteresis").get<uint32_t>());
    ours->set_consecutive_hysteresis(fp16.at("consecutive_hysteresis").get<bool>());
    ours->set_min_loss_scale(fp16.at("min_loss_scale").get<double>());
    SCOPED_TRACE(c.dump());
    const auto steps = c.at("steps").get<std::string>();
    const auto scales = c.at("scales").get<std::vector<double>>();
    v1::LossScale now = InitialLossScale(spec);
    for (size_t i = 0; i < scales.size(); ++i) {
      const bool overflow = steps.at(i) == 'o';
      EXPECT_FALSE(overflow && OverflowFails(spec, now)) << "step " << i + 1;
      now = NextLossScale(spec, now, overflow);
      ASSERT_EQ(now.scale(), scales[i]) << "after step " << i + 1;
    }
    if (!c.at("fails").get<bool>()) continue;
    ++fails;
    EXPECT_EQ(steps.size(), scales.size() + 1);
    EXPECT_EQ(steps.back(), 'o');
    EXPECT_TRUE(OverflowFails(spec, now));
  }
  EXPECT_GT(fails, 0);
  EXPECT_GT(json.at("cases").size(), static_cast<size_t>(fails));
}

TEST(LossScaleTest, AFixedScaleStaysAndItsOverflowsFail) {
  const v1::JobSpec spec = Fp16({"fp16.loss_scale=7", "fp16.loss_scale_window=1"});
  EXPECT_THAT(ScalesAfter(spec, "...."), ElementsAre(7, 7, 7, 7));
  EXPECT_TRUE(OverflowFails(spec, InitialLossScale(spec)));
}

TEST(LossScaleTest, GrowsNoFurtherThanAFloatHolds) {
  const v1::JobSpec spec = Fp16({"fp16.loss_scale_window=1"});
  const std::vector<double> scales = ScalesAfter(spec, std::string(200, '.'));
  EXPECT_EQ(scales.back(), std::ldexp(1, 126));
  v1::LossScale now;
  now.set_scale(scales.back());
  EXPECT_TRUE(std::isfinite(GradientScale(spec, now)));
}

TEST(LossScaleTest, GradientsAreScaledAsIfTheMicroBatchesTokensWereAPowerOfTwo) {
  v1::JobSpec spec = Fp16({"train_batch_size=6", "train_micro_batch_size_per_gpu=3"});
  spec.mutable_model()->set_sequence_length(48);  // 144 tokens: 128
  EXPECT_EQ(GradientScale(spec, InitialLossScale(spec)), 65536.0f / 128);
  spec.mutable_model()->set_sequence_length(1);  // 3: 2
  EXPECT_EQ(GradientScale(spec, InitialLossScale(spec)), 65536.0f / 2);
}

TEST(LossScaleTest, OtherTypesHaveNone) {
  for (const char* type : {"bf16.enabled=true", "bf16.enabled=false"}) {
    const v1::JobSpec spec = Normalised({type});
    v1::LossScale now = InitialLossScale(spec);
    EXPECT_EQ(now.ByteSizeLong(), 0u);
    EXPECT_EQ(GradientScale(spec, now), 1.0f);
    EXPECT_TRUE(OverflowFails(spec, now));
    EXPECT_EQ(NextLossScale(spec, now, false).ByteSizeLong(), 0u);
    EXPECT_FALSE(MakeDecision(spec, 3, 1, 10, now).has_loss_scale());
    now.set_scale(8);
    EXPECT_EQ(ContinuedLossScale(spec, now).ByteSizeLong(), 0u);
  }
}

TEST(LossScaleTest, ARunGoesOnWithWhatWasSavedAsFarAsTheSpecificationLetsIt) {
  const v1::JobSpec spec = Fp16({"fp16.min_loss_scale=4"});
  v1::LossScale saved = InitialLossScale(spec);
  for (const bool overflow : {true, true, false, false}) {
    saved = NextLossScale(spec, saved, overflow);
  }
  EXPECT_EQ(ContinuedLossScale(spec, saved).SerializeAsString(), saved.SerializeAsString());
  EXPECT_EQ(ContinuedLossScale(spec, {}).SerializeAsString(),
            InitialLossScale(spec).SerializeAsString());

  saved.set_scale(2);
  saved.set_hysteresis(9);
  EXPECT_EQ(ContinuedLossScale(spec, saved).scale(), 4);
  EXPECT_EQ(ContinuedLossScale(spec, saved).hysteresis(), 2u);
  saved.set_hysteresis(0);
  EXPECT_EQ(ContinuedLossScale(spec, saved).hysteresis(), 1u);
  const v1::LossScale fixed = ContinuedLossScale(Fp16({"fp16.loss_scale=100"}), saved);
  EXPECT_EQ(fixed.scale(), 100);
  EXPECT_EQ(fixed.skipped_steps(), 2u);
}

TEST(MakeDecisionTest, OfFp16TakesTheScaleOutAgain) {
  v1::JobSpec spec = Fp16({"gradient_clipping=1"});
  v1::LossScale scale = InitialLossScale(spec);
  scale.set_skipped_steps(2);
  const double by = GradientScale(spec, scale);
  const v1::StepDecision decision = MakeDecision(spec, 7, 4, 100, scale);
  EXPECT_EQ(decision.multiplier(), static_cast<float>(1 / (4 + 1e-6) / (by * 100)));
  EXPECT_EQ(decision.adam_step(), 5u);  // two of the six steps before were skipped
  EXPECT_EQ(decision.loss_scale().good_steps(), 1u);
  EXPECT_FALSE(decision.skip());
}

TEST(MakeDecisionTest, AnOverflowIsASkipThatAdamDoesNotCount) {
  const v1::JobSpec spec = Fp16();
  v1::LossScale scale = InitialLossScale(spec);
  const v1::StepDecision decision = MakeDecision(spec, 1, NAN, 100, scale, true);
  EXPECT_TRUE(decision.skip());
  EXPECT_EQ(decision.multiplier(), 0);
  EXPECT_EQ(decision.loss_scale().skipped_steps(), 1u);
  EXPECT_EQ(decision.loss_scale().hysteresis(), 1u);
  EXPECT_EQ(MakeDecision(spec, 2, 1, 100, decision.loss_scale()).adam_step(), 1u);
}

TEST(MakeDecisionTest, AStepWithoutTokensSaysNothingOfTheScale) {
  const v1::JobSpec spec = Fp16();
  const v1::LossScale scale = InitialLossScale(spec);
  const v1::StepDecision decision = MakeDecision(spec, 1, 0, 0, scale);
  EXPECT_TRUE(decision.skip());
  EXPECT_EQ(decision.loss_scale().SerializeAsString(), scale.SerializeAsString());
}

TEST(IsCommittableTest, OnlyASkippedStepOfFp16MayHaveALossThatIsNotFinite) {
  v1::StepRecord record;
  record.set_loss(NAN);
  record.set_grad_norm(INFINITY);
  EXPECT_FALSE(IsCommittable(Fp16(), record));
  record.set_skipped(true);
  EXPECT_TRUE(IsCommittable(Fp16(), record));
  EXPECT_FALSE(IsCommittable(Normalised({"bf16.enabled=true"}), record));
  record.set_seconds(NAN);
  EXPECT_FALSE(IsCommittable(Fp16(), record));
  EXPECT_TRUE(IsCommittable(Normalised({}), v1::StepRecord()));
}

}  // namespace
}  // namespace zeroshard
