// The loss scale of offloaded fp16 jobs: in every decision, and with all that a run goes on from.
#include "common/spec/loss_scale.h"

#include <limits>

#include "gmock/gmock.h"
#include "tests/coordinator/core/offload_harness.h"
#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::HasSubstr;

v1::JobSpec Fp16Spec(uint64_t interval = 0) {
  v1::JobSpec spec = OffloadHarness::SavedSpec("a", 2, 9, interval);
  spec.mutable_bf16()->set_enabled(false);
  spec.mutable_fp16()->set_enabled(true);
  spec.mutable_fp16()->set_hysteresis(1);
  EXPECT_TRUE(NormaliseJobSpec(&spec).ok());
  return spec;
}

void StartFp16(OffloadHarness& h, uint64_t interval = 0) {
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartOffloaded(Fp16Spec(interval));
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

// A step that overflowed on the ranks.
v1::StepDecision Overflow(OffloadHarness& h, uint64_t step) {
  h.Seal("a-1", step);
  CommitStep event = h.CommitEvent(h.Root("a"), step);
  event.body.mutable_record()->set_skipped(true);
  event.body.mutable_record()->set_loss(std::numeric_limits<double>::quiet_NaN());
  event.body.mutable_record()->set_grad_norm(std::numeric_limits<double>::infinity());
  h.Step(event);
  h.Pump();
  v1::StepDecision decision;
  EXPECT_TRUE(h.Answered(event.request));
  EXPECT_TRUE(h.Answer(event.request).status.ok()) << h.Answer(event.request).status;
  EXPECT_TRUE(decision.ParseFromString(h.Answer(event.request).text));
  return decision;
}

double AssignedScale(OffloadHarness& h, const std::string& worker) {
  return h.member(worker).assign->loss_scale().scale();
}

TEST(OffloadLossScale, AnOverflowIsASkipWithHalfTheScaleAndIsCounted) {
  OffloadHarness h;
  StartFp16(h);
  EXPECT_EQ(AssignedScale(h, "worker-0"), 65536);
  const v1::StepDecision first = Overflow(h, 1);
  EXPECT_TRUE(first.skip());
  EXPECT_EQ(first.loss_scale().scale(), 32768);
  EXPECT_EQ(h.Status("a").committed_step(), 1);
  const v1::StepDecision second = h.Train("a", 2);
  EXPECT_FALSE(second.skip());
  EXPECT_EQ(second.adam_step(), 1);  // the first that is applied
  EXPECT_EQ(second.loss_scale().good_steps(), 1);
  // A micro-batch has 32 tokens: gradients came scaled by 32768 / 32, over 100 tokens.
  EXPECT_FLOAT_EQ(second.multiplier(), 1.0f / (1024 * 100));
  EXPECT_EQ(Measured(h, MetricKind::kNonFinite), 1);
}

TEST(OffloadLossScale, AnotherTypeMayNotSkip) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartOffloaded(OffloadHarness::OffloadSpec("a", 2));
  EXPECT_FALSE(h.member("worker-0").assign->has_loss_scale());
  h.Seal("a-1", 1);
  CommitStep event = h.CommitEvent(h.Root("a"), 1);
  event.body.mutable_record()->set_skipped(true);
  event.body.mutable_record()->set_loss(std::numeric_limits<double>::quiet_NaN());
  h.Step(event);
  EXPECT_EQ(h.Answer(event.request).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(h.Answer(event.request).status.message()), HasSubstr("not finite"));
}

TEST(OffloadLossScale, ANewGenerationGoesOnWithIt) {
  OffloadHarness h;
  StartFp16(h);
  Overflow(h, 1);
  Overflow(h, 2);
  h.ReplaceWorker("worker-1");
  h.LetGo({"worker-0"});
  h.BeginRanks("a");
  ASSERT_EQ(h.Status("a").generation(), 2);
  EXPECT_EQ(AssignedScale(h, "worker-0"), 16384);
  EXPECT_EQ(h.member("worker-0").assign->loss_scale().skipped_steps(), 2);
  EXPECT_EQ(h.Train("a", 3).adam_step(), 1);
}

TEST(OffloadLossScale, ACheckpointHasItAndARollBackGoesBackToIt) {
  OffloadHarness h;
  StartFp16(h, 2);
  Overflow(h, 1);
  h.Train("a", 2);
  ASSERT_EQ(h.completed.size(), 1);
  EXPECT_EQ(h.completed[0].loss_scale.scale(), 32768);
  EXPECT_EQ(h.completed[0].loss_scale.good_steps(), 1);
  EXPECT_EQ(h.completed[0].loss_scale.skipped_steps(), 1);
  EXPECT_EQ(Overflow(h, 3).loss_scale().scale(), 16384);
  h.KillStore("store-0");
  h.LetGo({"worker-0", "worker-1"});
  h.StartStore("store-0");
  h.BeginRanks("a");
  ASSERT_EQ(h.Status("a").version().epoch(), 2) << h.Status("a").reason();
  ASSERT_EQ(h.Status("a").committed_step(), 2);
  EXPECT_EQ(AssignedScale(h, "worker-0"), 32768);
  EXPECT_EQ(h.Train("a", 3).adam_step(), 2);
}

TEST(OffloadLossScale, ARunThatGoesOnFromACheckpointBeginsWithIts) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  Checkpoint from;
  from.resume.set_checkpoint("/old/step-00000003");
  from.resume.mutable_loss_scale()->set_scale(2048);
  from.resume.mutable_loss_scale()->set_hysteresis(1);
  from.resume.mutable_loss_scale()->set_skipped_steps(2);
  from.step = 3;
  from.next_sample = 12;
  Submit submit{h.NewRequest(), Fp16Spec(), {}};
  submit.from = from;
  h.Step(submit);
  h.Pump();
  h.BeginRanks("a");
  EXPECT_EQ(AssignedScale(h, "worker-0"), 2048);
  const v1::StepDecision decision = h.Train("a", 4);
  EXPECT_EQ(decision.adam_step(), 2);
  EXPECT_EQ(decision.loss_scale().scale(), 2048);
}

}  // namespace
}  // namespace zeroshard::coordinator
