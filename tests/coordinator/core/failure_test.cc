// A job that fails names the rank, the host and the cause, and its peers stop at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class Failure : public ::testing::Test {
 protected:
  Failure() {
    for (int i = 0; i < 3; ++i) h.Join(absl::StrCat("worker-", i), absl::StrCat("host-", i));
    h.StartJob(Harness::Spec("a", 3, 100), all);
    for (const std::string& name : all) h.Work(name, 12, "backward");
  }

  Harness h;
  const std::vector<std::string> all = {"worker-0", "worker-1", "worker-2"};
};

TEST_F(Failure, AKilledProcessIsNamedWithItsSignalWhateverPeersSaidFirst) {
  h.End("worker-0", "UNAVAILABLE", "all_gather blocks.0: peer 2 closed the connection", 2);
  EXPECT_THAT(h.member("worker-1").StopReason(), HasSubstr("rank 0 reports UNAVAILABLE"));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Disconnect("worker-1");
  h.Exit("worker-1", 0, 9);
  const v1::JobStatus status = h.Status("a");
  EXPECT_EQ(status.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(status.reason(),
              AllOf(HasSubstr("rank 1 (worker-1 on host-1)"), HasSubstr("killed by signal 9"),
                    HasSubstr("SIGKILL"), HasSubstr("step 12, backward")));
}

TEST_F(Failure, SurvivorsAreToldToStopInTheSameDecision) {
  h.Exit("worker-2", 3, 0);
  EXPECT_THAT(h.member("worker-0").StopReason(), HasSubstr("rank 2"));
  EXPECT_THAT(h.member("worker-1").StopReason(), HasSubstr("rank 2"));
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("ended with exit code 3"));
}

TEST_F(Failure, WithoutASupervisorTheBrokenConnectionAndThePeersNameTheDead) {
  h.Disconnect("worker-2");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.End("worker-0", "UNAVAILABLE", "connection reset", 1);  // blames the wrong neighbour
  h.End("worker-1", "UNAVAILABLE", "connection reset", 2);
  h.AdvanceBeating(absl::Seconds(1), all);
  const v1::JobStatus status = h.Status("a");
  EXPECT_EQ(status.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(status.reason(), AllOf(HasSubstr("rank 2 (worker-2 on host-2) stopped answering"),
                                     HasSubstr("its connection to the coordinator broke")));
}

TEST_F(Failure, ManyAccusersOutweighOne) {
  h.End("worker-1", "DEADLINE_EXCEEDED", "reduce_scatter: no answer of 0", 0);
  h.End("worker-0", "DEADLINE_EXCEEDED", "reduce_scatter: no answer of 1", 1);
  h.End("worker-2", "DEADLINE_EXCEEDED", "reduce_scatter: no answer of 1", 1);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("rank 1 (worker-1 on host-1) stopped answering"));
}

TEST_F(Failure, AnErrorOfItsOwnBeatsThePeersThatLostIt) {
  h.End("worker-0", "UNAVAILABLE", "peer 1 is gone", 1);
  h.End("worker-2", "UNAVAILABLE", "peer 1 is gone", 1);
  h.End("worker-1", "INVALID_ARGUMENT", "tokens.bin: token 70000 at offset 12, vocabulary 50257");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 1 (worker-1 on host-1): INVALID_ARGUMENT: tokens.bin"),
                    Not(HasSubstr("gone"))));
}

TEST_F(Failure, ANonFiniteValueIsCountedOnceAndNamesTheRankThatHadIt) {
  const std::string text = "step 12: the gradient of rank 1 is not finite, sample 3";
  for (const char* name : {"worker-0", "worker-2", "worker-1"}) {
    ReportEnd end = h.EndEvent(name, "INTERNAL", text, 1);
    end.body.set_nonfinite(true);
    h.Step(end);
  }
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 1 (worker-1 on host-1)"), HasSubstr(text)));
  int count = 0;
  for (const Measure& measure : h.measures()) count += measure.kind == MetricKind::kNonFinite;
  EXPECT_EQ(count, 1);
}

TEST_F(Failure, AnErrorThatOnlySpeaksOfNonFiniteValuesIsNotCountedAsOne) {
  h.End("worker-1", "INVALID_ARGUMENT", "train.clip: a non-finite number, wanted one above 0");
  h.Advance(absl::Seconds(2));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  for (const Measure& measure : h.measures()) EXPECT_NE(measure.kind, MetricKind::kNonFinite);
}

TEST_F(Failure, ABrokenStreamThatComesBackInTimeHarmsNothing) {
  h.Disconnect("worker-1");
  h.AdvanceBeating(absl::Seconds(9), {"worker-0", "worker-2"});
  h.Connect("worker-1", /*running=*/true);
  h.AdvanceBeating(absl::Seconds(9), all);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

TEST_F(Failure, ABrokenStreamThatStaysAwayFailsTheJobAtTheTimeout) {
  h.Disconnect("worker-1");
  h.AdvanceBeating(absl::Milliseconds(10500), {"worker-0", "worker-2"});
  EXPECT_THAT(h.member("worker-0").StopReason(), HasSubstr("worker-1"));
  h.AdvanceBeating(absl::Seconds(1), {"worker-0", "worker-2"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 1 (worker-1 on host-1)"), HasSubstr("nothing was heard")));
}

TEST_F(Failure, ARankWithoutProgressIsNamedFencedAndRefusedWhenItWakes) {
  const SessionId stuck = h.member("worker-1").session;
  h.Work("worker-0", 13, "communication");
  h.Work("worker-2", 13, "communication");
  h.AdvanceBeating(absl::Seconds(29), all);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.AdvanceBeating(absl::Seconds(2), all);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("no progress"));
  h.AdvanceBeating(absl::Seconds(1), {"worker-0", "worker-2"});
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 1 (worker-1 on host-1): no progress for 30"),
                    HasSubstr("timeouts.step_seconds"), HasSubstr("step 12, backward")));
  EXPECT_TRUE(h.IsClosed(stuck));
  h.Connect("worker-1", true);
  const auto* refused = h.member("worker-1").Last(v1::CoordinatorMessage::kRefused);
  ASSERT_NE(refused, nullptr);
  EXPECT_TRUE(refused->refused().fenced());
}

TEST_F(Failure, ProgressAloneKeepsAJobAliveHoweverLongAStepTakes) {
  for (int i = 0; i < 10; ++i) {
    h.AdvanceBeating(absl::Seconds(20), all);
    for (const std::string& name : all) h.Work(name, 12, "backward");
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

TEST_F(Failure, ARankThatGoesIdleWithoutAReportFailsTheJob) {
  h.Idle("worker-2");
  h.AdvanceBeating(absl::Seconds(12), all);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 2 (worker-2"), HasSubstr("went idle without reporting")));
}

TEST_F(Failure, AGoodbyeInTheMiddleOfAJobFailsIt) {
  MemberSaid said{h.member("worker-0").session, {}};
  said.message.mutable_goodbye()->set_reason("SIGTERM");
  h.Step(said);
  h.AdvanceBeating(absl::Seconds(1), {"worker-1", "worker-2"});
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 0 (worker-0"), HasSubstr("it left: \"SIGTERM\"")));
}

TEST_F(Failure, AnUnreachablePeerIsReportedByName) {
  MemberSaid said{h.member("worker-0").session, {}};
  *said.message.mutable_unreachable()->mutable_running() = h.member("worker-0").Fence();
  said.message.mutable_unreachable()->set_peer_rank(2);
  said.message.mutable_unreachable()->set_reason("Connection refused");
  h.Step(said);
  h.AdvanceBeating(absl::Seconds(1), all);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 2 (worker-2"), HasSubstr("Connection refused")));
}

TEST_F(Failure, SurvivorsTakeTheNextJobAndTheDeadDoNot) {
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-0");
  h.Idle("worker-2");
  h.SubmitJob(Harness::Spec("b", 2));
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(h.member("worker-2").assign->run_id(), "b-1");
  EXPECT_EQ(h.member("worker-2").assign->rank(), 1u);
}

TEST_F(Failure, AMemberThatDoesNotStopIsFenced) {
  h.CancelJob("a");
  h.Idle("worker-0");
  h.Idle("worker-1");
  h.AdvanceBeating(absl::Seconds(29), all);
  EXPECT_FALSE(h.IsClosed(h.member("worker-2").session));
  h.AdvanceBeating(absl::Seconds(2), all);
  EXPECT_TRUE(h.IsClosed(h.member("worker-2").session));
  EXPECT_FALSE(h.IsClosed(h.member("worker-1").session));
}

TEST_F(Failure, WhatAFailedRunSaysLaterIsRefused) {
  h.Exit("worker-1", 0, 9);
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 1, 1)).status.code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(h.History("a-1"), IsEmpty());
}

TEST_F(Failure, AnExitOfAnotherProcessOfTheNameIsIgnored) {
  v1::ReportExitRequest body;
  body.set_member("worker-1");
  body.set_pid(1);
  body.set_signal(9);
  h.Step(ReportExit{h.NewRequest(), body});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

}  // namespace
}  // namespace zeroshard::coordinator
