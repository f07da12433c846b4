// A pipeline changes no bit of what its data line computes without one.
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "tests/worker/train/mesh_harness.h"

namespace zeroshard {
namespace {

using Overrides = std::vector<std::string>;

std::string Job(const std::string& model) { return model == "gpt2" ? TinyGpt2() : TinyLlama(); }

v1::JobSpec Spec(const std::string& model, const Overrides& overrides, int stage) {
  Overrides all = overrides;
  all.push_back(absl::StrFormat("zero_optimization.stage=%d", stage));
  return MakeSpec(Job(model), all);
}

// As it is without a pipeline. Computed once for each.
std::string Alone(const v1::JobSpec& spec, int data_ranks) {
  static std::map<std::pair<std::string, int>, std::string> known;
  std::string& print = known[{spec.SerializeAsString(), data_ranks}];
  if (print.empty()) {
    const MemoryDataset data = TinyData();
    print = TrainFingerprint(spec, {.world = data_ranks}, data);
  }
  return print;
}

void ExpectSame(const v1::JobSpec& spec, const MeshRun& run) {
  const MemoryDataset data = TinyData();
  EXPECT_EQ(MeshFingerprint(spec, run, data), Alone(spec, run.shape.data))
      << run.shape.pipeline << " stages of " << run.virtual_stages << " runs, " << run.shape.data
      << " data ranks, ZeRO stage " << spec.zero_optimization().stage();
}

// Pipeline ranks, data ranks, virtual stages. Llama's layers are untied, gpt2's tied.
using Shape = std::tuple<int, int, int>;
class PipelineNumbers : public testing::TestWithParam<std::tuple<const char*, Shape>> {
 protected:
  std::string Model() const { return std::get<0>(GetParam()); }
  MeshRun Run() const {
    const auto [pipeline, data, runs] = std::get<1>(GetParam());
    return {.shape = {.pipeline = pipeline, .data = data}, .virtual_stages = runs};
  }
  // Where the ranks of a pipeline have several runs there must be as many units.
  Overrides Layers() const {
    const MeshRun run = Run();
    return {absl::StrFormat("model.layers=%d",
                            std::max(3, run.shape.pipeline * run.virtual_stages - 1))};
  }
  // Head and embedding on two ranks.
  bool Apart() const { return Model() == "gpt2" && Run().shape.pipeline > 1; }
};

std::string NameOfShape(const testing::TestParamInfo<PipelineNumbers::ParamType>& info) {
  const auto [pipeline, data, runs] = std::get<1>(info.param);
  return absl::StrFormat("%s_p%d_d%d_v%d", std::get<0>(info.param), pipeline, data, runs);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, PipelineNumbers,
    testing::Combine(testing::Values("gpt2", "llama"),
                     testing::Values(Shape{1, 1, 2}, Shape{2, 1, 1}, Shape{2, 1, 2}, Shape{2, 2, 1},
                                     Shape{2, 2, 2}, Shape{1, 2, 2}, Shape{4, 1, 1}, Shape{4, 1, 2},
                                     Shape{3, 1, 1})),
    NameOfShape);

// Three micro-batches: on one data rank three rounds, on two ranks two, of which one is ragged.
TEST_P(PipelineNumbers, EveryZeroStageHasTheBitsOfItsDataLine) {
  for (const int stage : {0, 1, 2, 3}) {
    // Without it a tied table's gradients are added in another order: below.
    Overrides overrides = Layers();
    if (Apart() && stage < 2) overrides.push_back("deterministic=true");
    ExpectSame(Spec(Model(), overrides, stage), Run());
  }
}

TEST_P(PipelineNumbers, OneMicroBatchAndMoreThanStages) {
  for (const char* batch : {"train_batch_size=2", "train_batch_size=14"}) {
    Overrides overrides = Layers();
    overrides.insert(overrides.end(), {batch, "steps=2", "deterministic=true"});
    for (const int stage : {1, 3}) ExpectSame(Spec(Model(), overrides, stage), Run());
  }
}

TEST_P(PipelineNumbers, SixteenBitsRecomputationAndDropoutToo) {
  Overrides overrides = Layers();
  overrides.insert(overrides.end(), {"bf16={enabled: true, stochastic_rounding: true}",
                                     "activation_checkpointing=true", "deterministic=true"});
  if (Model() == "gpt2") {
    for (const char* rate :
         {"model.embd_pdrop=0.1", "model.attn_pdrop=0.1", "model.resid_pdrop=0.1"})
      overrides.push_back(rate);
  }
  for (const int stage : {1, 3}) ExpectSame(Spec(Model(), overrides, stage), Run());
}

// What stage 3 keeps gathered, how it fetches ahead, and how buckets are cut changes nothing.
TEST_P(PipelineNumbers, ScheduleSettingsChangeNothing) {
  for (const char* setting :
       {"zero_optimization.stage3_max_reuse_distance=1000000000",
        "zero_optimization.stage3_prefetch_bucket_size=0", "zero_optimization.overlap_comm=false",
        "zero_optimization.reduce_bucket_size=1000"}) {
    const MemoryDataset data = TinyData();
    Overrides overrides = Layers();
    const std::string expected = Alone(Spec(Model(), overrides, 3), Run().shape.data);
    overrides.push_back(setting);
    EXPECT_EQ(MeshFingerprint(Spec(Model(), overrides, 3), Run(), data), expected) << setting;
  }
}

// The gradients of a rank's micro-batches added in full have the bits of stages 0 and 1.
TEST_P(PipelineNumbers, FullGradientsAreThoseOfStageOne) {
  if (Apart()) GTEST_SKIP() << "a tied table's gradients are added in another order";
  const MemoryDataset data = TinyData();
  MeshRun run = Run();
  run.full_gradients = true;
  const std::string expected = Alone(Spec(Model(), Layers(), 1), run.shape.data);
  for (const int stage : {2, 3})
    EXPECT_EQ(MeshFingerprint(Spec(Model(), Layers(), stage), run, data), expected) << stage;
}

// The sums of head and rows are added once where they are on two ranks; on one rank each
// micro-batch's are, in turn.
TEST(PipelineNumbersTest, FullGradientsOfATiedTableAgreeWithinRounding) {
  const MemoryDataset data = TinyData();
  for (const int stage : {0, 1, 3}) {
    const v1::JobSpec spec = Spec("gpt2", {}, stage);
    const MeshRun run{.shape = {.pipeline = 2, .data = 2}, .full_gradients = true};
    const auto expected = TrainJob(Spec("gpt2", {}, std::min(stage, 1)), {.world = 2}, data);
    const auto seen = TrainMesh(spec, run, data);
    for (const RankResult& result : seen) {
      ASSERT_TRUE(result.status.ok()) << result.status;
      ASSERT_EQ(result.records.size(), expected[0].records.size());
      for (size_t i = 0; i < result.records.size(); ++i) {
        const v1::StepRecord& wanted = expected[0].records[i];
        EXPECT_NEAR(result.records[i].loss(), wanted.loss(), 1e-5 * wanted.loss());
        EXPECT_NEAR(result.records[i].grad_norm(), wanted.grad_norm(), 1e-5 * wanted.grad_norm());
      }
    }
  }
}

TEST(PipelineNumbersTest, CopiesOfATiedTableStayOneForFiftySteps) {
  const MemoryDataset data = TinyData();
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
    for (const int stage : {1, 3}) {
      const v1::JobSpec spec = Spec("gpt2", {precision, "steps=50"}, stage);
      // By rank and step.
      std::vector<std::vector<std::vector<float>>> tables(4);
      MeshRun run{.shape = {.pipeline = 2, .data = 2}};
      run.on_step = [&](int rank, uint64_t, Trainer* trainer) {
        auto table = trainer->StageTensor("wte.weight");
        ASSERT_TRUE(table.ok()) << table.status();
        tables[static_cast<size_t>(rank)].push_back(*std::move(table));
      };
      for (const RankResult& result : TrainMesh(spec, run, data))
        ASSERT_TRUE(result.status.ok()) << result.status;
      ASSERT_EQ(tables[0].size(), 50u);
      for (size_t step = 0; step < 50; ++step) {
        EXPECT_TRUE(step == 0 || tables[0][step] != tables[0][step - 1]) << "nothing was trained";
        for (const size_t rank : {1, 2, 3})
          ASSERT_EQ(std::memcmp(tables[rank][step].data(), tables[0][step].data(),
                                tables[0][step].size() * sizeof(float)),
                    0)
              << "rank " << rank << " after step " << step + 1;
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
