// What a rank of a pipeline holds and sends equals what the planner predicts, to the byte; and the
// plan what arithmetic says.
#include <algorithm>

#include "common/plan/activation_table.h"
#include "tests/worker/train/mesh_harness.h"
#include "worker/train/pipeline_rank.h"

namespace zeroshard {
namespace {

// A rank's plan, from the specification alone.
struct Planned {
  ModelTable model;
  PipelineStages stages;
  ZeroOptions options;
  StageModel stage;
  RankSchedule schedule;
  ZeroPolicy policy;

  Planned(const v1::JobSpec& spec, const MeshRun& run, int rank)
      : model(*MakeModelTable(spec.model())),
        stages(*CutStages(UnitCosts(model.config, spec.activation_checkpointing()),
                          run.shape.pipeline, run.virtual_stages)),
        options(MakeZeroOptions(spec, run.shape.data)) {
    options.full_gradients = run.full_gradients;
    stage = MakeStageModel(model, stages, rank);
    schedule =
        (*MakePipelineSchedule({.stages = run.shape.pipeline,
                                .virtual_stages = run.virtual_stages,
                                .micro_batches = RoundsOf(options)}))[static_cast<size_t>(rank)];
    policy = MakeStagePolicy(stage, options, schedule);
  }
};

void ExpectPlanHolds(const char* model, const MeshRun& run,
                     const std::vector<std::string>& overrides) {
  const v1::JobSpec spec = MakeSpec(model, overrides);
  const MemoryDataset data(ChainTokens(24 * 40 + 1, 61), 24);
  const auto results = TrainMesh(spec, run, data);
  for (int rank = 0; rank < run.shape.Ranks(); ++rank) {
    SCOPED_TRACE(absl::StrFormat("rank %d of %d x %d, %d runs; %s", rank, run.shape.pipeline,
                                 run.shape.data, run.virtual_stages, overrides[0]));
    const RankResult& result = results[static_cast<size_t>(rank)];
    ASSERT_TRUE(result.status.ok()) << result.status;
    const MeshPosition at = PositionOf(run.shape, rank);
    const Planned planned(spec, run, at.pipeline);
    const RankPlan plan =
        PlanRank(planned.stage, planned.policy, planned.schedule, at.data, run.shape.Ranks());
    const auto held = [&](MemoryKind kind) {
      return static_cast<uint64_t>(result.memory[static_cast<int>(kind)]);
    };
    EXPECT_EQ(held(MemoryKind::kParameters), plan.parameters);
    EXPECT_EQ(held(MemoryKind::kGradients), plan.gradients);
    EXPECT_EQ(held(MemoryKind::kOptimizer), plan.optimizer);
    EXPECT_EQ(held(MemoryKind::kActivations), plan.activations);
    EXPECT_EQ(result.last_step.sent, plan.StepBytes());
    for (int op = 0; op < kCollectiveOps; ++op) {
      for (int phase = 0; phase < kPhases; ++phase) {
        EXPECT_EQ(result.traffic[op][phase], plan.step[op][phase] * spec.steps())
            << NameOf(static_cast<CollectiveOp>(op)) << " " << NameOf(static_cast<Phase>(phase));
      }
    }
  }
}

TEST(PipelinePlanTest, MemoryAndTrafficOfARunEqualThePlan) {
  const char kLayers[] = "model.layers=4";
  for (const char* model : {TinyGpt2(), TinyLlama()}) {
    for (const MeshRun& run : {MeshRun{.shape = {.pipeline = 2, .data = 2}},
                               MeshRun{.shape = {.pipeline = 2, .data = 2}, .virtual_stages = 2},
                               MeshRun{.shape = {.pipeline = 4}}}) {
      for (const char* stage : {"zero_optimization.stage=0", "zero_optimization.stage=1",
                                "zero_optimization.stage=2", "zero_optimization.stage=3"}) {
        for (const char* more : {"train_batch_size=10", "model.vocab_size=997", "bf16.enabled=true",
                                 "train_batch_size=4"})
          ExpectPlanHolds(model, run, {more, stage, kLayers, "steps=2"});
      }
    }
  }
}

TEST(PipelinePlanTest, KeptUnitsAndFullGradientsCostWhatThePlanSays) {
  const MeshRun run{.shape = {.pipeline = 2, .data = 2}};
  const char kStage3[] = "zero_optimization.stage=3";
  for (const char* more : {"zero_optimization.stage3_max_reuse_distance=1000000000",
                           "zero_optimization.stage3_max_reuse_distance=30000",
                           "zero_optimization.stage3_max_live_parameters=15000",
                           "activation_checkpointing=true", "model.trainable=['blocks.*']"})
    ExpectPlanHolds(TinyGpt2(), run, {more, kStage3, "steps=2", "train_batch_size=12"});
  MeshRun full = run;
  full.full_gradients = true;
  ExpectPlanHolds(TinyGpt2(), full, {"train_batch_size=12", kStage3, "steps=2"});
}

// With a boundless distance a unit is gathered once a step; with no room for units that are kept,
// for every forward and backward.
TEST(PipelinePlanTest, Stage3GathersOnceAStepOrForEveryUse) {
  const MeshRun run{.shape = {.pipeline = 2, .data = 2}};
  const std::vector<std::string> base = {"zero_optimization.stage=3", "train_batch_size=16"};
  const uint64_t rounds = 4;  // 16 samples, 2 a micro-batch, 2 data ranks
  for (const bool kept : {false, true}) {
    std::vector<std::string> overrides = base;
    overrides.push_back(kept ? "zero_optimization.stage3_max_reuse_distance=1000000000"
                             : "zero_optimization.stage3_max_live_parameters=0");
    const v1::JobSpec spec = MakeSpec(TinyLlama(), overrides);
    for (const int rank : {0, 1}) {
      const Planned planned(spec, run, rank);
      uint64_t forward = 0, backward = 0;  // bytes that one gather of all of a rank's units sends
      for (size_t u = 0; u < planned.model.units.size(); ++u) {
        if (!planned.stage.Runs(static_cast<int>(u))) continue;
        const uint64_t bytes =
            static_cast<uint64_t>(ShardLayout::Make(planned.model.units[u].length, 2).shard) * 4;
        forward += bytes;
        if (planned.model.units[u].kind == UnitKind::kBlock) backward += bytes;
      }
      const RankPlan plan = PlanRank(planned.stage, planned.policy, planned.schedule, 0, 4);
      EXPECT_EQ(plan.step[0][0], kept ? forward : rounds * forward);
      EXPECT_EQ(plan.step[0][1], kept ? 0 : rounds * backward);
    }
  }
}

// v = 1: min(m, p - r) micro-batches, of what the rank's units keep.
TEST(PipelinePlanTest, ActivationsAliveAreAsManyAsTheBoundSays) {
  for (const int p : {2, 3, 4}) {
    for (const int m : {1, 2, 3, 9}) {
      const v1::JobSpec spec =
          MakeSpec(TinyGpt2(), {absl::StrFormat("train_batch_size=%d", 2 * m), "model.layers=6"});
      const MeshRun run{.shape = {.pipeline = p}};
      for (int rank = 0; rank < p; ++rank) {
        const Planned planned(spec, run, rank);
        int64_t kept = 0, scratch = 0;
        for (int u = planned.stages.Begin(rank); u < planned.stages.End(rank); ++u) {
          const ActivationTable table = MakeActivationTable(
              planned.model.config, planned.model.units[static_cast<size_t>(u)].kind, 2,
              DType::kF32, false);
          kept += table.kept_bytes;
          scratch = std::max(scratch, table.scratch_bytes);
        }
        // Two for gradients from unit to unit, two for outputs, one for what comes from each side.
        const int64_t boundary = int64_t{2} * 24 * 32 * 4;
        const int64_t boundaries = 4 + (rank > 0) + (rank < p - 1);
        EXPECT_EQ(StageActivationBytes(planned.stage, planned.options, planned.schedule),
                  std::min(m, p - rank) * kept + scratch + boundaries * boundary)
            << "p " << p << " m " << m << " rank " << rank;
        EXPECT_EQ(OpenMicroBatches(planned.schedule), std::min(m, p - rank));
      }
    }
  }
}

// Of each micro-batch every boundary is crossed once each way; the tied table's gradient once a
// step, by what a rank owns of it.
TEST(PipelinePlanTest, TransfersAreOneBoundaryEachWayAndTheTiedTable) {
  const v1::JobSpec spec = MakeSpec(TinyGpt2(), {"zero_optimization.stage=2"});  // 3 micro-batches
  const MeshRun run{.shape = {.pipeline = 3}};
  const uint64_t boundary = 2 * 24 * 32 * 4;
  const uint64_t table = 64 * ((61 * 32 + 63) / 64) * 4;
  for (const int rank : {0, 1, 2}) {
    const Planned planned(spec, run, rank);
    const RankPlan plan = PlanRank(planned.stage, planned.policy, planned.schedule, 0, 3);
    EXPECT_EQ(plan.step[4][0], rank < 2 ? 3 * boundary : 0);
    EXPECT_EQ(plan.step[4][1], rank > 0 ? 3 * boundary : 0);
    EXPECT_EQ(plan.step[4][2], rank != 1 ? table : 0);
  }
}

}  // namespace
}  // namespace zeroshard
