// Offloaded jobs that wait: whom they hold up, what they say, and what a cancel does to them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(CancelWithSave, WhatItWentBackToIsThereSoThatItEndsAtOnce) {
  OffloadHarness h;
  StartSaved(h, 1, 1, 2);
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
  StartSaved(h);
  h.TrainTo("a", 3);
  h.CancelJob("a", true);
  h.KillStore("store-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("lost before it could be saved"));
}

TEST(CancelWithSave, BetweenAFailureAndItsVerdictItIsSaidToBeTaken) {
  OffloadHarness h;
  StartSaved(h);
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
  StartSaved(h);
  h.TrainTo("a", 3);
  h.SubmitJob(Harness::Spec("b", 1));
  h.KillStore("store-0");
  h.LetGo(kBoth);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("waits for room on the shard stores"));
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED) << "the store may be back at once";
  EXPECT_THAT(h.Status("b").reason(), HasSubstr("behind a-1"));
  h.AdvanceBeating(absl::Seconds(25), kBoth);
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING) << h.Status("b").reason();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("waits for room on the shard stores"));
}

TEST(RecoveryQueue, WithItsRoomBackItIsTheFirstAgain) {
  OffloadHarness h;
  StartSaved(h);
  h.TrainTo("a", 3);
  h.KillStore("store-0");
  h.LetGo(kBoth);
  h.AdvanceBeating(absl::Seconds(25), kBoth);
  h.SubmitJob(Harness::Spec("b", 2));
  ASSERT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING) << h.Status("b").reason();
  h.SubmitJob(Harness::Spec("c", 1));
  h.StartStore("store-0");
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("needs 2 workers, 0 idle"));
  h.CancelJob("b");
  h.LetGo(kBoth);
  EXPECT_THAT(h.member("worker-0").assign->run_id(), "a-1");
  EXPECT_EQ(h.Status("c").state(), v1::JOB_STATE_QUEUED);
}

TEST(RecoveryWords, AJobThatOpensItsNextGenerationSaysWhatItWaitsFor) {
  OffloadHarness h;
  StartSaved(h);
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
  StartSaved(h);
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
  StartSaved(h);
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
  StartSaved(h);
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
  StartSaved(h);
  h.Work("worker-1", 1, "forward");
  h.TrainTo("a", 4);
  const v1::JobStatus status = h.Status("a");
  for (const v1::RankStatus& rank : status.ranks()) EXPECT_EQ(rank.progress().step(), 4);
}

// Two jobs with two replicas; the first waits for a worker.
void StartTwo(OffloadHarness& h, int stores) {
  h.JoinMany(4);
  for (int i = 0; i < stores; ++i) h.StartStore(absl::StrCat("store-", i));
  h.StartOffloaded(OffloadHarness::OffloadSpec("a", 2, 6, 2));
  h.StartOffloaded(OffloadHarness::OffloadSpec("b", 2, 6, 2));
  h.TrainTo("a", 2);
  h.Exit("worker-0", 0, 9);
  h.Idle("worker-0");
  h.LetGo({"worker-1"});
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  ASSERT_EQ(h.Status("b").state(), v1::JOB_STATE_RUNNING);
}

TEST(Behind, AJobThatNeedsNoRanksIsNotHeldUp) {
  OffloadHarness h;
  StartTwo(h, 2);
  h.TrainTo("b", 6);
  h.KillStore("store-1");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_COMPLETED) << h.Status("b").reason();
}

TEST(Behind, LostReplicasAreFilledAllTheSame) {
  OffloadHarness h;
  StartTwo(h, 3);
  h.TrainTo("b", 3);
  h.Exit("worker-2", 0, 9);
  h.Idle("worker-2");
  ASSERT_EQ(h.Status("b").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("b").reason(), ::testing::HasSubstr("behind a-1"));
  h.KillStore("store-1");
  h.KillStore("store-2");
  h.AdvanceBeating(absl::Seconds(11), {"store-0", "worker-1", "worker-3"});
  h.Pump();
  EXPECT_EQ(h.Status("b").version().epoch(), 1) << h.LastEvents("b");
  EXPECT_EQ(h.Status("b").committed_step(), 3);
  EXPECT_THAT(h.Status("b").reason(), ::testing::HasSubstr("behind a-1"));
  h.Join("worker-0");
  h.Join("worker-2");
  h.LetGo({"worker-3"});
  h.BeginRanks("a");
  h.BeginRanks("b");
  for (const char* job : {"a", "b"}) {
    h.TrainTo(job, 6);
    EXPECT_EQ(h.Status(job).committed_step(), 6) << h.Status(job).reason();
    EXPECT_EQ(h.Status(job).steps_lost(), 0);
  }
}

// While there is no room for what was lost, nobody waits for what the others load.
TEST(WaitingForRoom, AStoreThatLoadsMeanwhileIsNotLate) {
  OffloadHarness h;
  h.JoinMany(2);
  const v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 2);
  const uint64_t limit = BytesOfJob(spec) * 2 / 3;
  h.Store("store-0").holds_loading = true;
  for (const char* store : {"store-0", "store-1"}) h.StartStore(store, "", limit);
  h.Submit1(spec);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING) << h.Status("a").reason();
  h.KillStore("store-1");
  h.LetGo(kBoth);
  EXPECT_THAT(h.Status("a").reason(), ::testing::HasSubstr("waits for room"));
  h.AdvanceBeating(absl::Seconds(45), {"store-0", "worker-0", "worker-1"});
  EXPECT_FALSE(h.core().members().fences().contains(h.member("store-0").hello.incarnation()));
  h.Store("store-0").holds_loading = false;
  h.StartStore("store-1", "", limit);
  GoOn(h);
}

}  // namespace
}  // namespace zeroshard::coordinator
