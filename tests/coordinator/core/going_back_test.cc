// Jobs whose state is on their ranks go on from their newest checkpoint when a rank is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const std::vector<std::string> kBoth = {"worker-0", "worker-1"};

std::vector<uint64_t> UpTo(uint64_t last) {
  std::vector<uint64_t> steps;
  for (uint64_t step = 1; step <= last; ++step) steps.push_back(step);
  return steps;
}

std::string Events(const Harness& h) {
  const v1::JobStatus status = h.Status("a");
  std::string text;
  for (const v1::JobEvent& event : status.events()) {
    absl::StrAppend(&text, event.reason(), "\n");
  }
  return text;
}

// Two workers, and job "a" at step `step`.
void Start(Harness& h, uint64_t step, uint64_t steps = 100) {
  h.JoinMany(2);
  h.StartJob(Harness::SavingSpec("a", 2, steps), kBoth);
  if (step > 0) h.Steps("worker-0", 1, step);
}

// Those that were told to stop have stopped.
void LetGo(Harness& h, const std::vector<std::string>& names) {
  for (const std::string& name : names) h.Idle(name);
}

// worker-1 dies and another process takes its place.
void Replace(Harness& h) {
  h.Exit("worker-1", 0, 9);
  LetGo(h, {"worker-0"});
  h.Forget("worker-1");
  h.Join("worker-1");
}

void Begin(Harness& h) {
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) h.Arrive(name, "start");
}

double StepsLost(const Harness& h) {
  double sum = 0;
  for (const Measure& measure : h.measures()) {
    if (measure.kind == MetricKind::kStepsLost) sum += measure.value;
  }
  return sum;
}

uint64_t ToldOf(Harness& h) {
  uint64_t sum = 0;
  for (const v1::StepRecord& record : h.HistoryRecords("a-1")) sum += record.steps_lost();
  return sum;
}

TEST(GoingBack, ALostRankEndsTheGenerationAndTheNextBeginsAtTheNewestCheckpoint) {
  Harness h;
  Start(h, 5);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.Steps("worker-0", 6, 8);
  h.Exit("worker-1", 0, 9);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("rank 0 (worker-0 on host-a) to stop"));
  EXPECT_THAT(Events(h), AllOf(HasSubstr("rank 1 (worker-1 on host-a)"), HasSubstr("SIGKILL")));
  EXPECT_THAT(h.member("worker-0").StopReason(), HasSubstr("SIGKILL"));
  EXPECT_EQ(h.History("a-1"), UpTo(8));
  LetGo(h, {"worker-0"});
  EXPECT_EQ(h.History("a-1"), UpTo(5));
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("needs 2 workers, 1 idle of 1"));
  h.Forget("worker-1");
  h.Join("worker-1");
  const v1::Assign& assign = *h.member("worker-1").assign;
  EXPECT_EQ(assign.generation(), 2);
  EXPECT_EQ(assign.first_step(), 6);
  EXPECT_EQ(assign.resume().checkpoint(), "/ckpt/step-5");
  EXPECT_FALSE(assign.resume().weights_only());
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  Begin(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(h.Status("a").steps_lost(), 3);
  EXPECT_EQ(StepsLost(h), 3);
  EXPECT_THAT(Events(h), HasSubstr("goes back to the checkpoint of step 5, /ckpt/step-5; 3 steps "
                                   "are lost and done again"));
  h.Steps("worker-0", 6, 100);
  for (const std::string& name : kBoth) h.End(name);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.History("a-1"), UpTo(100));
  EXPECT_EQ(h.HistoryRecords("a-1")[5].steps_lost(), 3);
  EXPECT_EQ(ToldOf(h), 3);
}

TEST(GoingBack, WhatTheHistoryTellsOfLostStepsAddsUpOverSeveralLosses) {
  Harness h;
  Start(h, 5);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.Steps("worker-0", 6, 8);
  Replace(h);  // 3, told by step 6
  Begin(h);
  h.Steps("worker-0", 6, 7);
  Replace(h);  // 2, and the telling step is gone
  Begin(h);
  EXPECT_EQ(h.Status("a").steps_lost(), 5);
  h.Steps("worker-0", 6, 10);
  h.ReportSaved("worker-0", Harness::Saved(10));
  h.Steps("worker-0", 11, 11);
  Replace(h);  // 1, told by step 11
  Begin(h);
  h.Steps("worker-0", 11, 20);
  EXPECT_EQ(h.Status("a").steps_lost(), 6);
  EXPECT_EQ(ToldOf(h), 6);
  EXPECT_EQ(h.HistoryRecords("a-1")[5].steps_lost(), 5);
  EXPECT_EQ(h.HistoryRecords("a-1")[10].steps_lost(), 1);
}

TEST(GoingBack, WithoutACheckpointItBeginsAgainWhereItBegan) {
  Harness h;
  h.JoinMany(2);
  h.SubmitFrom(Harness::SavingSpec("a", 2), Harness::From(40, "x-1"));
  Begin(h);
  h.Steps("worker-0", 41, 44);
  h.ReportSample("worker-0", 44, "Once", "upon");
  Replace(h);
  EXPECT_EQ(h.member("worker-1").assign->first_step(), 41);
  EXPECT_EQ(h.member("worker-1").assign->resume().checkpoint(), "/ckpt/step-40");
  EXPECT_EQ(h.Status("a").committed_step(), 40);
  EXPECT_EQ(h.Status("a").steps_lost(), 4);
  EXPECT_THAT(h.Samples("a-1"), IsEmpty());
  Begin(h);
  h.Steps("worker-0", 41, 44);
  h.ReportSample("worker-0", 44, "Once", "upon");
  EXPECT_THAT(h.Samples("a-1"), SizeIs(1)) << "done again, it is no repetition";
}

TEST(GoingBack, AFreshJobBeginsAnewAndSaysThatItHasNoCheckpoint) {
  Harness h;
  Start(h, 3);
  Replace(h);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 1);
  EXPECT_FALSE(h.member("worker-0").assign->has_resume());
  EXPECT_THAT(Events(h), HasSubstr("step 0, where it began: it has completed no checkpoint; 3 "));
  EXPECT_THAT(h.History("a-1"), IsEmpty());
}

// keep_last deletes the older one before rank 0 says that the newer one is complete.
TEST(GoingBack, ACheckpointThatNobodyReportedIsFoundOnTheDisk) {
  Harness h;
  Start(h, 12);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.disk().clear();
  h.WriteCheckpoint("a-1", 10);
  Replace(h);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 11);
  EXPECT_EQ(h.member("worker-0").assign->resume().checkpoint(), "/ckpt/step-10");
  EXPECT_EQ(h.Status("a").checkpoint().step(), 10);
  EXPECT_EQ(h.Status("a").steps_lost(), 2);
  Begin(h);
  h.Steps("worker-0", 11, 14);
  Replace(h);
  Begin(h);
  h.Steps("worker-0", 11, 12);
  EXPECT_EQ(h.Status("a").steps_lost(), 6);
  EXPECT_EQ(ToldOf(h), 6);
}

TEST(GoingBack, OneThatWasReportedAndIsGoneIsNotUsed) {
  Harness h;
  Start(h, 12);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.ReportSaved("worker-0", Harness::Saved(10));
  h.disk().erase(10);
  Replace(h);
  EXPECT_EQ(h.member("worker-0").assign->resume().checkpoint(), "/ckpt/step-5");
  Begin(h);
  h.Steps("worker-0", 6, 10);
  h.ReportSaved("worker-0", Harness::Saved(10));
  EXPECT_EQ(h.Status("a").checkpoint().step(), 10) << "written again, it is no repetition";
}

TEST(GoingBack, ANewerOneThatIsDamagedIsNamedWhereTheJobGoesFurtherBack) {
  Harness h;
  Start(h, 12);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.ReportSaved("worker-0", Harness::Saved(10));
  h.DamageCheckpoint(10);
  Replace(h);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 6);
  EXPECT_THAT(Events(h),
              AllOf(HasSubstr("goes back to the checkpoint of step 5, /ckpt/step-5; 7 steps"),
                    HasSubstr("step 10, /ckpt/step-10, was reported complete, and is not complete "
                              "any more; not used: /ckpt/step-10 has no manifest.json")));
}

TEST(GoingBack, TheOneThatItWentOnFromMayBeGoneTheNextTime) {
  Harness h;
  Start(h, 12);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.ReportSaved("worker-0", Harness::Saved(10));
  Replace(h);
  Begin(h);
  h.Steps("worker-0", 11, 14);
  h.DamageCheckpoint(10);
  Replace(h);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 6);
  EXPECT_EQ(h.member("worker-0").assign->resume().checkpoint(), "/ckpt/step-5");
  EXPECT_EQ(h.Status("a").checkpoint().step(), 5);
  EXPECT_EQ(h.History("a-1"), UpTo(5));
  EXPECT_EQ(h.Status("a").steps_lost(), 11);
}

// The folder is not mounted, or another one on the coordinator's host.
TEST(GoingBack, WhereNoneIsFoundAlthoughOneWasReportedNothingIsCutAndTheJobFailsInTheEnd) {
  for (const bool damaged : {false, true}) {
    Harness h;
    Start(h, 8);
    h.ReportSaved("worker-0", Harness::Saved(5));
    if (damaged) {
      h.DamageCheckpoint(5);
    } else {
      h.disk().clear();
    }
    Replace(h);
    h.AdvanceBeating(absl::Seconds(30), kBoth);
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
    EXPECT_THAT(
        h.Status("a").reason(),
        AllOf(HasSubstr("the checkpoint of step 5, /ckpt/step-5, was reported complete"),
              HasSubstr("no complete one in /ckpt"), HasSubstr("one folder for all hosts")));
    EXPECT_EQ(h.History("a-1"), UpTo(8));
    h.Restart();
    for (const std::string& name : kBoth) h.Connect(name);
    h.AdvanceBeating(absl::Seconds(63), kBoth);
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
    EXPECT_THAT(h.Status("a").reason(),
                AllOf(HasSubstr("no complete one in /ckpt"), HasSubstr("timeouts.start_seconds"),
                      HasSubstr("--resume-from /ckpt/step-5")));
    if (damaged) {
      EXPECT_THAT(h.Status("a").reason(), HasSubstr("(/ckpt/step-5 has no manifest.json)"));
    }
    EXPECT_EQ(h.History("a-1"), UpTo(8));
    EXPECT_EQ(h.Status("a").committed_step(), 8);
    EXPECT_EQ(h.Status("a").checkpoint().step(), 5);
    EXPECT_EQ(h.Status("a").steps_lost(), 0);
  }
}

TEST(GoingBack, AFolderThatComesBackInTimeIsGoneOnFrom) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.disk().clear();
  Replace(h);
  h.AdvanceBeating(absl::Seconds(30), kBoth);
  ASSERT_EQ(h.Status("a").generation(), 1);
  h.WriteCheckpoint("a-1", 5);
  h.AdvanceBeating(absl::Seconds(2), kBoth);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 6);
  EXPECT_EQ(h.History("a-1"), UpTo(5));
}

// While the coordinator was away rank 0 trained on, saved, and died with what it had to report.
TEST(GoingBack, StepsThatNobodyReportedAreMissingInTheHistoryAndSaidToBe) {
  Harness h;
  Start(h, 8);
  h.WriteCheckpoint("a-1", 10);
  Replace(h);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 11);
  EXPECT_EQ(h.Status("a").committed_step(), 10);
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_THAT(Events(h), HasSubstr("the history lacks steps 9 to 10"));
  h.Restart();
  EXPECT_EQ(h.Status("a").committed_step(), 10);
}

TEST(GoingBack, AnotherRunsCheckpointIsNone) {
  Harness h;
  Start(h, 8);
  h.WriteCheckpoint("b-1", 7);
  Replace(h);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 1);
}

TEST(GoingBack, AnErrorOfARanksOwnFailsTheJobAtOnce) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.End("worker-0", "UNAVAILABLE", "peer 1 is gone", 1);
  h.End("worker-1", "INVALID_ARGUMENT", "tokens.bin: token 70000 at offset 12, vocabulary 50257");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("tokens.bin"), HasSubstr("--resume-from /ckpt/step-5")));
}

TEST(GoingBack, ANonFiniteValueIsNotTriedAgain) {
  Harness h;
  Start(h, 8);
  for (const std::string& name : kBoth) {
    ReportEnd end = h.EndEvent(name, "INTERNAL", "step 9: the loss of rank 1 is not finite", 1);
    end.body.set_nonfinite(true);
    h.Step(end);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
}

TEST(GoingBack, WithoutACheckpointSectionTheJobFailsAsNothingIsKept) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2, 100), kBoth);
  h.Exit("worker-1", 0, 9);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
}

TEST(GoingBack, RecoveriesThatLeadNoFurtherEndTheJob) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  for (int i = 0; i < 5; ++i) {
    Replace(h);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << i;
    Begin(h);
    h.Steps("worker-0", 6, 8);  // as far as it was before, and no further
  }
  h.Exit("worker-1", 0, 9);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("5 recoveries in a row did not get beyond step 8"),
                    HasSubstr("SIGKILL"), HasSubstr("--resume-from /ckpt/step-5")));
}

TEST(GoingBack, AStepFurtherBeginsTheCountAnew) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  for (uint64_t i = 0; i < 12; ++i) {
    Replace(h);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << i;
    Begin(h);
    h.Steps("worker-0", 6, 9 + i);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

TEST(GoingBack, AWorkerThatIsToldToLeaveCostsNoStepWhereItCouldSave) {
  Harness h;
  Start(h, 10);
  h.ReportSaved("worker-0", Harness::Saved(10));
  h.End("worker-0", "CANCELLED", "saved step 10");
  h.End("worker-1", "CANCELLED", "told to leave (SIGTERM); saved step 10", 1);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(Events(h), HasSubstr("rank 1 (worker-1 on host-a): told to leave (SIGTERM)"));
  LetGo(h, {"worker-0"});
  h.Forget("worker-1");
  h.Join("worker-2");
  ASSERT_TRUE(h.member("worker-2").assign.has_value()) << h.Status("a").reason();
  EXPECT_EQ(h.member("worker-2").assign->first_step(), 11);
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
}

// It could complete a newer checkpoint, and delete the one that was found.
TEST(GoingBack, NobodyLooksBeforeTheRankThatSavesHasStopped) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.Join("worker-2");
  h.Join("worker-3");
  h.Exit("worker-1", 0, 9);
  h.AdvanceBeating(absl::Seconds(20), {"worker-0", "worker-2", "worker-3"});
  EXPECT_FALSE(h.member("worker-2").assign.has_value());
  h.disk().clear();
  h.WriteCheckpoint("a-1", 8);
  LetGo(h, {"worker-0"});
  EXPECT_EQ(h.member("worker-2").assign->first_step(), 9);
}

TEST(GoingBack, ARankThatDoesNotStopIsFencedAndHoldsUpNobodyForLonger) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.Join("worker-2");
  h.Join("worker-3");
  h.Exit("worker-1", 0, 9);
  h.AdvanceBeating(absl::Seconds(31), {"worker-0", "worker-2", "worker-3"});
  ASSERT_TRUE(h.member("worker-2").assign.has_value()) << h.Status("a").reason();
  EXPECT_EQ(h.member("worker-2").assign->generation(), 2);
}

// It was stopped by a signal, counts as lost, and keeps the lock of the folder until it wakes.
TEST(GoingBack, AProcessThatStillHoldsTheFolderIsWaitedFor) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) {
    h.End(name, "FAILED_PRECONDITION",
          "checkpoint.dir /ckpt: job a (run a-1, process 7 on host host-a) writes there; wait", 0);
  }
  LetGo(h, kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << h.Status("a").reason();
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("waits for a process that was given up"));
  EXPECT_EQ(h.Status("a").generation(), 2);
  h.disk().clear();
  h.WriteCheckpoint("a-1", 7);  // it woke
  h.AdvanceBeating(absl::Seconds(11), kBoth);
  EXPECT_EQ(h.Status("a").generation(), 3);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 8);
}

// Each rank finds the folder locked by the process that was given up.
void FindFolderHeld(Harness& h) {
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) {
    h.End(name, "FAILED_PRECONDITION",
          "checkpoint.dir /ckpt: job a (run a-1, process 7 on host host-a) writes there; wait", 0);
  }
  LetGo(h, kBoth);
}

void AwaitGeneration(Harness& h, uint64_t generation) {
  for (int i = 0; i < 65 && h.Status("a").generation() < generation; ++i) {
    h.AdvanceBeating(absl::Seconds(1), kBoth);
  }
  ASSERT_EQ(h.Status("a").generation(), generation) << h.Status("a").reason();
}

TEST(GoingBack, WaitingForTheFolderIsNoRecoveryThatLedNowhere) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  for (uint64_t generation = 2; generation <= 9; ++generation) {
    ASSERT_NO_FATAL_FAILURE(AwaitGeneration(h, generation));
    FindFolderHeld(h);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << h.Status("a").reason();
    EXPECT_THAT(h.Status("a").reason(),
                AllOf(HasSubstr("kill it"), HasSubstr("process 7 on host host-a")));
  }
  ASSERT_NO_FATAL_FAILURE(AwaitGeneration(h, 10));  // it was killed
  Begin(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Steps("worker-0", 6, 9);
  EXPECT_EQ(h.History("a-1"), UpTo(9));
}

TEST(GoingBack, AFolderThatIsNeverLeftEndsTheJobAndSaysWhichProcessToKill) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  const absl::Duration begun = h.now();
  for (uint64_t generation = 2;; ++generation) {
    ASSERT_LT(generation, 20);
    ASSERT_NO_FATAL_FAILURE(AwaitGeneration(h, generation));
    FindFolderHeld(h);
    if (h.Status("a").state() != v1::JOB_STATE_RECOVERING) break;
  }
  EXPECT_GE(h.now() - begun, absl::Minutes(10));
  EXPECT_LE(h.now() - begun, absl::Minutes(12));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("kill that process"), HasSubstr("process 7 on host host-a"),
                    HasSubstr("--resume-from /ckpt/step-5")));
}

TEST(GoingBack, ACoordinatorThatDiesWhileItLooksLooksAgain) {
  Harness h;
  Start(h, 0);
  h.WriteCheckpoint("a-1", 3);  // nobody reported it, nor a step
  h.HoldAnswers();
  Replace(h);
  ASSERT_THAT(h.Status("a").reason(), HasSubstr("looks for"));
  h.Restart();
  h.AnswerHeld();
  for (const std::string& name : kBoth) h.Connect(name);
  ASSERT_EQ(h.Status("a").generation(), 2) << h.Status("a").reason();
  EXPECT_EQ(h.member("worker-1").assign->first_step(), 4);
  EXPECT_EQ(h.member("worker-1").assign->resume().checkpoint(), "/ckpt/step-3");
}

TEST(GoingBack, OnlyBeforeItHasTrainedAnotherRunsCheckpointsAreToldByTheirTimeWithClocksApart) {
  Harness h;
  h.JoinMany(2);
  const int64_t submitted = h.unix_ms();
  h.StartJob(Harness::SavingSpec("a", 2), kBoth);
  Replace(h);
  EXPECT_EQ(h.last_look().since_unix_ms, submitted - 3600 * 1000);
  Begin(h);
  h.Steps("worker-0", 1, 5);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  EXPECT_EQ(h.last_look().since_unix_ms, 0);
  Begin(h);
  Replace(h);  // with no step of this generation
  EXPECT_EQ(h.last_look().since_unix_ms, 0);
}

TEST(GoingBack, TheFirstStepOfTheRunStaysItsFirstOverARestart) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  Replace(h);
  Begin(h);
  EXPECT_EQ(h.Status("a").first().step(), 1);
  h.Steps("worker-0", 6, 7);
  h.Restart();
  EXPECT_EQ(h.Status("a").first().step(), 1);
  EXPECT_EQ(h.Status("a").last().step(), 7);
  EXPECT_EQ(h.Status("a").committed_step(), 7);
  for (const std::string& name : kBoth) h.Connect(name, /*running=*/true);
  Replace(h);
  h.Restart();
  EXPECT_EQ(h.Status("a").first().step(), 1);
  EXPECT_EQ(h.Status("a").committed_step(), 5);
}

TEST(GoingBack, AnotherJobsFolderIsNotWaitedFor) {
  Harness h;
  Start(h, 8);
  Replace(h);
  for (const std::string& name : kBoth) h.Work(name, 0, "loading");
  for (const std::string& name : kBoth) {
    h.End(name, "FAILED_PRECONDITION",
          "checkpoint.dir /ckpt: job b (run b-1, process 7 on host host-a) writes there; wait", 0);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
}

TEST(GoingBack, AFolderThatCannotBeReadIsTriedAgainAndThenGivenUp) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.BreakDisk(absl::DeadlineExceededError("/ckpt does not answer"));
  Replace(h);
  h.AdvanceBeating(absl::Seconds(30), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("looks for its newest complete checkpoint"));
  h.BreakDisk(absl::OkStatus());
  h.AdvanceBeating(absl::Seconds(2), kBoth);
  ASSERT_EQ(h.member("worker-1").assign->first_step(), 6);
  Begin(h);
  h.Steps("worker-0", 6, 9);
  h.BreakDisk(absl::DeadlineExceededError("/ckpt does not answer"));
  Replace(h);
  h.AdvanceBeating(absl::Seconds(63), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("/ckpt does not answer"), HasSubstr("timeouts.start_seconds")));
}

// A step of the next generation could else be cut with those that were given up.
TEST(GoingBack, NoGenerationBeginsBeforeTheHistoryIsCut) {
  Harness h;
  Start(h, 8);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.HoldAnswers();
  Replace(h);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("looks for"));
  EXPECT_FALSE(h.member("worker-1").assign.has_value());
  h.AnswerHeld();
  EXPECT_TRUE(h.member("worker-1").assign.has_value());
}

TEST(GoingBack, CancelledMeanwhileItSaysWhatIsLeft) {
  for (const bool save : {false, true}) {
    Harness h;
    Start(h, 8);
    h.ReportSaved("worker-0", Harness::Saved(5));
    h.Exit("worker-1", 0, 9);
    EXPECT_TRUE(h.Answer(h.CancelJob("a", save)).status.ok());
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
    if (save) {
      EXPECT_THAT(h.Status("a").reason(), HasSubstr("--resume-from /ckpt/step-5"));
    }
    LetGo(h, {"worker-0"});
    EXPECT_EQ(h.History("a-1"), UpTo(8));
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  }
}

TEST(GoingBack, ItIsFirstForTheWorkersThatItLost) {
  Harness h;
  Start(h, 8);
  h.SubmitJob(Harness::Spec("b", 1));
  h.Exit("worker-1", 0, 9);
  LetGo(h, {"worker-0"});
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(h.Status("b").reason(), "behind a-1 in the queue");
  h.Forget("worker-1");
  h.Join("worker-1");
  EXPECT_EQ(h.member("worker-0").assign->run_id(), "a-1");
}

// The coordinator dies at each event between the loss and the next step, before its log has the
// decision, after, and with a history that does not follow the log yet.
TEST(GoingBack, EveryCrashOfTheCoordinatorLeavesTheHistoryOfOneRun) {
  for (const Harness::Crash how : {Harness::Crash::kBeforeTheLog, Harness::Crash::kAfterTheLog,
                                   Harness::Crash::kBeforeTheHistory}) {
    for (uint64_t at = 1; at <= 12; ++at) {
      Harness h;
      Start(h, 5);
      h.ReportSaved("worker-0", Harness::Saved(5));
      h.Steps("worker-0", 6, 8);
      h.CrashAt(at, how);
      const int boots = h.boots();
      const auto reconnect = [&] {
        for (const std::string& name : kBoth) {
          if (h.boots() != boots && h.member(name).session == 0) {
            h.Connect(name, h.IsWorking(name));
          }
        }
      };
      h.Exit("worker-1", 0, 9);
      h.Forget("worker-1");
      h.Join("worker-1");
      reconnect();
      h.Idle("worker-0");
      reconnect();
      for (int second = 0; second < 45; ++second) {
        h.AdvanceBeating(absl::Seconds(1), kBoth);
        reconnect();
      }
      const std::string where = absl::StrCat("event ", at, ", ", static_cast<int>(how));
      ASSERT_TRUE(h.member("worker-1").assign.has_value())
          << where << ": " << h.Status("a").reason();
      ASSERT_EQ(h.member("worker-0").assign->first_step(), 6) << where;
      ASSERT_EQ(h.History("a-1"), UpTo(5)) << where;
      for (int i = 0; i < 3 && h.Status("a").state() != v1::JOB_STATE_RUNNING; ++i) {
        Begin(h);
        reconnect();
      }
      h.Steps("worker-0", 6, 20);
      reconnect();
      h.Steps("worker-0", 6, 20);
      EXPECT_EQ(h.History("a-1"), UpTo(20)) << where << "\n" << Events(h);
      EXPECT_EQ(h.Status("a").steps_lost(), 3) << where;
      EXPECT_EQ(ToldOf(h), 3) << where;
    }
  }
}

}  // namespace
}  // namespace zeroshard::coordinator
