// Tensor ranks of a mesh that share each sequence train what one process trains, and what is on its
// way between stages is the less for it.
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/worker/train/mesh_job.h"

namespace zeroshard {
namespace {

v1::JobSpec Spec(const std::string& model, std::vector<std::string> overrides, bool divided) {
  v1::JobSpec spec = MakeSpec(MeshJob(model), overrides);
  spec.mutable_parallel()->set_sequence_parallel(divided);
  return spec;
}

struct SequenceCase {
  std::string model;
  MeshShape shape;
  int stage = 0;
  bool checkpointing = false;
};

class MeshSequence : public testing::TestWithParam<SequenceCase> {};

std::vector<SequenceCase> Cases() {
  std::vector<SequenceCase> cases;
  for (const char* model : {"gpt2", "llama", "tied-llama"}) {
    for (const int stage : {0, 1, 2, 3}) {
      cases.push_back({model, {.pipeline = 1, .data = 2, .tensor = 2}, stage, stage % 2 == 0});
      cases.push_back({model, {.pipeline = 2, .data = 1, .tensor = 4}, stage, stage % 2 == 1});
    }
    cases.push_back({model, {.pipeline = 2, .data = 2, .tensor = 2}, 3, false});
    cases.push_back({model, {.pipeline = 4, .data = 1, .tensor = 2}, 2, true});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Meshes, MeshSequence, testing::ValuesIn(Cases()), [](const auto& info) {
  const SequenceCase& c = info.param;
  std::string model = c.model;
  std::erase(model, '-');
  return absl::StrFormat("%s_%s_stage%d", model, NameOf(c.shape), c.stage);
});

uint64_t Sent(const RankResult& result, Phase phase) {
  return result.traffic[static_cast<size_t>(CollectiveOp::kSend)][static_cast<size_t>(phase)];
}

TEST_P(MeshSequence, TrainsAsOneProcessAndSendsLess) {
  const SequenceCase& c = GetParam();
  const std::vector<std::string> overrides = {
      absl::StrFormat("zero_optimization.stage=%d", c.stage),
      absl::StrFormat("activation_checkpointing=%s", c.checkpointing ? "true" : "false")};
  const MemoryDataset data = MeshData();
  const v1::JobSpec whole = Spec(c.model, overrides, false);
  const std::vector<std::string> names = TensorNames(whole, /*ends=*/true);
  const RankResult alone = TrainJob(whole, {.world = 1, .tensors = names}, data)[0];
  ASSERT_TRUE(alone.status.ok()) << alone.status;
  std::map<std::string, std::vector<float>> weights;
  for (size_t i = 0; i < names.size(); ++i) weights[names[i]] = alone.tensors[i];

  const MeshRun run{.shape = c.shape, .tensors = names};
  const std::vector<RankResult> undivided = TrainMesh(whole, run, data);
  const std::vector<RankResult> divided = TrainMesh(Spec(c.model, overrides, true), run, data);
  ExpectAgree(divided, alone, weights, names, 1e-5);
  for (size_t rank = 0; rank < divided.size(); ++rank) {
    const RankResult& with = divided[rank];
    const RankResult& without = undivided[rank];
    ASSERT_TRUE(without.status.ok()) << without.status;
    // A forward's rows have the same bits.
    EXPECT_EQ(with.records[0].loss(), without.records[0].loss());
    const auto activations = static_cast<size_t>(MemoryKind::kActivations);
    EXPECT_LT(with.memory[activations], without.memory[activations]);
    for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
      EXPECT_EQ(Sent(with, phase) * static_cast<uint64_t>(c.shape.tensor), Sent(without, phase));
    }
  }
}

TEST(MeshSequenceTest, SequencesThatTensorRanksDoNotDivideAreRefused) {
  const v1::JobSpec spec = Spec("gpt2", {}, true);
  for (const RankResult& result : TrainMesh(spec, {.shape = {.tensor = 8}}, MeshData())) {
    EXPECT_TRUE(absl::StrContains(result.status.message(),
                                  "12 tokens (model.sequence_length) on 8 tensor ranks"))
        << result.status;
  }
}

}  // namespace
}  // namespace zeroshard
