// Which jobs are taken, placed or kept waiting, by the memory of workers.
#include "coordinator/core/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "common/plan/planner.h"
#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kGB = 1'000'000'000;

std::vector<RankNeed> Needs(int ranks, uint64_t bytes, uint64_t copy = 0) {
  std::vector<RankNeed> needs(static_cast<size_t>(ranks));
  for (size_t r = 0; r < needs.size(); ++r) {
    needs[r].plan.set_rank(static_cast<uint32_t>(r));
    needs[r].plan.set_parameter_bytes(bytes);
    needs[r].copy = copy;
  }
  return needs;
}

WorkerRoom Cpu(const std::string& host, uint64_t memory, uint64_t limit = 0) {
  return {"worker", host, true, limit == 0 ? memory : limit, memory};
}
WorkerRoom Gpu(const std::string& host, uint64_t device, uint64_t memory) {
  return {"worker", host, false, device, memory};
}

TEST(PickWorkers, CpuWorkersOfAHostShareItsMemory) {
  const auto needs = Needs(2, 6 * kGB);
  EXPECT_THAT(PickWorkers(needs, {Cpu("a", 16 * kGB), Cpu("a", 16 * kGB)}), ElementsAre(0, 1));
  EXPECT_THAT(PickWorkers(needs, {Cpu("a", 8 * kGB), Cpu("a", 8 * kGB)}), IsEmpty());
  EXPECT_THAT(PickWorkers(needs, {Cpu("a", 8 * kGB), Cpu("b", 8 * kGB)}), ElementsAre(0, 1));
  // Who has no room any more is passed over.
  EXPECT_THAT(PickWorkers(needs, {Cpu("a", 8 * kGB), Cpu("a", 8 * kGB), Cpu("b", 8 * kGB)}),
              ElementsAre(0, 2));
  // Nothing is known of their memory.
  EXPECT_THAT(PickWorkers(needs, {Cpu("a", 0), Cpu("a", 0)}), ElementsAre(0, 1));
}

TEST(PickWorkers, AGpuIsItsWorkersAloneAndCopiesAreInHostMemory) {
  EXPECT_THAT(
      PickWorkers(Needs(2, 60 * kGB), {Gpu("a", 80 * kGB, 64 * kGB), Gpu("a", 80 * kGB, 64 * kGB)}),
      ElementsAre(0, 1));
  EXPECT_THAT(PickWorkers(Needs(2, 90 * kGB),
                          {Gpu("a", 80 * kGB, 640 * kGB), Gpu("a", 80 * kGB, 640 * kGB)}),
              IsEmpty());
  EXPECT_THAT(PickWorkers(Needs(2, 60 * kGB, 40 * kGB),
                          {Gpu("a", 80 * kGB, 64 * kGB), Gpu("a", 80 * kGB, 64 * kGB)}),
              IsEmpty());
}

TEST(PickWorkers, AWorkersOwnLimitHolds) {
  EXPECT_THAT(PickWorkers(Needs(1, 6 * kGB), {Cpu("a", 64 * kGB, 4 * kGB), Cpu("a", 64 * kGB)}),
              ElementsAre(1));
  // The copy is the host's memory too where that is the device.
  EXPECT_THAT(PickWorkers(Needs(1, 6 * kGB, 3 * kGB), {Cpu("a", 64 * kGB, 8 * kGB)}), IsEmpty());
}

TEST(CannotHold, IsSaidOnlyWhereNoChoiceCould) {
  const auto needs = Needs(2, 6 * kGB);
  EXPECT_TRUE(CannotHold(needs, {Cpu("a", 8 * kGB), Cpu("a", 8 * kGB)}));
  EXPECT_TRUE(CannotHold(needs, {Cpu("a", 4 * kGB), Cpu("b", 64 * kGB)}));
  EXPECT_FALSE(CannotHold(needs, {Cpu("a", 4 * kGB), Cpu("b", 64 * kGB), Cpu("b", 64 * kGB)}));
  EXPECT_FALSE(CannotHold(needs, {Cpu("a", 4 * kGB)})) << "another may come";
  EXPECT_FALSE(CannotHold(needs, {}));
  EXPECT_FALSE(CannotHold({}, {Cpu("a", 1), Cpu("a", 1)}));
  EXPECT_TRUE(CannotHold(needs, {Gpu("a", 80 * kGB, 0), Gpu("a", 4 * kGB, 0)}));
}

TEST(DescribeShortage, NamesTheLargestRankByKindAndWhatIsThere) {
  auto needs = Needs(2, 2 * kGB, kGB);
  needs[1].plan.set_optimizer_bytes(4 * kGB);
  EXPECT_EQ(DescribeShortage(needs, {Cpu("a", 4 * kGB), Cpu("a", 4 * kGB)}),
            "of 2 ranks rank 1 takes 7.0 GB (parameters 2.0 GB, optimizer 4.0 GB, a copy to write "
            "checkpoints from 1.0 GB), and a has 4.0 GB for its 2 workers");
  EXPECT_THAT(DescribeShortage(needs, {Gpu("a", 3 * kGB, 64 * kGB)}), HasSubstr("(worker 3.0 GB)"));
}

// A GPT-2 of 12 * 4 * 512^2 and its embedding, 12.6 + 26.2 M parameters in bf16.
v1::JobSpec ModelSpec(uint32_t workers, uint32_t stage) {
  v1::JobSpec spec = Harness::Spec("job", workers);
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_architecture("gpt2");
  model.set_hidden_size(512);
  model.set_layers(4);
  model.set_heads(8);
  model.set_sequence_length(64);
  model.set_vocab_size(51200);
  spec.mutable_bf16()->set_enabled(true);
  spec.set_train_micro_batch_size_per_gpu(1);
  spec.set_train_batch_size(8);
  v1::ZeroSpec& zero = *spec.mutable_zero_optimization();
  zero.set_stage(stage);
  zero.set_stage3_param_persistence_threshold(0);
  return spec;
}

std::vector<v1::ShardPlan> PlanOf(const v1::JobSpec& spec) { return *PlanShards(spec); }

uint64_t Largest(const v1::JobSpec& spec) {
  uint64_t most = 0;
  for (const RankNeed& need : NeedsOf(spec, PlanOf(spec))) most = std::max(most, need.Device());
  return most;
}

TEST(SmallestChange, IsTheFewestKeysThatFit) {
  const auto no_stores = [](const v1::JobSpec&) { return false; };
  const v1::JobSpec spec = ModelSpec(2, 0);
  const auto with_stage = [&](uint32_t stage) { return Largest(ModelSpec(2, stage)); };
  for (uint32_t stage = 1; stage <= 3; ++stage) {
    ASSERT_LT(with_stage(stage), with_stage(stage - 1));
    const std::vector<WorkerRoom> rooms(2, Gpu("a", with_stage(stage), 0));
    EXPECT_EQ(SmallestChange(spec, rooms, no_stores),
              absl::StrCat("the smallest change that fits: --set zero_optimization.stage=", stage));
  }
  // Twice the workers do at stage 3 what two do not.
  const std::vector<WorkerRoom> four(4, Gpu("a", Largest(ModelSpec(4, 3)), 0));
  EXPECT_EQ(SmallestChange(spec, four, no_stores),
            "the smallest change that fits: --set zero_optimization.stage=3 --set "
            "resources.workers=4");
}

TEST(SmallestChange, OffloadsWhereStoresHoldIt) {
  v1::JobSpec spec = ModelSpec(1, 1);
  v1::JobSpec offloaded = spec;
  offloaded.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("cpu");
  const std::vector<WorkerRoom> rooms = {Gpu("a", Largest(offloaded), 0)};
  const auto stores = [](bool hold) { return [hold](const v1::JobSpec&) { return hold; }; };
  EXPECT_EQ(SmallestChange(spec, rooms, stores(true)),
            "the smallest change that fits: --set "
            "zero_optimization.offload_optimizer.device=cpu");
  // Without stores: more workers of that size.
  const std::string more = SmallestChange(spec, rooms, stores(false));
  EXPECT_THAT(more, AllOf(HasSubstr("no change of the job fits the workers that are here"),
                          HasSubstr("--set zero_optimization.stage=3")));
  EXPECT_THAT(SmallestChange(Harness::Spec("job", 1), rooms, stores(true)), IsEmpty());
}

// --- the core ------------------------------------------------------------------------------------

class AdmissionTest : public testing::Test {
 protected:
  void JoinGpu(const std::string& name, uint64_t memory) {
    h_.Join(name, absl::StrCat("host-of-", name), 64 * kGB);
    FakeMember member = h_.member(name);
    member.hello.set_device("cuda");
    member.hello.set_device_memory_bytes(memory);
    h_.Disconnect(name);
    h_.member(name).hello = member.hello;
    h_.Connect(name);
  }
  RequestId Submit1(const v1::JobSpec& spec, bool force = false) {
    const RequestId id = h_.NewRequest();
    Submit event{id, spec, PlanOf(spec)};
    event.force = force;
    h_.Step(event);
    return id;
  }
  Harness h_;
};

TEST_F(AdmissionTest, AJobThatNoneOfTheWorkersCouldHoldIsRefusedWithThePlanThatWould) {
  const v1::JobSpec spec = ModelSpec(2, 0);
  const uint64_t stage3 = Largest(ModelSpec(2, 3));
  JoinGpu("worker-0", stage3);
  JoinGpu("worker-1", stage3);
  const absl::Status status = h_.Answer(Submit1(spec)).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("job job does not fit the memory of the workers"), HasSubstr("rank 0 takes"),
            HasSubstr("optimizer"), HasSubstr("host-of-worker-0"),
            HasSubstr("the smallest change that fits: --set zero_optimization.stage=3"),
            HasSubstr("--force")));
  EXPECT_TRUE(h_.core().runs().empty());
  // What it says is true.
  Submit1(ModelSpec(2, 3));
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_PLACING);
}

TEST_F(AdmissionTest, WithoutEnoughWorkersNothingIsKnownAndTheJobWaits) {
  Submit1(ModelSpec(2, 0));
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(h_.Status("job").reason(), HasSubstr("needs 2 workers, 0 idle of 0"));
  // Workers that are too small: it stays, and says that.
  JoinGpu("worker-0", 1000);
  JoinGpu("worker-1", 1000);
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_QUEUED);
  EXPECT_THAT(h_.Status("job").reason(),
              AllOf(HasSubstr("whose memory does not hold it"), HasSubstr("worker-0 1.0 kB")));
  // Others come.
  JoinGpu("worker-2", 80 * kGB);
  JoinGpu("worker-3", 80 * kGB);
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_PLACING);
  const v1::JobStatus placed = h_.Status("job");
  for (const v1::RankStatus& rank : placed.ranks()) {
    EXPECT_THAT(rank.member(), testing::AnyOf("worker-2", "worker-3"));
  }
}

TEST_F(AdmissionTest, AForcedJobWaitsAndHoldsUpNobody) {
  JoinGpu("worker-0", 1000);
  const RequestId id = Submit1(ModelSpec(1, 0), /*force=*/true);
  EXPECT_TRUE(h_.Answer(id).status.ok());
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_QUEUED);
  h_.SubmitJob(Harness::Spec("small", 1));
  EXPECT_EQ(h_.Status("small").state(), v1::JOB_STATE_PLACING);
  // Large enough, but there are only as many as are busy: then it is first in the queue.
  JoinGpu("worker-1", 80 * kGB);
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_PLACING);
}

TEST_F(AdmissionTest, HostsOfCpuWorkersAndCheckpointsCount) {
  v1::JobSpec spec = ModelSpec(2, 1);
  spec.mutable_checkpoint()->set_dir("/ckpt");
  const std::vector<RankNeed> needs = NeedsOf(spec, PlanOf(spec));
  // 12 bytes of what a rank owns.
  EXPECT_EQ(needs[0].copy, 12 * needs[0].plan.owned_parameters());
  const uint64_t both = needs[0].Device() + needs[0].copy + needs[1].Device() + needs[1].copy;
  h_.Join("worker-0", "host-a", both - 1);
  h_.Join("worker-1", "host-a", both - 1);
  const absl::Status status = h_.Answer(Submit1(spec)).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("a copy to write checkpoints from"), HasSubstr("host-a has"),
                    HasSubstr("for its 2 workers")));
  spec.mutable_checkpoint()->clear_dir();
  Submit1(spec);
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_PLACING);
}

TEST_F(AdmissionTest, WhatRanksMeasureIsShownBesideTheirPlan) {
  h_.Join("worker-0");
  Submit1(ModelSpec(1, 0));
  const v1::JobStatus before = h_.Status("job");
  ASSERT_EQ(before.ranks_size(), 1);
  EXPECT_FALSE(before.ranks(0).has_usage());
  v1::RankUsage usage;
  usage.set_parameter_bytes(77);
  usage.set_step(3);
  MemberSaid said{h_.member("worker-0").session, {}};
  v1::Heartbeat& beat = *said.message.mutable_heartbeat();
  *beat.mutable_running() = h_.member("worker-0").Fence();
  beat.mutable_progress()->set_step(3);
  *beat.mutable_progress()->mutable_usage() = usage;
  h_.Step(said);
  // Also when nothing but that is new.
  beat.mutable_progress()->mutable_usage()->set_traffic_bytes(5);
  h_.Step(said);
  const v1::JobStatus status = h_.Status("job");
  EXPECT_EQ(status.ranks(0).usage().parameter_bytes(), 77u);
  EXPECT_EQ(status.ranks(0).usage().traffic_bytes(), 5u);
  EXPECT_FALSE(status.ranks(0).progress().has_usage());
  // The last word stays when the job is over.
  ReportEnd end{h_.NewRequest(), {}};
  *end.body.mutable_fence() = h_.member("worker-0").Fence();
  end.body.set_error_code("INTERNAL");
  end.body.mutable_usage()->set_parameter_bytes(78);
  h_.Step(end);
  h_.Advance(absl::Seconds(5));
  EXPECT_EQ(h_.Status("job").state(), v1::JOB_STATE_FAILED);
  ASSERT_EQ(h_.Status("job").ranks_size(), 1);
  EXPECT_EQ(h_.Status("job").ranks(0).usage().parameter_bytes(), 78u);
}

}  // namespace
}  // namespace zeroshard::coordinator
