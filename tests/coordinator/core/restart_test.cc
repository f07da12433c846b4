// The coordinator dies and starts again, at any moment, with and without what it had written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "coordinator/core/text.h"
#include "tests/coordinator/core/sim_worker.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const std::vector<std::string> kBoth = {"worker-0", "worker-1"};

TEST(Restart, AJobGoesOnInItsGenerationWhenItsMembersComeBack) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  h.Put("worker-0", "k", "v");
  h.Steps("worker-0", 1, 1);
  h.Restart();
  EXPECT_EQ(h.core().term(), 2);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Connect("worker-0", true);
  h.Connect("worker-1", true);
  EXPECT_EQ(h.member("worker-1").Last(v1::CoordinatorMessage::kWelcome)->welcome().term(), 2);
  EXPECT_THAT(h.Status("a").events().rbegin()->reason(), HasSubstr("all 2 ranks are back"));
  EXPECT_EQ(h.Answer(h.Get("worker-1", "k")).text, "v");
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 1, 3)).number, 3);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2, 3));
  h.End("worker-0");
  h.End("worker-1");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED);
  EXPECT_EQ(h.Status("a").generation(), 1);
}

TEST(Restart, ABarrierThatOneRankSawCompleteIsCompleteForTheOther) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  h.Arrive("worker-0", "save");
  h.Arrive("worker-1", "save");  // its answer is lost with the coordinator
  h.Restart();
  h.Connect("worker-0", true);
  h.Connect("worker-1", true);
  EXPECT_TRUE(h.Answer(h.Arrive("worker-1", "save")).status.ok());
}

TEST(Restart, MembersThatDoNotComeBackAreNamedAndTheJobFails) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  h.Restart();
  h.Connect("worker-0", true);
  h.AdvanceBeating(absl::Seconds(19), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.AdvanceBeating(absl::Seconds(3), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("rank 1 (worker-1 on host-a)"),
                                            HasSubstr("did not come back within 20.0 s")));
  EXPECT_THAT(h.member("worker-0").StopReason(), HasSubstr("worker-1"));
  h.Connect("worker-1", true);
  EXPECT_TRUE(h.member("worker-1").Last(v1::CoordinatorMessage::kRefused)->refused().fenced());
}

TEST(Restart, AMemberThatDiedMeanwhileIsNamedWithItsSignal) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  h.Restart();
  h.Connect("worker-0", true);
  h.Exit("worker-1", 0, 11);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("SIGSEGV"));
}

TEST(Restart, WithItsStateLostMembersAreToldToStopAndServeAgain) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  h.Restart(/*lose_everything=*/true);
  h.Connect("worker-0", true);
  h.Connect("worker-1", true);
  EXPECT_THAT(h.member("worker-0").StopReason(),
              AllOf(HasSubstr("has no run \"a-1\""), HasSubstr("data folder was lost")));
  h.SubmitJob(Harness::Spec("b", 2));
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);  // no double scheduling
  h.Idle("worker-0");
  h.Idle("worker-1");
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING);
}

TEST(Restart, AnAssignmentThatWasNeverDeliveredIsSentAgain) {
  Harness h;
  h.JoinMany(2);
  h.SubmitJob(Harness::Spec("a", 2));
  h.member("worker-1").assign.reset();
  h.Restart();
  h.Connect("worker-0");
  h.Connect("worker-1");
  ASSERT_TRUE(h.member("worker-1").assign.has_value());
  EXPECT_EQ(h.member("worker-1").assign->generation(), 1);
}

TEST(Restart, ASlowStartHasItsWholeTimeAgain) {
  Harness h;
  h.JoinMany(2);
  v1::JobSpec spec = Harness::Spec("a", 2);
  spec.mutable_timeouts()->set_start_seconds(120);
  h.SubmitJob(spec);
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  h.AdvanceBeating(absl::Seconds(60), kBoth);
  h.Restart();
  for (const std::string& name : kBoth) h.Connect(name, true);
  h.AdvanceBeating(absl::Seconds(100), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING) << h.Status("a").reason();
  for (const std::string& name : kBoth) h.Arrive(name, "start");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

TEST(Restart, AStartThatNeverEndsStillFailsTheJob) {
  Harness h;
  h.JoinMany(2);
  h.SubmitJob(Harness::Spec("a", 2));  // 60 s to start
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  h.Restart();
  for (const std::string& name : kBoth) h.Connect(name, true);
  h.AdvanceBeating(absl::Seconds(60 + 20 + 2), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("timeouts.start_seconds"));
}

TEST(Restart, AFailureThatWasReportedBeforeIsNotForgotten) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  h.End("worker-1", "INVALID_ARGUMENT", "tokens.bin is too short");
  h.Restart();
  h.Advance(absl::Seconds(2));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 1 (worker-1"), HasSubstr("tokens.bin is too short")));
}

TEST(Restart, TheQueueIsTakenUpInItsOrder) {
  Harness h;
  h.SubmitJob(Harness::Spec("a", 1));
  h.SubmitJob(Harness::Spec("b", 1));
  h.Restart();
  h.Join("worker-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);
}

// One whole job with a crash at event number `crash_at`; how many events it took.
uint64_t RunWithCrash(uint64_t crash_at, Harness::Crash how) {
  Harness h;
  std::vector<SimWorker> workers;
  for (const std::string& name : kBoth) {
    h.Join(name);
    workers.emplace_back(&h, name);
  }
  const uint64_t begin = h.events();
  if (crash_at != 0) h.CrashAt(crash_at, how);
  const v1::JobSpec spec = Harness::Spec("a", 2, 4);
  int boots = h.boots();
  RequestId submitted = h.SubmitJob(spec);
  for (int round = 0; round < 400 && !IsEnded(h.Status("a").state()); ++round) {
    if (boots != h.boots()) {
      boots = h.boots();
      if (!h.Answered(submitted)) {
        const RequestId again = h.SubmitJob(spec);
        if (h.Answer(again).status.code() != absl::StatusCode::kAlreadyExists) submitted = again;
      }
    }
    for (SimWorker& worker : workers) worker.Act();
    h.Advance(absl::Milliseconds(100));
  }
  const v1::JobStatus status = h.Status("a");
  const std::string where = absl::StrCat("crash at event ", crash_at, ", ",
                                         how == Harness::Crash::kAfterTheLog ? "after" : "before",
                                         " the log: ", status.reason());
  EXPECT_EQ(status.state(), v1::JOB_STATE_COMPLETED) << where;
  EXPECT_EQ(status.generation(), 1) << where;
  EXPECT_EQ(status.run_id(), "a-1") << where;
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2, 3, 4)) << where;
  EXPECT_EQ(h.core().term(), crash_at == 0 || h.CrashIsToCome() ? 1 : 2) << where;
  return h.events() - begin;
}

TEST(Restart, AJobCompletesWithACrashAtAnyEvent) {
  const uint64_t events = RunWithCrash(0, Harness::Crash::kBeforeTheLog);
  ASSERT_GT(events, 20u);
  for (uint64_t at = 1; at <= events; ++at) {
    RunWithCrash(at, Harness::Crash::kBeforeTheLog);
    RunWithCrash(at, Harness::Crash::kAfterTheLog);
  }
}

}  // namespace
}  // namespace zeroshard::coordinator
