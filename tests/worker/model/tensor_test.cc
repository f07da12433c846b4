// Units that are split over tensor ranks against the same units whole.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/worker/model/model_runner.h"
#include "tests/worker/model/tensor_fixture.h"
#include "tests/worker/model/tensor_ranks.h"
#include "worker/comm/traffic.h"

namespace zeroshard {
namespace {

using Case = TensorCase;

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const int t : {1, 2, 4}) {
    for (const bool tied : {true, false}) {
      const std::string suffix = absl::StrCat(tied ? "_tied_" : "_untied_", t);
      cases.push_back({.name = "gpt2" + suffix, .architecture = "gpt2", .tied = tied, .tensor = t});
      for (const int kv : {1, 2, 4}) {
        cases.push_back({.name = absl::StrCat("llama_kv", kv, suffix),
                         .architecture = "llama",
                         .kv_heads = kv,
                         .tied = tied,
                         .biased = kv != 4,
                         .tensor = t});
      }
    }
    cases.push_back({.name = absl::StrCat("gpt2_dropout_", t),
                     .architecture = "gpt2",
                     .tensor = t,
                     .checkpointing = true,
                     .dropout = true,
                     .documents = true});
    cases.push_back({.name = absl::StrCat("llama_dropout_", t),
                     .architecture = "llama",
                     .kv_heads = 2,
                     .tensor = t,
                     .dropout = true,
                     .documents = true});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Models, TensorTest, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(TensorTest, LossAndGradientsAreThoseOfTheWholeModel) {
  Make(GetParam());
  ExpectSame(GetParam(), OptionsOf(GetParam()), 1e-5);
}

class SplitTest : public TensorTest {};

INSTANTIATE_TEST_SUITE_P(Models, SplitTest,
                         testing::Values(Case{.name = "gpt2", .architecture = "gpt2"},
                                         Case{.name = "llama_copies",
                                              .architecture = "llama",
                                              .kv_heads = 1,
                                              .tied = false,
                                              .biased = true,
                                              .tensor = 4}),
                         [](const auto& info) { return info.param.name; });

// Each rank's product is rounded before the sum: bf16 keeps 8 bits.
TEST_P(SplitTest, InBf16TheyAreNearThoseOfTheWholeModel) {
  Make(GetParam());
  RunOptions options = OptionsOf(GetParam());
  options.dtype = DType::kBF16;
  ExpectSame(GetParam(), options, 0.05);
}

TEST_P(SplitTest, CheckpointingAndBuffersChangeNoBit) {
  Make(GetParam());
  const TensorRanks ranks(table_, GetParam().tensor);
  const std::vector<RunResult> plain = ranks.Run(flat_, tokens_, targets_, {});
  RunOptions options;
  options.checkpointing = options.separate_buffers = true;
  const std::vector<RunResult> other = ranks.Run(flat_, tokens_, targets_, options);
  for (size_t rank = 0; rank < plain.size(); ++rank) ExpectSameBits(plain[rank], other[rank]);
}

// Where an event were forgotten a sum would be of other numbers on some of these schedules.
TEST_P(SplitTest, OnADeviceThatIsLateTheBitsAreTheSame) {
  Make(GetParam());
  const RunOptions options = OptionsOf(GetParam());
  const std::vector<RunResult> plain =
      TensorRanks(table_, GetParam().tensor).Run(flat_, tokens_, targets_, options);
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const TensorRanks ranks(table_, GetParam().tensor, seed);
    const std::vector<RunResult> late = ranks.Run(flat_, tokens_, targets_, options);
    for (size_t rank = 0; rank < plain.size(); ++rank) ExpectSameBits(plain[rank], late[rank]);
  }
}

// Two sums forward and two backward a block, one more where its first half is computed again; one
// of the embedding's rows; one backward and two small gathers a sequence by the head, which the run
// asks for its loss twice.
TEST_P(SplitTest, WhatRanksSendIsCounted) {
  Make(GetParam());
  const ModelConfig& c = table_.config;
  const int tensor = GetParam().tensor;
  const DType type = DType::kF32;
  const int64_t n = kSequences * c.sequence * c.hidden;
  for (const bool checkpointing : {false, true}) {
    const TensorRanks ranks(table_, tensor);
    RunOptions options;
    options.checkpointing = checkpointing;
    ranks.Run(flat_, tokens_, targets_, options);
    for (int rank = 0; rank < tensor; ++rank) {
      const TrafficCounters& seen = ranks.lines[static_cast<size_t>(rank)].line->traffic();
      const int64_t sum = AllReduceBytes(n, type, tensor, rank);
      const int64_t head = kSequences * AllReduceBytes(n / kSequences, type, tensor, rank);
      const auto get = [&](CollectiveOp op, Phase phase) {
        return static_cast<int64_t>(seen.Get(op, phase));
      };
      EXPECT_EQ(get(CollectiveOp::kAllReduce, Phase::kForward), sum + c.layers * 2 * sum);
      EXPECT_EQ(get(CollectiveOp::kAllReduce, Phase::kBackward),
                c.layers * (checkpointing ? 3 : 2) * sum + head);
      EXPECT_EQ(get(CollectiveOp::kAllGather, Phase::kForward),
                2 * kSequences * AllGatherBytes(3 * c.sequence, type, tensor));
      EXPECT_EQ(get(CollectiveOp::kReduceScatter, Phase::kBackward), 0);
      // The planner's arithmetic, of one loss.
      TrafficTable planned = PlannedTraffic(table_, tensor, rank, kSequences, checkpointing);
      planned[traffic::kAllGather][traffic::kForward] *= 2;
      ExpectSent(ranks.lines[static_cast<size_t>(rank)], planned);
    }
  }
}

TEST_P(SplitTest, GradientsOfCopiedHeadsAreAddedOnce) {
  Make(GetParam());
  const TensorRanks ranks(table_, GetParam().tensor);
  ranks.Run(flat_, tokens_, targets_, {});
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const auto& line = ranks.lines[static_cast<size_t>(rank)];
    ASSERT_EQ(line.copies != nullptr, GetParam().kv_heads < GetParam().tensor);
    if (line.copies == nullptr) continue;
    const ModelConfig& c = ranks.slices[0].model.config;
    const int64_t width = c.kv_heads * c.head_dim;
    // Two matrices, and two biases, between which the layout has padding.
    const int64_t biases = RoundUp(width, 64) + width;
    const int size = line.copies->size(), place = line.copies->rank();
    EXPECT_EQ(static_cast<int64_t>(
                  line.copies->traffic().Get(CollectiveOp::kAllReduce, Phase::kBackward)),
              c.layers * (AllReduceBytes(2 * width * c.hidden, DType::kF32, size, place) +
                          AllReduceBytes(biases, DType::kF32, size, place)));
  }
}

// Scratch and kept memory beside what a model of the slice's sizes needs: the gradient on its way
// in a block, the places of tokens in the embedding, those of a sequence's targets and the ranks'
// parts of its softmax in the head.
TEST_P(SplitTest, ActivationsOfASliceAreThoseOfItsSizesAndWhatTheGroupNeeds) {
  Make(GetParam());
  const TensorRank slice = MakeTensorRank(table_, GetParam().tensor, 0);
  const ModelConfig& split = slice.model.config;
  ModelConfig alone = split;
  alone.tensor = 1;
  const auto extra = [&](UnitKind kind) {
    const auto of = [&](const ModelConfig& c) {
      return MakeActivationTable(c, kind, kSequences, DType::kF32, false);
    };
    EXPECT_EQ(of(split).kept_bytes, of(alone).kept_bytes);
    return of(split).scratch_bytes - of(alone).scratch_bytes;
  };
  const int64_t tokens = kSequences * split.sequence;
  EXPECT_EQ(extra(UnitKind::kBlock), tokens * split.hidden * 4);
  EXPECT_EQ(extra(UnitKind::kEmbedding), tokens * 4);
  EXPECT_EQ(extra(UnitKind::kHead),
            RoundUp(split.sequence * 4, 64) + RoundUp(split.tensor * 3 * split.sequence * 4, 64));
  EXPECT_EQ(split.heads * GetParam().tensor, table_.config.heads);
}

TEST_P(SplitTest, InferenceHasTheWholeModelsLogitsOnEveryRank) {
  Make(GetParam());
  tokens_.resize(static_cast<size_t>(table_.config.sequence));
  const std::vector<int64_t> pieces = {17, 1, 1, 21};
  absl::StatusOr<std::vector<float>> whole = DecodeModel(
      table_, flat_, tokens_, pieces, static_cast<int64_t>(tokens_.size()), RunOptions());
  ASSERT_TRUE(whole.ok()) << whole.status();
  const TensorRanks ranks(table_, GetParam().tensor);
  const std::vector<std::vector<float>> split = ranks.Decode(flat_, tokens_, pieces, {});
  for (const std::vector<float>& logits : split) {
    ASSERT_EQ(logits.size(), whole->size());
    EXPECT_EQ(std::memcmp(logits.data(), split[0].data(), logits.size() * sizeof(float)), 0);
    std::vector<float> error = logits;
    for (size_t i = 0; i < error.size(); ++i) error[i] -= (*whole)[i];
    EXPECT_LE(NormOf(error) / NormOf(*whole), 1e-5);
  }
}

TEST_P(SplitTest, ANaNInOneRanksWeightsReachesEveryRanksLoss) {
  Make(GetParam());
  const ParameterInfo* matrix = table_.units[1].Find("attn.proj.weight");
  flat_[1][static_cast<size_t>(matrix->offset + matrix->size - 1)] = std::nanf("");
  const TensorRanks ranks(table_, GetParam().tensor);
  for (const RunResult& result : ranks.Run(flat_, tokens_, targets_, {}))
    EXPECT_TRUE(std::isnan(result.loss));
}

// Of five words four ranks have two, two, one and none.
TEST_F(TensorTest, ARankWithoutWordsTakesPart) {
  for (const bool tied : {true, false}) {
    const Case c{
        .name = "few words", .architecture = "gpt2", .tied = tied, .tensor = 4, .vocab = 5};
    tokens_.clear();
    targets_.clear();
    Make(c);
    EXPECT_EQ(MakeTensorRank(table_, 4, 3).slices[0][0].begin, 5);
    ExpectSame(c, OptionsOf(c), 1e-5);
  }
}

TEST_F(TensorTest, ARankThatIsGoneEndsTheOthersCallsWithAnError) {
  Make({.name = "gone", .architecture = "llama", .tensor = 2});
  TensorRanks ranks(table_, 2);
  ranks.groups[1] = nullptr;
  ranks.lines[1] = {};
  RunOptions options;
  options.slice = &ranks.slices[0];
  options.group = ranks.groups[0].get();
  options.device = ranks.devices[0].get();
  options.ops = ranks.ops[0].get();
  const absl::StatusOr<RunResult> result = RunModel(
      ranks.slices[0].model, SliceOf(ranks.slices[0], table_, flat_), tokens_, targets_, options);
  EXPECT_FALSE(result.ok());
  EXPECT_TRUE(absl::StrContains(result.status().message(), "embedding")) << result.status();
}

}  // namespace
}  // namespace zeroshard
