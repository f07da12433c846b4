// A loss on the validation set that was due when rank 0 was lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr uint64_t kSteps = 5;

void StartEvaluated(OffloadHarness& h, uint32_t collective_seconds = 300) {
  h.JoinMany(2);
  h.StartStore("store-0");
  v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 2, kSteps);
  spec.mutable_eval()->add_data("/data/val");
  spec.mutable_eval()->set_interval_steps(2);
  spec.mutable_timeouts()->set_collective_seconds(collective_seconds);
  h.StartOffloaded(spec);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

void LoseRankZero(OffloadHarness& h) {
  h.ReplaceWorker("worker-0");
  h.LetGo({"worker-1"});
}

void Evaluated(OffloadHarness& h, uint64_t step, double loss) {
  ReportSteps report{h.NewRequest(), {}};
  *report.body.mutable_fence() = h.member(h.Root("a")).Fence();
  v1::StepRecord& record = *report.body.add_records();
  record.set_step(step);
  record.set_eval_loss(loss);
  h.Step(report);
  h.Pump();
  EXPECT_TRUE(h.Answer(report.request).status.ok()) << h.Answer(report.request).status;
}

std::vector<double> EvalLosses(OffloadHarness& h) {
  std::vector<double> losses;
  for (const v1::StepRecord& record : h.HistoryRecords("a-1")) {
    losses.push_back(record.has_eval_loss() ? record.eval_loss() : 0);
  }
  return losses;
}

TEST(Evaluation, TheNextRankZeroMakesUpForOne) {
  OffloadHarness h;
  StartEvaluated(h);
  h.TrainTo("a", 2);
  LoseRankZero(h);
  ASSERT_TRUE(h.member("worker-0").assign);
  EXPECT_TRUE(h.member("worker-0").assign->evaluate());
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 3);
  h.BeginRanks("a");
  Evaluated(h, 2, 2.5);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2));
  EXPECT_THAT(EvalLosses(h), ElementsAre(0, 2.5));
  EXPECT_EQ(h.HistoryRecords("a-1")[1].loss(), Harness::Record(2).loss());
  h.Train("a", 3);
  EXPECT_EQ(h.Status("a").committed_step(), 3);
}

TEST(Evaluation, OneThatWasReportedOrWasNotDueIsNotMadeAgain) {
  OffloadHarness h;
  StartEvaluated(h);
  h.TrainTo("a", 2);
  Evaluated(h, 2, 2.5);
  LoseRankZero(h);
  EXPECT_FALSE(h.member("worker-0").assign->evaluate());
  h.BeginRanks("a");
  h.Train("a", 3);
  LoseRankZero(h);
  EXPECT_FALSE(h.member("worker-0").assign->evaluate());
}

TEST(Evaluation, OneThatNeverComesHoldsUpNoStep) {
  OffloadHarness h;
  StartEvaluated(h);
  h.TrainTo("a", 2);
  LoseRankZero(h);
  h.BeginRanks("a");
  h.TrainTo("a", 4);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2, 3));
}

TEST(Evaluation, ItIsStillMissedAfterTheCoordinatorStartedAgain) {
  OffloadHarness h;
  StartEvaluated(h);
  h.TrainTo("a", 2);
  h.Restart();
  h.ReconnectStore("store-0");
  h.Connect("worker-1", true);
  h.Idle("worker-0");
  h.Join("worker-0");
  h.AdvanceBeating(absl::Seconds(30), {"worker-0", "worker-1", "store-0"});
  h.LetGo({"worker-1"});
  h.Pump();
  ASSERT_TRUE(h.member("worker-0").assign) << h.Status("a").reason();
  EXPECT_TRUE(h.member("worker-0").assign->evaluate());
}

TEST(Evaluation, AfterTheLastStepTheJobIsNotDoneWithoutIt) {
  OffloadHarness h;
  StartEvaluated(h);
  h.TrainTo("a", kSteps);
  h.Exit("worker-0", 0, 9);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("needs 2 workers"));
  h.Idle("worker-0");
  h.Join("worker-0");
  h.LetGo({"worker-1"});
  ASSERT_TRUE(h.member("worker-0").assign);
  EXPECT_TRUE(h.member("worker-0").assign->evaluate());
  EXPECT_EQ(h.member("worker-0").assign->first_step(), kSteps + 1);
  h.BeginRanks("a");
  Evaluated(h, kSteps, 2.25);
  for (const char* name : {"worker-0", "worker-1"}) h.End(name);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(kSteps)));
  EXPECT_EQ(EvalLosses(h).back(), 2.25);
}

TEST(Evaluation, AfterTheLastStepItIsGivenUpInTheEnd) {
  OffloadHarness h;
  StartEvaluated(h);
  h.TrainTo("a", kSteps);
  h.Exit("worker-0", 0, 9);
  h.Pump();
  const v1::TimeoutSpec limits = h.Spec("a", 1).timeouts();
  h.AdvanceBeating(absl::Seconds(limits.start_seconds() + limits.step_seconds() + 301),
                   {"worker-1", "store-0"});
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("after step 5 is left out of the history"));
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(kSteps)));
}

TEST(Evaluation, ARollBackGivesItItsTimeAnew) {
  OffloadHarness h;
  StartEvaluated(h, 20);
  h.TrainTo("a", kSteps);
  LoseRankZero(h);
  h.KillStore("store-0");
  h.LetGo({"worker-0", "worker-1"});
  h.StartStore("store-0");
  h.BeginRanks("a");
  ASSERT_EQ(h.Status("a").version().epoch(), 2) << h.Status("a").reason();
  const std::vector<std::string> all = {"worker-0", "worker-1", "store-0"};
  for (uint64_t step = 1; step <= 4; ++step) {
    h.AdvanceBeating(absl::Seconds(25), all);
    EXPECT_EQ(h.Train("a", step).step(), step) << h.Status("a").reason();
  }
  h.AdvanceBeating(absl::Seconds(15), all);  // it has been 115 s since rank 0 was lost
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_THAT(h.LastEvents("a"), Not(HasSubstr("left out")));
  Evaluated(h, 4, 2.5);
  EXPECT_EQ(EvalLosses(h).back(), 2.5);
}

TEST(Evaluation, ACancelDoesNotWaitForIt) {
  OffloadHarness h;
  StartEvaluated(h);
  h.TrainTo("a", 2);
  h.Exit("worker-0", 0, 9);
  h.CancelJob("a");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2));
}

}  // namespace
}  // namespace zeroshard::coordinator
