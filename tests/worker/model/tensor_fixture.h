// Models of every kind, whole and split over tensor ranks, on the same sequences.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "common/plan/tensor_slices.h"
#include "common/plan/tensor_traffic.h"
#include "gtest/gtest.h"
#include "tests/worker/model/model_runner.h"
#include "tests/worker/model/tensor_ranks.h"

namespace zeroshard {

constexpr int64_t kSequences = 2;

struct TensorCase {
  std::string name;
  std::string architecture;
  int kv_heads = 4;
  bool tied = true;
  bool biased = false;
  int tensor = 2;
  bool checkpointing = false;
  bool dropout = false;
  bool documents = false;
  int vocab = 131;  // a prime
  bool sequence_parallel = false;
  int64_t sequences = kSequences;
};

inline v1::ModelSpec SpecOf(const TensorCase& c) {
  v1::ModelSpec spec;
  spec.set_architecture(c.architecture);
  spec.set_hidden_size(64);
  spec.set_layers(2);
  spec.set_heads(4);
  spec.set_sequence_length(40);  // so that sums are larger and smaller than kDirectAllReduce
  spec.set_vocab_size(c.vocab);
  spec.set_tie_embeddings(c.tied);
  if (c.architecture == "llama") {
    spec.set_kv_heads(c.kv_heads);
    spec.set_intermediate_size(96);
    if (c.biased) {
      spec.set_attention_bias(true);
      spec.set_mlp_bias(true);
    }
  }
  if (c.dropout) {
    spec.set_embd_pdrop(0.1f);
    spec.set_attn_pdrop(0.2f);
    spec.set_resid_pdrop(0.3f);
  }
  return spec;
}

// What the planner says that a rank sends for one micro-batch, in fp32.
inline TrafficTable PlannedTraffic(const ModelTable& table, int tensor, int rank, int64_t sequences,
                                   bool checkpointing) {
  const ModelTable slice = MakeTensorRank(table, tensor, rank).model;
  TrafficTable sum{};
  for (const UnitTable& unit : slice.units) {
    const TrafficTable of_unit =
        TensorTraffic(slice.config, unit, TensorShareOf(table.config, tensor, rank), sequences,
                      DType::kF32, checkpointing);
    for (size_t op = 0; op < sum.size(); ++op)
      for (size_t phase = 0; phase < sum[op].size(); ++phase) sum[op][phase] += of_unit[op][phase];
  }
  return sum;
}

// What a rank sent over its line and that of its copied heads, in all.
inline void ExpectSent(const TensorLines& lines, const TrafficTable& planned) {
  for (int op = 0; op < kCollectiveOps; ++op) {
    for (int phase = 0; phase < kPhases; ++phase) {
      const auto sent = [&](const Communicator* line) {
        return line == nullptr
                   ? 0
                   : line->traffic().Get(static_cast<CollectiveOp>(op), static_cast<Phase>(phase));
      };
      EXPECT_EQ(sent(lines.line.get()) + sent(lines.copies.get()),
                planned[static_cast<size_t>(op)][static_cast<size_t>(phase)])
          << NameOf(static_cast<CollectiveOp>(op)) << " " << NameOf(static_cast<Phase>(phase));
    }
  }
}

class TensorTest : public testing::TestWithParam<TensorCase> {
 protected:
  void Make(const TensorCase& c) {
    table_ = MakeModelTable(SpecOf(c)).value();
    table_.config.sequence_parallel = c.sequence_parallel;
    flat_ = AnyParameters(table_, 7);
    std::mt19937 random(11);
    std::uniform_int_distribution<int32_t> token(0, c.vocab - 1);
    const int64_t T = table_.config.sequence;
    for (int64_t i = 0; i < c.sequences * T; ++i) {
      tokens_.push_back(token(random));
      targets_.push_back(i % 7 == 3 ? -1 : token(random));
      if (c.documents) starts_.push_back(i % T < T / 3 ? 0 : static_cast<int32_t>(T / 3));
    }
    // Both ends of the vocabulary, so that the first and the last rank that has words have some.
    tokens_[1] = targets_[1] = c.vocab - 1;
    tokens_[2] = targets_[2] = 0;
  }

  RunOptions OptionsOf(const TensorCase& c) const {
    RunOptions options;
    options.checkpointing = c.checkpointing;
    options.dropout = c.dropout;
    options.seed = 3;
    options.step = 9;
    options.first_sample = 5;
    options.document_start = starts_;
    return options;
  }

  RunResult Whole(const RunOptions& options) const {
    absl::StatusOr<RunResult> result = RunModel(table_, flat_, tokens_, targets_, options);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : RunResult();
  }

  // Each tensor's gradient, put together from the ranks that are home to its rows, is the whole
  // model's; copies have the same bits, padding has a gradient of zero.
  void ExpectGradients(const TensorRanks& ranks, const std::vector<RunResult>& split,
                       const RunResult& whole, double tolerance) const {
    for (size_t u = 0; u < table_.units.size(); ++u) {
      for (size_t i = 0; i < table_.units[u].parameters.size(); ++i)
        ExpectGradient(ranks, split, whole, u, i, tolerance);
    }
  }

  void ExpectGradient(const TensorRanks& ranks, const std::vector<RunResult>& split,
                      const RunResult& whole, size_t u, size_t i, double tolerance) const {
    const std::string& name = table_.units[u].parameters[i].name;
    std::vector<float> joined(whole.gradients.at(name).size(), std::nanf(""));
    for (const bool homes : {true, false}) {
      for (size_t rank = 0; rank < split.size(); ++rank) {
        const TensorRank& slice = ranks.slices[rank];
        if (slice.IsHome(u, i) != homes) continue;
        const ParameterInfo& p = slice.model.units[u].parameters[i];
        const std::vector<float>& seen = split[rank].gradients.at(name);
        int64_t used = 0;
        for (const SliceRun& run : FullRuns(slice, u, {p.offset, p.offset + p.size})) {
          const float* from = seen.data() + (run.local - p.offset);
          float* to = joined.data() + run.element;
          const size_t bytes = static_cast<size_t>(run.size) * sizeof(float);
          if (homes) std::memcpy(to, from, bytes);
          EXPECT_EQ(std::memcmp(to, from, bytes), 0) << name << " of rank " << rank;
          used = run.local - p.offset + run.size;
        }
        for (size_t e = static_cast<size_t>(used); e < seen.size(); ++e)
          ASSERT_EQ(seen[e], 0.0f) << name << " has padding at " << e << " of rank " << rank;
      }
    }
    // A key's bias moves a row of scores alike, but for rotary positions: zero but for rounding.
    const std::string measure = table_.config.architecture == Architecture::kGpt2
                                    ? absl::StrReplaceAll(name, {{"attn.k.bias", "attn.q.bias"}})
                                    : name;
    const double norm = NormOf(whole.gradients.at(measure));
    ASSERT_GT(norm, 0) << name;
    std::vector<float> error = joined;
    for (size_t e = 0; e < error.size(); ++e) error[e] -= whole.gradients.at(name)[e];
    EXPECT_LE(NormOf(error) / norm, tolerance) << name;
  }

  void ExpectSame(const TensorCase& c, const RunOptions& options, double tolerance) {
    const RunResult whole = Whole(options);
    const TensorRanks ranks(table_, c.tensor);
    const std::vector<RunResult> split = ranks.Run(flat_, tokens_, targets_, options);
    for (const RunResult& result : split) {
      EXPECT_EQ(result.loss, split[0].loss);
      EXPECT_EQ(result.loss_only, result.loss);
      EXPECT_NEAR(result.loss, whole.loss, tolerance * whole.loss);
    }
    ExpectGradients(ranks, split, whole, tolerance);
  }

  ModelTable table_;
  std::vector<std::vector<float>> flat_;
  std::vector<int32_t> tokens_, targets_, starts_;
};

inline void ExpectSameBits(const RunResult& a, const RunResult& b) {
  EXPECT_EQ(a.loss, b.loss);
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (const auto& [name, values] : a.gradients) {
    const std::vector<float>& other = b.gradients.at(name);
    ASSERT_EQ(values.size(), other.size()) << name;
    EXPECT_EQ(std::memcmp(values.data(), other.data(), values.size() * sizeof(float)), 0) << name;
  }
}

}  // namespace zeroshard
