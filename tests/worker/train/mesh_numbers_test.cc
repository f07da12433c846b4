// Every mesh trains what one process trains.
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernels/init.h"
#include "common/status_macros.h"
#include "tests/worker/train/mesh_job.h"

namespace zeroshard {
namespace {

using Overrides = std::vector<std::string>;

constexpr double kTolerance = 1e-5;

v1::JobSpec Spec(const std::string& model, Overrides overrides, int stage) {
  overrides.push_back(absl::StrFormat("zero_optimization.stage=%d", stage));
  return MakeSpec(MeshJob(model), overrides);
}

struct AloneResult {
  RankResult result;
  std::map<std::string, std::vector<float>> weights;  // all of them
};

// Of one process. Computed once for each job.
const AloneResult& Alone(const v1::JobSpec& spec, const TokenDataset& data) {
  static std::map<std::string, AloneResult> known;
  const auto [found, added] = known.try_emplace(spec.SerializeAsString());
  AloneResult& alone = found->second;
  if (added) {
    const std::vector<std::string> names = TensorNames(spec);
    alone.result = TrainJob(spec, {.world = 1, .tensors = names}, data)[0];
    EXPECT_TRUE(alone.result.status.ok()) << alone.result.status;
    for (size_t i = 0; i < alone.result.tensors.size(); ++i)
      alone.weights[names[i]] = alone.result.tensors[i];
  }
  return alone;
}

void ExpectAsAlone(const std::string& model, MeshRun run, const Overrides& overrides, int stage) {
  const v1::JobSpec spec = Spec(model, overrides, stage);
  SCOPED_TRACE(absl::StrFormat("%s on %s, %d runs, ZeRO stage %d", model, NameOf(run.shape),
                               run.virtual_stages, stage));
  const MemoryDataset data = MeshData(static_cast<int32_t>(spec.model().vocab_size()));
  // Gathering takes longer than training.
  if (run.tensors.empty()) run.tensors = TensorNames(spec, /*ends=*/stage != 3);
  const AloneResult& alone = Alone(Spec(model, overrides, 0), data);
  ASSERT_NE(alone.result.records.front().loss(), alone.result.records.back().loss())
      << "nothing was trained";
  ExpectAgree(TrainMesh(spec, run, data), alone.result, alone.weights, run.tensors, kTolerance);
}

using Shape = std::tuple<int, int>;  // ranks, which of their shapes
class MeshNumbers : public testing::TestWithParam<std::tuple<const char*, Shape>> {
 protected:
  static MeshShape ShapeOf(const Shape& of) {
    return ShapesOf(std::get<0>(of))[static_cast<size_t>(std::get<1>(of))];
  }
};

std::vector<Shape> AllShapes() {
  std::vector<Shape> all;
  for (const int ranks : {2, 4, 8}) {
    const int n = static_cast<int>(ShapesOf(ranks).size());
    for (int i = 0; i < n; ++i) all.emplace_back(ranks, i);
  }
  return all;
}

std::string NameOfCase(const testing::TestParamInfo<MeshNumbers::ParamType>& info) {
  const auto [ranks, index] = std::get<1>(info.param);
  std::string name = std::get<0>(info.param);
  std::erase(name, '-');
  return name + "_" + NameOf(ShapesOf(ranks)[static_cast<size_t>(index)]);
}

INSTANTIATE_TEST_SUITE_P(Shapes, MeshNumbers,
                         testing::Combine(testing::Values("gpt2", "llama", "tied-llama"),
                                          testing::ValuesIn(AllShapes())),
                         NameOfCase);

// With eight data ranks five have no micro-batch, with eight stages there are fewer micro-batches
// than stages, with four stages blocks are not shared out evenly, with eight tensor ranks four hold
// each key and value head.
TEST_P(MeshNumbers, AreThoseOfOneProcessAtEveryZeroStage) {
  const auto [model, shape] = GetParam();
  for (const int stage : {0, 1, 2, 3}) ExpectAsAlone(model, {.shape = ShapeOf(shape)}, {}, stage);
}

const MeshShape kCube{.pipeline = 2, .data = 2, .tensor = 2};

TEST(MeshNumbersTest, DropoutAndRecomputationHaveTheMasksOfOneProcess) {
  const Overrides overrides = {"activation_checkpointing=true", "model.embd_pdrop=0.1",
                               "model.attn_pdrop=0.1", "model.resid_pdrop=0.1"};
  ExpectAsAlone("gpt2", {.shape = kCube}, overrides, 3);
  ExpectAsAlone("gpt2", {.shape = {.tensor = 4}}, overrides, 0);
}

TEST(MeshNumbersTest, OneMicroBatchAndMoreThanStages) {
  for (const char* batch : {"train_batch_size=2", "train_batch_size=14"}) {
    ExpectAsAlone("gpt2", {.shape = kCube}, {batch}, 2);
    ExpectAsAlone("llama", {.shape = {.pipeline = 4, .tensor = 2}}, {batch}, 3);
  }
}

TEST(MeshNumbersTest, InterleavedStagesAndFullGradients) {
  for (const char* model : {"gpt2", "llama"}) {
    ExpectAsAlone(model, {.shape = kCube, .virtual_stages = 2}, {}, 3);
    ExpectAsAlone(model, {.shape = {.pipeline = 1, .tensor = 2}, .virtual_stages = 3}, {}, 1);
    ExpectAsAlone(model, {.shape = kCube, .full_gradients = true}, {}, 2);
  }
}

// Ten rows on eight ranks are two on each of the first five, and padding alone on the others.
TEST(MeshNumbersTest, RanksWithoutARowOfTheVocabularyTakePart) {
  for (const char* model : {"gpt2", "llama"})
    ExpectAsAlone(model, {.shape = {.tensor = 8}}, {"model.vocab_size=10"}, 1);
}

// Everything that a test can see of a run, bit for bit.
std::string Print(const v1::JobSpec& spec, MeshRun run) {
  const MemoryDataset data = MeshData();
  run.tensors = TensorNames(spec, /*ends=*/true);
  const std::vector<RankResult> results = TrainMesh(spec, run, data);
  std::string print;
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    std::string own;
    for (const v1::StepRecord& r : result.records)
      absl::StrAppendFormat(&own, "%d %a %a\n", r.step(), r.loss(), r.grad_norm());
    for (const std::vector<float>& tensor : result.tensors)
      own.append(reinterpret_cast<const char*>(tensor.data()), tensor.size() * sizeof(float));
    EXPECT_TRUE(print.empty() || own == print) << "ranks disagree";
    print = own;
  }
  return print;
}

TEST(MeshNumbersTest, StagesOfPipelineAndZeroChangeNoBitOfATensorGroup) {
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
    for (const char* model : {"gpt2", "llama"}) {
      const Overrides overrides = {precision, "deterministic=true"};
      const std::string wanted =
          Print(Spec(model, overrides, 0), {.shape = {.data = 2, .tensor = 2}});
      for (const int stage : {0, 1, 2, 3})
        EXPECT_EQ(Print(Spec(model, overrides, stage), {.shape = kCube}), wanted)
            << model << " " << precision << ", ZeRO stage " << stage;
    }
  }
}

TEST(MeshNumbersTest, SixteenBitsAgreeWithinTheirRounding) {
  const MemoryDataset data = MeshData();
  for (const char* model : {"gpt2", "llama"}) {
    const v1::JobSpec spec = Spec(model, {"bf16.enabled=true"}, 1);
    const RankResult alone = TrainJob(spec, {.world = 1}, data)[0];
    const auto results = TrainMesh(spec, {.shape = kCube}, data);
    ASSERT_TRUE(alone.status.ok() && results[0].status.ok()) << results[0].status;
    for (size_t i = 0; i < alone.records.size(); ++i) {
      const v1::StepRecord &seen = results[0].records.at(i), &wanted = alone.records[i];
      EXPECT_NEAR(seen.loss(), wanted.loss(), 2e-3 * wanted.loss());
      EXPECT_NEAR(seen.grad_norm(), wanted.grad_norm(), 2e-2 * wanted.grad_norm());
    }
  }
}

// Where eps is far above every gradient, and neither moments nor decay have a part, an update is
// learning rate / eps times the gradient: what changed is the gradient, gathered, each element
// once.
TEST(MeshNumbersTest, TheNormIsThatOfTheGatheredGradient) {
  constexpr double kEps = 1e6, kScale = 100;
  const Overrides overrides = {
      "steps=1", "gradient_clipping=0",
      "optimizer={type: AdamW, params: {lr: 1.0e8, betas: [0, 0], eps: 1.0e6, weight_decay: 0}}"};
  const MemoryDataset data = MeshData();
  for (const char* model : {"gpt2", "llama", "tied-llama"}) {
    for (const MeshShape& shape :
         {kCube, MeshShape{.pipeline = 2, .tensor = 4}, MeshShape{.data = 2, .tensor = 4}}) {
      const v1::JobSpec spec = Spec(model, overrides, 2);
      const auto results = TrainMesh(spec, {.shape = shape, .tensors = TensorNames(spec)}, data);
      const ModelTable table = *MakeModelTable(spec.model());
      const FreshWeights fresh(spec.seed());
      double squares = 0;
      size_t at = 0;
      for (const RankResult& result : results) ASSERT_TRUE(result.status.ok()) << result.status;
      for (const UnitTable& unit : table.units) {
        for (const ParameterInfo& info : unit.parameters) {
          std::vector<float> before(static_cast<size_t>(info.size));
          ASSERT_TRUE(fresh.Read(info, 0, info.size, before.data()).ok());
          const std::vector<float>& after = results[0].tensors.at(at++);
          ASSERT_EQ(after.size(), before.size()) << info.name;
          for (size_t i = 0; i < before.size(); ++i) {
            const double gradient =
                (static_cast<double>(before[i]) - static_cast<double>(after[i])) / kScale;
            squares += gradient * gradient;
          }
        }
      }
      const v1::StepRecord& record = results[0].records.at(0);
      ASSERT_EQ(record.learning_rate(), kScale * kEps);
      EXPECT_GT(record.grad_norm(), 0.1);
      EXPECT_NEAR(record.grad_norm(), std::sqrt(squares), 1e-5 * record.grad_norm())
          << model << " " << NameOf(shape);
    }
  }
}

// First and last stage, and in each every tensor rank: StageTensor joins what a stage's ranks hold.
TEST(MeshNumbersTest, CopiesOfATiedTableStayOneForFiftySteps) {
  const MemoryDataset data = MeshData();
  for (const char* model : {"gpt2", "tied-llama"}) {
    const std::string table = std::string(model) == "gpt2" ? "wte.weight" : "embed.weight";
    std::vector<std::vector<std::vector<float>>> tables(4);  // by rank and step
    MeshRun run{.shape = {.pipeline = 2, .tensor = 2}};
    run.on_step = [&](int rank, uint64_t, Trainer* trainer) {
      auto seen = trainer->StageTensor(table);
      ASSERT_TRUE(seen.ok()) << seen.status();
      tables[static_cast<size_t>(rank)].push_back(*std::move(seen));
    };
    for (const RankResult& result :
         TrainMesh(Spec(model, {"steps=50", "model.layers=2"}, 2), run, data))
      ASSERT_TRUE(result.status.ok()) << result.status;
    ASSERT_EQ(tables[0].size(), 50u);
    for (size_t step = 0; step < 50; ++step) {
      EXPECT_TRUE(step == 0 || tables[0][step] != tables[0][step - 1]) << "nothing was trained";
      for (const size_t rank : {1, 2, 3})
        ASSERT_EQ(std::memcmp(tables[rank][step].data(), tables[0][step].data(),
                              tables[0][step].size() * sizeof(float)),
                  0)
            << model << ": rank " << rank << " after step " << step + 1;
    }
  }
}

TEST(MeshNumbersTest, ATensorThatIsSetIsGatheredAsItWas) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec spec = Spec("llama", {"steps=1"}, 3);
  const ModelTable table = *MakeModelTable(spec.model());
  MeshRun run{.shape = {.pipeline = 2, .tensor = 4}};
  run.prepare = [&](int rank, Trainer* trainer) -> absl::Status {
    float next = 0;
    for (const UnitTable& unit : table.units) {
      for (const ParameterInfo& info : unit.parameters) {
        std::vector<float> values(static_cast<size_t>(info.size));
        for (float& value : values) value = next++;
        ZS_RETURN_IF_ERROR(trainer->SetTensor(info.name, values));
        ZS_ASSIGN_OR_RETURN(const std::vector<float> seen, trainer->GatherTensor(info.name));
        EXPECT_EQ(seen, values) << info.name;
      }
    }
    const absl::Status few = trainer->SetTensor("embed.weight", {1.0f, 2.0f});
    if (rank < 4) {  // the first stage's
      EXPECT_EQ(few.message(), absl::StrCat("embed.weight has ", 53 * 64, " elements, not 2"));
    }
    EXPECT_EQ(trainer->SetTensor("embed", {}).code(), absl::StatusCode::kNotFound);
    return absl::CancelledError("seen");
  };
  for (const RankResult& result : TrainMesh(spec, run, data))
    EXPECT_EQ(result.status.message(), "seen");
}

}  // namespace
}  // namespace zeroshard
