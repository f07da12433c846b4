// Offloaded jobs: admission, opening, steps, the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "common/plan/nvme_bytes.h"
#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// --- admission ----------------------------------------------------------------------------------

TEST(OffloadAdmission, WithoutAnyStoreTheJobWaitsAndSaysSo) {
  OffloadHarness h;
  h.JoinMany(2);
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(h.Status("a").reason(), "needs a shard store; none has joined");
  h.StartStore("store-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING);
}

TEST(OffloadAdmission, AJobThatCanNeverFitIsRefusedWithTheNumbers) {
  OffloadHarness h;
  h.JoinMany(1);
  h.StartStore("store-0", "host-s", 10000);
  const RequestId id = h.SubmitJob(OffloadHarness::OffloadSpec("a", 1));
  EXPECT_EQ(h.Answer(id).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(h.Answer(id).status.message(),
              AllOf(HasSubstr("10.0 kB"), HasSubstr("1 store"), HasSubstr("--memory-limit")));
  EXPECT_TRUE(h.core().runs().empty());
}

TEST(OffloadAdmission, FewerStoresThanReplicasAreRefused) {
  OffloadHarness h;
  h.StartStore("store-0");
  const RequestId id = h.SubmitJob(OffloadHarness::OffloadSpec("a", 1, 6, 2));
  EXPECT_THAT(h.Answer(id).status.message(), HasSubstr("at least 2 are wanted"));
}

TEST(OffloadAdmission, NvmeCountsAgainstTheNvmeFolder) {
  OffloadHarness h;
  h.JoinMany(1);
  v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 1);
  spec.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("nvme");
  h.StartStore("store-0", "host-s", 1 << 30, 1000);
  const RequestId id = h.SubmitJob(spec);
  EXPECT_THAT(h.Answer(id).status.message(), HasSubstr("NVMe"));
  EXPECT_THAT(h.Answer(id).status.message(), Not(HasSubstr("--nvme-dir")));
  // One without memory for the buffers does not do either.
  h.StartStore("store-1", "host-s", 1000, 1 << 30);
  EXPECT_THAT(h.Answer(h.SubmitJob(spec)).status.message(),
              HasSubstr("of free memory for the buffers"));
  h.StartStore("store-2", "host-s", 1 << 30, 1 << 30);
  EXPECT_TRUE(h.Answer(h.SubmitJob(spec)).status.ok());
  const auto nodes = h.core().Nodes(Moment{h.now(), h.unix_ms()});
  uint64_t nvme = 0, memory = 0;
  for (const v1::Node& node : nodes) {
    nvme += node.reserved_nvme_bytes();
    memory += node.reserved_bytes();
  }
  const StoreNeeds needs = *MakeStoreNeeds(spec, 4096);
  EXPECT_EQ(nvme, needs.bytes + needs.fixed);
  EXPECT_GT(needs.fixed, 0u);
  EXPECT_EQ(memory, NvmeMemoryBytes(4096));
}

TEST(OffloadAdmission, ASecondJobWaitsForTheRoomOfTheFirst) {
  OffloadHarness h;
  h.JoinMany(2);
  const v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 1, 2);
  h.StartStore("store-0", "host-s", BytesOfJob(spec) * 3 / 2);
  h.StartOffloaded(spec);
  h.Submit1(OffloadHarness::OffloadSpec("b", 1, 2));
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(h.Status("b").reason(), AllOf(HasSubstr("waits for room"), HasSubstr("free of")));
  const auto nodes = h.core().Nodes(Moment{h.now(), h.unix_ms()});
  EXPECT_EQ(nodes.front().jobs(), 1);
  EXPECT_EQ(nodes.front().reserved_bytes(), BytesOfJob(spec));

  // Its room is free when the store says that it dropped the job, not before.
  h.Store("store-0").deaf = true;
  h.CancelJob("a");
  h.Idle("worker-0");
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);
  h.Store("store-0").deaf = false;
  h.Pump();
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING);
}

TEST(OffloadAdmission, NodesTellWhatAStoreHoldsByTier) {
  OffloadHarness h;
  Start(h, 1);
  v1::StoreUsage& usage = *h.Stored("store-0", "a-1").report.mutable_usage();
  usage.set_chunks(5);
  usage.set_master_bytes(100);
  usage.set_exp_avg_bytes(20);
  usage.set_exp_avg_sq_bytes(3);
  usage.set_parameter_bytes(4000);
  usage.set_staging_bytes(50000);
  usage.set_nvme_bytes(700);
  h.Pump();
  const auto held = [&h] {
    for (const v1::Node& node : h.core().Nodes(Moment{h.now(), h.unix_ms()})) {
      if (node.hello().name() == "store-0") return node;
    }
    return v1::Node();
  };
  EXPECT_EQ(held().chunks(), 5);
  EXPECT_EQ(held().held_bytes(), 54123);
  EXPECT_EQ(held().held_nvme_bytes(), 700);
  h.CancelJob("a");
  h.Idle("worker-0");
  EXPECT_EQ(held().chunks(), 0);
}

TEST(OffloadAdmission, ADropIsSaidAgainUntilItIsAnswered) {
  OffloadHarness h;
  Start(h, 1);
  h.Store("store-0").deaf = true;
  h.CancelJob("a");
  const auto drops = [&] {
    int count = 0;
    for (const auto& message : h.member("store-0").inbox) {
      count += message.has_store() && message.store().drop();
    }
    return count;
  };
  EXPECT_EQ(drops(), 1);
  h.AdvanceBeating(absl::Seconds(25), {"store-0"});
  EXPECT_GE(drops(), 3);
  h.Store("store-0").deaf = false;
  h.Pump();
  const int said = drops();
  h.AdvanceBeating(absl::Seconds(25), {"store-0"});
  EXPECT_EQ(drops(), said);
}

TEST(OffloadAdmission, ChunksAreSpreadOverAllStores) {
  OffloadHarness h;
  Start(h, 3, 2);
  const StoreNeeds needs = *MakeStoreNeeds(OffloadHarness::OffloadSpec("a", 2), 4096);
  ASSERT_GE(needs.chunks.size(), 6);
  size_t held = 0;
  for (const char* name : {"store-0", "store-1", "store-2"}) {
    EXPECT_GE(h.Stored(name, "a-1").chunks.size(), needs.chunks.size() / 3);
    held += h.Stored(name, "a-1").chunks.size();
  }
  EXPECT_EQ(held, 2 * needs.chunks.size());
}

// --- opening ------------------------------------------------------------------------------------

TEST(OffloadOpening, RanksAreToldOnlyWhenEveryStoreHasTheGenerationOpen) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartStore("store-1");
  h.Store("store-1").deaf = true;
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  EXPECT_FALSE(h.member("worker-0").assign);
  h.Connect("worker-1");  // nor when it comes back
  EXPECT_FALSE(h.member("worker-1").assign);
  h.Store("store-1").deaf = false;
  h.Pump();
  ASSERT_TRUE(h.member("worker-0").assign);
  const v1::Assign& assign = *h.member("worker-1").assign;
  EXPECT_EQ(assign.first_step(), 1);
  EXPECT_EQ(assign.version().epoch(), 1);
  EXPECT_EQ(assign.version().step(), 0);
  EXPECT_EQ(assign.next_sample(), 0);
  EXPECT_EQ(assign.stores().stores_size(), 2);
  EXPECT_EQ(assign.stores().stores(0).address(), h.member("store-0").hello.address());
}

TEST(OffloadOpening, AStoreThatDoesNotOpenIsNamedInTime) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.Store("store-0").deaf = true;
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  h.AdvanceBeating(absl::Seconds(61), {"store-0", "worker-0", "worker-1"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("store-0"), HasSubstr("has not answered"), Not(HasSubstr("rank"))));
}

TEST(OffloadOpening, SlowLoadingIsNotBlamedOnTheRanks) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.Store("store-0").holds_loading = true;
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  ASSERT_TRUE(h.member("worker-0").assign);
  h.Work("worker-0", 0, "waiting");
  h.Work("worker-1", 0, "waiting");
  const std::vector<std::string> all = {"store-0", "worker-0", "worker-1"};
  for (int i = 0; i < 4; ++i) {  // it gets on: that starts the time anew
    h.AdvanceBeating(absl::Seconds(40), all);
    v1::StoreReport& report = h.Stored("store-0", "a-1").report;
    report.set_progress(report.progress() + 1);
    h.Pump();
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING);
  h.AdvanceBeating(absl::Seconds(61), all);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("store-0"), HasSubstr("load"),
                                            HasSubstr("start_seconds"), Not(HasSubstr("worker"))));
}

TEST(OffloadOpening, AStoreThatCannotLoadFailsTheJobWithItsWords) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.Store("store-0").load_problem = "/models/x: no such folder";
  h.Store("store-0").load_code = "NOT_FOUND";
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("store-0"), HasSubstr("NOT_FOUND: /models/x: no such folder")));
  EXPECT_TRUE(h.Stored("store-0", "a-1").report.dropped());
}

// --- steps --------------------------------------------------------------------------------------

TEST(OffloadStep, IsDecidedWhenEveryStoreHasAllOfIt) {
  OffloadHarness h;
  Start(h, 2);
  const RequestId request = h.Commit("worker-0", 1);
  EXPECT_FALSE(h.Answered(request));
  h.SealOn("store-0", "a-1", 1);
  h.Pump();
  EXPECT_FALSE(h.Answered(request));
  EXPECT_EQ(h.Status("a").committed_step(), 0);
  h.SealOn("store-1", "a-1", 1);
  h.Pump();
  ASSERT_TRUE(h.Answered(request));
  v1::StepDecision decision;
  ASSERT_TRUE(decision.ParseFromString(h.Answer(request).text));
  EXPECT_EQ(decision.step(), 1);
  EXPECT_EQ(decision.epoch(), 1);
  EXPECT_EQ(decision.generation(), 1);
  EXPECT_EQ(decision.next_sample(), 4);
  EXPECT_FLOAT_EQ(decision.multiplier(), 1.0f / 100);  // of 100 tokens, without clipping
  EXPECT_EQ(h.Status("a").committed_step(), 1);
  EXPECT_EQ(h.Status("a").version().step(), 1);
  EXPECT_THAT(h.Stored("store-1", "a-1").applied, ElementsAre(1));
}

TEST(OffloadStep, ARequestThatIsSaidAgainGetsTheLoggedAnswer) {
  OffloadHarness h;
  Start(h, 1);
  const RequestId first = h.Commit("worker-0", 1);
  const RequestId second = h.Commit("worker-0", 1);
  h.Seal("a-1", 1);
  EXPECT_EQ(h.Answer(first).text, h.Answer(second).text);
  CommitStep other = h.CommitEvent("worker-0", 1);
  other.body.mutable_record()->set_tokens(7);  // it does not matter any more
  h.Step(other);
  EXPECT_EQ(h.Answer(other.request).text, h.Answer(first).text);
  EXPECT_EQ(h.Status("a").committed_step(), 1);
}

TEST(OffloadStep, TheNextOneWaitsUntilEveryReplicaHasAppliedTheLast) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.Store("store-1").holds_applying = true;
  h.Train("a", 1);
  h.SealOn("store-0", "a-1", 2);
  const RequestId request = h.Commit("worker-0", 2);
  EXPECT_FALSE(h.Answered(request));
  h.Store("store-1").holds_applying = false;
  h.Pump();
  h.SealOn("store-1", "a-1", 2);
  h.Pump();
  EXPECT_TRUE(h.Answered(request));
}

TEST(OffloadStep, RefusesWhatIsNotItsTurn) {
  OffloadHarness h;
  Start(h, 1);
  h.TrainTo("a", 2);
  const auto code = [&](const CommitStep& event) {
    h.Step(event);
    return h.Answer(event.request).status.code();
  };
  EXPECT_EQ(code(h.CommitEvent("worker-0", 4)), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(h.CommitEvent("worker-0", 1)), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(code(h.CommitEvent("worker-1", 3)), absl::StatusCode::kInvalidArgument);
  CommitStep event = h.CommitEvent("worker-0", 3);
  event.body.set_epoch(2);
  EXPECT_EQ(code(event), absl::StatusCode::kFailedPrecondition);
  event = h.CommitEvent("worker-0", 3);
  event.body.mutable_fence()->set_generation(7);
  EXPECT_EQ(code(event), absl::StatusCode::kFailedPrecondition);
  event = h.CommitEvent("worker-0", 3);
  event.body.mutable_record()->set_grad_norm(std::numeric_limits<double>::infinity());
  EXPECT_EQ(code(event), absl::StatusCode::kInvalidArgument);
  h.TrainTo("a", 6);
  EXPECT_EQ(code(h.CommitEvent("worker-0", 7)), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2, 3, 4, 5));  // the last may still get an eval loss
}

TEST(OffloadStep, AJobWithoutOffloadHasNone) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  const CommitStep event = h.CommitEvent("worker-0", 1);
  h.Step(event);
  EXPECT_EQ(h.Answer(event.request).status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(OffloadStep, OneWithoutTokensIsASkip) {
  OffloadHarness h;
  Start(h, 1);
  h.Seal("a-1", 1);
  CommitStep event = h.CommitEvent("worker-0", 1);
  event.body.mutable_record()->set_tokens(0);
  h.Step(event);
  h.Pump();
  v1::StepDecision decision;
  ASSERT_TRUE(decision.ParseFromString(h.Answer(event.request).text));
  EXPECT_TRUE(decision.skip());
  EXPECT_EQ(h.Stored("store-0", "a-1").report.version().step(), 1);
}

TEST(OffloadStep, ReplicasThatDifferFailTheJobNamingStoreAndChunk) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.Store("store-1").wrong_digest_of = 2;
  h.Train("a", 1);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Train("a", 2);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("chunk 2"), HasSubstr("store-0"),
                                            HasSubstr("store-1"), HasSubstr("after step 1")));
  EXPECT_EQ(h.Status("a").committed_step(), 1);
}

TEST(OffloadStep, AStoreThatLacksGradientsForTooLongIsNamedAndTheRanksGoOnAnew) {
  OffloadHarness h;
  Start(h, 2);
  h.SealOn("store-0", "a-1", 1);
  const RequestId request = h.Commit("worker-0", 1);
  h.AdvanceBeating(absl::Seconds(31), {"store-0", "store-1", "worker-0", "worker-1"});
  ASSERT_TRUE(h.Answered(request));
  EXPECT_EQ(h.Answer(request).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(h.Answer(request).status.message(),
              AllOf(HasSubstr("store-1"), HasSubstr("lacks gradients of step 1"),
                    Not(HasSubstr("store-0"))));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.LetGo(kBoth);
  h.BeginRanks("a");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(h.Status("a").generation(), 2);
}

TEST(OffloadStep, AStoreThatNeverAppliesIsFencedAndNoRankIsBlamed) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.Store("store-1").holds_applying = true;
  h.Train("a", 1);
  h.AdvanceBeating(absl::Seconds(32), {"store-0", "store-1", "worker-0", "worker-1"});
  EXPECT_TRUE(h.member("store-1").Last(v1::CoordinatorMessage::kRefused)->refused().fenced());
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.LastEvents("a"),
              AllOf(HasSubstr("store-1"), HasSubstr("applying a step"), Not(HasSubstr("rank 0"))));
}

// --- history ------------------------------------------------------------------------------------

TEST(OffloadHistory, AFullerRecordOfTheLastStepIsTaken) {
  OffloadHarness h;
  Start(h, 1);
  h.Train("a", 1);
  ReportSteps report = h.StepsEvent("worker-0", 1, 1);
  report.body.mutable_records(0)->set_eval_loss(2.5);
  report.body.mutable_records(0)->set_loss(99);  // decided is decided
  h.Step(report);
  EXPECT_TRUE(h.Answer(report.request).status.ok());
  ASSERT_THAT(h.HistoryRecords("a-1"), SizeIs(1));
  EXPECT_EQ(h.HistoryRecords("a-1")[0].eval_loss(), 2.5);
  EXPECT_EQ(h.HistoryRecords("a-1")[0].loss(), 5.0);
  h.Step(report);  // said again
  h.TrainTo("a", 3);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2));
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 4, 4)).status.code(), absl::StatusCode::kOutOfRange);
  h.CancelJob("a");
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2, 3));
}

// --- the end ------------------------------------------------------------------------------------

TEST(OffloadEnd, TheDigestComesFromTheStoresAndTheyDropTheJob) {
  OffloadHarness h;
  Start(h, 3, 2);
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  // Each chunk once: the fake stores add 2^chunk.
  const size_t chunks = MakeStoreNeeds(OffloadHarness::OffloadSpec("a", 2), 4096)->chunks.size();
  EXPECT_EQ(h.Status("a").weights_digest(),
            absl::StrFormat("%016x%016x", 0, (uint64_t{1} << chunks) - 1));
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
  for (const char* name : {"store-0", "store-1", "store-2"}) {
    EXPECT_TRUE(h.Stored(name, "a-1").report.dropped()) << name;
  }
}

TEST(OffloadEnd, TwoJobsSideBySideDoNotMeet) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartStore("store-1");
  h.StartOffloaded(OffloadHarness::OffloadSpec("a", 1, 2));
  h.StartOffloaded(OffloadHarness::OffloadSpec("b", 1, 3));
  h.Train("a", 1);
  h.Train("b", 1);
  h.Train("b", 2);
  h.Train("a", 2);
  h.End("worker-0");
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED);
  EXPECT_EQ(h.Status("b").committed_step(), 2);
  h.Train("b", 3);
  h.End("worker-1");
  h.Pump();
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_COMPLETED);
}

}  // namespace
}  // namespace zeroshard::coordinator
