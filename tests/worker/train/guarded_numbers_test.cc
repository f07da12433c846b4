// On a device that the host cannot reach a job has the CPU's losses, norms and weights bit for bit,
// whenever the device does its work.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/train/guarded_backend.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

using More = std::vector<std::string>;

enum class Text : uint8_t { kTokens, kDocuments };

struct Case {
  const char* name;
  bool llama;
  Shape shape;
  More more;
  Offload offload = Offload::kNone;
  Text text = Text::kTokens;
};

// Three micro-batches of two samples where the batch size is not given; clipping is on.
const char* const kBf16 = "bf16.enabled=true";
const char* const kOneRound = "train_batch_size=4";  // of two ranks
const char* const kRagged = "train_batch_size=10";
const char* const kDeterministic = "deterministic=true";
const char* const kSparse = "model.vocab_size=997";
const char* const kCheckpointing = "activation_checkpointing=true";
const char* const kInOrder = "zero_optimization.overlap_comm=false";
const char* const kReuse = "zero_optimization.stage3_max_reuse_distance=1000000000";
const char* const kSmallUnitsWhole = "zero_optimization.stage3_param_persistence_threshold=4000";
const char* const kFewLive = "zero_optimization.stage3_max_live_parameters=0";
const char* const kNoPrefetch = "zero_optimization.stage3_prefetch_bucket_size=0";
const char* const kSomePrefetch = "zero_optimization.stage3_prefetch_bucket_size=13000";
const char* const kSmallBuckets = "zero_optimization.reduce_bucket_size=64";
const char* const kOneSmallPush =
    "zero_optimization.offload_optimizer={device: cpu, buffer_count: 1, buffer_size: 64}";

More Dropout(More more) {
  for (const char* rate : {"model.embd_pdrop=0.1", "model.attn_pdrop=0.2", "model.resid_pdrop=0.1"})
    more.push_back(rate);
  return more;
}

std::vector<Case> Cases() {
  const More untied = {"model.tie_embeddings=false", kBf16};
  const More tied = {"model.tie_embeddings=true", kBf16};
  const More frozen = {"model.trainable=['blocks.1.*', '*_f*']", kBf16};
  const More small = {"model.hidden_size=16", "model.layers=1", kBf16};
  const Offload optimizer = Offload::kOptimizer, all = Offload::kAll;
  return {
      // How gradients are kept: whole in the wire type, whole in fp32, shards.
      {"Stage0Alone", false, {1, 0}, {kRagged}},
      {"Stage0OneRound", false, {3, 0}, {}},
      {"Stage0Accumulates", false, {2, 0}, {kBf16}},
      {"Stage0Deterministic", false, {2, 0}, {kDeterministic, kRagged, kBf16}},
      {"Stage1OneRound", true, {2, 1}, {kOneRound, kBf16}},
      {"Stage1Accumulates", true, {3, 1}, {kRagged}},
      {"Stage1Deterministic", true, {2, 1}, {kDeterministic, kBf16}},
      {"Stage2Alone", true, {1, 2}, {kBf16}},
      {"Stage2", false, {2, 2}, {kBf16}},
      {"Stage2Ragged", true, {3, 2}, {kRagged}},
      {"Stage3Alone", false, {1, 3}, {kRagged, kBf16}},
      {"Stage3", true, {2, 3}, {}},
      {"Stage3OneRound", false, {2, 3}, {kOneRound, kBf16}},
      {"Stage3Ragged", false, {3, 3}, {kRagged, kBf16, kDeterministic}},
      {"WithoutClipping", false, {2, 2}, {"gradient_clipping=0"}},
      {"ClippedHard", false, {2, 3}, {"gradient_clipping=0.01", kBf16}},
      // The token table.
      {"SparseRowsOfATiedTable", false, {2, 3}, {kSparse, kBf16}},
      {"SparseRowsOfAnUntiedTable", true, {3, 2}, {kSparse}},
      {"SparseRowsInOrder", false, {2, 2}, {kSparse, kInOrder}},
      {"SparseRowsAccumulated", true, {2, 1}, {kSparse, kBf16}},
      {"UntiedGpt2", false, {2, 2}, untied},
      {"TiedLlama", true, {2, 3}, tied},
      // What a micro-batch runs through.
      {"Checkpointing", true, {2, 3}, {kCheckpointing, kBf16}},
      {"DropoutIsDrawnAgain", false, {2, 3}, Dropout({kCheckpointing, kBf16})},
      {"DropoutIsNot", false, {2, 1}, Dropout({})},
      {"Documents", true, {2, 3}, {kBf16}, Offload::kNone, Text::kDocuments},
      {"DocumentsRagged", false, {3, 2}, {kCheckpointing}, Offload::kNone, Text::kDocuments},
      {"Frozen", false, {2, 3}, frozen},
      {"FrozenStage0", false, {2, 0}, frozen},
      {"EmptyShards", false, {3, 3}, small},
      // When things move.
      {"InOrderStage0", false, {2, 0}, {kInOrder, kDeterministic}},
      {"InOrderStage1", true, {2, 1}, {kInOrder, kOneRound}},
      {"InOrderStage3", false, {3, 3}, {kInOrder, kBf16}},
      {"SmallBuckets", true, {2, 2}, {kSmallBuckets, kBf16}},
      {"NoPrefetch", false, {2, 3}, {kNoPrefetch}},
      {"SomePrefetch", true, {3, 3}, {kSomePrefetch, kBf16}},
      {"FewLive", false, {2, 3}, {kFewLive}},
      {"Reuse", false, {2, 3}, {kReuse, kBf16}},
      {"ReuseCheckpointed", true, {2, 3}, {kReuse, kCheckpointing}},
      {"SmallUnitsWhole", false, {2, 3}, {kSmallUnitsWhole, kBf16}},
      // State in the stores.
      {"OffloadStage1", false, {2, 1}, {kOneRound, kBf16}, optimizer},
      {"OffloadStage1Accumulates", true, {3, 1}, {kRagged, kBf16}, optimizer},
      {"OffloadStage2", false, {2, 2}, {kBf16}, optimizer},
      {"OffloadStage2Deterministic", true, {3, 2}, {kDeterministic, kRagged}, optimizer},
      {"OffloadStage3", true, {2, 3}, {kBf16}, optimizer},
      {"OffloadStage3Alone", false, {1, 3}, {}, optimizer},
      {"OffloadStage3Ragged", false, {3, 3}, {kRagged, kBf16}, optimizer},
      {"OffloadSmallUnitsWhole", false, {2, 3}, {kSmallUnitsWhole, kBf16}, optimizer},
      {"OffloadSparseRows", false, {2, 3}, {kSparse, kBf16}, optimizer},
      {"OffloadFrozen", false, {2, 2}, frozen, optimizer},
      {"OffloadOneSmallPush", true, {2, 3}, {kOneSmallPush, kBf16}, optimizer},
      {"OffloadInOrder", true, {2, 2}, {kInOrder, kBf16}, optimizer},
      // Gradients that leave from where they were reduced.
      {"OffloadOneRoundStage2", true, {2, 2}, {kOneRound, kBf16}, optimizer},
      {"OffloadOneRoundStage3", false, {3, 3}, {}, optimizer},
      {"OffloadOneRoundAlone", false, {1, 3}, {"train_batch_size=2", kBf16}, all},
      {"OffloadOneRoundIdleRank", true, {3, 2}, {kOneRound, kBf16}, optimizer},
      {"OffloadOneRoundSmallBuckets", false, {2, 3}, {kOneRound, kSmallBuckets, kBf16}, all},
      {"OffloadOneRoundInOrder", true, {2, 3}, {kOneRound, kInOrder}, all},
      {"OffloadOneRoundSparseRows", false, {2, 2}, {kOneRound, kSparse, kBf16}, optimizer},
      {"OffloadOneRoundUntied",
       false,
       {2, 3},
       {kOneRound, "model.tie_embeddings=false", kBf16},
       all},
      {"OffloadOneRoundTied", true, {2, 3}, {kOneRound, "model.tie_embeddings=true", kBf16}, all},
      {"OffloadOneRoundFrozen",
       false,
       {2, 3},
       {kOneRound, "model.trainable=['blocks.1.*', '*_f*']", kBf16},
       all},
      {"OffloadParam", false, {2, 3}, {kBf16}, all},
      {"OffloadParamRagged", true, {3, 3}, {kRagged, kCheckpointing}, all},
      {"OffloadParamFewLive", false, {2, 3}, {kFewLive, kBf16}, all},
      {"OffloadParamReuse", true, {2, 3}, {kReuse, kBf16}, all},
      {"OffloadParamSmallUnitsWhole", false, {3, 3}, {kSmallUnitsWhole, kInOrder}, all},
      {"OffloadParamDropout", false, {2, 3}, Dropout({kBf16}), all},
      {"OffloadEmptyShards", true, {3, 3}, small, all},
  };
}

struct Outcome {
  std::string numbers;
  std::vector<RankResult> ranks;
};

Outcome Train(const Case& c, const RankBackend& backend) {
  More more = c.more;
  more.push_back("steps=3");
  const v1::JobSpec spec = Spec(c.llama ? TinyLlama() : TinyGpt2(), c.shape, c.offload, more);
  const std::vector<int32_t> tokens =
      ChainTokens(24 * 40 + 1, static_cast<int32_t>(spec.model().vocab_size()));
  const MemoryDataset plain(tokens, 24);
  const Documents documents(tokens, 24);
  const TokenDataset& data =
      c.text == Text::kDocuments ? static_cast<const TokenDataset&>(documents) : plain;
  RunOptions options{.world = c.shape.world, .backend = backend};
  Outcome outcome;
  if (c.offload == Offload::kNone) {
    outcome.ranks = TrainJob(spec, options, data);
  } else {
    MemoryStores stores(spec, {});
    outcome.ranks = TrainOffloaded(spec, options, data, &stores);
    if (outcome.ranks[0].status.ok()) stores.WaitForVersion(spec.steps());
    outcome.numbers = stores.Digest();
  }
  for (const RankResult& rank : outcome.ranks) {
    EXPECT_TRUE(rank.status.ok()) << rank.status;
    EXPECT_EQ(rank.records.size(), spec.steps());
    EXPECT_EQ(Fingerprint(rank), Fingerprint(outcome.ranks[0])) << "ranks disagree";
  }
  outcome.numbers += Fingerprint(outcome.ranks[0]);
  return outcome;
}

class GuardedNumbers : public testing::TestWithParam<Case> {};

TEST_P(GuardedNumbers, AreTheCpusWheneverWorkIsDone) {
  const Case& c = GetParam();
  const Outcome expected = Train(c, {});
  const uint64_t seeds = c.shape.world > 1 ? 2 * kSchedules : kSchedules;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "device seed " << seed);
    const Outcome seen = Train(c, GuardedBackend(seed));
    EXPECT_EQ(seen.numbers, expected.numbers);
    for (size_t rank = 0; rank < seen.ranks.size(); ++rank) {
      EXPECT_EQ(seen.ranks[rank].traffic, expected.ranks[rank].traffic);
      for (const MemoryKind kind : {MemoryKind::kParameters, MemoryKind::kGradients,
                                    MemoryKind::kOptimizer, MemoryKind::kActivations}) {
        EXPECT_EQ(seen.ranks[rank].memory[static_cast<int>(kind)],
                  expected.ranks[rank].memory[static_cast<int>(kind)])
            << NameOf(kind);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Jobs, GuardedNumbers, testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zeroshard
