#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "coordinator/core/text.h"
#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Jobs, AJobWaitsUntilThereAreEnoughWorkersAndSaysSo) {
  Harness h;
  h.JoinMany(2);
  const RequestId id = h.SubmitJob(Harness::Spec("a", 4));
  ASSERT_TRUE(h.Answer(id).status.ok());
  EXPECT_EQ(h.Answer(id).text, "a-1");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(h.Status("a").reason(), "needs 4 workers, 2 idle of 2");
  h.Join("worker-2");
  EXPECT_EQ(h.Status("a").reason(), "needs 4 workers, 3 idle of 3");
  h.Join("worker-3");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING);
}

TEST(Jobs, RanksGoToWorkersInNaturalOrderOfTheirNames) {
  Harness h;
  for (const char* name : {"w-10", "w-2", "w-1"}) h.Join(name, absl::StrCat("host-", name));
  h.SubmitJob(Harness::Spec("a", 3));
  const v1::Assign& assign = *h.member("w-10").assign;
  EXPECT_EQ(assign.rank(), 2);
  EXPECT_EQ(assign.world_size(), 3);
  EXPECT_EQ(assign.generation(), 1);
  EXPECT_EQ(assign.first_step(), 1);
  EXPECT_EQ(assign.run_id(), "a-1");
  EXPECT_EQ(assign.mesh().data(), 3);
  ASSERT_EQ(assign.peers_size(), 3);
  EXPECT_EQ(assign.peers(1).member(), "w-2");
  EXPECT_EQ(assign.peers(1).host(), "host-w-2");
}

TEST(Jobs, AJobRunsAndCompletesAndItsWorkersTakeTheNext) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), {"worker-0", "worker-1"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.SubmitJob(Harness::Spec("b", 2));
  EXPECT_EQ(h.Status("b").reason(), "needs 2 workers, 0 idle of 2");
  const RequestId steps = h.Steps("worker-0", 1, 3);
  EXPECT_EQ(h.Answer(steps).number, 3);
  h.End("worker-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.End("worker-1");
  const v1::JobStatus done = h.Status("a");
  EXPECT_EQ(done.state(), v1::JOB_STATE_COMPLETED);
  EXPECT_EQ(done.weights_digest(), "d1");
  EXPECT_EQ(done.first().step(), 1);
  EXPECT_EQ(done.last().step(), 3);
  EXPECT_EQ(done.ended_unix_ms(), h.unix_ms());
  h.Idle("worker-0");
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);
  h.Idle("worker-1");
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(h.member("worker-1").assign->run_id(), "b-1");
}

TEST(Jobs, OnlyOfARankThatWasCutShortIsThePhaseShown) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), {"worker-0", "worker-1"});
  const auto phase = [&h](const std::string& job, int rank) {
    return h.Status(job).ranks(rank).progress().phase();
  };
  for (const char* name : {"worker-0", "worker-1"}) h.Work(name, 0, "loading");
  h.Steps("worker-0", 1, 3);
  h.End("worker-0");
  EXPECT_EQ(phase("a", 0), "");
  EXPECT_EQ(phase("a", 1), "loading");
  h.End("worker-1");
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED);
  EXPECT_EQ(phase("a", 1), "");
  EXPECT_EQ(h.Status("a").ranks(1).progress().step(), 3);

  for (const char* name : {"worker-0", "worker-1"}) h.Idle(name);
  h.StartJob(Harness::Spec("b", 2), {"worker-0", "worker-1"});
  h.Work("worker-0", 1, "forward");
  h.CancelJob("b");
  EXPECT_EQ(phase("b", 0), "");

  for (const char* name : {"worker-0", "worker-1"}) h.Idle(name);
  h.StartJob(Harness::Spec("c", 2), {"worker-0", "worker-1"});
  h.Work("worker-0", 1, "backward");
  h.End("worker-0", "INTERNAL", "broken");
  h.End("worker-1", "INTERNAL", "broken");
  ASSERT_EQ(h.Status("c").state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(phase("c", 0), "backward");
}

TEST(Jobs, TheQueueIsFirstInFirstOut) {
  Harness h;
  h.SubmitJob(Harness::Spec("big", 2));
  h.SubmitJob(Harness::Spec("small", 1));
  h.Join("worker-0");
  EXPECT_EQ(h.Status("small").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(h.Status("small").reason(), "behind big-1 in the queue");
  h.Join("worker-1");
  EXPECT_EQ(h.Status("big").state(), v1::JOB_STATE_PLACING);
  h.Join("worker-2");
  EXPECT_EQ(h.Status("small").state(), v1::JOB_STATE_PLACING);
}

TEST(Jobs, ANameIsUniqueAmongJobsThatHaveNotEndedAndARunIdForEver) {
  Harness h;
  h.SubmitJob(Harness::Spec("a", 1));
  const RequestId again = h.SubmitJob(Harness::Spec("a", 1));
  EXPECT_EQ(h.Answer(again).status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(h.Answer(again).status.message()), HasSubstr("a is QUEUED (run a-1)"));
  h.CancelJob("a");
  EXPECT_EQ(h.Answer(h.SubmitJob(Harness::Spec("a", 1))).text, "a-2");
  h.CancelJob("a");
  h.Restart();
  EXPECT_EQ(h.Answer(h.SubmitJob(Harness::Spec("a", 1))).text, "a-3");
  EXPECT_EQ(h.Status("a").run_id(), "a-3");
  EXPECT_EQ(h.Status("a-1").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(h.Status("a").directory(), "jobs/a");
  EXPECT_EQ(h.Status("a-1").directory(), "jobs/a@a-1");
}

TEST(Jobs, BadNamesAndTooManyJobsAreRefused) {
  CoreOptions options;
  options.max_live_jobs = 1;
  Harness h(options);
  for (const char* name : {"", "../x", ".hidden", "a b"}) {
    EXPECT_EQ(h.Answer(h.SubmitJob(Harness::Spec(name, 1))).status.code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
  h.SubmitJob(Harness::Spec("a", 1));
  EXPECT_EQ(h.Answer(h.SubmitJob(Harness::Spec("b", 1))).status.code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(Jobs, TheOldestEndedRunsAreForgottenBeyondTheLimit) {
  CoreOptions options;
  options.max_ended_jobs = 2;
  Harness h(options);
  for (int i = 0; i < 4; ++i) {
    h.SubmitJob(Harness::Spec("a", 1));
    h.CancelJob("a");
  }
  EXPECT_EQ(h.core().List().size(), 2u);
  EXPECT_EQ(h.Status("a-1").run_id(), "");
  EXPECT_EQ(h.Status("a-4").run_id(), "a-4");
  h.Restart();
  EXPECT_EQ(h.core().List().size(), 2u);
  EXPECT_EQ(h.Answer(h.SubmitJob(Harness::Spec("a", 1))).text, "a-5");
}

TEST(Jobs, CancellingAQueuedJobIsImmediateAndARunningOneStopsItsRanks) {
  Harness h;
  h.SubmitJob(Harness::Spec("q", 5));
  EXPECT_TRUE(h.Answer(h.CancelJob("q")).status.ok());
  EXPECT_EQ(h.Status("q").state(), v1::JOB_STATE_CANCELLED);

  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), {"worker-0", "worker-1"});
  const RequestId waiting = h.Get("worker-0", "k");
  h.CancelJob("a");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(h.member("worker-0").StopReason(), "cancelled by a client");
  EXPECT_EQ(h.member("worker-1").StopReason(), "cancelled by a client");
  EXPECT_EQ(h.Answer(waiting).status.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(h.Answer(h.CancelJob("a")).status.ok());  // again
}

TEST(Jobs, CancellingWhatIsNotThereListsWhatIs) {
  Harness h;
  h.SubmitJob(Harness::Spec("alpha", 1));
  const absl::Status status = h.Answer(h.CancelJob("beta")).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no job \"beta\"; there is alpha"));
}

TEST(Jobs, AnEndedJobCannotBeCancelled) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1, 1), {"worker-0"});
  h.Steps("worker-0", 1, 1);
  h.End("worker-0");
  EXPECT_EQ(h.Answer(h.CancelJob("a")).status.code(), absl::StatusCode::kFailedPrecondition);
}

TEST(Jobs, ADeterministicJobRefusesAMixtureOfFingerprints) {
  Harness h;
  h.JoinMany(1);
  FakeMember& other = h.Join("worker-1");
  other.hello.set_fingerprint("avx512");
  other.hello.set_incarnation(std::string(32, 'b'));
  h.Disconnect("worker-1");
  h.Connect("worker-1");
  v1::JobSpec spec = Harness::Spec("a", 2);
  spec.set_deterministic(true);
  h.SubmitJob(spec);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("one numeric fingerprint"));
  h.Join("worker-2");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING);
  EXPECT_FALSE(h.member("worker-1").assign.has_value());
}

TEST(Steps, AreTakenOnceAndInOrder) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2, 10), {"worker-0", "worker-1"});
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 1, 2)).number, 2);
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 1, 4)).number, 4);  // said again, and two more
  const Reply gap = h.Answer(h.Steps("worker-0", 6, 7));
  EXPECT_EQ(gap.status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(gap.status.message()),
              StartsWith("step 5 of a-1 is wanted next, got step 6"));
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 9, 11)).status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 5, 11)).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(h.Answer(h.Steps("worker-1", 5, 5)).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2, 3, 4, 5, 6, 7, 8, 9, 10));
}

TEST(Steps, AValueThatIsNotFiniteIsNeverWritten) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), {"worker-0"});
  ReportSteps event = h.StepsEvent("worker-0", 1, 2);
  event.body.mutable_records(1)->set_loss(std::numeric_limits<double>::quiet_NaN());
  h.Step(event);
  EXPECT_EQ(h.Answer(event.request).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1));
}

TEST(Steps, CompletionWaitsForStepsThatAreStillUnderWay) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), {"worker-0"});
  h.End("worker-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Steps("worker-0", 1, 3);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED);
}

TEST(Steps, AJobWhoseStepsNeverComeFails) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), {"worker-0"});
  h.Steps("worker-0", 1, 2);
  h.End("worker-0");
  h.Idle("worker-0");
  h.AdvanceBeating(absl::Seconds(11), {"worker-0"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("of 3 steps only 2 were reported"));
}

TEST(Ends, RanksThatDisagreeAboutTheWeightsFailTheJob) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), {"worker-0", "worker-1"});
  h.Steps("worker-0", 1, 3);
  h.End("worker-0");
  ReportEnd event = h.EndEvent("worker-1");
  event.body.set_weights_digest("d2");
  h.Step(event);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("ranks disagree about the final weights"));
}

TEST(Ends, AReportSaidAgainIsAnsweredTheSame) {
  Harness h;
  h.JoinMany(1);
  h.StartJob(Harness::Spec("a", 1), {"worker-0"});
  h.Steps("worker-0", 1, 3);
  EXPECT_TRUE(h.Answer(h.End("worker-0")).status.ok());
  EXPECT_TRUE(h.Answer(h.End("worker-0")).status.ok());
  h.Restart();
  EXPECT_TRUE(h.Answer(h.End("worker-0")).status.ok());
}

TEST(Fences, EveryCallOfAnotherRunGenerationMemberOrIncarnationIsRefused) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), {"worker-0", "worker-1"});
  const auto refused = [&](auto change) {
    PutKey event{h.NewRequest(), {}};
    *event.body.mutable_fence() = h.member("worker-0").Fence();
    event.body.set_key("k");
    change(*event.body.mutable_fence());
    h.Step(event);
    return h.Answer(event.request).status.code() == absl::StatusCode::kFailedPrecondition;
  };
  EXPECT_TRUE(refused([](v1::Fence& f) { f.set_run_id("other-1"); }));
  EXPECT_TRUE(refused([](v1::Fence& f) { f.set_generation(2); }));
  EXPECT_TRUE(refused([](v1::Fence& f) { f.set_rank(1); }));
  EXPECT_TRUE(refused([](v1::Fence& f) { f.set_rank(4000000000u); }));
  EXPECT_TRUE(refused([](v1::Fence& f) { f.set_member("worker-1"); }));
  EXPECT_TRUE(refused([](v1::Fence& f) { f.set_incarnation("0"); }));
  EXPECT_FALSE(refused([](v1::Fence& f) {}));
}

}  // namespace
}  // namespace zeroshard::coordinator
