// Offloaded jobs that wait: whom they hold up, what they say, and what a cancel does to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::vector<std::string> kWorkers = {"worker-0", "worker-1"};

void StartSaved(OffloadHarness& h, uint64_t interval) {
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartOffloaded(OffloadHarness::SavedSpec("a", 2, 9, interval));
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

TEST(CancelWithSave, WhatItWentBackToIsThereSoThatItEndsAtOnce) {
  OffloadHarness h;
  StartSaved(h, 2);
  h.TrainTo("a", 3);
  // Before anybody knows that the store is dead.
  h.CancelJob("a", true);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.KillStore("store-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").committed_step(), 2);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("the checkpoint of step 2 is complete"));
}

TEST(CancelWithSave, WithoutAnyCheckpointItSaysAtOnceThatNothingIsLeft) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.CancelJob("a", true);
  h.KillStore("store-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("lost before it could be saved"));
}

TEST(CancelWithSave, BetweenAFailureAndItsVerdictItIsSaidToBeTaken) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.End("worker-1", "UNAVAILABLE", "a store is gone", 0);
  ASSERT_THAT(h.Status("a").reason(), HasSubstr("stopping: "));
  h.CancelJob("a", true);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("writing a checkpoint before it is cancelled"),
                    HasSubstr("stopping: "), HasSubstr("UNAVAILABLE")));
}

TEST(RecoveryQueue, OneWithoutRoomHoldsUpNobodyForLong) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.SubmitJob(Harness::Spec("b", 1));
  h.KillStore("store-0");
  h.LetGo(kWorkers);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("waits for room on the shard stores"));
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED) << "the store may be back at once";
  EXPECT_THAT(h.Status("b").reason(), HasSubstr("behind a-1"));
  h.AdvanceBeating(absl::Seconds(25), kWorkers);
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING) << h.Status("b").reason();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("waits for room on the shard stores"));
}

TEST(RecoveryQueue, WithItsRoomBackItIsTheFirstAgain) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.KillStore("store-0");
  h.LetGo(kWorkers);
  h.AdvanceBeating(absl::Seconds(25), kWorkers);
  h.SubmitJob(Harness::Spec("b", 2));
  ASSERT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING) << h.Status("b").reason();
  h.SubmitJob(Harness::Spec("c", 1));
  h.StartStore("store-0");
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("needs 2 workers, 0 idle"));
  h.CancelJob("b");
  h.LetGo(kWorkers);
  EXPECT_THAT(h.member("worker-0").assign->run_id(), "a-1");
  EXPECT_EQ(h.Status("c").state(), v1::JOB_STATE_QUEUED);
}

TEST(RecoveryWords, AJobThatOpensItsNextGenerationSaysWhatItWaitsFor) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.Store("store-0").deaf = true;
  h.ReplaceWorker("worker-1");
  h.LetGo({"worker-0"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("waits for store-0"), HasSubstr("generation 1 open; wanted 2")));
  h.Store("store-0").deaf = false;
  h.Pump();
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("waits for rank 0 (worker-0"), HasSubstr("rank 1 (worker-1"),
                    Not(HasSubstr("store-0"))));
  h.BeginRanks("a");
  EXPECT_THAT(h.Status("a").reason(), Not(HasSubstr("waits for")));
}

TEST(RecoveryWords, AfterTheCoordinatorsStartItSaysWhoIsNotBack) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.Restart();
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("store-0"), HasSubstr("rank 0 (worker-0"), HasSubstr("rank 1")));
  h.ReconnectStore("store-0");
  h.Connect("worker-0", true);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("waits for rank 1 (worker-1"), Not(HasSubstr("store-0"))));
  h.Connect("worker-1", true);
  EXPECT_THAT(h.Status("a").reason(), Not(HasSubstr("waits for")));
}

TEST(RecoveryWords, ARecoveringJobThatIsSavedSaysSo) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.Store("store-0").holds_snapshots = true;
  h.Exit("worker-1", 0, 9);
  h.CancelJob("a", true);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("writing a checkpoint before it is cancelled"));
}

TEST(RecoveryWords, AfterAFailureThatACancelMetItIsTheSaveThatIsWaitedFor) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.TrainTo("a", 3);
  h.Store("store-0").holds_snapshots = true;
  h.End("worker-1", "UNAVAILABLE", "a peer is gone", 0);
  h.CancelJob("a", true);
  h.AdvanceBeating(absl::Seconds(2), {"worker-0", "worker-1", "store-0"});
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(h.Status("a").reason(),
            "writing a checkpoint before it is cancelled; waits for the checkpoint of step 3");
  h.Store("store-0").holds_snapshots = false;
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
}

TEST(RankProgress, IsNeverBehindTheCommittedStep) {
  OffloadHarness h;
  StartSaved(h, 0);
  h.Work("worker-1", 1, "forward");
  h.TrainTo("a", 4);
  const v1::JobStatus status = h.Status("a");
  for (const v1::RankStatus& rank : status.ranks()) EXPECT_EQ(rank.progress().step(), 4);
}

}  // namespace
}  // namespace zeroshard::coordinator
