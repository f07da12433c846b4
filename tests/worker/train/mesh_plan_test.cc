// What a rank of a mesh holds and sends equals what the planner says of the specification.
#include <algorithm>

#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "common/plan/mesh.h"
#include "common/plan/transient_bytes.h"
#include "tests/worker/train/mesh_job.h"

namespace zeroshard {
namespace {

v1::JobSpec SpecOf(const std::string& model, const MeshRun& run,
                   const std::vector<std::string>& overrides, bool divided) {
  v1::JobSpec spec = MakeSpec(MeshJob(model).c_str(), overrides);
  spec.mutable_resources()->set_workers(static_cast<uint32_t>(run.shape.Ranks()));
  v1::ParallelSpec* parallel = spec.mutable_parallel();
  parallel->set_tensor(static_cast<uint32_t>(run.shape.tensor));
  parallel->set_pipeline(static_cast<uint32_t>(run.shape.pipeline));
  parallel->set_virtual_stages(static_cast<uint32_t>(run.virtual_stages));
  parallel->set_sequence_parallel(divided);
  if (run.full_gradients) spec.mutable_zero_optimization()->set_pipeline_gradients("full");
  return spec;
}

// The buffers that the plan of the rank's stage names; what it leaves out (tokens, sums of squares
// and of losses) is below 10 KiB here, of 160 KiB and more.
uint64_t MostBuffers(const v1::JobSpec& spec, const MeshRun& run, const MeshPosition& at) {
  const ModelTable model = *MakeModelTable(spec.model());
  const ZeroOptions options = MakeZeroOptions(spec, run.shape.data);
  const auto schedules = *MakePipelineSchedule({.stages = run.shape.pipeline,
                                                .virtual_stages = run.virtual_stages,
                                                .micro_batches = RoundsOf(options)});
  const StageModel part = CutModel(&model, CutOf(spec), options.checkpointing).Part(at.pipeline);
  const RankSchedule& schedule = schedules[static_cast<size_t>(at.pipeline)];
  return TransientBytes(part.model, MakeStagePolicy(part, options, schedule)) + 10240;
}

void ExpectPlanHolds(const std::string& model, const MeshRun& run,
                     const std::vector<std::string>& overrides, bool divided = false) {
  const v1::JobSpec spec = SpecOf(model, run, overrides, divided);
  const auto plans = PlanShards(spec);
  ASSERT_TRUE(plans.ok()) << plans.status();
  const auto ranks = PlanRanks(spec, *MakeModelTable(spec.model()), run.shape.Ranks());
  ASSERT_TRUE(ranks.ok()) << ranks.status();
  const auto results = TrainMesh(spec, run, MeshData());
  for (int rank = 0; rank < run.shape.Ranks(); ++rank) {
    SCOPED_TRACE(absl::StrFormat("rank %d of %s, %d runs, %s, %s", rank, NameOf(run.shape),
                                 run.virtual_stages, model, absl::StrJoin(overrides, " ")));
    const RankResult& result = results[static_cast<size_t>(rank)];
    ASSERT_TRUE(result.status.ok()) << result.status;
    const RankPlan& plan = (*ranks)[static_cast<size_t>(rank)];
    const auto held = [&](MemoryKind kind) {
      return static_cast<uint64_t>(result.memory[static_cast<int>(kind)]);
    };
    EXPECT_EQ(held(MemoryKind::kParameters), plan.parameters);
    EXPECT_EQ(held(MemoryKind::kGradients), plan.gradients);
    EXPECT_EQ(held(MemoryKind::kOptimizer), plan.optimizer);
    EXPECT_EQ(held(MemoryKind::kActivations), plan.activations);
    EXPECT_LE(static_cast<uint64_t>(result.peak[static_cast<int>(MemoryKind::kBuffers)]),
              MostBuffers(spec, run, PositionOf(run.shape, rank)));
    EXPECT_EQ(result.last_step.sent, plan.StepBytes());
    EXPECT_EQ((*plans)[static_cast<size_t>(rank)].traffic_bytes_per_step(), plan.StepBytes());
    for (size_t op = 0; op < plan.step.size(); ++op) {
      for (size_t phase = 0; phase < plan.step[op].size(); ++phase) {
        EXPECT_EQ(result.traffic[op][phase], plan.step[op][phase] * spec.steps())
            << NameOf(static_cast<CollectiveOp>(op)) << " " << NameOf(static_cast<Phase>(phase));
      }
    }
  }
}

class MeshPlanTest : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Models, MeshPlanTest, testing::Values("gpt2", "llama", "tied-llama"),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param, {{"-", "_"}});
                         });

// Copied key and value heads (two of them, four tensor ranks), a vocabulary that ranks pad, ragged
// rounds, layers that three stages divide unevenly.
TEST_P(MeshPlanTest, EveryRankHoldsAndSendsWhatThePlanSays) {
  for (const MeshShape& shape : {MeshShape{.pipeline = 1, .data = 1, .tensor = 2},
                                 MeshShape{.pipeline = 1, .data = 2, .tensor = 4},
                                 MeshShape{.pipeline = 2, .data = 2, .tensor = 2},
                                 MeshShape{.pipeline = 3, .data = 1, .tensor = 2}}) {
    for (const char* stage : {"zero_optimization.stage=0", "zero_optimization.stage=1",
                              "zero_optimization.stage=2", "zero_optimization.stage=3"})
      ExpectPlanHolds(GetParam(), {.shape = shape}, {stage});
  }
}

TEST_P(MeshPlanTest, SoDoTheyWithEverySettingThatChangesIt) {
  const MeshShape cube{.pipeline = 2, .data = 2, .tensor = 2};
  const char kStage3[] = "zero_optimization.stage=3";
  for (const char* more :
       {"bf16.enabled=true", "activation_checkpointing=true", "train_batch_size=4",
        "zero_optimization.stage3_max_reuse_distance=1000000000", "model.trainable=['blocks.*']",
        "zero_optimization.stage3_prefetch_bucket_size=0"})
    ExpectPlanHolds(GetParam(), {.shape = cube}, {kStage3, more});
  ExpectPlanHolds(GetParam(), {.shape = cube, .full_gradients = true},
                  {kStage3, "bf16.enabled=true"});
  ExpectPlanHolds(GetParam(), {.shape = cube, .virtual_stages = 2}, {kStage3});
  for (const char* more : {"activation_checkpointing=false", "activation_checkpointing=true"})
    ExpectPlanHolds(GetParam(), {.shape = cube}, {kStage3, more}, /*divided=*/true);
}

}  // namespace
}  // namespace zeroshard
