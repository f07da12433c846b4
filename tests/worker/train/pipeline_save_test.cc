// A checkpoint of one mesh is gone on from by another.
#include <string>
#include <vector>

#include "tests/common/temp_folder.h"
#include "tests/worker/train/mesh_harness.h"

namespace zeroshard {
namespace {

v1::JobSpec Spec(int stage, const std::string& dir) {
  v1::JobSpec spec = MakeSpec(
      TinyGpt2(), {"deterministic=true", absl::StrFormat("zero_optimization.stage=%d", stage)});
  spec.mutable_checkpoint()->set_dir(dir);
  spec.mutable_checkpoint()->set_interval_steps(2);
  return spec;
}

// Saved after step 2 of 4 on the first mesh, gone on from on the second: the weights of a run that
// never ended.
void ExpectGoesOn(const MeshRun& first, int first_stage, const MeshRun& second, int second_stage) {
  const TempFolder folder;
  const MemoryDataset data = TinyData();
  const auto saved = TrainMesh(Spec(first_stage, folder / "one"), first, data);
  for (const RankResult& result : saved) ASSERT_TRUE(result.status.ok()) << result.status;
  ASSERT_EQ(saved[0].checkpoints.size(), 2u);
  ASSERT_EQ(saved[0].checkpoints[0].step(), 2u);
  MeshRun again = second;
  again.first_step = 3;
  again.resume_from = saved[0].checkpoints[0].path();
  for (const RankResult& result : TrainMesh(Spec(second_stage, folder / "two"), again, data)) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.digest, saved[0].digest);
  }
}

const MeshRun kAlone{.shape = {.pipeline = 1}};
const MeshRun kMesh{.shape = {.pipeline = 2, .data = 2}};
const MeshRun kRuns{.shape = {.pipeline = 2}, .virtual_stages = 2};

TEST(PipelineSaveTest, AMeshGoesOnAsOneRank) { ExpectGoesOn(kMesh, 3, kAlone, 1); }
TEST(PipelineSaveTest, OneRankGoesOnAsAMesh) { ExpectGoesOn(kAlone, 0, kMesh, 2); }
TEST(PipelineSaveTest, AMeshGoesOnAsAnother) { ExpectGoesOn(kMesh, 2, kRuns, 3); }

}  // namespace
}  // namespace zeroshard
