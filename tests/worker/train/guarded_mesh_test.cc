// A mesh on devices that the host cannot reach has the numbers of one on CPUs bit for bit, whenever
// each device does its work.
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/train/guarded_backend.h"
#include "tests/worker/train/mesh_harness.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

using More = std::vector<std::string>;

struct Case {
  const char* name;
  bool llama;
  int stage;
  MeshShape mesh;
  More more = {};
  int virtual_stages = 1;
  bool full_gradients = false;
  Offload offload = Offload::kNone;
  bool divides_sequences = false;
};

const char* const kBf16 = "bf16.enabled=true";
const char* const kDeterministic = "deterministic=true";
const char* const kCheckpointing = "activation_checkpointing=true";
const char* const kInOrder = "zero_optimization.overlap_comm=false";

More Dropout(More more) {
  for (const char* rate : {"model.embd_pdrop=0.1", "model.attn_pdrop=0.2", "model.resid_pdrop=0.1"})
    more.push_back(rate);
  return more;
}

// Three micro-batches of two sequences; 61 rows of the token table; two key and value heads.
std::vector<Case> Cases() {
  const MeshShape stages{.pipeline = 2}, tensor{.tensor = 2}, both{.pipeline = 2, .tensor = 2};
  const MeshShape data{.pipeline = 2, .data = 2};
  const MeshShape cube{.pipeline = 2, .data = 2, .tensor = 2};
  return {
      {"PipelineStage0", false, 0, stages},
      {"PipelineStage2", true, 2, stages, {kBf16}},
      {"PipelineStage3", false, 3, stages, {kBf16, kCheckpointing}},
      {"PipelineInterleaved", false, 1, stages, {kBf16, kDeterministic}, 2},
      {"PipelineFullGradients", true, 3, stages, {}, 1, true},
      {"PipelineDropout", false, 1, stages, Dropout({kBf16})},
      {"PipelineOneMicroBatch", true, 3, stages, {"train_batch_size=2"}},
      {"PipelineInOrder", false, 3, data, {kInOrder, kBf16}},
      {"PipelineAndDataStage2", true, 2, data, {kBf16}},
      {"TensorStage0", true, 0, tensor, {kBf16}},
      {"TensorStage3", false, 3, tensor},
      {"TensorDropout", false, 1, tensor, Dropout({kBf16, kCheckpointing})},
      {"TensorAndPipelineStage1", false, 1, both, {kBf16}},
      {"TensorAndPipelineStage3", true, 3, both, {kCheckpointing}},
      {"HeadsOnTwoRanksEach", true, 2, {.tensor = 4}, {kBf16}},
      {"Cube", false, 3, cube, {kBf16}},
      {"OffloadPipeline", true, 2, stages, {kBf16}, 1, false, Offload::kOptimizer},
      {"OffloadTensor", false, 1, tensor, {kBf16}, 1, false, Offload::kOptimizer},
      {"OffloadAllOfTensorAndPipeline", true, 3, both, {kBf16}, 1, false, Offload::kAll},
      {"Evaluation", false, 3, both, {"eval={data: [unused], interval_steps: 2}", kBf16}},
      {"DividedSequences", false, 2, both, Dropout({kBf16}), 1, false, Offload::kNone, true},
  };
}

struct Outcome {
  std::vector<RankResult> ranks;
  std::string stores;  // the digest of what they have at the end
};

Outcome Train(const Case& c, const RankBackend& backend) {
  v1::JobSpec spec = Spec(c.llama ? TinyLlama() : TinyGpt2(), {1, c.stage}, c.offload, c.more);
  if (c.divides_sequences) spec.mutable_parallel()->set_sequence_parallel(true);
  const MemoryDataset data = TinyData();
  const MemoryDataset eval(ChainTokens(24 * 7 + 1, 61, 99), 24);
  MeshRun run{.shape = c.mesh,
              .virtual_stages = c.virtual_stages,
              .full_gradients = c.full_gradients,
              .backend = backend};
  if (spec.has_eval()) run.eval_data = &eval;
  std::unique_ptr<MemoryStores> stores;
  if (c.offload != Offload::kNone) {
    stores = std::make_unique<MemoryStores>(spec, MemoryStores::Options{});
    run.store = [&stores](int rank) { return stores->MakeRank(rank); };
  }
  Outcome outcome{.ranks = TrainMesh(spec, run, data), .stores = ""};
  for (const RankResult& rank : outcome.ranks) {
    EXPECT_TRUE(rank.status.ok()) << rank.status;
    EXPECT_EQ(rank.records.size(), spec.steps());
  }
  if (stores != nullptr && outcome.ranks[0].status.ok()) {
    stores->WaitForVersion(spec.steps());
    outcome.stores = stores->Digest();
  }
  return outcome;
}

std::vector<double> EvalLosses(const RankResult& rank) {
  std::vector<double> losses;
  for (const v1::StepRecord& record : rank.records) losses.push_back(record.eval_loss());
  return losses;
}

class GuardedMesh : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Jobs, GuardedMesh, testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(GuardedMesh, HasTheCpusNumbersWheneverWorkIsDone) {
  const Case& c = GetParam();
  const Outcome outcome = Train(c, {});
  const std::vector<RankResult>& expected = outcome.ranks;
  // All eager, all lazy, all delayed; and each rank another one.
  for (uint64_t seed = 0; seed <= kSchedules; ++seed) {
    SCOPED_TRACE(testing::Message() << "device seed " << seed);
    const Outcome guarded = Train(c, GuardedBackend(seed));
    const std::vector<RankResult>& seen = guarded.ranks;
    ASSERT_EQ(seen.size(), expected.size());
    EXPECT_EQ(guarded.stores, outcome.stores);
    for (size_t rank = 0; rank < seen.size(); ++rank) {
      SCOPED_TRACE(testing::Message() << "rank " << rank);
      EXPECT_EQ(Fingerprint(seen[rank]), Fingerprint(expected[rank]));
      EXPECT_EQ(EvalLosses(seen[rank]), EvalLosses(expected[rank]));
      EXPECT_EQ(seen[rank].traffic, expected[rank].traffic);
      for (const MemoryKind kind : {MemoryKind::kParameters, MemoryKind::kGradients,
                                    MemoryKind::kOptimizer, MemoryKind::kActivations}) {
        EXPECT_EQ(seen[rank].memory[static_cast<int>(kind)],
                  expected[rank].memory[static_cast<int>(kind)])
            << NameOf(kind);
      }
    }
  }
}

// A rank that is gone takes no memory with it that a device still works on: a guarded one ends the
// process where it does.
TEST(GuardedMeshFaults, ARankThatIsGoneEndsTheOthersOfItsMesh) {
  const v1::JobSpec spec = MakeSpec(TinyGpt2(), {"zero_optimization.stage=3"});
  const MemoryDataset data = TinyData();
  for (uint64_t seed = 0; seed <= kSchedules; ++seed) {
    for (const int gone : {0, 3}) {
      MeshRun run{.shape = {.pipeline = 2, .tensor = 2}, .backend = GuardedBackend(seed)};
      run.dies = [gone](int rank, uint64_t step, StepPhase, const std::string&) {
        return rank == gone && step == 2;
      };
      for (const RankResult& rank : TrainMesh(spec, run, data))
        EXPECT_FALSE(rank.status.ok()) << "seed " << seed << ", rank " << gone << " is gone";
    }
  }
}

}  // namespace
}  // namespace zeroshard
