// Offloaded jobs beside stores whose disk or memory takes no state, or does not keep it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

void Fill(OffloadHarness& h, const std::string& store) {
  h.Store(store).load_problem = "/nvme/a-1.chunks: no space left on device";
  h.Store(store).load_code = "RESOURCE_EXHAUSTED";
}

void Empty(OffloadHarness& h, const std::string& store) { h.Store(store).load_problem.clear(); }

// What is on it turns out to be wrong.
void Damage(OffloadHarness& h, const std::string& store) {
  v1::StoreReport& report = h.Stored(store, "a-1").report;
  report.set_phase(v1::STORE_PHASE_FAILED);
  report.set_problem("chunk 3: checksum");
  report.set_error_code("DATA_LOSS");
  h.Pump();
}

std::vector<std::string> StoresOf(const OffloadHarness& h) {
  std::vector<std::string> names;
  const v1::JobStatus status = h.Status("a");
  for (const v1::StoreStatus& store : status.stores()) names.push_back(store.member());
  return names;
}

// The ranks of each generation that is opened begin, until none is.
void Settle(OffloadHarness& h) {
  for (int i = 0; i < 4 && h.Status("a").state() == v1::JOB_STATE_RECOVERING; ++i) {
    h.LetGo(kBoth);
    if (!h.Status("a").ranks().empty()) h.BeginRanks("a");
  }
}

// --- two replicas -------------------------------------------------------------------------------

TEST(FullDisk, OfAStoreThatJoinsCostsAJobThatRunsOnOneReplicaNothing) {
  OffloadHarness h;
  Start(h, 2, 2, 60);
  h.TrainTo("a", 2);
  h.KillStore("store-1");
  h.LetGo(kBoth);
  GoOn(h);
  ASSERT_THAT(StoresOf(h), ElementsAre("store-0"));
  h.StartStore("store-2");
  Fill(h, "store-2");
  for (uint64_t step = 3; step <= 60; ++step) {
    h.Train("a", step);
    Settle(h);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
    ASSERT_EQ(h.Status("a").committed_step(), step);
    h.AdvanceBeating(absl::Milliseconds(500), {"store-0", "store-2", "worker-0", "worker-1"});
  }
  EXPECT_THAT(h.LastEvents("a"), AllOf(HasSubstr("no space left on device"),
                                       HasSubstr("goes on with 1 of 2 replicas")));
  EXPECT_EQ(h.Status("a").version().epoch(), 1);
  // The second is that of the loss; in 29 s it was asked at once and 10 s later, not after each
  // step.
  EXPECT_EQ(h.Status("a").generation(), 4u);
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_TRUE(h.Stored("store-2", "a-1").report.dropped());
}

TEST(FullDisk, OfTheSecondStoreAtTheStartLeavesTheJobOnTheFirst) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartStore("store-1");
  Fill(h, "store-1");
  h.Submit1(OffloadHarness::OffloadSpec("a", 2, 6, 2));
  h.BeginRanks("a");
  Settle(h);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0"));
  ExpectFinishes(h);
}

TEST(FullDisk, ThatIsEmptiedGetsItsReplicaWhenItHasRested) {
  OffloadHarness h;
  Start(h, 2, 2, 20);
  h.TrainTo("a", 2);
  h.KillStore("store-1");
  h.LetGo(kBoth);
  GoOn(h);
  h.StartStore("store-2");
  Fill(h, "store-2");
  h.TrainTo("a", 3);
  Settle(h);
  ASSERT_THAT(StoresOf(h), ElementsAre("store-0"));
  Empty(h, "store-2");
  h.TrainTo("a", 4);
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0"));  // it rests
  h.AdvanceBeating(absl::Seconds(11), {"store-0", "store-2", "worker-0", "worker-1"});
  h.TrainTo("a", 5);
  Settle(h);
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0", "store-2"));
  EXPECT_EQ(h.Stored("store-2", "a-1").copied.size() % h.Stored("store-2", "a-1").chunks.size(),
            0u);
  ExpectFinishes(h);
}

// 10 s, then twice as long each time, up to 10 min; and it is asked when it has rested, not later.
TEST(FullDisk, IsTriedAgainAfterARestThatDoublesEachTimeUpToTenMinutes) {
  OffloadHarness h;
  Start(h, 2, 2, 1000);
  h.TrainTo("a", 2);
  h.KillStore("store-1");
  h.LetGo(kBoth);
  GoOn(h);
  h.StartStore("store-2");
  Fill(h, "store-2");
  uint64_t step = 3;
  const auto train = [&] {
    const uint64_t before = h.Status("a").generation();
    h.Train("a", step);
    Settle(h);
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
    EXPECT_EQ(h.Status("a").committed_step(), step++);
    EXPECT_THAT(StoresOf(h), ElementsAre("store-0"));
    return h.Status("a").generation() > before;
  };
  // A step at least every 10 s, so that no rank is taken for stuck.
  const auto rests_for = [&](absl::Duration time) {
    while (time > absl::ZeroDuration()) {
      const absl::Duration slice = std::min(time, absl::Seconds(10));
      h.AdvanceBeating(slice, {"store-0", "store-2", "worker-0", "worker-1"});
      time -= slice;
      if (time > absl::ZeroDuration() && train()) return false;
    }
    return true;
  };
  ASSERT_TRUE(train());  // at once
  for (const int seconds : {10, 20, 40, 80, 160, 320, 600, 600}) {
    ASSERT_TRUE(rests_for(absl::Seconds(seconds) - absl::Milliseconds(500))) << seconds;
    ASSERT_FALSE(train()) << seconds;
    ASSERT_TRUE(rests_for(absl::Milliseconds(500)));
    ASSERT_TRUE(train()) << seconds;
  }
}

// After a start nothing is known of what it failed at: it is told to forget the job.
TEST(FullDisk, OfAStoreAsideWhenTheCoordinatorStartsAgainLosesNothing) {
  OffloadHarness h;
  Start(h, 2, 2, 8);
  h.TrainTo("a", 2);
  h.KillStore("store-1");
  h.LetGo(kBoth);
  GoOn(h);
  h.StartStore("store-2");
  Fill(h, "store-2");
  h.TrainTo("a", 3);
  Settle(h);
  ASSERT_THAT(StoresOf(h), ElementsAre("store-0"));
  h.Restart();
  for (const char* store : {"store-0", "store-2"}) h.ReconnectStore(store);
  for (const std::string& name : kBoth) h.Connect(name, true);
  h.Pump();
  EXPECT_TRUE(h.Stored("store-2", "a-1").report.dropped());
  ExpectFinishes(h);
}

// --- one replica --------------------------------------------------------------------------------

TEST(FullDisk, OfOneOfTwoStoresAtTheStartPutsAllOnTheOther) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartStore("store-1");
  Fill(h, "store-0");
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  h.BeginRanks("a");
  Settle(h);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_THAT(StoresOf(h), ElementsAre("store-1"));
  ExpectFinishes(h);
}

TEST(FullDisk, OfEachStoreFailsTheJobWithTheWordsOfAll) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartStore("store-1");
  Fill(h, "store-0");
  Fill(h, "store-1");
  h.Submit1(OffloadHarness::OffloadSpec("a", 2));
  Settle(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("cannot load its part"), HasSubstr("store-0 on"),
                    HasSubstr("store-1 on"), HasSubstr("no other shard store has room"),
                    HasSubstr("no space left on device"), HasSubstr("submit the job again")));
  for (const char* store : {"store-0", "store-1"}) {
    EXPECT_TRUE(h.Stored(store, "a-1").report.dropped()) << store;
  }
}

TEST(FullDisk, AfterALossOfWhatWasOnItMovesTheStateOfTheCheckpointElsewhere) {
  OffloadHarness h;
  StartSaved(h, 2, 1, 2);
  h.TrainTo("a", 3);
  Fill(h, "store-1");
  Damage(h, "store-1");
  Settle(h);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").committed_step(), 2);
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0"));
  EXPECT_THAT(h.LastEvents("a"), Not(HasSubstr("no space left")));  // it was not asked again
  ExpectFinishes(h, 1);
}

TEST(DamagingDisk, IsLeftForAStoreThatHasRoomAndNotComeBackTo) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartOffloaded(OffloadHarness::SavedSpec("a", 2, 9, 2));
  h.StartStore("store-1");
  ASSERT_THAT(StoresOf(h), ElementsAre("store-0"));
  h.TrainTo("a", 3);
  Damage(h, "store-0");
  Settle(h);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_THAT(StoresOf(h), ElementsAre("store-1"));
  h.TrainTo("a", 5);
  EXPECT_EQ(h.Status("a").version().epoch(), 2);
  ExpectFinishes(h, 1);
}

TEST(DamagingDisk, WithoutAnyOtherIsLoadedAgain) {
  OffloadHarness h;
  StartSaved(h, 1, 1, 2);
  for (int i = 0; i < 3; ++i) {
    h.TrainTo("a", 3);
    Damage(h, "store-0");
    Settle(h);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
    ASSERT_EQ(h.Status("a").committed_step(), 2);
  }
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0"));
  ExpectFinishes(h, 3);
}

TEST(DamagingDisk, WithoutAnyOtherEndsTheJobWhenItGoesOnDoingSo) {
  OffloadHarness h;
  StartSaved(h, 1, 1, 2);
  for (int i = 0; i < 5; ++i) {
    h.TrainTo("a", 3);
    Damage(h, "store-0");
    Settle(h);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  }
  h.TrainTo("a", 3);
  Damage(h, "store-0");
  Settle(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("store-0 on"), HasSubstr("for the 6th time"), HasSubstr("checksum"),
                    HasSubstr("no other shard store has room"), HasSubstr("submit the job again")));
}

// The first time may be a bit that flipped; the second is the disk.
TEST(DamagingDisk, OfAReplicaIsFilledAgainOnceAndThenRests) {
  OffloadHarness h;
  Start(h, 2, 2, 9);
  h.TrainTo("a", 2);
  Damage(h, "store-1");
  Settle(h);
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0", "store-1"));
  h.TrainTo("a", 3);
  Damage(h, "store-1");
  Settle(h);
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0"));
  h.TrainTo("a", 4);
  EXPECT_THAT(StoresOf(h), ElementsAre("store-0"));
  ExpectFinishes(h);
}

}  // namespace
}  // namespace zeroshard::coordinator
