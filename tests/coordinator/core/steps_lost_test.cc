// What a roll-back cost, as the history tells it: in the first step that is done after it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::IsEmpty;
using ::testing::Pair;

// By step, where there are any.
std::vector<std::pair<uint64_t, uint64_t>> Told(OffloadHarness& h) {
  std::vector<std::pair<uint64_t, uint64_t>> told;
  for (const v1::StepRecord& record : h.HistoryRecords("a-1")) {
    if (record.steps_lost() != 0) told.emplace_back(record.step(), record.steps_lost());
  }
  return told;
}

void StartOnOne(OffloadHarness& h, uint64_t interval, uint64_t steps = 12) {
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartOffloaded(interval == 0 ? OffloadHarness::OffloadSpec("a", 2, steps)
                                 : OffloadHarness::SavedSpec("a", 2, steps, interval));
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

// The only store is started again, empty.
void RollBack(OffloadHarness& h) {
  h.KillStore("store-0");
  h.LetGo(kBoth);
  h.StartStore("store-0");
  h.BeginRanks("a");
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

// A coordinator that starts again, with everybody else still there.
void Restart(OffloadHarness& h) {
  h.Restart();
  h.ReconnectStore("store-0");
  for (const std::string& name : kBoth) h.Connect(name, true);
  h.Pump();
}

TEST(StepsLost, TheFirstStepAfterARollBackTellsThem) {
  OffloadHarness h;
  StartOnOne(h, 4);
  h.TrainTo("a", 7);
  ASSERT_EQ(h.Status("a").checkpoint().step(), 4);
  RollBack(h);
  EXPECT_EQ(h.Status("a").steps_lost(), 3);
  EXPECT_THAT(Told(h), IsEmpty());
  h.TrainTo("a", 12);
  for (const std::string& name : kBoth) h.End(name);
  h.Pump();
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(12)));
  EXPECT_THAT(Told(h), ElementsAre(Pair(5, 3)));
}

TEST(StepsLost, WithoutAnyNothingIsTold) {
  OffloadHarness h;
  StartOnOne(h, 4);
  h.TrainTo("a", 2);
  h.ReplaceWorker("worker-0");
  h.LetGo({"worker-1"});
  h.BeginRanks("a");
  h.TrainTo("a", 6);
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(5)));
  EXPECT_THAT(Told(h), IsEmpty());
}

// The step that told of the first is itself given up: what it said is said again.
TEST(StepsLost, ARollBackBehindTheStepThatToldOfAnotherTellsOfBoth) {
  OffloadHarness h;
  StartOnOne(h, 0);
  h.TrainTo("a", 3);
  RollBack(h);
  h.TrainTo("a", 2);
  EXPECT_THAT(Told(h), ElementsAre(Pair(1, 3)));
  RollBack(h);
  EXPECT_THAT(Told(h), IsEmpty());
  h.TrainTo("a", 4);
  EXPECT_EQ(h.Status("a").steps_lost(), 5);
  EXPECT_THAT(Told(h), ElementsAre(Pair(1, 5)));
}

TEST(StepsLost, OneBehindACheckpointThatStaysIsToldOnce) {
  OffloadHarness h;
  StartOnOne(h, 2);
  h.TrainTo("a", 3);
  RollBack(h);
  h.TrainTo("a", 7);
  ASSERT_EQ(h.Status("a").checkpoint().step(), 6);
  RollBack(h);
  h.TrainTo("a", 10);
  EXPECT_EQ(h.Status("a").steps_lost(), 2);
  EXPECT_THAT(Told(h), ElementsAre(Pair(3, 1), Pair(7, 1)));
}

// A coordinator that died had completed it and could not log that: the job goes back behind it, and
// finds it when it is there again.
TEST(StepsLost, ARollBackBehindACheckpointThatIsFoundLaterIsToldOnce) {
  OffloadHarness h;
  StartOnOne(h, 2);
  h.TrainTo("a", 5);
  h.on_disk.insert(6);
  RollBack(h);
  ASSERT_EQ(h.Status("a").committed_step(), 4);
  h.TrainTo("a", 7);
  ASSERT_EQ(h.Status("a").checkpoint().step(), 6);
  EXPECT_THAT(h.completed, ::testing::SizeIs(2)) << "of steps 2 and 4";
  RollBack(h);
  ASSERT_EQ(h.Status("a").committed_step(), 6);
  h.TrainTo("a", 9);
  EXPECT_EQ(h.Status("a").steps_lost(), 2);
  EXPECT_THAT(Told(h), ElementsAre(Pair(5, 1), Pair(7, 1)));
}

// Ranks of an offloaded job report steps and samples alone.
TEST(StepsLost, ACheckpointThatARankSpeaksOfIsNotWhatTheJobGoesBackTo) {
  OffloadHarness h;
  StartOnOne(h, 4);
  h.TrainTo("a", 7);
  ReportSteps report = h.StepsEvent(h.Root("a"), 7, 7);
  v1::CheckpointRecord& record = *report.body.add_checkpoints();
  record.set_step(6);
  record.set_complete(true);
  record.set_path("/ckpt/step-00000006");
  h.Step(report);
  ASSERT_EQ(h.Status("a").checkpoint().step(), 4);
  RollBack(h);
  EXPECT_EQ(h.Status("a").committed_step(), 4);
  h.TrainTo("a", 9);
  EXPECT_EQ(h.Status("a").steps_lost(), 3);
  EXPECT_THAT(Told(h), ElementsAre(Pair(5, 3)));
}

TEST(StepsLost, AStoreThatIsLostAgainBeforeAnyStepCostsNothingMore) {
  OffloadHarness h;
  StartOnOne(h, 0);
  h.TrainTo("a", 3);
  RollBack(h);
  RollBack(h);
  h.TrainTo("a", 2);
  EXPECT_EQ(h.Status("a").steps_lost(), 3);
  EXPECT_THAT(Told(h), ElementsAre(Pair(1, 3)));
}

TEST(StepsLost, ACoordinatorThatStartsAgainBeforeThatStepStillTellsThem) {
  OffloadHarness h;
  StartOnOne(h, 2);
  h.TrainTo("a", 3);
  RollBack(h);
  h.TrainTo("a", 7);
  RollBack(h);
  Restart(h);
  h.TrainTo("a", 10);
  ASSERT_EQ(h.Status("a").committed_step(), 10) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), 2);
  EXPECT_THAT(Told(h), ElementsAre(Pair(3, 1), Pair(7, 1)));
}

TEST(StepsLost, ACoordinatorThatDiesWithThatStepInItsLogAloneTellsThemOnce) {
  for (const auto how : {Harness::Crash::kBeforeTheLog, Harness::Crash::kAfterTheLog}) {
    OffloadHarness h;
    StartOnOne(h, 2);
    h.TrainTo("a", 3);
    RollBack(h);
    h.Seal("a-1", 3);
    h.CrashAt(1, how);
    h.Step(h.CommitEvent(h.Root("a"), 3));
    ASSERT_EQ(h.boots(), 2);
    h.ReconnectStore("store-0");
    for (const std::string& name : kBoth) h.Connect(name, true);
    h.Pump();
    h.Commit(h.Root("a"), 3);
    h.TrainTo("a", 5);
    ASSERT_EQ(h.Status("a").committed_step(), 5) << h.Status("a").reason();
    EXPECT_THAT(Told(h), ElementsAre(Pair(3, 1)));
  }
}

TEST(StepsLost, WhatARankSaysOfThemIsNotTakenOver) {
  OffloadHarness h;
  StartOnOne(h, 0);
  h.TrainTo("a", 1);
  h.Seal("a-1", 2);
  CommitStep event = h.CommitEvent(h.Root("a"), 2);
  event.body.mutable_record()->set_steps_lost(9);
  h.Step(event);
  h.Pump();
  h.TrainTo("a", 3);
  EXPECT_THAT(h.History("a-1"), ElementsAre(1, 2));
  EXPECT_THAT(Told(h), IsEmpty());

  OffloadHarness without;
  without.JoinMany(1);
  without.StartJob(Harness::Spec("a", 1), {"worker-0"});
  ReportSteps report = without.StepsEvent("worker-0", 1, 2);
  report.body.mutable_records(1)->set_steps_lost(9);
  without.Step(report);
  EXPECT_THAT(without.History("a-1"), ElementsAre(1, 2));
  EXPECT_THAT(Told(without), IsEmpty());
}

}  // namespace
}  // namespace zeroshard::coordinator
