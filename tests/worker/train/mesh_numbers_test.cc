// Every mesh trains what one process trains.
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/kernels/init.h"
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
  for (const int stage : {0, 1, 2, 3})
    ExpectAsAlone(model, {.shape = ShapeOf(shape)}, {}, stage);
}

}  // namespace
}  // namespace zeroshard
