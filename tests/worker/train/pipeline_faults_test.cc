// Ranks of a mesh that are gone, numbers that are not, and jobs that a pipeline refuses.
#include <limits>
#include <string>
#include <vector>

#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/mesh_harness.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// Whoever it is, in whatever it does: nobody waits for a deadline (a minute in the harness).
TEST(PipelineFaultsTest, ARankThatIsGoneEndsTheWaitsOfAll) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = MakeSpec(TinyGpt2(), {"zero_optimization.stage=3", "steps=4"});
  for (int gone = 0; gone < 4; ++gone) {
    for (const StepPhase phase : {StepPhase::kForward, StepPhase::kBackward}) {
      MeshRun run{.shape = {.pipeline = 2, .data = 2}};
      run.dies = [&](int rank, uint64_t step, StepPhase now, const std::string&) {
        return rank == gone && step == 2 && now == phase;
      };
      const absl::Time start = absl::Now();
      const std::vector<RankResult> results = TrainMesh(spec, run, data);
      EXPECT_LT(absl::Now() - start, absl::Seconds(30));
      for (int rank = 0; rank < 4; ++rank) {
        const RankResult& result = results[static_cast<size_t>(rank)];
        EXPECT_FALSE(result.status.ok()) << "rank " << rank << " while " << gone << " was gone";
        EXPECT_EQ(result.records.size(), 1u);
      }
    }
  }
}

// A NaN in the last stage's weights: every rank names the loss, its rank and its samples.
TEST(PipelineFaultsTest, ANanEndsTheJobWithOneMessageOnAllRanks) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = MakeSpec(TinyLlama(), {"zero_optimization.stage=2"});
  MeshRun run{.shape = {.pipeline = 2, .data = 2}};
  run.prepare = [](int, Trainer* trainer) {
    std::vector<float> values(32, 1.0f);
    values[3] = std::numeric_limits<float>::quiet_NaN();
    return trainer->SetTensor("norm_f.weight", values);
  };
  const std::vector<RankResult> results = TrainMesh(spec, run, data);
  for (const RankResult& result : results) {
    EXPECT_TRUE(IsNonFinite(result.status)) << result.status;
    EXPECT_EQ(result.status.message(), results[0].status.message());
    // Rank 2 is the last stage's first data rank; its first micro-batch is number 0.
    EXPECT_THAT(std::string(result.status.message()),
                AllOf(HasSubstr("step 1: non-finite loss"), HasSubstr("on rank 2 in micro-batch 0"),
                      HasSubstr("samples 0 to 1")));
  }
}

// An overflow on one stage is skipped by all.
TEST(PipelineFaultsTest, AnOverflowIsSkippedOnAllStages) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec =
      MakeSpec(TinyGpt2(), {"fp16={enabled: true, initial_scale_power: 32}", "deterministic=true",
                            "zero_optimization.stage=2", "steps=8"});
  const std::vector<RankResult> alone = TrainJob(spec, {.world = 2}, data);
  ASSERT_TRUE(alone[0].status.ok()) << alone[0].status;
  EXPECT_TRUE(alone[0].records.front().skipped()) << "this scale overflows nowhere";
  for (const RankResult& result : TrainMesh(spec, {.shape = {.pipeline = 2, .data = 2}}, data)) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    ASSERT_EQ(result.records.size(), alone[0].records.size());
    for (size_t i = 0; i < result.records.size(); ++i) {
      EXPECT_EQ(result.records[i].skipped(), alone[0].records[i].skipped()) << i;
      EXPECT_EQ(result.records[i].loss_scale(), alone[0].records[i].loss_scale()) << i;
    }
    EXPECT_EQ(result.digest, alone[0].digest);
  }
}

absl::Status StatusOf(const std::string& job, const MeshRun& run,
                      const std::string& more = "steps=1") {
  const MemoryDataset data = TinyData();
  return TrainMesh(MakeSpec(TinyGpt2(), {job, more}), run, data)[0].status;
}

TEST(PipelineFaultsTest, WhatDoesNotFitIsRefusedWithTheNumbers) {
  const absl::Status few = StatusOf("model.layers=1", {.shape = {.pipeline = 4}});
  EXPECT_EQ(few.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(few.message()), AllOf(HasSubstr("parallel.pipeline"), HasSubstr("3")));
  const absl::Status runs = StatusOf("steps=1", {.shape = {.pipeline = 2}, .virtual_stages = 0});
  EXPECT_EQ(runs.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(runs.message()), HasSubstr("0 virtual stages"));
  const absl::Status table = StatusOf("model.trainable=['wpe.weight']", {.shape = {.pipeline = 2}},
                                      "bf16={enabled: true, stochastic_rounding: true}");
  EXPECT_EQ(table.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(table.message()), HasSubstr("wte.weight"));
}

}  // namespace
}  // namespace zeroshard
