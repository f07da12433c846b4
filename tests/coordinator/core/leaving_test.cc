// Stores that are asked to leave: what they alone hold is saved before they go.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A heartbeat of a store that was asked to leave. True: it was told that it may go.
bool AsksToLeave(OffloadHarness& h, const std::string& store) {
  const size_t before = h.member(store).inbox.size();
  MemberSaid said{h.member(store).session, {}};
  said.message.mutable_heartbeat()->mutable_progress()->set_phase("leaving");
  h.Step(said);
  h.Pump();
  const auto& inbox = h.member(store).inbox;
  return std::any_of(inbox.begin() + static_cast<ptrdiff_t>(before), inbox.end(),
                     [](const v1::CoordinatorMessage& message) {
                       return message.has_stop() && message.stop().run_id().empty();
                     });
}

void Leave(OffloadHarness& h, const std::string& store) {
  h.Store(store).jobs.clear();
  h.Store(store).incarnation.clear();
  MemberSaid said{h.member(store).session, {}};
  said.message.mutable_goodbye()->set_reason("told to leave (SIGTERM)");
  h.Step(said);
  h.Pump();
}

TEST(StoreLeaves, WhatItAloneHoldsIsSavedFirstAndNoStepIsLost) {
  OffloadHarness h;
  StartSaved(h);
  h.TrainTo("a", 3);
  h.Store("store-0").holds_snapshots = true;
  EXPECT_FALSE(AsksToLeave(h, "store-0"));
  EXPECT_THAT(h.LastEvents("a"),
              AllOf(HasSubstr("store-0"), HasSubstr("asked to leave"), HasSubstr("saved first")));
  EXPECT_FALSE(AsksToLeave(h, "store-0")) << "it is still being written";
  h.Store("store-0").holds_snapshots = false;
  h.Pump();
  EXPECT_EQ(h.Status("a").checkpoint().step(), 3);
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  Leave(h, "store-0");
  h.LetGo(kBoth);
  h.StartStore("store-0");
  GoOn(h);
  ExpectFinishes(h);
}

TEST(StoreLeaves, NoStepIsDecidedOnceItMayGo) {
  OffloadHarness h;
  StartSaved(h);
  h.TrainTo("a", 3);
  h.Seal("a-1", 4);
  EXPECT_FALSE(AsksToLeave(h, "store-0"));
  const RequestId request = h.Commit("worker-0", 4);
  EXPECT_FALSE(h.Answered(request));
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  EXPECT_FALSE(h.Answered(request));
  Leave(h, "store-0");
  EXPECT_EQ(h.Answer(request).status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(h.Status("a").committed_step(), 3);
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
}

TEST(StoreLeaves, NorIsTheFirst) {
  OffloadHarness h;
  StartSaved(h);
  h.Seal("a-1", 1);
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  const RequestId request = h.Commit("worker-0", 1);
  EXPECT_FALSE(h.Answered(request));
  Leave(h, "store-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
}

TEST(StoreLeaves, AStepWhoseCheckpointWasBegunIsDecidedAndSaved) {
  for (const uint64_t step : {1, 2, 4}) {  // also where nothing is to be saved but that
    OffloadHarness h;
    StartSaved(h, 1, 1, step == 2 ? 1 : step);
    h.TrainTo("a", step - 1);
    h.answers_snapshots = false;
    h.Seal("a-1", step);
    const RequestId request = h.Commit("worker-0", step);
    EXPECT_FALSE(AsksToLeave(h, "store-0")) << step;
    EXPECT_FALSE(h.Answered(request));
    h.answers_snapshots = true;
    h.Pump();
    EXPECT_TRUE(h.Answered(request));
    EXPECT_EQ(h.Status("a").checkpoint().step(), step);
    EXPECT_TRUE(AsksToLeave(h, "store-0"));
  }
}

// Its folder is for nothing else, and no rank is there that would decide the step.
TEST(StoreLeaves, AFolderOfAStepThatWasNotDecidedHoldsUpNoSave) {
  for (const bool cancelled : {false, true}) {
    OffloadHarness h;
    StartSaved(h, 1, 1, 4);
    h.TrainTo("a", 3);
    h.answers_snapshots = false;
    h.Seal("a-1", 4);
    h.Commit("worker-0", 4);
    h.Exit("worker-1", 0, 9);
    h.answers_snapshots = true;
    h.Pump();
    h.LetGo(kBoth);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
    if (cancelled) {
      h.CancelJob("a", true);
      h.Pump();
      EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED) << h.Status("a").reason();
    } else {
      AsksToLeave(h, "store-0");
      EXPECT_TRUE(AsksToLeave(h, "store-0"));
    }
    EXPECT_EQ(h.Status("a").checkpoint().step(), 3);
  }
}

// Writing takes longer than ranks wait for a step.
TEST(StoreLeaves, RanksThatCannotWaitAsLongAreNotOpenedAgainBeforeItIsGone) {
  OffloadHarness h;
  StartSaved(h);
  h.TrainTo("a", 3);
  h.Store("store-0").holds_snapshots = true;
  EXPECT_FALSE(AsksToLeave(h, "store-0"));
  for (int i = 0; i < 7; ++i) {
    for (const std::string& name : kBoth) {
      if (h.Status("a").ranks_size() != 0) h.End(name, "UNAVAILABLE", "nothing moved for 300 s");
    }
    h.LetGo(kBoth);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << h.Status("a").reason();
    EXPECT_THAT(h.Status("a").reason(), HasSubstr("asked to leave"));
    h.BeginRanks("a");
  }
  ASSERT_EQ(h.Status("a").generation(), 1);
  h.Store("store-0").holds_snapshots = false;
  h.Pump();
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  Leave(h, "store-0");
  h.StartStore("store-0");
  GoOn(h);
  ExpectFinishes(h);
}

TEST(StoreLeaves, WithAnotherReplicaItGoesAtOnce) {
  OffloadHarness h;
  StartSaved(h, 2, 2);
  h.TrainTo("a", 3);
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  EXPECT_TRUE(h.Train("a", 4).step() == 4) << "nothing is held up";
  EXPECT_EQ(h.Status("a").checkpoint().step(), 0);
}

TEST(StoreLeaves, WhenBothReplicasLeaveTheyAreSaved) {
  OffloadHarness h;
  StartSaved(h, 2, 2);
  h.TrainTo("a", 3);
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  EXPECT_FALSE(AsksToLeave(h, "store-1"));
  EXPECT_EQ(h.Status("a").checkpoint().step(), 3);
  EXPECT_TRUE(AsksToLeave(h, "store-1"));
}

TEST(StoreLeaves, WithoutACheckpointSectionItIsSaidWhatIsLost) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartOffloaded(OffloadHarness::OffloadSpec("a", 2));
  h.TrainTo("a", 2);
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("without a checkpoint section they are lost with it"));
}

TEST(StoreLeaves, WhatCannotBeSavedHoldsUpNobody) {
  OffloadHarness h;
  StartSaved(h);
  h.TrainTo("a", 3);
  h.Store("store-0").snapshot_problem = "no space left";
  h.Seal("a-1", 4);
  EXPECT_FALSE(AsksToLeave(h, "store-0"));
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("no space left"));
  h.Store("store-0").holds_snapshots = true;  // another save would not end
  EXPECT_EQ(h.Train("a", 4).step(), 4);
  h.Seal("a-1", 5);
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  EXPECT_EQ(h.Train("a", 5).step(), 5);
}

TEST(StoreLeaves, AJobThatHasNotTrainedOrHasEndedHoldsNoStore) {
  OffloadHarness h;
  StartSaved(h);
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  EXPECT_THAT(h.LastEvents("a"), Not(HasSubstr("asked to leave")));
  h.CancelJob("a");
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
}

TEST(StoreLeaves, ItGetsNothingNew) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  EXPECT_TRUE(AsksToLeave(h, "store-0"));
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_QUEUED);
  h.StartStore("store-1");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING);
  EXPECT_FALSE(h.Store("store-0").jobs.contains("a-1"));
}

TEST(StoreLeaves, ACancelledJobIsSavedBeforeItGoes) {
  OffloadHarness h;
  StartSaved(h);
  h.TrainTo("a", 3);
  h.CancelJob("a", true);
  AsksToLeave(h, "store-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_CANCELLED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").checkpoint().step(), 3);
}

}  // namespace
}  // namespace zeroshard::coordinator
