// Checkpoints of one mesh pipeline x data x tensor are gone on from by another.
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/train/checkpoint_harness.h"
#include "tests/worker/train/mesh_job.h"

namespace zeroshard {
namespace {

// Who trains two steps more, at which ZeRO stage.
struct Leg {
  MeshShape shape;
  int stage = 0;
};

v1::JobSpec Spec(const std::string& model, const Leg& leg, uint64_t steps, const std::string& dir,
                 std::vector<std::string> overrides) {
  overrides.push_back(absl::StrFormat("zero_optimization.stage=%d", leg.stage));
  v1::JobSpec spec = MakeSpec(MeshJob(model), overrides);
  spec.set_steps(steps);
  if (!dir.empty()) spec.mutable_checkpoint()->set_dir(dir);
  return spec;
}

std::string NameOf(const Leg& leg) {
  return absl::StrFormat("%s at stage %d", NameOf(leg.shape), leg.stage);
}

// Each leg goes on from the checkpoint of the one before. Before it trains it saves what it has
// loaded, which must be what was saved, bit by bit. Returns the last one's results.
std::vector<RankResult> TrainLegs(const std::string& model, const std::vector<Leg>& legs,
                                  const TempFolder& folder,
                                  const std::vector<std::string>& overrides) {
  const MemoryDataset data = MeshData();
  std::vector<RankResult> results;
  std::string from;
  uint64_t step = 0;
  for (size_t i = 0; i < legs.size(); ++i) {
    SCOPED_TRACE(absl::StrFormat("%s, leg %d: %s", model, i, NameOf(legs[i])));
    const auto dir = [&](const char* of) { return folder / absl::StrFormat("%s-%d", of, i); };
    MeshRun run{.shape = legs[i].shape, .first_step = step + 1, .resume_from = from};
    if (!from.empty()) {
      const State wanted = ReadState(from);
      ExpectAllOk(TrainMesh(Spec(model, legs[i], step, dir("loaded"), overrides), run, data));
      ExpectSameState(ReadState(dir("loaded") + "/" + CheckpointName(step)), wanted,
                      NameOf(legs[i]));
    }
    step += 2;
    run.tensors = TensorNames(Spec(model, legs[i], step, "", overrides));
    results = TrainMesh(Spec(model, legs[i], step, dir("trained"), overrides), run, data);
    ExpectAllOk(results);
    for (const RankResult& result : results) EXPECT_EQ(result.digest, results[0].digest);
    from = dir("trained") + "/" + CheckpointName(step);
    const auto reader = CheckpointReader::Open(from);
    EXPECT_TRUE(reader.ok()) << reader.status();
    if (testing::Test::HasFailure()) return {};
    // The digest that ranks compute together is the one that is written.
    EXPECT_EQ((*reader)->manifest().digests[0], results[0].digest);
    EXPECT_EQ((*reader)->manifest().world_size, static_cast<uint32_t>(legs[i].shape.Ranks()));
  }
  return results;
}

// And the end is that of one process that never stopped.
void ExpectAsAlone(const std::string& model, const std::vector<Leg>& legs) {
  const TempFolder folder;
  const std::vector<RankResult> seen = TrainLegs(model, legs, folder, {});
  ASSERT_FALSE(seen.empty());
  const v1::JobSpec spec = Spec(model, {}, 2 * legs.size(), "", {});
  const std::vector<std::string> names = TensorNames(spec);
  const RankResult alone = TrainJob(spec, {.world = 1, .tensors = names}, MeshData())[0];
  ASSERT_TRUE(alone.status.ok()) << alone.status;
  for (const RankResult& result : seen) {
    ASSERT_EQ(result.records.size(), 2u);
    EXPECT_NEAR(result.records.back().loss(), alone.records.back().loss(),
                1e-5 * alone.records.back().loss());
  }
  for (size_t i = 0; i < names.size(); ++i)
    ExpectNear(seen[0].tensors[i], alone.tensors[i], 1e-5, names[i]);
}

Leg On(int data, int tensor, int pipeline, int stage) {
  return {.shape = {.pipeline = pipeline, .data = data, .tensor = tensor}, .stage = stage};
}

// Key and value heads for two: four tensor ranks share them.
const std::vector<Leg> kLegs = {On(2, 2, 2, 3), On(4, 1, 1, 1), On(1, 2, 4, 2), On(1, 1, 1, 0)};
const std::vector<Leg> kShared = {On(1, 4, 2, 1), On(2, 2, 1, 2), On(1, 8, 1, 3), On(1, 1, 2, 0)};

TEST(MeshSaveTest, Gpt2GoesOnOnEveryOtherMesh) { ExpectAsAlone("gpt2", kLegs); }
TEST(MeshSaveTest, LlamaGoesOnOnEveryOtherMesh) { ExpectAsAlone("llama", kLegs); }
TEST(MeshSaveTest, TiedLlamaGoesOnOnEveryOtherMesh) { ExpectAsAlone("tied-llama", kLegs); }
TEST(MeshSaveTest, HeadsThatRanksShareGoOnToo) { ExpectAsAlone("llama", kShared); }

// Parameters are a function of the state that is saved, also where they are rounded at random.
TEST(MeshSaveTest, SixteenBitsRoundedAtRandomGoOnToo) {
  const TempFolder folder;
  TrainLegs("gpt2", kLegs, folder, {"bf16.enabled=true", "bf16.stochastic_rounding=true"});
}

// Frozen tensors have no moments, and frozen units are in 16 bits alone.
TEST(MeshSaveTest, FrozenPartsGoOnToo) {
  const TempFolder folder;
  TrainLegs("llama", kShared, folder,
            {"bf16.enabled=true", "model.trainable=['blocks.1.*', 'blocks.3.mlp.*', 'norm_f.*']"});
}

}  // namespace
}  // namespace zeroshard
