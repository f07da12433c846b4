// The loss of text that is not trained on, measured by a mesh.
#include <string>
#include <vector>

#include "tests/worker/train/mesh_job.h"

namespace zeroshard {
namespace {

MemoryDataset EvalData(int64_t samples) {
  return MemoryDataset(ChainTokens(12 * samples + 1, 53, 99), 12);
}

v1::JobSpec Spec(const std::string& model, int stage, std::vector<std::string> more = {}) {
  more.push_back("eval={data: [unused], interval_steps: 1}");
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", stage));
  return MakeSpec(MeshJob(model), more);
}

std::vector<double> LossesOf(const RankResult& result) {
  std::vector<double> losses;
  for (const v1::StepRecord& record : result.records) losses.push_back(record.eval_loss());
  return losses;
}

// Of one process.
RankResult Alone(const v1::JobSpec& spec, const TokenDataset* eval, int world = 1) {
  RunOptions options{.world = world};
  options.eval_data = eval;
  const MemoryDataset data = MeshData();
  RankResult result = TrainJob(spec, options, data)[0];
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_NE(result.records.at(0).eval_loss(), result.records.at(1).eval_loss());
  return result;
}

std::vector<RankResult> OnMesh(const v1::JobSpec& spec, MeshRun run, const TokenDataset* eval) {
  run.eval_data = eval;
  const MemoryDataset data = MeshData();
  return TrainMesh(spec, run, data);
}

// Eleven samples: five micro-batches and half a one, ragged on two data ranks.
TEST(MeshEvalTest, StagesMeasureTheBitsOfTheirDataLine) {
  const MemoryDataset eval = EvalData(11);
  for (const char* model : {"gpt2", "llama"}) {
    for (const int stage : {1, 3}) {
      const v1::JobSpec spec = Spec(model, stage, {"deterministic=true"});
      const std::vector<double> wanted = LossesOf(Alone(spec, &eval));
      for (const MeshRun& run : {MeshRun{.shape = {.pipeline = 2}},
                                 MeshRun{.shape = {.pipeline = 2, .data = 2}, .virtual_stages = 2},
                                 MeshRun{.shape = {.pipeline = 1, .data = 2}, .virtual_stages = 3},
                                 MeshRun{.shape = {.pipeline = 4}}}) {
        for (const RankResult& result : OnMesh(spec, run, &eval)) {
          ASSERT_TRUE(result.status.ok()) << result.status;
          EXPECT_EQ(LossesOf(result), wanted) << model << " " << NameOf(run.shape) << " " << stage;
        }
      }
    }
  }
}

// 150 micro-batches are more than a runner keeps sums of: two full calls and a shorter one.
TEST(MeshEvalTest, ManyMicroBatchesAreMeasuredInTurns) {
  const MemoryDataset eval = EvalData(299);
  const v1::JobSpec spec = Spec("gpt2", 3, {"deterministic=true", "model.layers=2"});
  const std::vector<double> wanted = LossesOf(Alone(spec, &eval));
  for (const int runs : {1, 2}) {
    const MeshRun run{.shape = {.pipeline = 2}, .virtual_stages = runs};
    for (const RankResult& result : OnMesh(spec, run, &eval)) {
      ASSERT_TRUE(result.status.ok()) << result.status;
      EXPECT_EQ(LossesOf(result), wanted) << runs;
    }
  }
}

TEST(MeshEvalTest, TensorRanksMeasureWhatOneProcessDoes) {
  const MemoryDataset eval = EvalData(11);
  for (const char* model : {"gpt2", "llama", "tied-llama"}) {
    const std::vector<double> wanted = LossesOf(Alone(Spec(model, 0), &eval));
    for (const MeshShape& shape : {MeshShape{.tensor = 2}, MeshShape{.data = 2, .tensor = 4},
                                   MeshShape{.pipeline = 2, .data = 2, .tensor = 2}}) {
      const auto results = OnMesh(Spec(model, 3), {.shape = shape}, &eval);
      for (const RankResult& result : results) {
        ASSERT_TRUE(result.status.ok()) << result.status;
        const std::vector<double> seen = LossesOf(result);
        EXPECT_EQ(seen, LossesOf(results[0]));
        for (size_t i = 0; i < wanted.size(); ++i)
          EXPECT_NEAR(seen.at(i), wanted[i], 1e-5 * wanted[i]) << model << " " << NameOf(shape);
      }
    }
  }
}

TEST(MeshEvalTest, ChangesNoBitOfTraining) {
  const MemoryDataset eval = EvalData(11);
  const MemoryDataset data = MeshData();
  const MeshRun run{.shape = {.pipeline = 2, .tensor = 2}, .tensors = {"blocks.5.mlp.fc.weight"}};
  for (const int stage : {1, 3}) {
    const auto seen = OnMesh(Spec("gpt2", stage), run, &eval);
    const auto wanted =
        TrainMesh(MakeSpec(MeshJob("gpt2"), {absl::StrFormat("zero_optimization.stage=%d", stage)}),
                  run, data);
    ASSERT_TRUE(seen[0].status.ok() && wanted[0].status.ok()) << seen[0].status;
    EXPECT_EQ(seen[0].records.at(1).loss(), wanted[0].records.at(1).loss());
    EXPECT_EQ(seen[0].records.at(1).grad_norm(), wanted[0].records.at(1).grad_norm());
    EXPECT_EQ(seen[0].tensors, wanted[0].tensors);
  }
}

}  // namespace
}  // namespace zeroshard
