// Jobs on a mesh with tensor ranks whose state is in the shard stores: the bits of the same mesh
// without offload, the numbers of one process, and one state in the stores whatever the mesh is.
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/worker/train/mesh_job.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

using Overrides = std::vector<std::string>;

constexpr double kTolerance = 1e-5;

v1::JobSpec MeshSpec(const std::string& model, int stage, Offload offload,
                     const Overrides& more = {}) {
  return Spec(MeshJob(model), {1, stage}, offload, more);
}

// All its tensors at the end, by name.
std::map<std::string, std::vector<float>> TensorsOf(const RankResult& result,
                                                    const std::vector<std::string>& names) {
  std::map<std::string, std::vector<float>> tensors;
  for (size_t i = 0; i < result.tensors.size(); ++i) tensors[names[i]] = result.tensors[i];
  return tensors;
}

std::vector<RankResult> TrainOn(MemoryStores* stores, const v1::JobSpec& spec, MeshRun run) {
  const MemoryDataset data = MeshData();
  run.store = [stores](int rank) { return stores->MakeRank(rank); };
  return TrainMesh(spec, run, data);
}

// Offloaded, every rank has what the mesh without offload has, bit for bit, and the stores too.
void ExpectBitsOfTheMesh(const std::string& model, MeshRun run, int stage,
                         const Overrides& more = {}) {
  SCOPED_TRACE(absl::StrFormat("%s on %s, ZeRO stage %d, %s", model, NameOf(run.shape), stage,
                               more.empty() ? "" : more[0]));
  const MemoryDataset data = MeshData();
  const v1::JobSpec without = MeshSpec(model, stage, Offload::kNone, more);
  run.tensors = TensorNames(without, /*ends=*/true);
  const auto wanted = TrainMesh(without, run, data);
  for (const RankResult& result : wanted) ASSERT_TRUE(result.status.ok()) << result.status;
  for (const Offload offload : OffloadsOf(stage)) {
    const v1::JobSpec spec = MeshSpec(model, stage, offload, more);
    MemoryStores stores(spec, {.seed = static_cast<uint64_t>(stage)});
    const auto results = TrainOn(&stores, spec, run);
    for (const RankResult& result : results) {
      ASSERT_TRUE(result.status.ok()) << result.status;
      EXPECT_EQ(Fingerprint(result), Fingerprint(results[0])) << "ranks disagree";
    }
    stores.WaitForVersion(spec.steps());
    EXPECT_EQ(Fingerprint(results[0]) + stores.Digest(), Fingerprint(wanted[0]));
    const auto seen = TensorsOf(results[0], run.tensors);
    for (const auto& [name, values] : seen) EXPECT_EQ(values, stores.Parameters(name)) << name;
  }
}

using MeshCase = std::tuple<const char*, MeshShape>;
class OffloadMesh : public testing::TestWithParam<MeshCase> {
 protected:
  std::string Model() const { return std::get<0>(GetParam()); }
  MeshShape Mesh() const { return std::get<1>(GetParam()); }
};

std::vector<MeshShape> TensorShapes() {
  std::vector<MeshShape> all;
  for (const int ranks : {2, 4})
    for (const MeshShape& shape : ShapesOf(ranks)) all.push_back(shape);
  all.push_back({.pipeline = 2, .data = 2, .tensor = 2});
  return all;
}

std::string NameOfCase(const testing::TestParamInfo<MeshCase>& info) {
  std::string name = std::get<0>(info.param);
  std::erase(name, '-');
  return name + "_" + NameOf(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Shapes, OffloadMesh,
                         testing::Combine(testing::Values("gpt2", "llama", "tied-llama"),
                                          testing::ValuesIn(TensorShapes())),
                         NameOfCase);

// Biases by heads of 8 and 16 elements, rows of a vocabulary of 53, key and value heads that two
// tensor ranks hold: nothing of it is a multiple of 64.
TEST_P(OffloadMesh, NumbersAreThoseOfOneProcessAtEveryZeroStage) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec reference = MeshSpec(Model(), 0, Offload::kNone);
  const std::vector<std::string> names = TensorNames(reference, /*ends=*/true);
  const RankResult alone = TrainJob(reference, {.world = 1, .tensors = names}, data)[0];
  ASSERT_TRUE(alone.status.ok()) << alone.status;
  for (const int stage : {1, 2, 3}) {
    for (const Offload offload : OffloadsOf(stage)) {
      SCOPED_TRACE(absl::StrFormat("ZeRO stage %d%s", stage,
                                   offload == Offload::kAll ? " with offload_param" : ""));
      const v1::JobSpec spec = MeshSpec(Model(), stage, offload);
      MemoryStores stores(spec, {});
      const auto results = TrainOn(&stores, spec, {.shape = Mesh(), .tensors = names});
      ExpectAgree(results, alone, TensorsOf(alone, names), names, kTolerance);
      stores.WaitForVersion(spec.steps());
    }
  }
}

// Three micro-batches, or one on each data rank: at stages 2 and 3 gradients then leave as they
// come, and only homes' count in the norm.
TEST_P(OffloadMesh, BitsAreThoseOfTheMeshWithoutOffload) {
  const std::string one_round = absl::StrFormat("train_batch_size=%d", 2 * Mesh().data);
  ExpectBitsOfTheMesh(Model(), {.shape = Mesh()}, 1);
  ExpectBitsOfTheMesh(Model(), {.shape = Mesh()}, 2, {one_round});
  ExpectBitsOfTheMesh(Model(), {.shape = Mesh()}, 3, {one_round});
}

TEST(OffloadMeshTest, SixteenBitsRecomputationAndFullGradientsToo) {
  const MeshRun run{.shape = {.pipeline = 2, .data = 1, .tensor = 2}};
  MeshRun full = run;
  full.full_gradients = true;
  for (const char* model : {"gpt2", "llama"}) {
    ExpectBitsOfTheMesh(
        model, run, 3,
        {"bf16={enabled: true, stochastic_rounding: true}", "activation_checkpointing=true"});
    ExpectBitsOfTheMesh(model, full, 2);
  }
}

TEST(OffloadMeshTest, ScheduleSettingsAndFrozenTensorsChangeNothing) {
  const MeshRun run{.shape = {.data = 2, .tensor = 2}};
  for (const char* setting :
       {"zero_optimization.reduce_bucket_size=64", "zero_optimization.overlap_comm=false",
        "zero_optimization.stage3_max_reuse_distance=1000000000",
        "zero_optimization.stage3_param_persistence_threshold=4000",
        "model.trainable=['blocks.*.attn.*']"})
    ExpectBitsOfTheMesh("gpt2", run, 3, {setting});
}

// Every element of what is trained once a step, from its home; each rank what it holds.
TEST(OffloadMeshTest, RanksPushWhatTheyAreHomeOfAndPullWhatTheyHold) {
  for (const char* model : {"gpt2", "llama"}) {
    for (const MeshShape& shape : {MeshShape{.data = 2, .tensor = 2},
                                   {.data = 1, .tensor = 4},
                                   {.pipeline = 2, .data = 1, .tensor = 2}}) {
      const v1::JobSpec spec = MeshSpec(model, 2, Offload::kOptimizer);
      MemoryStores stores(spec, {});
      for (const RankResult& result : TrainOn(&stores, spec, {.shape = shape}))
        ASSERT_TRUE(result.status.ok()) << result.status;
      const ModelTable& full = stores.model();
      const PipelineStages stages = *CutStages(UnitCosts(full.config, false), shape.pipeline, 1);
      uint64_t trained = 0, pushed = 0;
      for (const UnitTable& unit : full.units) trained += static_cast<uint64_t>(unit.length) * 4;
      for (int rank = 0; rank < shape.Ranks(); ++rank) {
        const MeshPosition at = PositionOf(shape, rank);
        TensorRank slice = MakeTensorRank(full, shape.tensor, at.tensor);
        const StageModel stage = MakeStageModel(slice.model, stages, at.pipeline);
        slice.model = stage.model;
        int64_t pushes = 0, pulls = 0;
        for (size_t u = 0; u < full.units.size(); ++u) {
          const ShardLayout layout = ShardLayout::Make(slice.model.units[u].length, shape.data);
          const auto runs = FullRuns(slice, u, {layout.Begin(at.data), layout.End(at.data)});
          if (u > 0 || !stage.copy) pushes += PushedElements(runs);
          pulls += PulledElements(runs);
        }
        if (stage.copy) {  // the positions that its unit has room for come along
          const ParameterInfo& wpe = full.units[0].parameters.back();
          if (full.units[0].parameters.size() > 1) pulls += wpe.size / shape.data;
        }
        EXPECT_EQ(stores.pushed(rank), static_cast<uint64_t>(pushes) * 4 * spec.steps());
        EXPECT_EQ(stores.pulled(rank), static_cast<uint64_t>(pulls) * 4 * (spec.steps() + 1));
        pushed += stores.pushed(rank);
      }
      EXPECT_EQ(pushed, trained * spec.steps()) << model << " on " << NameOf(shape);
    }
  }
}

std::map<std::string, std::vector<float>> StateOf(MemoryStores* stores) {
  std::map<std::string, std::vector<float>> state;
  for (const UnitTable& unit : stores->model().units) {
    for (const ParameterInfo& p : unit.parameters) {
      for (const StateKind kind : {StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq})
        state[absl::StrCat(p.name, " ", static_cast<int>(kind))] = stores->State(kind, p.name);
    }
  }
  return state;
}

// Trains `steps` more on a mesh, whose ranks begin with exactly what the stores have.
void Continue(MemoryStores* stores, const v1::JobSpec& spec, const MeshShape& shape, uint64_t steps,
              RankResult* all) {
  const uint64_t first = all->records.size() + 1, last = first + steps - 1;
  const auto before = StateOf(stores);
  MeshRun run{.shape = shape, .first_step = first};
  run.next_sample = 6 * (first - 1);
  run.prepare = [&](int, Trainer* trainer) -> absl::Status {
    for (const std::string& name : TensorNames(spec)) {
      auto seen = trainer->GatherTensor(name);
      if (!seen.ok()) return seen.status();
      EXPECT_EQ(*seen, stores->Parameters(name)) << name << " on " << NameOf(shape);
    }
    EXPECT_EQ(StateOf(stores), before) << "a mesh that attaches changes nothing";
    return absl::OkStatus();
  };
  run.on_step = [&](int rank, uint64_t step, Trainer*) {
    if (rank == 0 && step == last && last < spec.steps()) stores->Abort("the next generation");
  };
  const auto results = TrainOn(stores, spec, run);
  for (const v1::StepRecord& record : results[0].records)
    if (record.step() <= last) all->records.push_back(record);
  ASSERT_EQ(all->records.size(), last) << results[0].status;
  stores->WaitForVersion(last);
  stores->Continue();
}

TEST(OffloadMeshTest, AnyMeshContinuesOnTheStateOfAnyOther) {
  const MemoryDataset data = MeshData();
  for (const char* model : {"gpt2", "llama"}) {
    const Overrides more = {"steps=8"};
    const v1::JobSpec reference = MeshSpec(model, 0, Offload::kNone, more);
    const std::vector<std::string> names = TensorNames(reference);
    const RankResult alone = TrainJob(reference, {.world = 1, .tensors = names}, data)[0];
    ASSERT_TRUE(alone.status.ok()) << alone.status;
    for (const Offload offload : OffloadsOf(3)) {
      const v1::JobSpec spec = MeshSpec(model, 3, offload, more);
      MemoryStores stores(spec, {});
      RankResult all;
      // (data, tensor, pipeline) = (2, 2, 1), resized to (1, 2, 1), then (1, 2, 2), (1, 1, 1).
      for (const MeshShape& shape : {MeshShape{.data = 2, .tensor = 2},
                                     {.data = 1, .tensor = 2},
                                     {.pipeline = 2, .data = 1, .tensor = 2},
                                     {.data = 1}}) {
        Continue(&stores, spec, shape, 2, &all);
        if (HasFatalFailure()) return;
      }
      for (size_t i = 0; i < 8; ++i) {
        const double wanted = alone.records[i].loss();
        EXPECT_NEAR(all.records[i].loss(), wanted, kTolerance * wanted) << "step " << i + 1;
      }
      for (size_t i = 0; i < names.size(); ++i)
        ExpectNear(stores.Parameters(names[i]), alone.tensors[i], kTolerance, names[i]);
    }
  }
}

// A rank of each position of a (2, 2, 2) mesh dies in the middle of a step: all end, nothing that
// was committed is lost, and four ranks of another mesh finish the undisturbed job.
TEST(OffloadMeshTest, ADeadRankInAnyPositionCostsNoCommittedStep) {
  const MemoryDataset data = MeshData();
  const Overrides more = {"steps=4"};
  const v1::JobSpec reference = MeshSpec("gpt2", 0, Offload::kNone, more);
  const std::vector<std::string> names = TensorNames(reference, /*ends=*/true);
  const RankResult alone = TrainJob(reference, {.world = 1, .tensors = names}, data)[0];
  ASSERT_TRUE(alone.status.ok()) << alone.status;
  for (int gone = 0; gone < 8; ++gone) {
    SCOPED_TRACE(absl::StrCat("rank ", gone));
    const v1::JobSpec spec = MeshSpec("gpt2", 2, Offload::kOptimizer, more);
    MemoryStores stores(spec, {});
    MeshRun run{.shape = {.pipeline = 2, .data = 2, .tensor = 2}};
    run.dies = [&](int rank, uint64_t step, StepPhase phase, const std::string&) {
      return rank == gone && step == 3 && phase == StepPhase::kBackward;
    };
    const absl::Time start = absl::Now();
    for (const RankResult& result : TrainOn(&stores, spec, run)) EXPECT_FALSE(result.status.ok());
    EXPECT_LT(absl::Now() - start, absl::Seconds(30));
    const size_t committed = stores.decisions().size();
    EXPECT_GE(committed, 1u);
    stores.WaitForVersion(committed);
    stores.Continue();
    MeshRun next{.shape = {.data = 2, .tensor = 2}, .tensors = names};
    next.first_step = committed + 1;
    next.next_sample = 6 * committed;
    for (const RankResult& result : TrainOn(&stores, spec, next))
      ASSERT_TRUE(result.status.ok()) << result.status;
    stores.WaitForVersion(4);
    for (size_t i = 0; i < names.size(); ++i)
      ExpectNear(stores.Parameters(names[i]), alone.tensors[i], kTolerance, names[i]);
  }
}

}  // namespace
}  // namespace zeroshard
