// Jobs that go on from checkpoints, report them, and end by writing one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Property;
using ::testing::SizeIs;

const std::vector<std::string> kBoth = {"worker-0", "worker-1"};

std::vector<std::string> Events(const Harness& h, const std::string& job) {
  std::vector<std::string> reasons;
  const v1::JobStatus status = h.Status(job);
  for (const v1::JobEvent& event : status.events()) reasons.push_back(event.reason());
  return reasons;
}

const PrepareFolder* Prepared(const Decision& decision) {
  for (const Action& action : decision.actions) {
    if (const auto* folder = std::get_if<PrepareFolder>(&action)) return folder;
  }
  return nullptr;
}

// Two workers train job "a", which saves into /ckpt, up to step `steps`.
void StartSaving(Harness& h, uint64_t steps) {
  h.JoinMany(2);
  h.StartJob(Harness::SavingSpec("a", 2), kBoth);
  if (steps > 0) h.Steps("worker-0", 1, steps);
}

// --- going on ---

TEST(Resume, ARunGoesOnAtTheStepAfterTheCheckpointAndCountsFromThere) {
  Harness h;
  h.JoinMany(1);
  ASSERT_TRUE(
      h.Answer(h.SubmitFrom(Harness::SavingSpec("a", 1), Harness::From(40, "x-1"))).status.ok());
  const v1::Assign& assign = *h.member("worker-0").assign;
  EXPECT_EQ(assign.first_step(), 41);
  EXPECT_EQ(assign.resume().checkpoint(), "/ckpt/step-40");
  EXPECT_FALSE(assign.resume().weights_only());
  EXPECT_EQ(h.Status("a").first_step(), 41);
  EXPECT_EQ(h.Status("a").committed_step(), 40);
  EXPECT_EQ(h.Status("a").resume().checkpoint(), "/ckpt/step-40");
  h.Work("worker-0", 41, "loading");
  h.Arrive("worker-0", "start");
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 43, 43)).status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(h.Answer(h.Steps("worker-0", 41, 100)).number, 100);
  EXPECT_EQ(h.Status("a").first().step(), 41);
  h.End("worker-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED);
}

TEST(Resume, ItIsStillKnownAfterARestartBeforeAnyStep) {
  Harness h;
  h.SubmitFrom(Harness::SavingSpec("a", 1), Harness::From(40, "x-1"));
  h.Restart();
  EXPECT_EQ(h.Status("a").first_step(), 41);
  EXPECT_EQ(h.Status("a").committed_step(), 40);
  h.Join("worker-0");
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 41);
  EXPECT_EQ(h.member("worker-0").assign->resume().checkpoint(), "/ckpt/step-40");
}

TEST(Resume, WeightsAloneStartAtStepOne) {
  Harness h;
  h.JoinMany(1);
  Checkpoint from = Harness::From(40, "x-1");
  from.resume.set_weights_only(true);
  h.SubmitFrom(Harness::SavingSpec("a", 1), from);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 1);
  EXPECT_TRUE(h.member("worker-0").assign->resume().weights_only());
  EXPECT_EQ(h.Status("a").committed_step(), 0);
  EXPECT_THAT(Events(h, "a"), Contains(HasSubstr("the weights of the checkpoint of step 40")));
}

TEST(Resume, WhatWasSkippedIsAnEvent) {
  Harness h;
  Checkpoint from = Harness::From(40, "x-1");
  from.skipped = {"/ckpt/step-60 has no manifest.json"};
  h.SubmitFrom(Harness::SavingSpec("a", 1), from);
  EXPECT_THAT(Events(h, "a"),
              AllOf(Contains(HasSubstr("goes on from the checkpoint of step 40, /ckpt/step-40")),
                    Contains("not used: /ckpt/step-60 has no manifest.json")));
}

TEST(Resume, TheHistoryOfTheRunThatWroteTheCheckpointIsCarriedOver) {
  Harness h;
  StartSaving(h, 50);
  h.CancelJob("a");
  Decision decision =
      h.Step(Submit{h.NewRequest(), Harness::SavingSpec("a", 2), {}, Harness::From(40, "a-1")});
  ASSERT_NE(Prepared(decision), nullptr);
  EXPECT_EQ(Prepared(decision)->history_of, "a-1");
  EXPECT_EQ(Prepared(decision)->first_step, 41);
}

TEST(Resume, NoOtherRunsHistoryIsTakenForIt) {
  Harness h;
  StartSaving(h, 50);
  h.CancelJob("a");
  Checkpoint elsewhere = Harness::From(40, "a-1");  // the same run id at another coordinator
  elsewhere.dir = "/other";
  Decision decision = h.Step(Submit{h.NewRequest(), Harness::SavingSpec("a", 2), {}, elsewhere});
  EXPECT_EQ(Prepared(decision)->history_of, "");
  decision =
      h.Step(Submit{h.NewRequest(), Harness::SavingSpec("b", 2), {}, Harness::From(40, "a-1")});
  EXPECT_EQ(Prepared(decision)->history_of, "");
  h.CancelJob("b");
  Checkpoint weights = Harness::From(40, "a-1");
  weights.resume.set_weights_only(true);
  h.CancelJob("a");
  decision = h.Step(Submit{h.NewRequest(), Harness::SavingSpec("a", 2), {}, weights});
  EXPECT_EQ(Prepared(decision)->history_of, "");
}

// --- reports ---

TEST(Checkpoints, AreEventsAndTheNewestCompleteOneIsRemembered) {
  Harness h;
  StartSaving(h, 10);
  EXPECT_TRUE(h.Answer(h.ReportSaved("worker-0", Harness::Saved(5))).status.ok());
  h.ReportSaved("worker-0", Harness::Saved(10, "cannot write /ckpt/x: No space left on device"));
  EXPECT_EQ(h.Status("a").checkpoint().step(), 5);
  EXPECT_THAT(
      Events(h, "a"),
      AllOf(
          Contains("checkpoint of step 5 complete in 1.2 s, 1.4 GB, training stood still 12.0 ms"),
          Contains("checkpoint of step 10 abandoned: cannot write /ckpt/x: No space left on "
                   "device")));
  h.Restart();
  EXPECT_EQ(h.Status("a").checkpoint().path(), "/ckpt/step-5");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

TEST(Checkpoints, SaidAgainChangeNothingAlsoAfterARestart) {
  Harness h;
  StartSaving(h, 10);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.ReportSaved("worker-0", Harness::Saved(10, "no room"));
  h.Restart();
  for (const std::string& name : kBoth) h.Connect(name, true);
  const size_t events = Events(h, "a").size();
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.ReportSaved("worker-0", Harness::Saved(10, "no room"));
  EXPECT_THAT(Events(h, "a"), SizeIs(events));
}

TEST(Checkpoints, ManyOfThemLeaveRoomForWhatElseHappened) {
  CoreOptions options;
  options.max_checkpoint_events = 3;
  Harness h(options);
  StartSaving(h, 100);
  for (uint64_t step = 1; step <= 20; ++step) h.ReportSaved("worker-0", Harness::Saved(step));
  for (const bool restart : {false, true}) {
    if (restart) h.Restart();
    EXPECT_THAT(Events(h, "a"),
                AllOf(Contains("submitted"), Contains(HasSubstr("checkpoint of step 18 complete")),
                      Contains(HasSubstr("checkpoint of step 20 complete")),
                      Not(Contains(HasSubstr("checkpoint of step 17 complete")))));
  }
}

TEST(Checkpoints, ReportsThatCannotBeAreRefused) {
  Harness h;
  StartSaving(h, 10);
  for (const uint64_t step : {uint64_t{0}, uint64_t{101}}) {
    EXPECT_EQ(h.Answer(h.ReportSaved("worker-0", Harness::Saved(step))).status.code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(h.Answer(h.ReportSample("worker-0", step, "p", "t")).status.code(),
              absl::StatusCode::kInvalidArgument);
  }
  v1::CheckpointRecord endless = Harness::Saved(5);
  endless.set_seconds(std::numeric_limits<double>::infinity());
  EXPECT_EQ(h.Answer(h.ReportSaved("worker-0", endless)).status.code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(h.Status("a").checkpoint().step(), 0);
}

TEST(Samples, AreKeptOnceByStepAndPromptAlsoAcrossARestart) {
  Harness h;
  StartSaving(h, 20);
  h.ReportSample("worker-0", 10, "Once", " upon");
  h.ReportSample("worker-0", 10, "Twice", " told");
  h.ReportSample("worker-0", 10, "Once", " upon");
  h.Restart();
  for (const std::string& name : kBoth) h.Connect(name, true);
  h.ReportSample("worker-0", 10, "Twice", " told");
  h.ReportSample("worker-0", 20, "Once", " more");
  std::vector<std::string> seen;
  for (const v1::SampleRecord& sample : h.Samples("a-1")) {
    seen.push_back(absl::StrCat(sample.step(), " ", sample.prompt(), sample.text()));
  }
  EXPECT_THAT(seen, ElementsAre("10 Once upon", "10 Twice told", "20 Once more"));
}

TEST(Samples, LongOnesAreCutBetweenCharacters) {
  CoreOptions options;
  options.max_sample_bytes = 8;
  Harness h(options);
  StartSaving(h, 20);
  h.ReportSample("worker-0", 10, "p",
                 "abcd\xc3\xa9"
                 "fghi");  // 10 bytes, the 5th and 6th one letter
  EXPECT_EQ(h.Samples("a-1").front().text(), "abcd...");
}

TEST(EvalLoss, OneThatIsNotFiniteIsLeftOutAndSaid) {
  Harness h;
  StartSaving(h, 0);
  ReportSteps event = h.StepsEvent("worker-0", 1, 2);
  event.body.mutable_records(0)->set_eval_loss(2.5);
  event.body.mutable_records(1)->set_eval_loss(std::numeric_limits<double>::quiet_NaN());
  h.Step(event);
  EXPECT_TRUE(h.Answer(event.request).status.ok());
  ASSERT_THAT(h.HistoryRecords("a-1"), SizeIs(2));
  EXPECT_EQ(h.HistoryRecords("a-1")[0].eval_loss(), 2.5);
  EXPECT_FALSE(h.HistoryRecords("a-1")[1].has_eval_loss());
  EXPECT_THAT(Events(h, "a"), Contains(HasSubstr("after step 2 is not finite")));
}

// --- cancelled with a checkpoint ---

bool ToldToSave(Harness& h, const std::string& name) {
  const v1::CoordinatorMessage* stop = h.member(name).Last(v1::CoordinatorMessage::kStop);
  return stop != nullptr && stop->stop().save();
}

TEST(SaveAndCancel, AsksTheRanksAndEndsCancelledNamingTheStep) {
  Harness h;
  StartSaving(h, 10);
  EXPECT_TRUE(h.Answer(h.CancelJob("a", true)).status.ok());
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(h.Status("a").reason(), "writing a checkpoint before it is cancelled");
  EXPECT_TRUE(ToldToSave(h, "worker-0"));
  EXPECT_TRUE(ToldToSave(h, "worker-1"));
  h.End("worker-1", "CANCELLED", "saved step 11");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Steps("worker-0", 11, 11);
  h.ReportSaved("worker-0", Harness::Saved(11));
  h.End("worker-0", "CANCELLED", "saved step 11");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(h.Status("a").reason(),
            "cancelled by a client; the checkpoint of step 11 is complete: /ckpt/step-11");
  for (const std::string& name : kBoth) h.Idle(name);
  h.StartJob(Harness::Spec("b", 2), kBoth);
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_RUNNING);
}

TEST(SaveAndCancel, NeedsACheckpointSection) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  const RequestId id = h.CancelJob("a", true);
  EXPECT_EQ(h.Answer(id).status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(h.Answer(id).status.message()), HasSubstr("no checkpoint section"));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

TEST(SaveAndCancel, AJobThatHasNotStartedHasNothingToSave) {
  Harness h;
  h.SubmitJob(Harness::SavingSpec("a", 2));
  EXPECT_TRUE(h.Answer(h.CancelJob("a", true)).status.ok());
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("nothing to save"));
}

TEST(SaveAndCancel, AskedTwiceIsAskedOnceAndAPlainOneStopsAtOnce) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  const size_t events = Events(h, "a").size();
  EXPECT_TRUE(h.Answer(h.CancelJob("a", true)).status.ok());
  EXPECT_THAT(Events(h, "a"), SizeIs(events));
  EXPECT_TRUE(h.Answer(h.CancelJob("a")).status.ok());
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(h.Status("a").reason(), "cancelled by a client before its checkpoint was complete");
  EXPECT_FALSE(ToldToSave(h, "worker-1"));  // the last word is a plain stop
}

TEST(SaveAndCancel, ASaveThatFailsFailsTheJobAndSaysWhatIsLeft) {
  Harness h;
  StartSaving(h, 10);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.CancelJob("a", true);
  h.Steps("worker-0", 11, 11);
  h.ReportSaved("worker-0", Harness::Saved(11, "cannot write /ckpt/x: No space left on device"));
  for (const std::string& name : kBoth) {
    h.End(name, "RESOURCE_EXHAUSTED", "cannot write /ckpt/x: No space left on device");
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("none of step 11 was completed"), HasSubstr("No space left"),
                    HasSubstr("checkpoint of step 5 with --resume-from /ckpt/step-5")));
}

TEST(SaveAndCancel, ARankThatNeverAnswersIsNamedWhenTheTimeIsOver) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  h.End("worker-0", "CANCELLED", "saved step 10");
  h.Idle("worker-0");
  // The other makes progress, but saves nothing: 30 s for the step and 20 s for the collectives.
  for (int second = 0; second < 49; ++second) {
    h.Work("worker-1", 10, "forward");
    h.AdvanceBeating(absl::Seconds(1), kBoth);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Work("worker-1", 10, "forward");
  h.AdvanceBeating(absl::Seconds(2), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("1 of 2 ranks had not stopped within 50.0 s of being told to save"),
                    HasSubstr("rank 1 (worker-1 on host-a): step 10, forward")));
  EXPECT_FALSE(ToldToSave(h, "worker-1"));
}

// Ten minutes, where a step and a collective may take 50 s: a slow disk is no reason to give up.
TEST(SaveAndCancel, ASaveThatAdvancesHasAllTheTimeItTakes) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  // Rank 1 has written its part; rank 0's grows.
  h.Work("worker-1", 10, "saving");
  for (int second = 0; second < 600; second += 25) {
    h.Work("worker-0", 10, "saving");
    h.AdvanceBeating(absl::Seconds(25), kBoth);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  }
  h.ReportSaved("worker-0", Harness::Saved(10));
  for (const std::string& name : kBoth) h.End(name, "CANCELLED", "saved step 10");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("the checkpoint of step 10 is complete"));
}

TEST(SaveAndCancel, ASaveThatNoLongerAdvancesIsGivenUp) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  h.End("worker-1", "CANCELLED", "saved step 10");
  h.Idle("worker-1");
  for (int i = 0; i < 8; ++i) {
    h.Work("worker-0", 10, "saving");
    h.AdvanceBeating(absl::Seconds(10), kBoth);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  // Alive, and busy with something else.
  for (int i = 0; i < 39; ++i) {
    h.Work("worker-0", 10, "waiting");
    h.AdvanceBeating(absl::Seconds(1), kBoth);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.Work("worker-0", 10, "waiting");
  h.AdvanceBeating(absl::Seconds(3), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              HasSubstr("1 of 2 ranks had not stopped within 50.0 s of the last sign that the "
                        "save advanced: rank 0"));
}

// Heartbeats that repeat one another show no progress: the step's limit counts.
TEST(SaveAndCancel, ASaveThatStandsStillOnEveryRankIsNoticed) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  for (const std::string& name : kBoth) h.Work(name, 10, "saving");
  h.AdvanceBeating(absl::Seconds(29), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.AdvanceBeating(absl::Seconds(5), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("no progress for 30"));
}

TEST(SaveAndCancel, ARankThatDiesMeanwhileEndsTheWait) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  h.Exit("worker-1", 0, 9);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("it was to be cancelled with a checkpoint"), HasSubstr("SIGKILL")));
}

TEST(SaveAndCancel, AJobThatIsDoneMeanwhileIsComplete) {
  Harness h;
  StartSaving(h, 99);
  h.CancelJob("a", true);
  h.Steps("worker-0", 100, 100);
  for (const std::string& name : kBoth) h.End(name);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED);
}

TEST(SaveAndCancel, ItGoesOnAcrossARestart) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  h.End("worker-1", "CANCELLED", "saved step 11");
  h.Restart();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.member("worker-0").inbox.clear();
  h.Connect("worker-0", true);
  EXPECT_TRUE(ToldToSave(h, "worker-0"));
  h.Idle("worker-1");
  h.Connect("worker-1");
  h.Steps("worker-0", 11, 11);
  h.ReportSaved("worker-0", Harness::Saved(11));
  h.End("worker-0", "CANCELLED", "saved step 11");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("the checkpoint of step 11 is complete"));
}

TEST(SaveAndCancel, AfterARestartTheTimeIsBoundedToo) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  h.Restart();
  for (const std::string& name : kBoth) h.Connect(name, true);
  for (int second = 0; second < 75; ++second) {
    for (const std::string& name : kBoth) h.Work(name, 10, "forward");
    h.AdvanceBeating(absl::Seconds(1), kBoth);
  }
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("2 of 2 ranks had not stopped"));
}

TEST(SaveAndCancel, AMessageThatWasLostWithTheConnectionIsSaidAgain) {
  Harness h;
  StartSaving(h, 10);
  h.Disconnect("worker-1");
  h.CancelJob("a", true);
  EXPECT_FALSE(ToldToSave(h, "worker-1"));
  h.Connect("worker-1", true);
  EXPECT_TRUE(ToldToSave(h, "worker-1"));
}

TEST(SaveAndCancel, EveryCrashOfTheCoordinatorLeavesADecision) {
  for (const Harness::Crash how : {Harness::Crash::kBeforeTheLog, Harness::Crash::kAfterTheLog}) {
    for (uint64_t at = 1; at <= 5; ++at) {
      Harness h;
      StartSaving(h, 10);
      h.CrashAt(at, how);
      const int boots = h.boots();
      // Whatever was not answered is said again.
      const auto until_answered = [&](const std::function<RequestId()>& say) {
        for (int i = 0; i < 3; ++i) {
          const RequestId id = say();
          if (h.Answered(id)) return;
          for (const std::string& name : kBoth) h.Connect(name, h.IsWorking(name));
        }
        ADD_FAILURE() << "never answered";
      };
      until_answered([&] { return h.CancelJob("a", true); });
      until_answered([&] { return h.Steps("worker-0", 11, 11); });
      until_answered([&] { return h.ReportSaved("worker-0", Harness::Saved(11)); });
      until_answered([&] { return h.End("worker-0", "CANCELLED", "saved step 11"); });
      until_answered([&] { return h.End("worker-1", "CANCELLED", "saved step 11"); });
      EXPECT_EQ(h.boots(), boots + 1);
      EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED)
          << "event " << at << ": " << h.Status("a").reason();
      EXPECT_THAT(h.Status("a").reason(), HasSubstr("the checkpoint of step 11 is complete"));
      EXPECT_THAT(h.History("a-1"), SizeIs(11));
    }
  }
}

// --- a worker that is told to leave ---

TEST(Leaving, TheJobNamesTheWorkerAndGoesOnFromWhatWasSaved) {
  Harness h;
  StartSaving(h, 10);
  h.Steps("worker-0", 11, 11);
  h.ReportSaved("worker-0", Harness::Saved(11));
  h.End("worker-0", "CANCELLED", "saved step 11");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(h.member("worker-1").StopReason(), "");  // it is on its way out by itself
  h.End("worker-1", "CANCELLED", "told to leave (SIGTERM); saved step 11", 1);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(Events(h, "a"),
              Contains("rank 1 (worker-1 on host-a): told to leave (SIGTERM); saved step 11"));
  h.Idle("worker-0");
  EXPECT_THAT(Events(h, "a"),
              Contains("the job goes back to the checkpoint of step 11, /ckpt/step-11; 0 steps are "
                       "lost and done again"));
}

TEST(Leaving, WhileACancellationSavesItIsACancellation) {
  Harness h;
  StartSaving(h, 10);
  h.CancelJob("a", true);
  h.ReportSaved("worker-0", Harness::Saved(10));
  h.End("worker-1", "CANCELLED", "told to leave (SIGTERM); saved step 10", 1);
  h.End("worker-0", "CANCELLED", "saved step 10");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
}

TEST(Leaving, ASaveThatFailsIsSaidWithTheWorkerThatWasToLeave) {
  Harness h;
  StartSaving(h, 10);
  h.End("worker-0", "RESOURCE_EXHAUSTED", "cannot write /ckpt/x: No space left on device");
  h.End("worker-1", "CANCELLED", "told to leave (SIGTERM); cannot write /ckpt/x", 1);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("rank 0 (worker-0 on host-a): RESOURCE_EXHAUSTED: cannot write"),
                    HasSubstr("rank 1 (worker-1 on host-a): told to leave (SIGTERM)")));
}

TEST(Leaving, WithoutACheckpointSectionItIsTheCause) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Harness::Spec("a", 2), kBoth);
  h.End("worker-1", "CANCELLED", "told to leave (SIGTERM)", 1);
  EXPECT_THAT(h.member("worker-0").StopReason(), HasSubstr("told to leave (SIGTERM)"));
  h.End("worker-0", "UNAVAILABLE", "rank 1 is gone", 1);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(h.Status("a").reason(),
            "rank 1 (worker-1 on host-a): CANCELLED: told to leave (SIGTERM)");
}

TEST(Leaving, ARankThatDoesNotFollowIsNamedWhenTheTimeIsOver) {
  Harness h;
  StartSaving(h, 10);
  h.End("worker-1", "CANCELLED", "told to leave (SIGTERM); saved step 10", 1);
  h.Idle("worker-1");
  h.Work("worker-0", 10, "waiting");
  h.AdvanceBeating(absl::Seconds(19), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.AdvanceBeating(absl::Seconds(2), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(Events(h, "a"), Contains(HasSubstr("1 of 2 ranks had not stopped within 20.0 s")));
}

// The peer waits at the barrier that starts training: nobody saved, and nobody follows by itself.
TEST(Leaving, BeforeTheJobTrainsItEndsTheGenerationAtOnceAndIsTheCause) {
  for (const bool restart : {false, true}) {
    Harness h;
    h.JoinMany(2);
    h.SubmitJob(Harness::SavingSpec("a", 2));
    for (const std::string& name : kBoth) h.Work(name, 0, "loading");
    h.Arrive("worker-0", "start");
    h.End("worker-1", "CANCELLED", "told to leave (SIGTERM)", 1);
    if (restart) {
      h.Restart();
      h.Connect("worker-0", true);
    }
    EXPECT_THAT(h.member("worker-0").StopReason(), HasSubstr("told to leave (SIGTERM)"));
    h.End("worker-0", "CANCELLED", h.member("worker-0").StopReason());
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
    EXPECT_THAT(Events(h, "a"),
                Contains("rank 1 (worker-1 on host-a): CANCELLED: told to leave (SIGTERM)"));
  }
}

// Rank 0, which reports checkpoints, left while this coordinator was away: they are on the disk.
TEST(Leaving, ACheckpointThatNobodyReportedIsGoneOnFrom) {
  for (const uint64_t reported : {0, 5, 10}) {
    Harness h;
    StartSaving(h, 10);
    if (reported > 0) h.ReportSaved("worker-0", Harness::Saved(reported));
    h.WriteCheckpoint("a-1", 10);
    h.Restart();
    h.Connect("worker-1", true);
    for (int i = 0; i < 100 && h.member("worker-1").StopReason().empty(); ++i) {
      h.AdvanceBeating(absl::Milliseconds(500), {"worker-1"});
    }
    const std::string stop = h.member("worker-1").StopReason();
    EXPECT_THAT(stop, HasSubstr("rank 0 (worker-0): it did not come back"));
    h.End("worker-1", "CANCELLED", stop + "; saved step 10");
    h.AdvanceBeating(absl::Seconds(2), {"worker-1"});
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
    EXPECT_THAT(Events(h, "a"),
                Contains(HasSubstr("rank 0 (worker-0 on host-a): it did not come back")));
    EXPECT_EQ(h.Status("a").checkpoint().step(), 10);
    EXPECT_EQ(h.Status("a").steps_lost(), 0);
  }
}

// What it begins with is to blame perhaps, so that another start is no use.
TEST(Failing, AJobThatDiesAtEachStartSaysInTheEndWhatToGoOnFrom) {
  Harness h;
  h.JoinMany(1);
  h.SubmitFrom(Harness::SavingSpec("a", 1), Harness::From(40, "x-1"));
  for (int i = 0; i < 6; ++i) {
    h.Work("worker-0", 41, "loading");
    h.Exit("worker-0", 0, 11);
    h.Forget("worker-0");
    if (i < 5) h.Join("worker-0");
  }
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("SIGSEGV"), HasSubstr("--resume-from /ckpt/step-40")));
}

}  // namespace
}  // namespace zeroshard::coordinator
