// Offloaded jobs whose chunks are being copied, or of which one copy is bad.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

const std::vector<std::string> kAlive = {"store-0", "worker-0", "worker-1"};

// store-0 is a new process that copies what each of the others holds.
void BeginCopies(OffloadHarness& h, int stores) {
  Start(h, stores, static_cast<uint32_t>(stores));
  h.TrainTo("a", 3);
  h.Disconnect("store-0");
  h.Store("store-0").holds_loading = true;
  h.StartStore("store-0");
  h.LetGo(kBoth);
  ASSERT_EQ(h.Stored("store-0", "a-1").report.phase(), v1::STORE_PHASE_LOADING);
}

// What store-1 holds alone, when store-1 dies.
void LoseTheSourceOfACopy(OffloadHarness& h) {
  BeginCopies(h, 2);
  h.KillStore("store-1");
  h.LetGo(kBoth);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
}

TEST(StoreCopies, ThatNeverEndAsTheOnlyHolderDiedGoBackWithinTheMembersTimeAndFenceNobody) {
  OffloadHarness h;
  LoseTheSourceOfACopy(h);
  const std::string incarnation = h.member("store-0").hello.incarnation();
  EXPECT_EQ(h.Status("a").version().epoch(), 1);
  EXPECT_THAT(h.Status("a").reason(),
              AllOf(HasSubstr("store-0 on"), HasSubstr("store-1 on"), HasSubstr("copied from")));
  h.AdvanceBeating(absl::Seconds(9), kAlive);
  EXPECT_EQ(h.Status("a").version().epoch(), 1);
  h.AdvanceBeating(absl::Milliseconds(1500), kAlive);
  h.Pump();
  EXPECT_EQ(h.Status("a").version().epoch(), 2) << h.LastEvents("a");
  EXPECT_EQ(h.Status("a").committed_step(), 0);
  EXPECT_FALSE(h.core().members().fences().contains(incarnation));
  h.Store("store-0").holds_loading = false;
  h.Pump();
  GoOn(h);
  ExpectFinishes(h, 3);
}

TEST(StoreCopies, ThatWereCompleteWhenTheirSourceDiedLoseNoStep) {
  OffloadHarness h;
  LoseTheSourceOfACopy(h);
  h.AdvanceBeating(absl::Seconds(8), kAlive);
  h.Store("store-0").holds_loading = false;  // its word was on the way
  h.Pump();
  GoOn(h);
  EXPECT_EQ(h.Status("a").version().epoch(), 1);
  ExpectFinishes(h);
}

TEST(StoreCopies, ThatSayThatTheirSourceIsGoneGoBackAtOnce) {
  OffloadHarness h;
  LoseTheSourceOfACopy(h);
  h.Store("store-0").holds_loading = false;
  h.Store("store-0").load_problem = "cannot copy chunk 3 from store-1 at host-of-store-1:7000";
  h.Store("store-0").load_code = "UNAVAILABLE";
  h.Step(Tick{});
  h.Store("store-0").holds_loading = true;
  h.Stored("store-0", "a-1").report.set_phase(v1::STORE_PHASE_FAILED);
  h.Stored("store-0", "a-1").report.set_problem(h.Store("store-0").load_problem);
  h.Stored("store-0", "a-1").report.set_error_code("UNAVAILABLE");
  h.Pump();
  EXPECT_EQ(h.Status("a").version().epoch(), 2) << h.LastEvents("a");
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("cannot copy chunk 3 from store-1"));
  h.Store("store-0").load_problem.clear();
  h.Store("store-0").holds_loading = false;
  h.Pump();
  GoOn(h);
}

// After its start the coordinator knows of the copy from its log alone.
TEST(StoreCopies, ThatNeverEndGoBackAfterAStartOfTheCoordinatorToo) {
  OffloadHarness h;
  LoseTheSourceOfACopy(h);
  h.AdvanceBeating(absl::Seconds(5), kAlive);
  h.Restart();
  h.ReconnectStore("store-0");
  for (const std::string& name : kBoth) h.Connect(name);
  h.AdvanceBeating(absl::Seconds(35), kAlive);
  h.Pump();
  EXPECT_EQ(h.Status("a").version().epoch(), 2) << h.LastEvents("a");
  EXPECT_FALSE(h.core().members().fences().contains(h.member("store-0").hello.incarnation()));
  h.Store("store-0").holds_loading = false;
  h.Pump();
  GoOn(h);
}

TEST(StoreCopies, WhoseSourceDiesAreTakenFromTheOtherHolderAtOnce) {
  OffloadHarness h;
  BeginCopies(h, 3);
  const uint64_t before = h.Stored("store-0", "a-1").report.map_version();
  h.KillStore("store-1");
  h.LetGo(kBoth);
  EXPECT_EQ(h.Stored("store-0", "a-1").report.map_version(), before + 1);
  for (const v1::StoreJob::Copy& copy : h.Stored("store-0", "a-1").job.copies()) {
    const auto from = static_cast<int>(copy.from_store());
    EXPECT_EQ(h.Stored("store-0", "a-1").job.map().stores(from).member(), "store-2");
  }
  h.Store("store-0").holds_loading = false;
  h.Pump();
  GoOn(h);
  EXPECT_EQ(h.Status("a").version().epoch(), 1);
  ExpectFinishes(h);
}

TEST(StoreCopies, WhatAStoreSaysThatItWaitsForIsShown) {
  OffloadHarness h;
  BeginCopies(h, 2);
  h.Stored("store-0", "a-1").report.set_problem("is copying: 3 of 12 chunks from store-1");
  h.Stored("store-0", "a-1").report.set_progress(3);
  h.Pump();
  const v1::JobStatus status = h.Status("a");
  for (const v1::StoreStatus& store : status.stores()) {
    EXPECT_EQ(store.problem(),
              store.member() == "store-0" ? "is copying: 3 of 12 chunks from store-1" : "");
  }
  // Also where its time is over.
  h.AdvanceBeating(absl::Seconds(200), {"store-0", "store-1", "worker-0", "worker-1"});
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("is copying: 3 of 12 chunks from store-1"));
}

// --- one replica is bad -------------------------------------------------------------------------

void Damage(OffloadHarness& h, const std::vector<std::string>& stores) {
  for (const std::string& store : stores) {
    v1::StoreReport& report = h.Stored(store, "a-1").report;
    report.set_phase(v1::STORE_PHASE_FAILED);
    report.set_problem("chunk 3: checksum");
    report.set_error_code("DATA_LOSS");
  }
  h.Pump();
}

TEST(BadReplica, IsDroppedWhereItIsAndFilledElsewhere) {
  OffloadHarness h;
  Start(h, 3, 2);
  h.TrainTo("a", 2);
  const std::set<uint32_t> lost = h.Stored("store-1", "a-1").chunks;
  ASSERT_FALSE(lost.empty());
  Damage(h, {"store-1"});
  EXPECT_THAT(h.LastEvents("a"), AllOf(HasSubstr("store-1"), HasSubstr("chunk 3: checksum")));
  h.LetGo(kBoth);
  GoOn(h);
  const v1::JobStatus status = h.Status("a");
  for (const v1::StoreStatus& store : status.stores()) EXPECT_NE(store.member(), "store-1");
  std::set<uint32_t> copied;
  for (const char* name : {"store-0", "store-2"}) {
    copied.insert(h.Stored(name, "a-1").copied.begin(), h.Stored(name, "a-1").copied.end());
  }
  EXPECT_EQ(copied, lost);
  ExpectFinishes(h);
  EXPECT_TRUE(h.Stored("store-1", "a-1").report.dropped());
}

TEST(BadReplica, ThatIsFoundByTheLastDigestIsReplacedToo) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.TrainTo("a", 5);
  h.Store("store-1").holds_applying = true;
  h.TrainTo("a", 6);
  ASSERT_EQ(h.Status("a").committed_step(), 6);
  h.Store("store-1").holds_applying = false;
  Damage(h, {"store-1"});
  h.LetGo(kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
}

// It then knows from its log alone that the store was ready.
TEST(BadReplica, ThatIsHeardOfAfterAStartOfTheCoordinatorIsReplacedToo) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.TrainTo("a", 3);
  h.Restart();
  v1::StoreReport& report = h.Stored("store-1", "a-1").report;
  report.set_phase(v1::STORE_PHASE_FAILED);
  report.set_problem("chunk 3: checksum");
  report.set_error_code("DATA_LOSS");
  for (const char* store : {"store-0", "store-1"}) h.ReconnectStore(store);
  for (const std::string& name : kBoth) h.Connect(name, true);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING) << h.Status("a").reason();
  h.LetGo(kBoth);
  GoOn(h);
  ExpectFinishes(h);
}

// The first is being filled from the second, which turns out to be bad too.
TEST(BadReplica, BothOfThemGoBack) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.TrainTo("a", 2);
  h.Store("store-0").holds_loading = true;
  Damage(h, {"store-0"});
  h.LetGo(kBoth);
  ASSERT_EQ(h.Stored("store-0", "a-1").report.phase(), v1::STORE_PHASE_LOADING);
  Damage(h, {"store-1"});
  h.LetGo(kBoth);
  h.AdvanceBeating(absl::Seconds(11), {"store-0", "store-1", "worker-0", "worker-1"});
  h.Store("store-0").holds_loading = false;
  h.Pump();
  EXPECT_EQ(h.Status("a").version().epoch(), 2) << h.LastEvents("a");
  GoOn(h);
  ExpectFinishes(h, 2);
}

// The digests after the last step have no next decision to be compared at.
TEST(BadReplica, ThatDiffersAfterTheLastStepFailsTheJob) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.TrainTo("a", 5);
  h.Store("store-1").wrong_digest_of = 2;
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("chunk 2"), HasSubstr("store-0"),
                                            HasSubstr("store-1"), HasSubstr("after step 6")));
}

// --- incarnations -------------------------------------------------------------------------------

TEST(Incarnations, ALateReportOfOneThatWasReplacedDoesNotCountForItsSuccessor) {
  OffloadHarness h;
  Start(h, 2, 2);
  h.TrainTo("a", 2);
  const SessionId old_session = h.member("store-1").session;
  const v1::StoreReport old_report = h.Stored("store-1", "a-1").report;
  h.Disconnect("store-1");
  h.Store("store-1").holds_loading = true;
  h.StartStore("store-1");
  h.LetGo(kBoth);
  ASSERT_EQ(h.Stored("store-1", "a-1").report.phase(), v1::STORE_PHASE_LOADING);
  MemberSaid late{old_session, {}};
  *late.message.mutable_store() = old_report;
  late.message.mutable_store()->set_map_version(2);
  late.message.mutable_store()->set_generation(h.Status("a").generation());
  h.Step(late);
  const v1::JobStatus status = h.Status("a");
  for (const v1::StoreStatus& store : status.stores()) {
    if (store.member() == "store-1") {
      EXPECT_EQ(store.phase(), v1::STORE_PHASE_LOADING);
    }
  }
}

// --- what a roll-back leaves --------------------------------------------------------------------

// With a sample of each step, a checkpoint every second, and a loss after step 5 of 8.
void TrainWithSamples(OffloadHarness& h, bool disturbed, std::vector<uint64_t>* positions) {
  h.JoinMany(2);
  h.StartStore("store-0");
  h.StartStore("store-1");
  h.StartOffloaded(OffloadHarness::SavedSpec("a", 2, 8, 2));
  bool lost = false;
  while (h.Status("a").committed_step() < 8) {
    const uint64_t step = h.Status("a").committed_step() + 1;
    const v1::StepDecision decision = h.Train("a", step);
    ASSERT_EQ(decision.step(), step) << h.Status("a").reason();
    positions->resize(step);
    positions->back() = decision.next_sample();
    for (const std::string prompt : {"one", "two"}) {
      h.ReportSample(h.Root("a"), step, prompt, absl::StrCat(prompt, " after ", step));
    }
    if (step != 5 || !disturbed || std::exchange(lost, true)) continue;
    h.KillStore("store-1");
    h.LetGo(kBoth);
    h.BeginRanks("a");
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
    ASSERT_EQ(h.Status("a").committed_step(), 4);
    // It goes on with the sample that step 5 began with.
    EXPECT_EQ(h.member("worker-0").assign->next_sample(), (*positions)[3]);
    EXPECT_EQ(h.member("worker-1").assign->next_sample(), (*positions)[3]);
    EXPECT_EQ(h.Samples("a-1").size(), 8u);
  }
  for (const std::string& name : kBoth) h.End(name);
  h.Pump();
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
}

TEST(RollBack, LeavesTheHistoryTheSamplesAndTheDataPositionsOfAnUndisturbedRun) {
  OffloadHarness undisturbed, disturbed;
  std::vector<uint64_t> wanted, seen;
  TrainWithSamples(undisturbed, false, &wanted);
  TrainWithSamples(disturbed, true, &seen);
  EXPECT_EQ(disturbed.Status("a").steps_lost(), 1);
  EXPECT_EQ(disturbed.Status("a").version().epoch(), 2);
  EXPECT_THAT(seen, ElementsAreArray(wanted));
  const auto text = [](const auto& records) {
    std::vector<std::string> texts;
    for (const auto& record : records) texts.push_back(record.SerializeAsString());
    return texts;
  };
  auto history = disturbed.HistoryRecords("a-1");
  ASSERT_EQ(history.size(), 8u);
  // But for what it cost, which the first step after it says.
  EXPECT_EQ(history[4].steps_lost(), 1u);
  history[4].clear_steps_lost();
  EXPECT_EQ(text(history), text(undisturbed.HistoryRecords("a-1")));
  EXPECT_EQ(text(disturbed.Samples("a-1")), text(undisturbed.Samples("a-1")));
}

TEST(RollBack, FromAllStepsTheJobHasItsTimeToEndAnew) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  v1::JobSpec spec = OffloadHarness::SavedSpec("a", 2, 6, 0);
  spec.mutable_timeouts()->set_collective_seconds(5);
  h.StartOffloaded(spec);
  h.Store("store-0").holds_snapshots = true;
  Finish(h);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  h.KillStore("store-0");
  h.LetGo(kBoth);
  h.StartStore("store-0");
  h.BeginRanks("a");
  ASSERT_EQ(h.Status("a").version().epoch(), 2) << h.Status("a").reason();
  for (int i = 0; i < 3; ++i) {  // a long step, longer than the end may take
    h.AdvanceBeating(absl::Seconds(15), kAlive);
    for (const std::string& name : kBoth) h.Work(name, 1, "forward");
  }
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  Finish(h);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
}

}  // namespace
}  // namespace zeroshard::coordinator
