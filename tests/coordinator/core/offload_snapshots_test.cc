// Checkpoints of offloaded jobs: which are taken, who writes what, what a failure means.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/offload_harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

const std::vector<std::string> kBoth = {"worker-0", "worker-1"};

void Start(OffloadHarness& h, uint64_t steps = 5, uint64_t interval = 2, uint32_t replicas = 1) {
  h.JoinMany(2);
  for (const char* name : {"store-0", "store-1"}) h.StartStore(name);
  h.StartOffloaded(OffloadHarness::SavedSpec("a", 2, steps, interval, replicas));
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
}

std::vector<uint64_t> Completed(const OffloadHarness& h) {
  std::vector<uint64_t> steps;
  for (const CompleteSnapshot& snapshot : h.completed) steps.push_back(snapshot.step);
  return steps;
}

TEST(Snapshots, AreTakenAtEveryIntervalAndAfterTheLastStep) {
  OffloadHarness h;
  Start(h);
  std::vector<bool> asked;
  for (uint64_t step = 1; step <= 5; ++step) asked.push_back(h.Train("a", step).snapshot());
  EXPECT_THAT(asked, ElementsAre(false, true, false, true, true));
  EXPECT_THAT(Completed(h), ElementsAre(2, 4, 5));
  EXPECT_EQ(h.completed[1].next_sample, 16);
  EXPECT_EQ(h.completed[1].samples, 1000);
  EXPECT_THAT(h.completed[1].files, SizeIs(2));
  EXPECT_EQ(h.Status("a").checkpoint().step(), 5);
  for (const std::string& name : kBoth) h.End(name);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED);
  EXPECT_EQ(h.closed_folders, 1);
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("checkpoint of step 4 complete"));
}

TEST(Snapshots, EachChunkIsWrittenByOneStore) {
  OffloadHarness h;
  Start(h, 5, 2, 2);
  h.Store("store-0").holds_snapshots = h.Store("store-1").holds_snapshots = true;
  h.TrainTo("a", 2);
  std::vector<uint32_t> chunks;
  std::set<uint32_t> indices;
  for (const char* name : {"store-0", "store-1"}) {
    ASSERT_TRUE(h.Stored(name, "a-1").order) << name;
    const v1::SnapshotOrder& order = *h.Stored(name, "a-1").order;
    chunks.insert(chunks.end(), order.chunks().begin(), order.chunks().end());
    indices.insert(order.index());
    EXPECT_EQ(order.count(), 2);
    EXPECT_EQ(order.step(), 2);
    EXPECT_EQ(order.folder(), "/ckpt/.step-2.tmp");
  }
  std::sort(chunks.begin(), chunks.end());
  const size_t count = MakeStoreNeeds(OffloadHarness::OffloadSpec("a", 2), 4096)->chunks.size();
  ASSERT_THAT(chunks, SizeIs(count));
  for (uint32_t chunk = 0; chunk < count; ++chunk) EXPECT_EQ(chunks[chunk], chunk);
  EXPECT_THAT(indices, ElementsAre(0, 1));
}

TEST(Snapshots, TrainingGoesOnMeanwhileAndTheNextOneWaits) {
  OffloadHarness h;
  Start(h);
  h.Store("store-1").holds_snapshots = true;
  h.TrainTo("a", 3);
  EXPECT_EQ(h.Status("a").committed_step(), 3);
  h.Seal("a-1", 4);
  const RequestId request = h.Commit("worker-0", 4);
  EXPECT_FALSE(h.Answered(request));
  h.Store("store-1").holds_snapshots = false;
  h.Pump();
  EXPECT_TRUE(h.Answered(request));
  EXPECT_THAT(Completed(h), ElementsAre(2, 4));
}

TEST(Snapshots, OneThatDoesNotGetOnIsGivenUpForTheNext) {
  OffloadHarness h;
  Start(h);
  const auto limit =
      absl::Seconds(OffloadHarness::SavedSpec("a", 2, 5, 2).timeouts().collective_seconds());
  h.Store("store-1").holds_snapshots = true;
  h.TrainTo("a", 3);
  h.Store("store-0").deaf = h.Store("store-1").deaf = true;
  h.AdvanceBeating(limit + absl::Seconds(1), {"store-0", "store-1"});
  h.Pump();
  EXPECT_THAT(h.abandoned, SizeIs(1));
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("checkpoint of step 2 abandoned: no progress"));
}

TEST(Snapshots, AFolderThatCannotBeUsedFailsTheJob) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.open_answer = absl::FailedPreconditionError("another job holds it");
  h.Submit1(OffloadHarness::SavedSpec("a", 2, 5, 2));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("/ckpt"), HasSubstr("another job holds it")));
  EXPECT_FALSE(h.member("worker-0").assign);
}

TEST(Snapshots, OneThatCannotBeginIsSaidAndTheStepGoesOn) {
  OffloadHarness h;
  Start(h);
  h.begin_answer = absl::ResourceExhaustedError("no space left");
  h.Train("a", 1);
  EXPECT_FALSE(h.Train("a", 2).snapshot());
  EXPECT_EQ(h.Status("a").committed_step(), 2);
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("checkpoint of step 2 abandoned: no space left"));
  h.begin_answer = absl::OkStatus();
  h.TrainTo("a", 4);
  EXPECT_EQ(h.Status("a").checkpoint().step(), 4);
}

TEST(Snapshots, AStoreThatCannotWriteAbandonsItEverywhere) {
  OffloadHarness h;
  Start(h);
  h.Store("store-1").snapshot_problem = "no space left on /ckpt";
  h.TrainTo("a", 3);
  EXPECT_THAT(h.abandoned, SizeIs(1));
  EXPECT_FALSE(h.Stored("store-0", "a-1").order);
  EXPECT_THAT(h.LastEvents("a"),
              AllOf(HasSubstr("step 2 abandoned: store-1"), HasSubstr("no space left on /ckpt")));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
}

TEST(Snapshots, TheLastOneIsTheJobs) {
  OffloadHarness h;
  Start(h, 3, 0);
  h.complete_problem = "no space left";
  h.TrainTo("a", 3);
  for (const std::string& name : kBoth) h.End(name);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("all 3 steps"), HasSubstr("no space left")));
}

TEST(Snapshots, ALostStoreAbandonsItAndTheJobGoesBackToTheOneBefore) {
  OffloadHarness h;
  Start(h, 8, 2);
  h.TrainTo("a", 3);
  h.Store("store-0").holds_snapshots = h.Store("store-1").holds_snapshots = true;
  h.Train("a", 4);
  h.KillStore("store-1");
  EXPECT_THAT(h.abandoned, SizeIs(1));
  EXPECT_EQ(h.Status("a").committed_step(), 2);
  EXPECT_EQ(h.Status("a").checkpoint().step(), 2);
}

TEST(Snapshots, AStoreThatIsLostAfterTheLastStepCostsOnlyTime) {
  OffloadHarness h;
  Start(h, 3, 0, 2);
  h.Store("store-0").holds_snapshots = h.Store("store-1").holds_snapshots = true;
  h.TrainTo("a", 3);
  h.KillStore("store-1");
  h.Store("store-0").holds_snapshots = false;
  h.LetGo(kBoth);
  h.Advance(absl::Seconds(1));
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason() << "\n"
                                                            << h.LastEvents("a");
  EXPECT_TRUE(h.on_disk.contains(3));
}

TEST(SnapshotCancel, TheNextStepIsSavedAndEndsTheJob) {
  OffloadHarness h;
  Start(h, 9, 0);
  h.TrainTo("a", 2);
  const RequestId cancel = h.CancelJob("a", true);
  EXPECT_TRUE(h.Answer(cancel).status.ok());
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(h.member("worker-0").Last(v1::CoordinatorMessage::kStop), nullptr);
  EXPECT_TRUE(h.Train("a", 3).snapshot());
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("the checkpoint of step 3 is complete"));
  EXPECT_NE(h.member("worker-0").Last(v1::CoordinatorMessage::kStop), nullptr);
}

TEST(SnapshotCancel, NoStepIsDecidedWhileItIsWritten) {
  OffloadHarness h;
  Start(h, 9, 0);
  h.TrainTo("a", 2);
  h.CancelJob("a", true);
  h.Store("store-0").holds_snapshots = true;
  h.Train("a", 3);
  h.Seal("a-1", 4);
  const RequestId request = h.Commit("worker-0", 4);
  EXPECT_FALSE(h.Answered(request));
  h.Store("store-0").holds_snapshots = false;
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(h.Status("a").committed_step(), 3);
  EXPECT_EQ(h.Answer(request).status.code(), absl::StatusCode::kAborted);
}

TEST(SnapshotCancel, AJobThatRecoversIsSavedWithoutRanks) {
  OffloadHarness h;
  Start(h, 9, 0);
  h.TrainTo("a", 2);
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-1");
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.CancelJob("a", true);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED) << h.Status("a").reason();
  EXPECT_TRUE(h.on_disk.contains(2));
}

TEST(SnapshotCancel, WhatIsSavedAlreadyEndsAtOnce) {
  OffloadHarness h;
  Start(h, 9, 2);
  h.TrainTo("a", 2);
  h.CancelJob("a", true);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(h.Status("a").committed_step(), 2);
}

TEST(SnapshotCancel, AFailureIsSaid) {
  OffloadHarness h;
  Start(h, 9, 0);
  h.TrainTo("a", 2);
  h.CancelJob("a", true);
  h.Store("store-1").snapshot_problem = "no space left";
  h.Train("a", 3);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("store-1"), HasSubstr("no space left")));
}

TEST(SnapshotCancel, BeforeItStartedThereIsNothingToSave) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.Submit1(OffloadHarness::SavedSpec("a", 2, 5, 2));
  h.CancelJob("a", true);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED);
}

TEST(SnapshotResume, GoesOnFromTheCheckpointsStepAndSample) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  Checkpoint from = Harness::From(40, "z-1");
  from.next_sample = 163;
  h.SubmitFrom(OffloadHarness::SavedSpec("a", 2, 50, 0), from);
  h.Pump();
  ASSERT_TRUE(h.member("worker-0").assign);
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 41);
  EXPECT_EQ(h.member("worker-0").assign->next_sample(), 163);
  EXPECT_EQ(h.member("worker-0").assign->version().step(), 40);
  EXPECT_EQ(h.Stored("store-0", "a-1").job.checkpoint(), "/ckpt/step-40");
  ASSERT_THAT(h.opened, SizeIs(1));
  EXPECT_EQ(h.opened[0].resumed_from, "/ckpt/step-40");
  h.BeginRanks("a");
  h.TrainTo("a", 42);
  // Without a checkpoint of its own it goes back to where it began.
  h.KillStore("store-0");
  EXPECT_EQ(h.Status("a").committed_step(), 40);
  EXPECT_EQ(h.Status("a").steps_lost(), 2);
  h.LetGo(kBoth);
  h.StartStore("store-0");
  EXPECT_EQ(h.member("worker-0").assign->next_sample(), 163);
}

}  // namespace
}  // namespace zeroshard::coordinator
