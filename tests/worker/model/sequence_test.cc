// Tensor ranks that divide the rows of norms and of the residual stream, against the whole model
// and against ranks that each have all rows.
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

class SequenceTest : public TensorTest {
 protected:
  TensorRanks Undivided(int tensor) const {
    ModelTable table = table_;
    table.config.sequence_parallel = false;
    return TensorRanks(table, tensor);
  }
};

bool IsOfANorm(const std::string& name) {
  return absl::StrContains(name, "norm") || absl::StrContains(name, "ln_");
}

// Micro-batches of three sequences on two or four ranks: some rows of a sequence are on one rank
// and some on the next.
std::vector<TensorCase> Cases() {
  std::vector<TensorCase> cases;
  for (const int t : {2, 4}) {
    for (const bool tied : {true, false}) {
      const std::string suffix = absl::StrCat(tied ? "_tied_" : "_untied_", t);
      cases.push_back({.name = "gpt2" + suffix,
                       .architecture = "gpt2",
                       .tied = tied,
                       .tensor = t,
                       .checkpointing = tied,
                       .sequences = tied ? 3 : 1});
      for (const int kv : {1, 2, 4}) {
        cases.push_back({.name = absl::StrCat("llama_kv", kv, suffix),
                         .architecture = "llama",
                         .kv_heads = kv,
                         .tied = tied,
                         .biased = kv != 4,
                         .tensor = t,
                         .checkpointing = tied == (kv == 2),
                         .sequences = kv == 2 ? 4 : 3});
      }
    }
    for (const bool checkpointing : {false, true}) {
      cases.push_back({.name = absl::StrCat("gpt2_dropout", checkpointing ? "_again_" : "_", t),
                       .architecture = "gpt2",
                       .tensor = t,
                       .checkpointing = checkpointing,
                       .dropout = true,
                       .documents = true,
                       .sequences = checkpointing ? 3 : 5});
    }
    cases.push_back({.name = absl::StrCat("llama_dropout_", t),
                     .architecture = "llama",
                     .kv_heads = 2,
                     .tensor = t,
                     .dropout = true,
                     .documents = true,
                     .sequences = 1});
  }
  for (TensorCase& c : cases) c.sequence_parallel = true;
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Models, SequenceTest, testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(SequenceTest, LossAndGradientsAreThoseOfTheWholeModel) {
  Make(GetParam());
  ExpectSame(GetParam(), OptionsOf(GetParam()), 1e-5);
}

// Every row is computed as without: the same masks, and sums of the same parts in the same order.
// Only a norm's gradient is added in another order: of each rank's rows, then of ranks.
TEST_P(SequenceTest, AllBitsButThoseOfNormsGradientsAreThoseOfUndividedRows) {
  Make(GetParam());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    RunOptions options = OptionsOf(GetParam());
    options.dtype = dtype;
    const std::vector<RunResult> whole =
        Undivided(GetParam().tensor).Run(flat_, tokens_, targets_, options);
    const TensorRanks ranks(table_, GetParam().tensor);
    const std::vector<RunResult> divided = ranks.Run(flat_, tokens_, targets_, options);
    for (size_t u = 1; u < table_.units.size(); ++u) {
      std::vector<float> joined;
      for (const RunResult& result : divided)
        joined.insert(joined.end(), result.inputs[u].begin(), result.inputs[u].end());
      ASSERT_EQ(joined.size(), whole[0].inputs[u].size());
      EXPECT_EQ(std::memcmp(joined.data(), whole[0].inputs[u].data(), joined.size() * 4), 0) << u;
    }
    for (size_t rank = 0; rank < divided.size(); ++rank) {
      EXPECT_EQ(divided[rank].loss, whole[rank].loss);
      for (const auto& [name, seen] : divided[rank].gradients) {
        const std::vector<float>& wanted = whole[rank].gradients.at(name);
        if (!IsOfANorm(name)) {
          EXPECT_EQ(std::memcmp(seen.data(), wanted.data(), seen.size() * 4), 0) << name;
          continue;
        }
        std::vector<float> error = seen;
        for (size_t i = 0; i < error.size(); ++i) error[i] -= wanted[i];
        EXPECT_LE(NormOf(error) / NormOf(wanted), dtype == DType::kF32 ? 1e-6 : 1e-2) << name;
      }
    }
  }
}

class DividedTest : public SequenceTest {};

INSTANTIATE_TEST_SUITE_P(Models, DividedTest,
                         testing::Values(TensorCase{.name = "gpt2",
                                                    .architecture = "gpt2",
                                                    .dropout = true,
                                                    .sequence_parallel = true,
                                                    .sequences = 3},
                                         TensorCase{.name = "llama_copies",
                                                    .architecture = "llama",
                                                    .kv_heads = 1,
                                                    .tied = false,
                                                    .biased = true,
                                                    .tensor = 4,
                                                    .sequence_parallel = true}),
                         [](const auto& info) { return info.param.name; });

TEST_P(DividedTest, CheckpointingAndBuffersChangeNoBit) {
  Make(GetParam());
  const TensorRanks ranks(table_, GetParam().tensor);
  RunOptions options = OptionsOf(GetParam());
  const std::vector<RunResult> plain = ranks.Run(flat_, tokens_, targets_, options);
  options.checkpointing = options.separate_buffers = true;
  const std::vector<RunResult> other = ranks.Run(flat_, tokens_, targets_, options);
  for (size_t rank = 0; rank < plain.size(); ++rank) ExpectSameBits(plain[rank], other[rank]);
}

// Where an event were forgotten, rows would be gathered or added too early on some schedules.
TEST_P(DividedTest, OnADeviceThatIsLateTheBitsAreTheSame) {
  Make(GetParam());
  for (const bool checkpointing : {false, true}) {
    RunOptions options = OptionsOf(GetParam());
    options.checkpointing = checkpointing;
    const std::vector<RunResult> plain =
        TensorRanks(table_, GetParam().tensor).Run(flat_, tokens_, targets_, options);
    for (uint64_t seed = 0; seed < 6; ++seed) {
      const TensorRanks ranks(table_, GetParam().tensor, seed);
      const std::vector<RunResult> late = ranks.Run(flat_, tokens_, targets_, options);
      for (size_t rank = 0; rank < plain.size(); ++rank) ExpectSameBits(plain[rank], late[rank]);
    }
  }
}

// Forward a block gathers the input of both halves and adds up the output of both; backward it
// gathers the gradient of both outputs and, as only own rows are kept, both inputs once more, and
// adds up the gradient of both inputs. Checkpointing repeats the forward but for the last sum, and
// then has the second input still. The embedding's rows are added up, their gradient is gathered;
// the head does the reverse, and the run asks it for its loss twice. Norms' gradients are summed.
TEST_P(DividedTest, WhatRanksSendIsCounted) {
  Make(GetParam());
  const ModelConfig& c = table_.config;
  const int t = GetParam().tensor;
  const int64_t n = GetParam().sequences;
  const DType type = DType::kF32;
  const int64_t part = n * c.sequence * c.hidden / t;
  // gpt2's norms have a bias beside the weight, which ends at a multiple of 64.
  const int64_t norm = (c.architecture == Architecture::kGpt2 ? 2 : 1) * c.hidden;
  const int64_t gather = AllGatherBytes(part, type, t);
  for (const bool checkpointing : {false, true}) {
    const TensorRanks ranks(table_, t);
    RunOptions options = OptionsOf(GetParam());
    options.checkpointing = checkpointing;
    ranks.Run(flat_, tokens_, targets_, options);
    for (int rank = 0; rank < t; ++rank) {
      const TrafficCounters& seen = ranks.lines[static_cast<size_t>(rank)].line->traffic();
      const std::vector<int64_t> parts(static_cast<size_t>(t), part);
      const int64_t sum = ReduceScatterBytes(parts, t, type, rank);
      const auto get = [&](CollectiveOp op, Phase phase) {
        return static_cast<int64_t>(seen.Get(op, phase));
      };
      EXPECT_EQ(get(CollectiveOp::kAllGather, Phase::kForward),
                (c.layers * 2 + 2) * gather + 2 * n * AllGatherBytes(3 * c.sequence, type, t));
      EXPECT_EQ(get(CollectiveOp::kReduceScatter, Phase::kForward), (c.layers * 2 + 1) * sum);
      EXPECT_EQ(get(CollectiveOp::kAllReduce, Phase::kForward), 0);
      EXPECT_EQ(get(CollectiveOp::kAllGather, Phase::kBackward),
                (c.layers * (checkpointing ? 5 : 4) + 1) * gather);
      EXPECT_EQ(get(CollectiveOp::kReduceScatter, Phase::kBackward),
                (c.layers * (checkpointing ? 3 : 2) + 1) * sum);
      EXPECT_EQ(get(CollectiveOp::kAllReduce, Phase::kBackward),
                (c.layers * 2 + 1) * AllReduceBytes(norm, type, t, rank));
      // The planner's arithmetic, of one loss.
      TrafficTable planned = PlannedTraffic(table_, t, rank, n, checkpointing);
      planned[traffic::kAllGather][traffic::kForward] +=
          static_cast<uint64_t>(gather + n * AllGatherBytes(3 * c.sequence, type, t));
      ExpectSent(ranks.lines[static_cast<size_t>(rank)], planned);
    }
  }
}

// A frozen norm's gradient is nobody's.
TEST_P(DividedTest, OfFrozenNormsNothingIsSent) {
  Make(GetParam());
  for (UnitTable& unit : table_.units)
    for (ParameterInfo& p : unit.parameters) p.trainable = !IsOfANorm(p.name);
  const TensorRanks ranks(table_, GetParam().tensor);
  ranks.Run(flat_, tokens_, targets_, OptionsOf(GetParam()));
  for (const TensorLines& line : ranks.lines)
    EXPECT_EQ(line.line->traffic().Get(CollectiveOp::kAllReduce, Phase::kBackward), 0u);
}

TEST_P(DividedTest, InferenceIsAsWithUndividedRows) {
  Make(GetParam());
  tokens_.resize(static_cast<size_t>(table_.config.sequence));
  const std::vector<int64_t> pieces = {17, 1, 1, 21};  // that no number of ranks divides
  const std::vector<std::vector<float>> wanted =
      Undivided(GetParam().tensor).Decode(flat_, tokens_, pieces, {});
  const TensorRanks ranks(table_, GetParam().tensor);
  EXPECT_EQ(ranks.Decode(flat_, tokens_, pieces, {}), wanted);
}

TEST_F(SequenceTest, ARankThatIsGoneEndsTheOthersCallsWithAnError) {
  Make({.name = "gone", .architecture = "gpt2", .tensor = 2, .sequence_parallel = true});
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
