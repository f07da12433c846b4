// Offloaded jobs: every row of the fault table.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// --- a worker is lost ---------------------------------------------------------------------------

class WorkerLoss : public ::testing::TestWithParam<int> {};

// Before the seal, after it, after the decision, after it was applied.
TEST_P(WorkerLoss, GoesOnFromTheCommittedStep) {
  OffloadHarness h;
  Start(h, 2);
  h.TrainTo("a", 2);
  switch (GetParam()) {
    case 0:
      h.SealOn("store-0", "a-1", 3);
      h.Commit("worker-0", 3);
      break;
    case 1:
      h.Seal("a-1", 3);
      break;
    case 2:
      h.Store("store-1").holds_applying = true;
      h.Train("a", 3);
      break;
    default:
      h.Train("a", 3);
  }
  const uint64_t committed = h.Status("a").committed_step();
  EXPECT_EQ(committed, GetParam() < 2 ? 2 : 3);
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-1");
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("SIGKILL"));
  EXPECT_THAT(h.member("worker-0").StopReason(), HasSubstr("SIGKILL"));
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("needs 2 workers"));
  h.LetGo({"worker-0"});
  h.Join("worker-2");
  h.Pump();
  h.Store("store-1").holds_applying = false;
  h.Pump();
  EXPECT_EQ(h.Stored("store-0", "a-1").report.generation(), 2);
  ASSERT_TRUE(h.member("worker-2").assign);
  EXPECT_EQ(h.member("worker-2").assign->first_step(), committed + 1);
  EXPECT_EQ(h.member("worker-2").assign->version().step(), committed);
  EXPECT_EQ(h.member("worker-2").assign->next_sample(), 4 * committed);
  h.BeginRanks("a");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_GT(h.measures().size(), 0);
  h.TrainTo("a", 6);
  h.End("worker-0");
  h.End("worker-2");
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_THAT(h.Stored("store-0", "a-1").applied, ElementsAreArray(UpTo(6)));
}
INSTANTIATE_TEST_SUITE_P(Points, WorkerLoss, ::testing::Range(0, 4));

TEST(OffloadRecovery, HowLongItTookIsMeasuredFromTheFirstSign) {
  OffloadHarness h;
  Start(h, 1);
  h.Train("a", 1);
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-1");
  h.AdvanceBeating(absl::Seconds(5), {"worker-0", "store-0"});
  h.LetGo({"worker-0"});
  h.Join("worker-1");
  h.Pump();
  h.BeginRanks("a");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_NEAR(Measured(h, MetricKind::kRecoverySeconds), 5.0, 0.6);
}

TEST(OffloadRecovery, ANetworkErrorRecoversAndAnErrorOfARankFails) {
  for (const bool own : {false, true}) {
    OffloadHarness h;
    Start(h, 1);
    h.Train("a", 1);
    h.End("worker-0", own ? "INVALID_ARGUMENT" : "UNAVAILABLE", "it broke");
    h.End("worker-1", "ABORTED", "told to stop");
    h.Pump();
    EXPECT_EQ(h.Status("a").state(), own ? v1::JOB_STATE_FAILED : v1::JOB_STATE_RECOVERING);
    EXPECT_THAT(h.LastEvents("a"), HasSubstr("it broke"));
  }
}

TEST(OffloadRecovery, AStoreThatARankLostIsNamedThoughAPeerLostThatRank) {
  OffloadHarness h;
  Start(h, 1);
  h.Train("a", 1);
  h.End("worker-1", "UNAVAILABLE", "connection reset", 0);
  h.End("worker-0", "UNAVAILABLE",
        absl::StrCat("store store-0 at ", h.member("store-0").hello.address(), ": gone"));
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.LastEvents("a"), AllOf(HasSubstr("UNAVAILABLE: store store-0 at "),
                                       ::testing::Not(HasSubstr("stopped answering"))));
}

TEST(OffloadRecovery, AWorkerThatWasToldToLeaveIsReplaced) {
  OffloadHarness h;
  Start(h, 1);
  h.Train("a", 1);
  h.End("worker-1", "CANCELLED", "SIGTERM", 1);
  h.End("worker-0", "ABORTED", "told to stop");
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
}

TEST(OffloadRecovery, FiveInARowWithoutAStepEndIt) {
  OffloadHarness h;
  Start(h, 1);
  h.Train("a", 1);
  for (int i = 0; i < 5; ++i) {
    h.End("worker-0", "UNAVAILABLE", "it broke");
    h.End("worker-1", "UNAVAILABLE", "it broke");
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << i;
    h.LetGo(kBoth);
    h.BeginRanks("a");
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << i;
  }
  h.End("worker-0", "UNAVAILABLE", "it broke");
  h.End("worker-1", "UNAVAILABLE", "it broke");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("5 recoveries in a row"), HasSubstr("broke")));
}

TEST(OffloadRecovery, ACommittedStepBetweenStartsTheCountAnew) {
  OffloadHarness h;
  Start(h, 1, 1, 20);
  for (int i = 0; i < 8; ++i) {
    h.Train("a", h.Status("a").committed_step() + 1);
    h.End("worker-0", "UNAVAILABLE", "it broke");
    h.End("worker-1", "UNAVAILABLE", "it broke");
    h.LetGo(kBoth);
    h.BeginRanks("a");
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << i;
  }
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(8)));
}

TEST(OffloadRecovery, ItIsFirstInTheQueue) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartOffloaded(OffloadHarness::OffloadSpec("a", 2));
  h.SubmitJob(Harness::Spec("b", 1));
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-1");
  h.LetGo({"worker-0"});
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(h.Status("b").reason(), HasSubstr("behind a-1"));
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("needs 2 workers, 1 idle of 1"));
}

TEST(OffloadRecovery, OldGenerationsAreRefused) {
  OffloadHarness h;
  Start(h, 1);
  const CommitStep stale = h.CommitEvent("worker-0", 1);
  h.End("worker-0", "UNAVAILABLE", "it broke");
  h.End("worker-1", "UNAVAILABLE", "it broke");
  h.LetGo(kBoth);
  h.BeginRanks("a");
  h.Step(stale);
  EXPECT_EQ(h.Answer(stale.request).status.code(), absl::StatusCode::kFailedPrecondition);
}

// --- a store is lost ----------------------------------------------------------------------------

class StoreLossWithReplicas : public ::testing::TestWithParam<int> {};

// At the same points; the third store is filled from the one that is left.
TEST_P(StoreLossWithReplicas, NoStepIsLostAndAnotherStoreIsFilled) {
  OffloadHarness h;
  Start(h, 3, 2);
  h.TrainTo("a", 2);
  switch (GetParam()) {
    case 0:
      h.SealOn("store-0", "a-1", 3);
      h.Commit("worker-0", 3);
      break;
    case 1:
      h.Seal("a-1", 3);
      break;
    case 2:
      h.Store("store-2").holds_applying = true;
      h.Train("a", 3);
      break;
    default:
      h.Train("a", 3);
  }
  const uint64_t committed = h.Status("a").committed_step();
  const std::set<uint32_t> lost = h.Stored("store-1", "a-1").chunks;
  h.KillStore("store-1");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.LetGo(kBoth);
  if (GetParam() == 2) {
    // What is copied is the state after the decision: store-2 must have applied it first.
    EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("store-2"), HasSubstr("applying")));
    h.Store("store-2").holds_applying = false;
    h.Pump();
  }
  GoOn(h);
  EXPECT_EQ(h.Status("a").version().epoch(), 1);
  EXPECT_EQ(h.Status("a").committed_step(), committed);
  std::set<uint32_t> copied;
  for (const char* name : {"store-0", "store-2"}) {
    copied.insert(h.Stored(name, "a-1").copied.begin(), h.Stored(name, "a-1").copied.end());
    EXPECT_EQ(h.Stored(name, "a-1").chunks.size(),
              MakeStoreNeeds(OffloadHarness::OffloadSpec("a", 2), 4096)->chunks.size());
  }
  EXPECT_EQ(copied, lost);
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_THAT(h.Stored("store-0", "a-1").applied, ElementsAreArray(UpTo(6)));
}
INSTANTIATE_TEST_SUITE_P(Points, StoreLossWithReplicas, ::testing::Range(0, 4));

TEST(StoreLoss, WithoutAThirdStoreItGoesOnAndALaterOneIsFilledAtADecision) {
  OffloadHarness h;
  Start(h, 2, 2, 8);
  h.TrainTo("a", 2);
  h.KillStore("store-1");
  h.LetGo(kBoth);
  GoOn(h);
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("goes on with 1 of 2 replicas"));
  h.TrainTo("a", 4);
  h.StartStore("store-2");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);  // until the next decision
  h.Train("a", 5);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.LetGo(kBoth);
  GoOn(h);
  const StoredJob& filled = h.Stored("store-2", "a-1");
  EXPECT_EQ(filled.copied.size(), filled.chunks.size());
  EXPECT_EQ(filled.report.version().step(), 5);
  // The first can now go.
  h.KillStore("store-0");
  h.LetGo(kBoth);
  h.BeginRanks("a");
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(8)));
}

TEST(StoreLoss, WithOneReplicaEverythingGoesBackToTheNewestCheckpoint) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartStore("store-1");
  h.StartOffloaded(OffloadHarness::SavedSpec("a", 2, 8, 2));
  h.TrainTo("a", 5);
  ASSERT_EQ(h.Status("a").checkpoint().step(), 4);
  h.KillStore("store-1");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(h.Status("a").committed_step(), 4);
  EXPECT_EQ(h.Status("a").version().epoch(), 2);
  EXPECT_EQ(h.Status("a").steps_lost(), 1);
  EXPECT_EQ(Measured(h, MetricKind::kStepsLost), 1);
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(4)));
  EXPECT_THAT(h.LastEvents("a"),
              AllOf(HasSubstr("epoch 2"), HasSubstr("/ckpt/step-4"), HasSubstr("1 step is lost")));
  h.LetGo(kBoth);
  GoOn(h);
  EXPECT_EQ(h.Stored("store-0", "a-1").job.checkpoint(), "/ckpt/step-4");
  EXPECT_EQ(h.Stored("store-0", "a-1").report.version().epoch(), 2);
  EXPECT_EQ(h.member("worker-0").assign->version().epoch(), 2);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 5);
  EXPECT_EQ(h.member("worker-0").assign->next_sample(), 16);
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(8)));
}

TEST(StoreLoss, WithoutACheckpointItBeginsAgainAndWaitsForAStore) {
  OffloadHarness h;
  Start(h, 1);
  h.TrainTo("a", 3);
  h.KillStore("store-0");
  h.LetGo(kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("waits for room on the shard stores"));
  EXPECT_EQ(h.Status("a").committed_step(), 0);
  EXPECT_EQ(h.Status("a").steps_lost(), 3);
  EXPECT_THAT(h.History("a-1"), IsEmpty());
  h.StartStore("store-0");
  GoOn(h);
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
}

TEST(StoreLoss, BeforeTheFirstStepNothingIsLost) {
  OffloadHarness h;
  Start(h, 2);
  h.KillStore("store-1");
  h.LetGo(kBoth);
  GoOn(h);
  EXPECT_EQ(h.Status("a").version().epoch(), 1);
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_THAT(h.Stored("store-0", "a-1").copied, IsEmpty());
}

TEST(StoreLoss, AStoreThatHangsAndWakesIsRefused) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.Train("a", 1);
  h.AdvanceBeating(absl::Seconds(11), {"store-0", "worker-0", "worker-1"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("store-1 on host-of-store-1: nothing was heard"));
  h.Connect("store-1");
  EXPECT_TRUE(h.member("store-1").Last(v1::CoordinatorMessage::kRefused)->refused().fenced());
}

TEST(StoreLoss, AProcessThatWasStartedAgainIsEmpty) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.TrainTo("a", 2);
  h.Disconnect("store-1");
  h.StartStore("store-1");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.LetGo(kBoth);
  GoOn(h);
  EXPECT_FALSE(h.Stored("store-1", "a-1").copied.empty());
  EXPECT_EQ(h.Stored("store-1", "a-1").report.version().step(), 2);
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
}

TEST(StoreLoss, ABrokenStreamAloneLosesNothing) {
  OffloadHarness h;
  Start(h, 1);
  h.Train("a", 1);
  h.Disconnect("store-0");
  const RequestId request = h.Commit("worker-0", 2);
  h.SealOn("store-0", "a-1", 2);
  h.ReconnectStore("store-0");
  EXPECT_TRUE(h.Answered(request));
  EXPECT_EQ(h.Status("a").generation(), 1);
  EXPECT_EQ(h.Stored("store-0", "a-1").report.version().step(), 2);
}

TEST(StoreLoss, DamageIsReplacedByTheOtherReplica) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.TrainTo("a", 2);
  v1::StoreReport& report = h.Stored("store-1", "a-1").report;
  report.set_phase(v1::STORE_PHASE_FAILED);
  report.set_problem("chunk 3: checksum");
  report.set_error_code("DATA_LOSS");
  h.Pump();
  EXPECT_THAT(h.LastEvents("a"), AllOf(HasSubstr("store-1"), HasSubstr("chunk 3: checksum")));
  h.LetGo(kBoth);
  GoOn(h);
  // There is no third: the same store is filled anew.
  EXPECT_FALSE(h.Stored("store-1", "a-1").copied.empty());
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
}

TEST(StoreLoss, DamageWithoutReplicasGoesBack) {
  OffloadHarness h;
  Start(h, 1);
  h.TrainTo("a", 2);
  v1::StoreReport& report = h.Stored("store-0", "a-1").report;
  report.set_phase(v1::STORE_PHASE_FAILED);
  report.set_problem("chunk 3: checksum");
  report.set_error_code("DATA_LOSS");
  h.Pump();
  h.LetGo(kBoth);
  GoOn(h);
  EXPECT_EQ(h.Status("a").steps_lost(), 2);
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
}

TEST(StoreLoss, AStoreThatKnowsMoreThanTheLogStopsTheJobReadably) {
  OffloadHarness h;
  Start(h, 1);
  h.Train("a", 1);
  h.Stored("store-0", "a-1").report.mutable_version()->set_step(5);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("store-0"), HasSubstr("step 5"), HasSubstr("log")));
}

TEST(StoreLoss, ALateStoreServesTheNextJob) {
  OffloadHarness h;
  Start(h, 1);
  h.StartStore("store-1");
  EXPECT_FALSE(h.Store("store-1").jobs.contains("a-1"));
  h.Join("worker-2");
  h.StartOffloaded(OffloadHarness::OffloadSpec("b", 1));
  EXPECT_FALSE(h.Stored("store-1", "b-1").chunks.empty());
}

TEST(StoreLoss, AfterTheLastStepItIsFinishedWithoutRanks) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.Store("store-1").deaf = true;
  h.TrainTo("a", 5);
  h.Store("store-1").deaf = false;
  h.Pump();
  h.TrainTo("a", 6);
  ASSERT_EQ(h.Status("a").committed_step(), 6);
  h.Exit("worker-1", 0, 9);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_FALSE(h.Status("a").weights_digest().empty());
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
}

TEST(StoreLoss, AllThreeKindsInOneRunLoseNoStep) {
  OffloadHarness h;
  Start(h, 3, 2, 10);
  h.TrainTo("a", 3);
  h.KillStore("store-2");
  h.LetGo(kBoth);
  h.BeginRanks("a");
  h.TrainTo("a", 5);
  h.Restart();
  for (const char* name : {"store-0", "store-1"}) h.ReconnectStore(name);
  for (const std::string& name : kBoth) h.Connect(name, true);
  h.TrainTo("a", 7);
  h.ReplaceWorker("worker-1");
  h.LetGo({"worker-0"});
  h.BeginRanks("a");
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(10)));
  EXPECT_THAT(h.Stored("store-0", "a-1").applied, ElementsAreArray(UpTo(10)));
}

}  // namespace
}  // namespace zeroshard::coordinator
