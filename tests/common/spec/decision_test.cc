#include "common/spec/decision.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

// A schedule whose rates are powers of two: step 1 of 4 warms up to a quarter of 1/8.
const char kWarmUp[] = "scheduler={type: linear, params: {warmup_steps: 4}}";

TEST(ClipFactor, ScalesOnlyWhatIsLonger) {
  EXPECT_EQ(ClipFactor(5, 0), 1.0);  // no clipping
  EXPECT_EQ(ClipFactor(0.5, 1), 1.0);
  EXPECT_NEAR(ClipFactor(4, 1), 0.25, 1e-6);
  EXPECT_LT(ClipFactor(4, 1), 0.25);  // 1 / (4 + 1e-6)
  EXPECT_EQ(ClipFactor(0, 1), 1.0);
}

TEST(MakeDecision, DividesBySummedTokensAndClips) {
  const v1::JobSpec plain = Normalised({"optimizer.params.lr=0.125", kWarmUp});
  v1::StepDecision decision = MakeDecision(plain, 1, 3.0, 1024);
  EXPECT_EQ(decision.step(), 1u);
  EXPECT_EQ(decision.adam_step(), 1u);
  EXPECT_FALSE(decision.skip());
  EXPECT_EQ(decision.multiplier(), 1.0f / 1024);
  EXPECT_EQ(decision.learning_rate(), 0.125f / 4);
  // What others decide is left alone.
  EXPECT_EQ(decision.epoch(), 0u);
  EXPECT_EQ(decision.generation(), 0u);
  EXPECT_EQ(decision.next_sample(), 0u);
  EXPECT_FALSE(decision.snapshot());

  const v1::JobSpec clipped = Normalised({"gradient_clipping=0.5"});
  decision = MakeDecision(clipped, 9, 2.0, 100);
  EXPECT_EQ(decision.multiplier(), static_cast<float>(0.5 / (2.0 + 1e-6) / 100));
  EXPECT_EQ(MakeDecision(clipped, 9, 0.25, 100).multiplier(), static_cast<float>(1.0 / 100));
}

TEST(MakeDecision, AStepWithoutTokensIsASkipThatCounts) {
  const v1::JobSpec spec = Normalised({"optimizer.params.lr=0.125", kWarmUp});
  const v1::StepDecision decision = MakeDecision(spec, 2, 0, 0);
  EXPECT_TRUE(decision.skip());
  EXPECT_EQ(decision.multiplier(), 0.0f);
  EXPECT_EQ(decision.step(), 2u);
  EXPECT_EQ(decision.adam_step(), 2u);
  EXPECT_EQ(MakeDecision(spec, 3, 1, 1).adam_step(), 3u);
}

TEST(MakeDecision, TheSameInputsGiveTheSameBytes) {
  const v1::JobSpec spec = Normalised({"gradient_clipping=1", "scheduler.type=cosine"});
  for (uint64_t step = 1; step <= 100; step += 7) {
    EXPECT_EQ(MakeDecision(spec, step, 1.7, 511).SerializeAsString(),
              MakeDecision(spec, step, 1.7, 511).SerializeAsString());
  }
}

TEST(MakeAdamWArgs, AreTheDecisionsNumbersAndTheSpecificationsRest) {
  const v1::JobSpec spec = Normalised(
      {"optimizer.params={lr: 0.125, betas: [0.5, 0.75], eps: 0.25, weight_decay: 0.0625}"});
  v1::StepDecision decision;
  decision.set_adam_step(7);
  decision.set_multiplier(0.375f);
  decision.set_learning_rate(0.03125f);  // not what the schedule says now: the decision counts
  const AdamWArgs args = MakeAdamWArgs(spec, decision);
  EXPECT_EQ(args.t, 7);
  EXPECT_EQ(args.grad_scale, 0.375f);
  EXPECT_EQ(args.learning_rate, 0.03125f);
  EXPECT_EQ(args.beta1, 0.5f);
  EXPECT_EQ(args.beta2, 0.75f);
  EXPECT_EQ(args.eps, 0.25f);
  EXPECT_EQ(args.weight_decay, 0.0625f);
}

TEST(MakeSgdArgs, AreTheDecisionsNumbersAndTheSpecificationsRest) {
  const v1::JobSpec spec = Normalised(
      {"zero_optimization={stage: 1, offload_optimizer: {device: cpu}}",
       "optimizer={type: SGD, params: {lr: 0.125, momentum: 0.875, weight_decay: 0.0625}}"});
  EXPECT_TRUE(UsesSgd(spec));
  EXPECT_FALSE(UsesSgd(Normalised()));
  v1::StepDecision decision;
  decision.set_multiplier(0.375f);
  decision.set_learning_rate(0.03125f);
  const SgdArgs args = MakeSgdArgs(spec, decision);
  EXPECT_EQ(args.learning_rate, 0.03125f);
  EXPECT_EQ(args.momentum, 0.875f);
  EXPECT_EQ(args.weight_decay, 0.0625f);
  EXPECT_EQ(args.grad_scale, 0.375f);
}

}  // namespace
}  // namespace zeroshard
