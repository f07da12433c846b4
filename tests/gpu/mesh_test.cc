// Tensor ranks and pipeline stages that share a GPU, through Gloo: the curve of a single rank.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/gpu/gpu_backend.h"
#include "tests/worker/train/mesh_harness.h"

namespace zeroshard {
namespace {

using More = std::vector<std::string>;

class GpuMesh : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const absl::Status none = CheckCudaDevice(0); !none.ok()) GTEST_SKIP() << none;
  }
  static v1::JobSpec Job(int stage, More more) {
    more.push_back(absl::StrFormat("zero_optimization.stage=%d", stage));
    return MakeSpec(GetParam() == std::string("gpt2") ? TinyGpt2() : TinyLlama(), more);
  }
  std::vector<RankResult> Alone(int stage, const More& more) const {
    return TrainJob(Job(stage, more), {.world = 1, .backend = GpuBackend()}, data_);
  }
  std::vector<RankResult> Mesh(int stage, const More& more, const MeshShape& shape) const {
    std::vector<RankResult> results =
        TrainMesh(Job(stage, more), {.shape = shape, .backend = GpuBackend()}, data_);
    for (const RankResult& rank : results) EXPECT_TRUE(rank.status.ok()) << rank.status;
    return results;
  }
  const MemoryDataset data_ = TinyData();
};
INSTANTIATE_TEST_SUITE_P(Models, GpuMesh, testing::Values("gpt2", "llama"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(GpuMesh, TwoTensorRanksByTwoStagesHaveTheCurveOfASingleRank) {
  struct Precision {
    const char* name;
    double tolerance;
  };
  for (const auto& [precision, tolerance] :
       {Precision{"bf16.enabled=false", 5e-4}, {"bf16.enabled=true", 2e-2}}) {
    const More more = {"steps=20", precision};
    const auto wanted = Alone(0, more);
    ASSERT_TRUE(wanted[0].status.ok()) << wanted[0].status;
    for (const int stage : {0, 3}) {
      SCOPED_TRACE(testing::Message() << precision << " stage " << stage);
      for (const RankResult& rank : Mesh(stage, more, {.pipeline = 2, .tensor = 2}))
        ExpectCurve(rank.records, wanted[0].records, tolerance);
    }
  }
}

// Each tensor rank draws its heads' part of the masks.
TEST_P(GpuMesh, DropoutOfTensorRanksHasTheCurveOfASingleRank) {
  const More more = {"model.embd_pdrop=0.1", "model.attn_pdrop=0.2", "model.resid_pdrop=0.1"};
  const auto wanted = Alone(1, more);
  ASSERT_TRUE(wanted[0].status.ok()) << wanted[0].status;
  for (const RankResult& rank : Mesh(1, more, {.tensor = 2}))
    ExpectCurve(rank.records, wanted[0].records, 1e-4);
}

TEST_P(GpuMesh, APipelineAloneChangesNoBit) {
  const More more = {"bf16.enabled=true", "deterministic=true"};
  for (const int stage : {1, 3}) {
    const auto wanted = Alone(stage, more);
    ASSERT_TRUE(wanted[0].status.ok()) << wanted[0].status;
    for (const RankResult& rank : Mesh(stage, more, {.pipeline = 2}))
      EXPECT_EQ(Fingerprint(rank), Fingerprint(wanted[0])) << "stage " << stage;
  }
}

}  // namespace
}  // namespace zeroshard
