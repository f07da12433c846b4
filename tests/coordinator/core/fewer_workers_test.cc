// resources.min_workers: jobs that start or go on with fewer workers than they want.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/plan/planner.h"
#include "tests/coordinator/core/running_job.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr absl::Duration kGrace = absl::Seconds(30);  // CoreOptions::replacement_grace

v1::JobSpec Elastic(uint32_t workers, uint32_t least) {
  v1::JobSpec spec = Harness::SavingSpec("a", workers);
  spec.mutable_resources()->set_min_workers(least);
  return spec;
}

std::string Events(const Harness& h) {
  const v1::JobStatus status = h.Status("a");
  std::string text;
  for (const v1::JobEvent& event : status.events()) absl::StrAppend(&text, event.reason(), "\n");
  return text;
}

TEST(FewerWorkers, AJobStartsWithAllThatItWantsWhereTheyAreThere) {
  Harness h;
  h.JoinMany(4);
  h.SubmitJob(Elastic(3, 1));
  EXPECT_EQ(h.member("worker-0").assign->world_size(), 3);
}

TEST(FewerWorkers, AJobThatIsQueuedWaitsForSomeTimeAndStartsWithWhatThereIs) {
  Harness h;
  h.JoinMany(2);
  h.SubmitJob(Elastic(3, 1));
  EXPECT_THAT(h.Status("a").reason(), AllOf(HasSubstr("needs 3 workers, 2 idle of 2"),
                                            HasSubstr("after 30.0 s it goes on with fewer, at "
                                                      "least 1")));
  h.AdvanceBeating(kGrace - absl::Seconds(1), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_QUEUED);
  h.AdvanceBeating(absl::Seconds(2), kBoth);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(h.member("worker-1").assign->world_size(), 2);
  EXPECT_THAT(Events(h), HasSubstr("2 of 3 workers, as resources.min_workers allows"));
}

TEST(FewerWorkers, ALostWorkerIsWaitedForAndThenDoneWithout) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Elastic(2, 1), kBoth);
  h.Steps("worker-0", 1, 5);
  h.ReportSaved("worker-0", Harness::Saved(5));
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-0");
  h.AdvanceBeating(kGrace - absl::Seconds(1), {"worker-0"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.AdvanceBeating(absl::Seconds(2), {"worker-0"});
  const v1::Assign& assign = *h.member("worker-0").assign;
  EXPECT_EQ(assign.generation(), 2);
  EXPECT_EQ(assign.world_size(), 1);
  EXPECT_EQ(assign.first_step(), 6);
  h.Work("worker-0", 6, "loading");
  h.Arrive("worker-0", "start");
  h.Steps("worker-0", 6, 100);
  h.End("worker-0");
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.History("a-1"), UpTo(100));
}

TEST(FewerWorkers, AReplacementThatComesInTimeIsTaken) {
  Harness h;
  h.JoinMany(2);
  h.StartJob(Elastic(2, 1), kBoth);
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-0");
  h.AdvanceBeating(kGrace - absl::Seconds(1), {"worker-0"});
  h.Join("worker-2");
  EXPECT_EQ(h.member("worker-2").assign->world_size(), 2);
}

TEST(FewerWorkers, WithFewerThanItNeedsItWaitsHoweverLong) {
  Harness h;
  h.JoinMany(3);
  h.StartJob(Elastic(3, 2), {"worker-0", "worker-1", "worker-2"});
  h.Exit("worker-1", 0, 9);
  h.Exit("worker-2", 0, 9);
  h.Idle("worker-0");
  h.AdvanceBeating(kGrace * 3, {"worker-0"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(h.Status("a").reason(), HasSubstr("it can go on with 2"));
  h.Forget("worker-1");
  h.Join("worker-1");
  EXPECT_EQ(h.member("worker-1").assign->world_size(), 2);
}

TEST(FewerWorkers, TheNextLossIsWaitedForAnewAndBringsItBackToItsSize) {
  Harness h;
  h.JoinMany(3);
  h.StartJob(Elastic(3, 1), {"worker-0", "worker-1", "worker-2"});
  h.Exit("worker-2", 0, 9);
  h.Idle("worker-0");
  h.Idle("worker-1");
  h.AdvanceBeating(kGrace + absl::Seconds(1), kBoth);
  ASSERT_EQ(h.member("worker-0").assign->world_size(), 2);
  for (const std::string& name : kBoth) h.Work(name, 1, "loading");
  for (const std::string& name : kBoth) h.Arrive(name, "start");
  h.Join("worker-3");
  h.Exit("worker-1", 0, 9);
  h.Idle("worker-0");
  h.AdvanceBeating(kGrace - absl::Seconds(1), {"worker-0", "worker-3"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.Join("worker-4");
  EXPECT_EQ(h.member("worker-4").assign->world_size(), 3);
}

TEST(FewerWorkers, ThePlanIsOfTheRanksThatThereAre) {
  Harness h;
  h.JoinMany(1);
  v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 2, 9, 1);
  spec.clear_zero_optimization();
  spec.mutable_zero_optimization()->set_stage(2);
  spec.mutable_resources()->set_min_workers(1);
  const auto plan = PlanShards(spec);
  ASSERT_TRUE(plan.ok() && plan->size() == 2) << plan.status();
  h.SubmitJob(spec, *plan);
  EXPECT_EQ(h.Status("a").plan_size(), 2);
  h.AdvanceBeating(kGrace + absl::Seconds(1), {"worker-0"});
  const v1::JobStatus status = h.Status("a");
  ASSERT_EQ(status.plan_size(), 1) << status.reason();
  EXPECT_EQ(status.plan(0).owned_parameters(),
            (*plan)[0].owned_parameters() + (*plan)[1].owned_parameters());
}

// Nobody behind it has to wait for more workers than it can do with.
TEST(FewerWorkers, ItHoldsUpOthersOnlyWhereThereAreAsManyAsItNeeds) {
  Harness h;
  h.JoinMany(1);
  h.AdvanceBeating(absl::Seconds(21), {"worker-0"});
  h.SubmitJob(Elastic(3, 2));
  h.SubmitJob(Harness::Spec("b", 1));
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_PLACING);
  h.Join("worker-1");
  h.SubmitJob(Harness::Spec("c", 1));
  EXPECT_EQ(h.Status("c").reason(), "behind a-1 in the queue");
}

TEST(FewerWorkers, AnOffloadedJobGoesOnFromTheCommittedStepAndGrowsWhenWorkersCome) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 2, 9, 1);
  spec.mutable_resources()->set_min_workers(1);
  h.StartOffloaded(spec);
  h.TrainTo("a", 3);
  h.Exit("worker-1", 0, 9);
  h.LetGo({"worker-0"});
  h.AdvanceBeating(kGrace + absl::Seconds(1), {"worker-0", "store-0"});
  h.Pump();
  ASSERT_EQ(h.member("worker-0").assign->world_size(), 1) << h.Status("a").reason();
  EXPECT_EQ(h.member("worker-0").assign->first_step(), 4);
  h.BeginRanks("a");
  h.TrainTo("a", 4);
  h.Forget("worker-1");
  h.Join("worker-1");
  h.TrainTo("a", 5);
  EXPECT_EQ(h.Status("a").generation(), 2) << "what comes and goes must not keep it from training";
  h.AdvanceBeating(kGrace, {"worker-0", "worker-1", "store-0"});
  h.TrainTo("a", 6);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  EXPECT_FALSE(h.member("worker-1").assign.has_value()) << "the rank that goes on has not stopped";
  h.LetGo({"worker-0"});
  h.Pump();
  ASSERT_TRUE(h.member("worker-1").assign.has_value()) << h.Status("a").reason();
  EXPECT_EQ(h.member("worker-1").assign->world_size(), 2);
  h.BeginRanks("a");
  h.TrainTo("a", 9);
  for (const std::string& name : kBoth) h.End(name);
  h.Pump();
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_COMPLETED) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").steps_lost(), 0);
  EXPECT_EQ(h.History("a-1"), UpTo(9));
}

v1::JobSpec ElasticOffload() {
  v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 2, 20, 1);
  spec.mutable_resources()->set_min_workers(1);
  return spec;
}

// Job "a" RUNNING on worker-0 alone.
void StartOnOne(OffloadHarness& h, const std::vector<v1::ShardPlan>& plan = {}) {
  h.Join("worker-0");
  h.StartStore("store-0");
  h.Step(Submit{h.NewRequest(), ElasticOffload(), plan, std::nullopt, /*force=*/true});
  h.AdvanceBeating(kGrace + absl::Seconds(1), {"worker-0", "store-0"});
  h.Pump();
  h.BeginRanks("a");
  ASSERT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  ASSERT_EQ(h.member("worker-0").assign->world_size(), 1);
  h.TrainTo("a", 1);
}

// For longer than what keeps it from growing.
void TrainOn(OffloadHarness& h, uint64_t step, std::vector<std::string> beating) {
  beating.insert(beating.end(), {"worker-0", "store-0"});
  for (uint64_t i = 0; i < 4; ++i) {
    h.AdvanceBeating(absl::Seconds(10), beating);
    h.TrainTo("a", step + i);
  }
}

TEST(FewerWorkers, AJobDoesNotGrowIntoWorkersThatOneWhichRecoversWaitsFor) {
  OffloadHarness h;
  ASSERT_NO_FATAL_FAILURE(StartOnOne(h));
  h.Join("worker-1");
  h.Join("worker-2");
  h.SubmitJob(Harness::SavingSpec("b", 2));
  for (const char* name : {"worker-1", "worker-2"}) h.Work(name, 0, "loading");
  for (const char* name : {"worker-1", "worker-2"}) h.Arrive(name, "start");
  ASSERT_EQ(h.Status("b").state(), v1::JOB_STATE_RUNNING) << h.Status("b").reason();
  h.Exit("worker-2", 0, 9);
  h.Idle("worker-1");
  ASSERT_EQ(h.Status("b").state(), v1::JOB_STATE_RECOVERING);
  TrainOn(h, 2, {"worker-1"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").generation(), 1);
  h.Forget("worker-2");
  h.Join("worker-2");
  EXPECT_EQ(h.member("worker-1").assign->run_id(), "b-1");
  EXPECT_EQ(h.Status("b").generation(), 2);
}

TEST(FewerWorkers, AJobDoesNotGrowIntoWorkersThatTheFirstInTheQueueWaitsFor) {
  OffloadHarness h;
  ASSERT_NO_FATAL_FAILURE(StartOnOne(h));
  h.Join("worker-1");
  h.SubmitJob(Harness::Spec("b", 2));
  TrainOn(h, 2, {"worker-1"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").generation(), 1);
  EXPECT_EQ(h.Status("b").state(), v1::JOB_STATE_QUEUED);
  h.CancelJob("b");
  h.TrainTo("a", 6);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
}

TEST(FewerWorkers, AMeshGrowsByWholeReplicas) {
  OffloadHarness h;
  h.JoinMany(2);
  h.StartStore("store-0");
  v1::JobSpec spec = OffloadHarness::OffloadSpec("a", 4, 20, 1);
  spec.mutable_resources()->set_min_workers(2);
  spec.mutable_parallel()->set_pipeline(2);
  h.SubmitJob(spec);
  h.AdvanceBeating(kGrace + absl::Seconds(1), {"worker-0", "worker-1", "store-0"});
  h.Pump();
  ASSERT_EQ(h.member("worker-0").assign->world_size(), 2) << h.Status("a").reason();
  h.BeginRanks("a");
  h.TrainTo("a", 1);
  h.Join("worker-2");
  const std::vector<std::string> beating = {"worker-1", "worker-2"};
  TrainOn(h, 2, beating);
  EXPECT_EQ(h.Status("a").generation(), 1) << "one worker is half a replica";
  h.Join("worker-3");
  h.TrainTo("a", 6);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.LetGo({"worker-0", "worker-1"});
  h.Pump();
  ASSERT_TRUE(h.member("worker-3").assign.has_value()) << h.Status("a").reason();
  EXPECT_EQ(h.member("worker-3").assign->world_size(), 4);
  EXPECT_EQ(h.member("worker-3").assign->mesh().data(), 2);
}

TEST(FewerWorkers, AJobGrowsOnlyWhereTheIdleWorkerCanHoldARank) {
  OffloadHarness h;
  const auto plan = PlanShards(ElasticOffload());
  ASSERT_TRUE(plan.ok()) << plan.status();
  h.Join("a-small-one", "host-b", 1000);
  ASSERT_NO_FATAL_FAILURE(StartOnOne(h, *plan));
  TrainOn(h, 2, {"a-small-one"});
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RUNNING) << h.Status("a").reason();
  EXPECT_EQ(h.Status("a").generation(), 1);
  h.Join("worker-1", "host-c");
  h.TrainTo("a", 6);
  EXPECT_EQ(h.Status("a").state(), v1::JOB_STATE_RECOVERING);
  h.LetGo({"worker-0"});
  h.Pump();
  EXPECT_EQ(h.member("worker-1").assign->world_size(), 2);
}

}  // namespace
}  // namespace zeroshard::coordinator
