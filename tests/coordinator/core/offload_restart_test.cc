// The coordinator of an offloaded job dies and starts again, at every event, with and without what
// it had written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/coordinator/core/offload_harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

const std::vector<std::string> kBoth = {"worker-0", "worker-1"};

std::vector<uint64_t> UpTo(uint64_t last) {
  std::vector<uint64_t> steps;
  for (uint64_t step = 1; step <= last; ++step) steps.push_back(step);
  return steps;
}

// Workers that do their part whatever becomes of the coordinator.
class Driver {
 public:
  Driver(OffloadHarness* harness, std::vector<std::string> stores)
      : h_(harness), stores_(std::move(stores)) {}

  void Act() {
    if (boots_ != h_->boots()) {
      boots_ = h_->boots();
      commit_ = 0;
      for (const std::string& name : stores_) h_->ReconnectStore(name);
      for (const std::string& name : kBoth) {
        if (boots_ == h_->boots()) h_->Connect(name, h_->IsWorking(name));
        ends_[name] = 0;
      }
      return;
    }
    h_->Pump();
    for (const std::string& name : kBoth) ActAs(name);
  }

 private:
  void ActAs(const std::string& name) {
    FakeMember& me = h_->member(name);
    if (me.Last(v1::CoordinatorMessage::kRefused) != nullptr) {
      h_->Idle(name);
      h_->Join(name);
      return;
    }
    if (me.session == 0 || !me.assign) return h_->Beat(name);
    const v1::CoordinatorMessage* stop = me.Last(v1::CoordinatorMessage::kStop);
    if (h_->IsWorking(name)) {
      if (stop != nullptr && stop->stop().generation() >= me.assign->generation()) {
        return h_->Idle(name);
      }
    } else {
      if (me.assign->generation() <= begun_[name]) return h_->Beat(name);
      begun_[name] = me.assign->generation();
      ends_[name] = 0;
      if (me.assign->rank() == 0) next_ = me.assign->first_step();
      return h_->Work(name, 0, "loading");
    }
    if (started_[name] != me.assign->generation()) {
      if (starts_[name] == 0 || !h_->Answered(starts_[name]))
        starts_[name] = h_->Arrive(name, "start");
      if (h_->Answered(starts_[name])) started_[name] = me.assign->generation();
      return;
    }
    if (next_ > me.assign->spec().steps()) {
      if (ends_[name] == 0) {
        ends_[name] = h_->End(name);
      } else if (h_->Answered(ends_[name])) {
        h_->Idle(name);
      }
      return;
    }
    h_->Beat(name);
    if (me.assign->rank() != 0) return;
    if (commit_ == 0) {
      h_->Seal(me.assign->run_id(), next_);
      commit_ = h_->Commit(name, next_);
    } else if (!h_->Answered(commit_)) {
      h_->Seal(me.assign->run_id(), next_);
    } else {
      if (h_->Answer(commit_).status.ok()) ++next_;
      commit_ = 0;
    }
  }

  OffloadHarness* const h_;
  const std::vector<std::string> stores_;
  int boots_ = 1;
  uint64_t next_ = 1;
  RequestId commit_ = 0;
  std::map<std::string, uint64_t> begun_, started_;
  std::map<std::string, RequestId> starts_, ends_;
};

bool Ended(const OffloadHarness& h) {
  const v1::JobState state = h.Status("a").state();
  return state == v1::JOB_STATE_COMPLETED || state == v1::JOB_STATE_FAILED;
}

// How many events it took.
uint64_t Drive(OffloadHarness& h, uint64_t crash_at, Harness::Crash how) {
  h.JoinMany(2);
  for (const char* name : {"store-0", "store-1"}) h.StartStore(name);
  const uint64_t before = h.events();
  if (crash_at != 0) h.CrashAt(crash_at, how);
  h.SubmitJob(OffloadHarness::SavedSpec("a", 2, 5, 2, 2));
  Driver driver(&h, {"store-0", "store-1"});
  for (int i = 0; i < 400 && !Ended(h); ++i) {
    if (h.Status("a").state() == v1::JOB_STATE_UNSPECIFIED && h.boots() > 1) {
      h.SubmitJob(OffloadHarness::SavedSpec("a", 2, 5, 2, 2));  // it was not heard of
    }
    driver.Act();
    h.Advance(absl::Milliseconds(100));
  }
  return h.events() - before;
}

class OffloadCrash : public ::testing::TestWithParam<Harness::Crash> {};

TEST_P(OffloadCrash, AtAnyEventNoStepIsLostOrDoneTwice) {
  uint64_t events = 0;
  {
    OffloadHarness h;
    events = Drive(h, 0, GetParam());
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  }
  ASSERT_GT(events, 60);
  for (uint64_t at = 1; at < events; ++at) {
    SCOPED_TRACE(absl::StrCat("event ", at, " of ", events));
    OffloadHarness h;
    Drive(h, at, GetParam());
    ASSERT_EQ(h.boots(), 2);
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason() << "\n"
                                                              << h.LastEvents("a");
    const std::string run = h.Status("a").run_id();
    EXPECT_THAT(h.History(run), ElementsAreArray(UpTo(5)));
    EXPECT_EQ(h.Status("a").generation(), 1);
    EXPECT_EQ(h.Status("a").steps_lost(), 0);
    EXPECT_FALSE(h.Status("a").weights_digest().empty());
    EXPECT_TRUE(h.on_disk.contains(5));
    for (const char* name : {"store-0", "store-1"}) {
      EXPECT_THAT(h.Stored(name, run).applied, ElementsAreArray(UpTo(5)));
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Log, OffloadCrash,
                         ::testing::Values(Harness::Crash::kBeforeTheLog,
                                           Harness::Crash::kAfterTheLog));

void Start(OffloadHarness& h, uint32_t replicas = 1) {
  h.JoinMany(2);
  for (const char* name : {"store-0", "store-1"}) h.StartStore(name);
  h.StartOffloaded(OffloadHarness::OffloadSpec("a", 2, 6, replicas));
  h.TrainTo("a", 2);
}

TEST(OffloadRestart, TheSameMembersGoOnInTheSameGeneration) {
  OffloadHarness h;
  Start(h);
  h.Restart();
  EXPECT_EQ(h.Status("a").committed_step(), 2);
  for (const char* name : {"store-0", "store-1"}) h.ReconnectStore(name);
  for (const std::string& name : kBoth) h.Connect(name, true);
  h.TrainTo("a", 4);
  EXPECT_EQ(h.Status("a").generation(), 1);
  EXPECT_EQ(h.Status("a").committed_step(), 4);
  EXPECT_EQ(h.Stored("store-0", "a-1").report.term(), 2);
}

TEST(OffloadRestart, AStoreThatDoesNotComeBackIsNamed) {
  OffloadHarness h;
  Start(h, 2);
  h.Restart();
  h.ReconnectStore("store-0");
  for (const std::string& name : kBoth) h.Connect(name, true);
  const RequestId request = h.Commit("worker-0", 3);
  h.AdvanceBeating(absl::Seconds(19), {"store-0", "worker-0", "worker-1"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING);
  h.AdvanceBeating(absl::Seconds(3), {"store-0", "worker-0", "worker-1"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_EQ(h.Answer(request).status.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(h.LastEvents("a"),
              HasSubstr("store-1 on host-of-store-1: it did not come back within 20.0 s"));
  h.Connect("store-1");
  EXPECT_TRUE(h.member("store-1").Last(v1::CoordinatorMessage::kRefused)->refused().fenced());
}

TEST(OffloadRestart, AStoreThatDiedMeanwhileIsReplacedAtOnce) {
  OffloadHarness h;
  Start(h, 2);
  h.Restart();
  h.ReconnectStore("store-0");
  h.StartStore("store-1");
  for (const std::string& name : kBoth) h.Connect(name, true);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.LastEvents("a"), HasSubstr("started again"));
}

TEST(OffloadRestart, ADecisionThatNobodyWasToldIsDrivenToItsEnd) {
  OffloadHarness h;
  Start(h);
  for (const char* name : {"store-0", "store-1"}) h.SealOn(name, "a-1", 3);
  h.Pump();
  h.CrashAt(1, Harness::Crash::kAfterTheLog);
  const CommitStep lost = h.CommitEvent("worker-0", 3);
  h.Step(lost);
  EXPECT_FALSE(h.Answered(lost.request));
  EXPECT_EQ(h.Status("a").committed_step(), 3);
  for (const char* name : {"store-0", "store-1"}) h.ReconnectStore(name);
  EXPECT_THAT(h.Stored("store-0", "a-1").applied, ElementsAre(1, 2, 3));
  for (const std::string& name : kBoth) h.Connect(name, true);
  const RequestId again = h.Commit("worker-0", 3);
  ASSERT_TRUE(h.Answered(again));
  EXPECT_EQ(h.Answer(again).number, 3);
  EXPECT_EQ(h.Status("a").committed_step(), 3);
}

TEST(OffloadRestart, WhatAnEndedJobLeftOnAStoreIsDropped) {
  OffloadHarness h;
  Start(h);
  h.Store("store-0").deaf = true;
  h.CancelJob("a");
  h.Restart();
  h.Store("store-0").deaf = false;
  EXPECT_FALSE(h.Stored("store-0", "a-1").report.dropped());
  h.ReconnectStore("store-0");
  EXPECT_TRUE(h.Stored("store-0", "a-1").report.dropped());
}

TEST(OffloadRestart, AJobThatEndedAsTheCoordinatorDiedHasItsLastStepInTheHistory) {
  OffloadHarness h;
  Start(h);
  h.TrainTo("a", 6);
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(5)));  // the sixth is not reported yet
  h.End("worker-0");
  h.CrashAt(1, Harness::Crash::kAfterTheLog);
  h.End("worker-1");
  ASSERT_EQ(h.boots(), 2);
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
  h.Restart();
  EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
}

TEST(OffloadRestart, ACrashDuringARollBackEndsInOneHistory) {
  for (const auto how : {Harness::Crash::kBeforeTheLog, Harness::Crash::kAfterTheLog}) {
    OffloadHarness h;
    h.JoinMany(2);
    for (const char* name : {"store-0", "store-1"}) h.StartStore(name);
    h.StartOffloaded(OffloadHarness::SavedSpec("a", 2, 6, 2));
    h.TrainTo("a", 5);
    h.CrashAt(1, how);
    h.KillStore("store-1");
    for (const std::string& name : kBoth) {
      h.Idle(name);
      h.Connect(name);
    }
    h.ReconnectStore("store-0");
    h.StartStore("store-1");
    h.Advance(absl::Seconds(1));
    h.LetGo(kBoth);
    EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(4)));
    EXPECT_EQ(h.Status("a").steps_lost(), 1);
    h.BeginRanks("a");
    ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
    h.TrainTo("a", 6);
    for (const std::string& name : kBoth) h.End(name);
    h.Pump();
    EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
    EXPECT_THAT(h.History("a-1"), ElementsAreArray(UpTo(6)));
  }
}

}  // namespace
}  // namespace zeroshard::coordinator
