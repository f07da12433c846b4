// The coordinator's series: which there are when, and what they say.
#include "coordinator/service/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/spec/job_spec.h"
#include "tests/coordinator/service/service_fixture.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kNow = absl::Seconds(1000);

v1::JobSpec Normal(uint32_t workers, int stage, bool offload = false) {
  v1::JobSpec spec = Spec(workers, 40);
  spec.mutable_zero_optimization()->set_stage(static_cast<uint32_t>(stage));
  // So that stage 3 keeps nothing whole.
  spec.mutable_zero_optimization()->set_stage3_param_persistence_threshold(0);
  spec.mutable_zero_optimization()->set_stage3_max_reuse_distance(0);
  if (offload) spec.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("cpu");
  const absl::Status status = NormaliseJobSpec(&spec);
  EXPECT_TRUE(status.ok()) << status;
  return spec;
}

class MetricsTest : public ::testing::Test {
 protected:
  std::string Text() {
    std::vector<prometheus::MetricFamily> families = registry_.Collect();
    for (prometheus::MetricFamily& family : metrics_.plans()->Collect()) {
      families.push_back(std::move(family));
    }
    return prometheus::TextSerializer().Serialize(families);
  }
  // Of the samples whose line begins with `prefix` and has `part`.
  double Sum(const std::string& prefix, const std::string& part = "") {
    double sum = 0;
    for (const absl::string_view line : absl::StrSplit(Text(), '\n')) {
      double value = 0;
      if (!absl::StartsWith(line, prefix) || !absl::StrContains(line, part)) continue;
      EXPECT_TRUE(absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) << line;
      sum += value;
    }
    return sum;
  }
  void Change(const std::string& job, v1::JobState state, uint32_t ranks = 0) {
    metrics_.Apply(JobChanges{job, state, ranks}, kNow);
  }

  prometheus::Registry registry_;
  Metrics metrics_{&registry_};
};

TEST_F(MetricsTest, WithoutAJobTheStatesAndEndsAreThereAtZero) {
  const std::string text = Text();
  for (const char* state : {"queued", "placing", "running", "recovering"}) {
    EXPECT_THAT(text, HasSubstr(absl::StrCat("\nzeroshard_jobs{state=\"", state, "\"} 0\n")));
  }
  for (const char* state : {"completed", "failed", "cancelled"}) {
    EXPECT_THAT(text,
                HasSubstr(absl::StrCat("\nzeroshard_jobs_ended_total{state=\"", state, "\"} 0\n")));
  }
  EXPECT_THAT(text, Not(HasSubstr("job=")));
}

TEST_F(MetricsTest, AJobIsCountedInTheStateThatItIsInAndThenByHowItEnded) {
  metrics_.Apply(JobAppears{"a", Normal(4, 3)});
  metrics_.Apply(JobAppears{"b", Normal(1, 0)});
  Change("a", v1::JOB_STATE_QUEUED);
  Change("b", v1::JOB_STATE_QUEUED);
  EXPECT_EQ(Sum("zeroshard_jobs{state=\"queued\"}"), 2);
  EXPECT_THAT(Text(), AllOf(HasSubstr("zeroshard_job_steps{job=\"a\"} 40\n"),
                            HasSubstr("zeroshard_job_workers{job=\"a\"} 0\n"),
                            HasSubstr("zeroshard_job_workers_wanted{job=\"a\"} 4\n"),
                            HasSubstr("zeroshard_job_generations_total{job=\"a\"} 0\n"),
                            HasSubstr("zeroshard_coordinator_barrier_missing{job=\"a\"} 0\n")));
  metrics_.Apply(Measure{MetricKind::kGeneration, "a", 1});
  Change("a", v1::JOB_STATE_PLACING, 4);
  EXPECT_EQ(Sum("zeroshard_jobs{state=\"placing\"}"), 1);
  metrics_.SetBarriers({{"a", 3}});
  EXPECT_THAT(Text(), AllOf(HasSubstr("zeroshard_job_workers{job=\"a\"} 4\n"),
                            HasSubstr("zeroshard_job_generations_total{job=\"a\"} 1\n"),
                            HasSubstr("zeroshard_coordinator_barrier_missing{job=\"a\"} 3\n"),
                            HasSubstr("zeroshard_coordinator_barrier_missing{job=\"b\"} 0\n")));
  metrics_.SetBarriers({});
  Change("a", v1::JOB_STATE_RUNNING, 4);
  Change("a", v1::JOB_STATE_RECOVERING);
  EXPECT_THAT(Text(), AllOf(HasSubstr("zeroshard_jobs{state=\"recovering\"} 1\n"),
                            HasSubstr("zeroshard_job_workers{job=\"a\"} 0\n"),
                            HasSubstr("zeroshard_coordinator_barrier_missing{job=\"a\"} 0\n")));
  Change("a", v1::JOB_STATE_FAILED);
  Change("b", v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(Sum("zeroshard_jobs{"), 0);
  EXPECT_EQ(Sum("zeroshard_jobs_ended_total{state=\"failed\"}"), 1);
  EXPECT_EQ(Sum("zeroshard_jobs_ended_total{state=\"cancelled\"}"), 1);
  EXPECT_EQ(Sum("zeroshard_jobs_ended_total{state=\"completed\"}"), 0);
  EXPECT_THAT(Text(), Not(HasSubstr("job=")));
}

TEST_F(MetricsTest, ThePlanOfEachRankIsThatOfTheShardPlan) {
  for (const bool offload : {false, true}) {
    for (int stage = 0; stage <= 3; ++stage) {
      if (offload && stage == 0) continue;
      const v1::JobSpec spec = Normal(2, stage, offload);
      const std::string job = absl::StrCat("s", stage, offload);
      metrics_.Apply(JobAppears{job, spec});
      Change(job, v1::JOB_STATE_QUEUED);
      EXPECT_THAT(Text(), Not(HasSubstr("zeroshard_job_plan")));  // it has no ranks yet
      Change(job, v1::JOB_STATE_PLACING, 2);
      const auto plans = PlanShards(spec);
      ASSERT_TRUE(plans.ok());
      for (const v1::ShardPlan& plan : *plans) {
        const std::string of_rank =
            absl::StrCat("{job=\"", job, "\",rank=\"", plan.rank(), "\",stage=\"", stage, "\",");
        const std::string memory = "zeroshard_job_plan_memory_bytes" + of_rank;
        EXPECT_EQ(Sum(memory + "kind=\"parameters\"}"),
                  static_cast<double>(plan.parameter_bytes()));
        EXPECT_EQ(Sum(memory + "kind=\"gradients\"}"), static_cast<double>(plan.gradient_bytes()));
        EXPECT_EQ(Sum(memory + "kind=\"optimizer\"}"), static_cast<double>(plan.optimizer_bytes()));
        EXPECT_EQ(Sum(memory + "kind=\"activations\"}"),
                  static_cast<double>(plan.activation_bytes()));
        const std::string traffic = "zeroshard_job_plan_traffic_bytes" + of_rank;
        EXPECT_EQ(Sum(traffic), static_cast<double>(plan.traffic_bytes_per_step()));
        EXPECT_GT(Sum(traffic, "op=\"reduce_scatter\""), 0);
        // Stage 3 alone gathers parameters as it goes.
        EXPECT_EQ(Sum(traffic, "op=\"all_gather\",phase=\"forward\"") > 0, stage == 3);
        const std::string offloaded = "zeroshard_job_plan_offload_bytes" + of_rank;
        EXPECT_EQ(Sum(offloaded + "direction=\"push\"}"),
                  static_cast<double>(plan.push_bytes_per_step()));
        EXPECT_EQ(Sum(offloaded + "direction=\"pull\"}"),
                  static_cast<double>(plan.pull_bytes_per_step()));
        EXPECT_EQ(plan.push_bytes_per_step() > 0, offload);
      }
      Change(job, v1::JOB_STATE_COMPLETED);
      EXPECT_THAT(Text(), Not(HasSubstr("zeroshard_job_plan")));
    }
  }
}

TEST_F(MetricsTest, WhatIsNotFiniteIsNotExported) {
  metrics_.Apply(JobAppears{"a", Normal(1, 0)});
  v1::StepRecord record;
  for (const double loss : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    record.set_step(record.step() + 1);
    record.set_loss(loss);
    record.set_eval_loss(loss);
    metrics_.SetSteps("a", {record});
  }
  EXPECT_THAT(Text(), AllOf(HasSubstr("zeroshard_job_committed_step{job=\"a\"} 2\n"),
                            Not(HasSubstr("zeroshard_job_loss{")),
                            Not(HasSubstr("zeroshard_job_eval_loss{"))));
  record.set_loss(2.5);
  record.set_eval_loss(3.5);
  metrics_.SetSteps("a", {record});
  record.set_loss(std::nan(""));
  record.set_eval_loss(std::nan(""));
  metrics_.SetSteps("a", {record});
  EXPECT_THAT(Text(), AllOf(HasSubstr("zeroshard_job_loss{job=\"a\"} 2.5\n"),
                            HasSubstr("zeroshard_job_eval_loss{job=\"a\"} 3.5\n"),
                            Not(HasSubstr("} Nan")), Not(HasSubstr("} +Inf"))));
}

// Names and labels of the samples, without their values.
std::set<std::string> Series(const std::string& text) {
  std::set<std::string> series;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    if (line.front() != '#') series.emplace(line.substr(0, line.rfind(' ')));
  }
  return series;
}

TEST_F(ServiceTest, TwoHundredShortJobsLeaveNoSeriesBehind) {
  Coordinator coordinator(folder.path());
  w0.Connect(coordinator);
  w0.BeatIdle();
  const std::set<std::string> before = Series(coordinator.Metrics());
  std::set<std::string> meanwhile;
  for (int i = 0; i < 200; ++i) {
    const bool cancelled = i % 4 == 3;
    v1::JobSpec spec = Spec(cancelled ? 2 : 1, 1);  // of two workers there is one
    spec.set_name(absl::StrCat("short-", i));
    v1::SubmitResponse response;
    const grpc::Status submitted = coordinator.Submit(spec, &response);
    ASSERT_TRUE(submitted.ok()) << submitted.error_message();
    if (cancelled) {
      grpc::ClientContext context;
      SetDeadline(&context);
      v1::CancelRequest request;
      request.set_job(spec.name());
      v1::JobStatus status;
      ASSERT_TRUE(coordinator.client->Cancel(&context, request, &status).ok());
      continue;
    }
    w0.TakeAssignment();
    ASSERT_TRUE(w0.Barrier("start").ok());
    ASSERT_TRUE(w0.Steps(1, 1, &committed).ok());
    if (i == 100) meanwhile = Series(coordinator.Metrics());
    ASSERT_TRUE(w0.End(true).ok());
    w0.BeatIdle();
  }
  EXPECT_EQ(coordinator.WatchToTheEnd("short-199").first.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_GT(meanwhile.size(), before.size() + 20);
  EXPECT_EQ(Series(coordinator.Metrics()), before);
  EXPECT_THAT(coordinator.Metrics(),
              AllOf(HasSubstr("zeroshard_jobs_ended_total{state=\"completed\"} 150\n"),
                    HasSubstr("zeroshard_jobs_ended_total{state=\"cancelled\"} 50\n"),
                    HasSubstr("zeroshard_jobs_ended_total{state=\"failed\"} 0\n")));
}

void Await(Coordinator& coordinator, const std::string& sample) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!absl::StrContains(coordinator.Metrics(), sample)) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << sample;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

TEST_F(ServiceTest, AfterARestartAJobsSeriesSayHowFarItIs) {
  auto first = std::make_unique<Coordinator>(folder.path());
  StartDemo(*first, 4);
  ASSERT_TRUE(w0.Steps(1, 2, &committed).ok());
  first.reset();
  Coordinator second(folder.path());
  Await(second, "zeroshard_job_committed_step{job=\"demo\"} 2\n");
  Await(second, "zeroshard_jobs{state=\"running\"} 1\n");
  EXPECT_THAT(second.Metrics(),
              AllOf(HasSubstr("zeroshard_job_workers{job=\"demo\"} 2\n"),
                    HasSubstr("zeroshard_job_steps_lost_total{job=\"demo\"} 0\n"),
                    HasSubstr("zeroshard_job_plan_memory_bytes{job=\"demo\",rank=\"1\"")));
}

TEST_F(ServiceTest, ABarrierSaysHowManyRanksItWaitsForAndAGenerationHowManyItHas) {
  Coordinator coordinator(folder.path());
  w0.Connect(coordinator);
  w1.Connect(coordinator);
  v1::SubmitResponse response;
  ASSERT_TRUE(coordinator.Submit(Spec(2, 3), &response).ok());
  w0.TakeAssignment();
  w1.TakeAssignment();
  EXPECT_THAT(coordinator.Metrics(),
              AllOf(HasSubstr("zeroshard_job_workers{job=\"demo\"} 2\n"),
                    HasSubstr("zeroshard_job_generations_total{job=\"demo\"} 1\n"),
                    HasSubstr("zeroshard_jobs{state=\"placing\"} 1\n"),
                    HasSubstr("zeroshard_job_plan_memory_bytes{job=\"demo\",rank=\"1\"")));
  std::thread early([&] { EXPECT_TRUE(w0.Barrier("start").ok()); });
  Await(coordinator, "zeroshard_coordinator_barrier_missing{job=\"demo\"} 1\n");
  EXPECT_TRUE(w1.Barrier("start").ok());
  early.join();
  Await(coordinator, "zeroshard_coordinator_barrier_missing{job=\"demo\"} 0\n");
  EXPECT_THAT(coordinator.Metrics(), HasSubstr("zeroshard_jobs{state=\"running\"} 1\n"));
}

}  // namespace
}  // namespace zeroshard::coordinator
