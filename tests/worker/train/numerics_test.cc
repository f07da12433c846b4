// Averaging, norms, decay groups, frozen tensors, uneven shards and values that are not finite.
#include <cmath>
#include <limits>
#include <set>

#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/cluster_harness.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

std::vector<std::string> At(int world, int stage, std::vector<std::string> more = {}) {
  more.push_back(absl::StrFormat("resources.workers=%d", world));
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", stage));
  return more;
}

// Where the rows of the embedding travel sparsely at worlds 1 and 2 (2 * 48 <= 100) and densely
// beyond.
TEST(TokenRowsTest, SparseAndDenseTransportGiveTheSameBits) {
  for (const char* model : {TinyGpt2(), TinyLlama()}) {
    for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
      const std::vector<std::string> more = {"model.vocab_size=100", "deterministic=true",
                                             precision};
      const MemoryDataset data(ChainTokens(24 * 40 + 1, 100), 24);
      const std::string expected =
          TrainFingerprint(MakeSpec(model, At(1, 0, more)), {.world = 1}, data);
      for (int world : {1, 2, 3, 4})
        for (int stage : {0, 1, 2, 3})
          EXPECT_EQ(
              TrainFingerprint(MakeSpec(model, At(world, stage, more)), {.world = world}, data),
              expected)
              << precision << " world " << world << " stage " << stage;
    }
  }
}

// Hidden 16 and one layer: the head's unit of two norms has 128 elements, so of four ranks the last
// two own nothing of it, and rows of the token table are split between owners.
TEST(UnevenShardsTest, ARankThatOwnsNothingOfAUnitTakesPart) {
  const std::vector<std::string> small = {"model.hidden_size=16", "model.layers=1",
                                          "deterministic=true"};
  const MemoryDataset data = TinyData();
  const auto table = MakeModelTable(MakeSpec(TinyGpt2(), small).model());
  ASSERT_TRUE(table.ok());
  const ShardLayout head = ShardLayout::Make(table->units.back().length, 4);
  ASSERT_EQ(head.Begin(3), head.End(3)) << "the last rank owns something";
  for (const char* model : {TinyGpt2(), TinyLlama()}) {
    const std::string expected =
        TrainFingerprint(MakeSpec(model, At(1, 0, small)), {.world = 1}, data);
    for (int stage : {0, 1, 2, 3})
      EXPECT_EQ(TrainFingerprint(MakeSpec(model, At(4, stage, small)), {.world = 4}, data),
                expected)
          << stage;
  }
}

// Micro-batch A with 3 tokens that count and B with 1: the mean is over 4 tokens, by accumulation
// and by two ranks.
TEST(AveragingTest, EveryTokenCountsOnce) {
  // One sample a micro-batch; sample i carries 3 losses where i is even, 1 where it is odd.
  MemoryDataset data(ChainTokens(24 * 2 + 1, 61), 24);
  data.MaskTargets(
      [](int64_t sample, int64_t position) { return position >= (sample % 2 == 0 ? 3 : 1); });
  const std::vector<std::string> one_step = {"train_batch_size=2",
                                             "train_micro_batch_size_per_gpu=1", "steps=1",
                                             "scheduler.type=constant", "scheduler.params={}"};
  const auto run = [&](int world, int stage, std::vector<std::string> more) {
    more.insert(more.end(), one_step.begin(), one_step.end());
    const auto results =
        TrainJob(MakeSpec(TinyGpt2(), At(world, stage, more)), {.world = world}, data);
    EXPECT_TRUE(results[0].status.ok()) << results[0].status;
    return results[0].records.at(0);
  };
  // Each sample alone, at the same initial weights: the loss of a step is seen before its update.
  std::vector<v1::StepRecord> alone;
  for (int64_t keep : {0, 1}) {
    MemoryDataset single(ChainTokens(24 * 2 + 1, 61), 24);
    single.MaskTargets([keep](int64_t sample, int64_t position) {
      return sample != keep || position >= (sample % 2 == 0 ? 3 : 1);
    });
    const auto results = TrainJob(MakeSpec(TinyGpt2(), At(1, 0, one_step)), {.world = 1}, single);
    ASSERT_TRUE(results[0].status.ok()) << results[0].status;
    alone.push_back(results[0].records.at(0));
  }
  ASSERT_EQ(alone[0].tokens(), 3u);
  ASSERT_EQ(alone[1].tokens(), 1u);
  const double mean = (alone[0].loss() * 3 + alone[1].loss()) / 4;
  for (int world : {1, 2}) {
    for (int stage : {0, 2, 3}) {
      const v1::StepRecord record = run(world, stage, {});
      EXPECT_EQ(record.tokens(), 4u);
      EXPECT_NEAR(record.loss(), mean, 1e-6);
    }
  }
}

TEST(GradientNormTest, IsOneNumberAndTiedTensorsCountOnce) {
  // At world 1 it is PyTorch's number (reference_test); here every placement must give it, all
  // ranks.
  const MemoryDataset data = TinyData();
  const auto norms = [&](int world, int stage) {
    const auto results = TrainJob(MakeSpec(TinyGpt2(), At(world, stage, {"deterministic=true"})),
                                  {.world = world}, data);
    std::set<double> seen;
    for (const RankResult& r : results) {
      EXPECT_TRUE(r.status.ok()) << r.status;
      seen.insert(r.records.at(0).grad_norm());
    }
    EXPECT_EQ(seen.size(), 1u) << "ranks disagree";
    return *seen.begin();
  };
  const double expected = norms(1, 0);
  for (int world : {2, 4})
    for (int stage : {0, 1, 2, 3}) EXPECT_EQ(norms(world, stage), expected);
}

// Weight decay with a gradient of zero: matrices shrink by lr * wd, norms and biases stay. The last
// block's gradient is made zero by a learning problem without one: only one step, and decay
// compared between a run with and a run without it, which differ by exactly the decay.
TEST(WeightDecayTest, AppliesToMatricesOnlyAtEveryStage) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> tensors = {
      "wte.weight",           "blocks.0.attn.q.weight", "blocks.1.mlp.proj.weight",
      "blocks.0.ln_1.weight", "blocks.2.mlp.fc.bias",   "ln_f.bias"};
  const auto train = [&](int world, int stage, const char* decay, const char* steps) {
    RunOptions options{.world = world};
    options.tensors = tensors;
    const auto results =
        TrainJob(MakeSpec(TinyGpt2(), At(world, stage,
                                         {decay, steps, "scheduler.type=constant",
                                          "scheduler.params={}", "deterministic=true"})),
                 options, data);
    EXPECT_TRUE(results[0].status.ok()) << results[0].status;
    return results[0].tensors;
  };
  const double lr = 3e-3, decay = 0.1;
  for (const auto& [world, stage] : {std::pair(1, 0), {2, 1}, {3, 2}, {4, 3}}) {
    const auto without = train(world, stage, "optimizer.params.weight_decay=0", "steps=1");
    const auto with = train(world, stage, "optimizer.params.weight_decay=0.1", "steps=1");
    // AdamW: p1 = p0 * (1 - lr * wd) - update, so without - with = p0 * lr * wd, and p0 = without +
    // update with |update| <= lr (the first step's normalised update is at most 1).
    for (size_t t = 0; t < tensors.size(); ++t) {
      double decayed = 0, expected = 0, stayed = 0;
      for (size_t i = 0; i < with[t].size(); ++i) {
        decayed += std::abs(double{without[t][i]} - double{with[t][i]});
        expected += std::abs(double{without[t][i]}) * lr * decay;
        stayed = std::max(stayed, std::abs(double{without[t][i]} - double{with[t][i]}));
      }
      if (t < 3) {
        const double slack = static_cast<double>(with[t].size()) * lr * lr * decay;
        EXPECT_NEAR(decayed, expected, slack + 0.02 * expected) << tensors[t];
        EXPECT_GT(decayed, 0.5 * expected) << tensors[t];
      } else {
        EXPECT_EQ(stayed, 0) << tensors[t];
      }
    }
  }
}

TEST(TrainableTest, FrozenTensorsStayAndTheRestTrainsTheSameAtEveryStage) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> more = {"model.trainable=['blocks.1.*', '*ln_f*']",
                                         "deterministic=true"};
  const std::vector<std::string> tensors = {"wte.weight", "blocks.0.mlp.fc.weight",
                                            "blocks.1.mlp.fc.weight"};
  std::vector<std::vector<float>> first;
  std::vector<std::vector<float>> initial;
  for (const auto& [world, stage] : {std::pair(1, 0), {2, 0}, {2, 1}, {3, 2}, {2, 3}}) {
    RunOptions options{.world = world};
    options.tensors = tensors;
    options.prepare = [&](int rank, Trainer* trainer) -> absl::Status {
      for (const std::string& name : tensors) {
        auto values = trainer->GatherTensor(name);
        if (!values.ok()) return values.status();
        if (rank == 0 && initial.size() < tensors.size()) initial.push_back(*values);
      }
      return absl::OkStatus();
    };
    const auto results = TrainJob(MakeSpec(TinyGpt2(), At(world, stage, more)), options, data);
    ASSERT_TRUE(results[0].status.ok()) << results[0].status;
    const auto& seen = results[0].tensors;
    EXPECT_EQ(seen[0], initial[0]);
    EXPECT_EQ(seen[1], initial[1]);
    EXPECT_NE(seen[2], initial[2]);
    if (first.empty()) first = seen;
    EXPECT_EQ(seen[2], first[2]) << "world " << world << " stage " << stage;
  }
}

// A weight that is NaN: every rank stops with one message, before any update, at every stage.
TEST(NonFiniteTest, ANanInOneWeightFailsTheJobNamingStepRankAndSamples) {
  const MemoryDataset data = TinyData();
  for (int stage : {0, 1, 2, 3}) {
    RunOptions options{.world = 2};
    options.prepare = [](int, Trainer* trainer) {
      std::vector<float> bias(128, 0.0f);
      bias[5] = std::numeric_limits<float>::quiet_NaN();
      return trainer->SetTensor("blocks.1.mlp.fc.bias", bias);
    };
    const auto results = TrainJob(MakeSpec(TinyGpt2(), At(2, stage)), options, data);
    for (const RankResult& result : results) {
      EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal) << result.status;
      EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 1: non-finite loss"));
      EXPECT_THAT(std::string(result.status.message()), HasSubstr("rank 0"));
      EXPECT_THAT(std::string(result.status.message()), HasSubstr("samples 0 to 1"));
      EXPECT_EQ(result.status, results[0].status) << "one message on all ranks";
      EXPECT_TRUE(result.records.empty());
      EXPECT_TRUE(IsNonFinite(result.status));
    }
  }
}

// A NaN that only one rank sees: its samples use a token whose embedding is NaN.
TEST(NonFiniteTest, ANanOnOneRankNamesThatRank) {
  std::vector<int32_t> tokens = ChainTokens(24 * 40 + 1, 60);  // token 60 is not among them
  // Sample order of seed 7 over 40 samples: the third micro-batch's first sample holds token 60.
  const SampleOrder order(40, 7);
  tokens[static_cast<size_t>(order.At(2) * 24 + 3)] = 60;
  const MemoryDataset data(tokens, 24);
  RunOptions options{.world = 3};
  options.prepare = [](int, Trainer* trainer) -> absl::Status {
    auto table = trainer->GatherTensor("embed.weight");
    if (!table.ok()) return table.status();
    (*table)[60 * 32 + 1] = std::numeric_limits<float>::infinity();
    return trainer->SetTensor("embed.weight", *table);
  };
  const auto results = TrainJob(MakeSpec(TinyLlama(), At(3, 3)), options, data);
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal) << result.status;
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("rank 1"));
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("samples 2 to 3"));
  }
}

}  // namespace
}  // namespace zeroshard
