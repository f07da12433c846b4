// Jobs on a mesh whose state is in the shard stores: the bits of the same mesh without, which
// without tensor ranks are those of one data line; the stores know no mesh.
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/train/mesh_harness.h"
#include "tests/worker/train/offload_harness.h"
#include "worker/train/pipeline_rank.h"

namespace zeroshard {
namespace {

using Overrides = std::vector<std::string>;

std::string Job(const std::string& model) { return model == "gpt2" ? TinyGpt2() : TinyLlama(); }

v1::JobSpec MeshSpec(const std::string& model, int stage, Offload offload,
                     const Overrides& more = {}) {
  return Spec(Job(model), {1, stage}, offload, more);
}

// What the ranks say, and the weights that the stores have.
std::string Print(const v1::JobSpec& spec, MeshRun run, MemoryStores* stores) {
  const MemoryDataset data = TinyData();
  run.store = [stores](int rank) { return stores->MakeRank(rank); };
  const std::string print = MeshFingerprint(spec, run, data);
  if (testing::Test::HasFailure()) return print;
  stores->WaitForVersion(spec.steps());
  return print + stores->Digest();
}

std::string Alone(const v1::JobSpec& spec, int data_ranks) {
  static std::map<std::pair<std::string, int>, std::string> known;
  std::string& print = known[{spec.SerializeAsString(), data_ranks}];
  if (print.empty()) {
    const MemoryDataset data = TinyData();
    print = TrainFingerprint(spec, {.world = data_ranks}, data);
  }
  return print;
}

// Stages 1 to 3, however it is offloaded, against one data line without.
void ExpectSame(const std::string& model, const MeshRun& run, const Overrides& more) {
  for (const int stage : {1, 2, 3}) {
    const std::string expected =
        Alone(MeshSpec(model, stage, Offload::kNone, more), run.shape.data);
    for (const Offload offload : OffloadsOf(stage)) {
      const v1::JobSpec spec = MeshSpec(model, stage, offload, more);
      MemoryStores stores(spec, {.seed = static_cast<uint64_t>(stage)});
      EXPECT_EQ(Print(spec, run, &stores), expected)
          << run.shape.pipeline << " stages of " << run.virtual_stages << " runs, "
          << run.shape.data << " data ranks, ZeRO stage " << stage
          << (offload == Offload::kAll ? " with offload_param " : " ") << more[0];
    }
  }
}

// Pipeline ranks, data ranks, virtual stages.
using PipelineShape = std::tuple<int, int, int>;
class OffloadPipeline : public testing::TestWithParam<std::tuple<const char*, PipelineShape>> {
 protected:
  std::string Model() const { return std::get<0>(GetParam()); }
  MeshRun Run() const {
    const auto [pipeline, data, runs] = std::get<1>(GetParam());
    return {.shape = {.pipeline = pipeline, .data = data}, .virtual_stages = runs};
  }
};
std::string NameOfShape(const testing::TestParamInfo<OffloadPipeline::ParamType>& info) {
  const auto [pipeline, data, runs] = std::get<1>(info.param);
  return absl::StrFormat("%s_p%d_d%d_v%d", std::get<0>(info.param), pipeline, data, runs);
}
INSTANTIATE_TEST_SUITE_P(
    Shapes, OffloadPipeline,
    testing::Combine(testing::Values("gpt2", "llama"),
                     testing::Values(PipelineShape{2, 1, 1}, PipelineShape{2, 2, 1},
                                     PipelineShape{4, 1, 1}, PipelineShape{2, 1, 2})),
    NameOfShape);

// Three micro-batches: rounds are added up, and on two data ranks the last is ragged.
TEST_P(OffloadPipeline, SeveralRounds) { ExpectSame(Model(), Run(), {"deterministic=true"}); }

// One round: at stages 2 and 3 gradients leave as they come, but for the embedding's.
TEST_P(OffloadPipeline, OneRound) {
  ExpectSame(Model(), Run(),
             {absl::StrFormat("train_batch_size=%d", 2 * Run().shape.data), "deterministic=true"});
}

TEST_P(OffloadPipeline, SixteenBits) {
  ExpectSame(Model(), Run(),
             {"bf16={enabled: true, stochastic_rounding: true}", "activation_checkpointing=true",
              "deterministic=true"});
}

// Where a rank adds its micro-batches in full, head and rows of a tied table are added in an order
// of the mesh's own: it is the mesh without offload that has the same bits.
TEST_P(OffloadPipeline, FullGradientsAreThoseOfTheMeshWithoutOffload) {
  const MemoryDataset data = TinyData();
  for (const int stage : {1, 3}) {
    MeshRun run = Run();
    run.full_gradients = true;
    const std::string expected =
        MeshFingerprint(MeshSpec(Model(), stage, Offload::kNone), run, data);
    const v1::JobSpec spec = MeshSpec(Model(), stage, Offload::kOptimizer);
    MemoryStores stores(spec, {});
    EXPECT_EQ(Print(spec, run, &stores), expected) << "ZeRO stage " << stage;
  }
}

TEST_P(OffloadPipeline, FrozenUnitsAndTensors) {
  for (const char* trainable :
       {"model.trainable=['blocks.1.*', '*_f*']", "model.trainable=['blocks.*.mlp.*']"})
    ExpectSame(Model(), Run(), {trainable, "bf16.enabled=true", "deterministic=true"});
}

// Settings that only change when what is gathered, pulled and pushed.
TEST(OffloadPipelineTest, ScheduleSettingsChangeNothing) {
  const MeshRun run{.shape = {.pipeline = 2, .data = 2}};
  const std::string expected = Alone(MeshSpec("gpt2", 3, Offload::kNone), 2);
  uint64_t seed = 0;
  for (const char* setting :
       {"zero_optimization.overlap_comm=false", "zero_optimization.reduce_bucket_size=64",
        "zero_optimization.stage3_prefetch_bucket_size=0",
        "zero_optimization.stage3_max_live_parameters=0",
        "zero_optimization.stage3_max_reuse_distance=1000000000",
        "zero_optimization.stage3_param_persistence_threshold=4000",
        "zero_optimization.offload_optimizer={device: cpu, buffer_count: 1, buffer_size: 64}"}) {
    for (const Offload offload : OffloadsOf(3)) {
      const v1::JobSpec spec = MeshSpec("gpt2", 3, offload, {setting});
      MemoryStores stores(spec, {.seed = ++seed});
      EXPECT_EQ(Print(spec, run, &stores), expected) << setting;
    }
  }
}

// Both ends of a tied table have what the stores have, after every step.
TEST(OffloadPipelineTest, CopiesOfATiedTableAreTheStores) {
  const MemoryDataset data = TinyData();
  for (const Offload offload : OffloadsOf(3)) {
    const v1::JobSpec spec =
        MeshSpec("gpt2", 3, offload, {"bf16.enabled=true", "steps=20", "deterministic=true"});
    MemoryStores stores(spec, {});
    MeshRun run{.shape = {.pipeline = 2, .data = 2}};
    run.store = [&](int rank) { return stores.MakeRank(rank); };
    std::vector<std::vector<std::vector<float>>> tables(4);  // by rank and step
    run.on_step = [&](int rank, uint64_t, Trainer* trainer) {
      auto table = trainer->StageTensor("wte.weight");
      ASSERT_TRUE(table.ok()) << table.status();
      tables[static_cast<size_t>(rank)].push_back(*std::move(table));
    };
    for (const RankResult& result : TrainMesh(spec, run, data))
      ASSERT_TRUE(result.status.ok()) << result.status;
    stores.WaitForVersion(20);
    ASSERT_EQ(tables[0].size(), 20u);
    EXPECT_EQ(tables[0].back(), stores.Parameters("wte.weight"));
    for (size_t step = 0; step < 20; ++step) {
      EXPECT_TRUE(step == 0 || tables[0][step] != tables[0][step - 1]) << "nothing was trained";
      for (const size_t rank : {1, 2, 3}) ASSERT_EQ(tables[rank][step], tables[0][step]) << rank;
    }
  }
}

// What a rank pushes and pulls is of its own units, a tied table pushed once: as the plan says.
TEST(OffloadPipelineTest, MemoryAndTrafficOfARunEqualThePlan) {
  const MemoryDataset data = TinyData();
  const MeshRun of{.shape = {.pipeline = 2, .data = 2}};
  for (const char* model : {"gpt2", "llama"}) {
    for (const int stage : {1, 2, 3}) {
      for (const Offload offload : OffloadsOf(stage)) {
        for (const char* more : {"train_batch_size=10", "train_batch_size=4",
                                 "zero_optimization.stage3_param_persistence_threshold=4000",
                                 "zero_optimization.stage3_max_reuse_distance=1000000000",
                                 "model.trainable=['blocks.1.*']"}) {
          const v1::JobSpec spec = MeshSpec(model, stage, offload, {more, "steps=2"});
          MemoryStores stores(spec, {});
          MeshRun run = of;
          run.store = [&](int rank) { return stores.MakeRank(rank); };
          const auto results = TrainMesh(spec, run, data);
          uint64_t pushed = 0;
          for (int rank = 0; rank < 4; ++rank) {
            SCOPED_TRACE(absl::StrFormat("%s stage %d rank %d %s", model, stage, rank, more));
            const RankResult& result = results[static_cast<size_t>(rank)];
            ASSERT_TRUE(result.status.ok()) << result.status;
            const MeshPosition at = PositionOf(run.shape, rank);
            const ZeroOptions options = MakeZeroOptions(spec, 2);
            const ModelTable& table = stores.model();
            const StageModel stage_model = MakeStageModel(
                table, *CutStages(UnitCosts(table.config, false), 2, 1), at.pipeline);
            const RankSchedule schedule = (*MakePipelineSchedule(
                {.stages = 2,
                 .micro_batches = RoundsOf(options)}))[static_cast<size_t>(at.pipeline)];
            const ZeroPolicy policy = MakeStagePolicy(stage_model, options, schedule);
            const RankPlan plan = PlanRank(stage_model, policy, schedule, at.data, 4);
            EXPECT_EQ(result.memory[static_cast<int>(MemoryKind::kParameters)],
                      static_cast<int64_t>(plan.parameters));
            EXPECT_EQ(result.memory[static_cast<int>(MemoryKind::kGradients)],
                      static_cast<int64_t>(plan.gradients));
            EXPECT_EQ(result.memory[static_cast<int>(MemoryKind::kOptimizer)], 0);
            EXPECT_EQ(stores.pushed(rank), plan.push * 2);
            pushed += stores.pushed(rank);
            uint64_t first = 0;  // pulls of what is kept, at the start
            for (size_t u = 0; u < policy.layouts.size(); ++u) {
              const ShardLayout& layout = policy.layouts[u];
              if (policy.KeepsParameters(static_cast<int>(u)))
                first += static_cast<uint64_t>(layout.End(at.data) - layout.Begin(at.data)) * 4;
            }
            EXPECT_EQ(stores.pulled(rank), plan.pull * 2 + first);
          }
          uint64_t trained = 0;  // each trained unit once a step, whatever the mesh is
          for (const UnitTable& unit : stores.model().units)
            trained += unit.AnyTrainable() ? static_cast<uint64_t>(unit.length) * 4 : 0;
          EXPECT_EQ(pushed, trained * 2);
        }
      }
    }
  }
}

// A generation that ends, and others of other meshes that go on: the steps of one run, and between
// them nothing of the state moves.
TEST(OffloadPipelineTest, AnyMeshContinuesOnTheSameState) {
  const MemoryDataset data = TinyData();
  for (const Offload offload : OffloadsOf(3)) {
    for (const char* model : {"gpt2", "llama"}) {
      const Overrides more = {"deterministic=true", "bf16.enabled=true", "steps=8"};
      const std::string expected = Alone(MeshSpec(model, 0, Offload::kNone, more), 1);
      const v1::JobSpec spec = MeshSpec(model, 3, offload, more);
      MemoryStores stores(spec, {});
      RankResult all;
      uint64_t step = 0;
      for (const MeshShape& shape :
           {MeshShape{.pipeline = 2, .data = 2}, {.data = 3}, {.pipeline = 4}, {.data = 1}}) {
        const uint64_t end = step + 2;
        std::map<std::string, std::vector<float>> weights;
        for (const UnitTable& unit : stores.model().units)
          for (const ParameterInfo& p : unit.parameters)
            weights[p.name] = stores.Parameters(p.name);
        MeshRun run{.shape = shape};
        run.first_step = step + 1;
        run.next_sample = 6 * step;
        run.store = [&](int rank) { return stores.MakeRank(rank); };
        run.prepare = [&](int, Trainer* trainer) -> absl::Status {
          for (const auto& [name, values] : weights) {
            auto seen = trainer->GatherTensor(name);
            if (!seen.ok()) return seen.status();
            EXPECT_EQ(*seen, values) << name;
          }
          return absl::OkStatus();
        };
        run.on_step = [&](int rank, uint64_t now, Trainer*) {
          if (rank == 0 && now == end && end < 8) stores.Abort("the next generation has begun");
        };
        const auto results = TrainMesh(spec, run, data);
        if (end == 8) {
          for (const RankResult& result : results) EXPECT_TRUE(result.status.ok()) << result.status;
        }
        for (const v1::StepRecord& record : results[0].records)
          if (record.step() <= end) all.records.push_back(record);
        stores.WaitForVersion(end);
        stores.Continue();
        step = end;
      }
      EXPECT_EQ(Fingerprint(all) + stores.Digest(), expected) << model;
    }
  }
}

// Whoever is gone, and wherever in the step: nobody waits for a deadline, the step is not committed
// in parts, and another mesh has the undisturbed job's bits.
TEST(OffloadPipelineTest, ARankThatIsGoneCostsNoCommittedStep) {
  const MemoryDataset data = TinyData();
  const Overrides more = {"deterministic=true", "steps=4"};
  const std::string expected = Alone(MeshSpec("gpt2", 0, Offload::kNone, more), 1);
  for (int gone = 0; gone < 4; ++gone) {
    for (const StepPhase phase : {StepPhase::kForward, StepPhase::kBackward, StepPhase::kOffload}) {
      const v1::JobSpec spec = MeshSpec("gpt2", 3, Offload::kAll, more);
      MemoryStores stores(spec, {});
      MeshRun run{.shape = {.pipeline = 2, .data = 2}};
      run.store = [&](int rank) { return stores.MakeRank(rank); };
      run.dies = [&](int rank, uint64_t step, StepPhase now, const std::string&) {
        return rank == gone && step == 3 && now == phase;
      };
      const absl::Time start = absl::Now();
      const auto before = TrainMesh(spec, run, data);
      EXPECT_LT(absl::Now() - start, absl::Seconds(30));
      for (const RankResult& result : before) EXPECT_FALSE(result.status.ok());
      const size_t committed = stores.decisions().size();
      EXPECT_GE(committed, 1u);  // a rank may be ahead of the commit of step 2
      stores.WaitForVersion(committed);
      stores.Continue();
      MeshRun next{.shape = {.pipeline = 2}};
      next.store = run.store;
      next.first_step = committed + 1;
      next.next_sample = 6 * committed;
      const auto after = TrainMesh(spec, next, data);
      for (const RankResult& result : after) ASSERT_TRUE(result.status.ok()) << result.status;
      stores.WaitForVersion(4);
      const std::string digest = stores.Digest();
      EXPECT_TRUE(expected.ends_with(digest)) << "rank " << gone << ", step 3";
    }
  }
}

// A job with a loss scale that overflows: stores skip what ranks skip.
TEST(OffloadPipelineTest, AnOverflowIsSkippedInTheStoresToo) {
  const Overrides more = {"fp16={enabled: true, initial_scale_power: 32}", "deterministic=true",
                          "steps=8"};
  ExpectSame("gpt2", {.shape = {.pipeline = 2, .data = 2}}, more);
}

}  // namespace
}  // namespace zeroshard
