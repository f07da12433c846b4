// The whole models against PyTorch's values (tests/reference), and what must not change any bit.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/reference/reference.h"
#include "tests/worker/model/model_runner.h"
#include "worker/model/head.h"

namespace zeroshard {
namespace {

class ModelTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    absl::StatusOr<Reference> loaded = Reference::Load(GetParam());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    reference_ = *std::move(loaded);
    for (const UnitTable& unit : reference_.table().units) {
      absl::StatusOr<std::vector<float>> flat = reference_.FlatUnit("initial", unit);
      ASSERT_TRUE(flat.ok()) << flat.status();
      flat_.push_back(*std::move(flat));
    }
    tokens_ = reference_.Ints("gradient.tokens").value();
    targets_ = reference_.Ints("gradient.targets").value();
    loss_ = reference_.Floats("gradient.loss").value().at(0);
    if (auto starts = reference_.Ints("gradient.document_start"); starts.ok()) starts_ = *starts;
  }

  // `options` for the sequences from `first` on, as the reference had them.
  RunOptions AsReference(RunOptions options, int64_t first) const {
    if (!starts_.empty()) {
      options.document_start.assign(starts_.begin() + first * reference_.table().config.sequence,
                                    starts_.end());
    }
    options.dropout = reference_.table().config.attn_pdrop > 0;
    options.seed = reference_.spec().seed();
    options.first_sample = first;
    return options;
  }

  RunResult Run(const RunOptions& options) const {
    absl::StatusOr<RunResult> result =
        RunModel(reference_.table(), flat_, tokens_, targets_, AsReference(options, 0));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : RunResult();
  }

  // Sequence b alone.
  RunResult RunSequence(int64_t b, const RunOptions& options) const {
    const int64_t T = reference_.table().config.sequence;
    const auto part = [&](const std::vector<int32_t>& all) {
      return std::vector<int32_t>(all.begin() + b * T, all.begin() + (b + 1) * T);
    };
    absl::StatusOr<RunResult> result =
        RunModel(reference_.table(), flat_, part(tokens_), part(targets_), AsReference(options, b));
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : RunResult();
  }

  // |seen - wanted| / |wanted| of each tensor is at most `tolerance`. Without rotary positions a
  // key's bias moves a whole row of scores alike, so that its gradient is zero but for rounding: it
  // is measured by the query's bias.
  void ExpectGradients(const std::map<std::string, std::vector<float>>& seen, double tolerance) {
    for (const UnitTable& unit : reference_.table().units) {
      for (const ParameterInfo& p : unit.parameters) {
        const std::vector<float> wanted = reference_.Tensor("gradient", p.name).value();
        const auto found = seen.find(p.name);
        ASSERT_NE(found, seen.end()) << p.name;
        ASSERT_EQ(found->second.size(), wanted.size()) << p.name;
        const std::string measure =
            gpt2() ? absl::StrReplaceAll(p.name, {{"attn.k.bias", "attn.q.bias"}}) : p.name;
        const double norm = Norm(reference_.Tensor("gradient", measure).value());
        std::vector<float> error = wanted;
        for (size_t i = 0; i < error.size(); ++i) error[i] -= found->second[i];
        ASSERT_GT(norm, 0) << p.name;
        EXPECT_LE(Norm(error) / norm, tolerance) << p.name;
      }
    }
  }

  bool gpt2() const { return reference_.table().config.architecture == Architecture::kGpt2; }

  static double Norm(const std::vector<float>& values) {
    double sum = 0;
    for (float value : values) sum += static_cast<double>(value) * value;
    return std::sqrt(sum);
  }

  Reference reference_;
  std::vector<std::vector<float>> flat_;
  std::vector<int32_t> tokens_, targets_, starts_;
  double loss_ = 0;
};

INSTANTIATE_TEST_SUITE_P(References, ModelTest, testing::ValuesIn(ReferenceNames()),
                         [](const auto& info) { return info.param; });

void ExpectSameBits(const RunResult& a, const RunResult& b) {
  EXPECT_EQ(a.loss, b.loss);
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (const auto& [name, values] : a.gradients) {
    const std::vector<float>& other = b.gradients.at(name);
    ASSERT_EQ(values.size(), other.size()) << name;
    EXPECT_EQ(std::memcmp(values.data(), other.data(), values.size() * sizeof(float)), 0) << name;
  }
}

TEST_P(ModelTest, Fp32LossAndGradientsAreThoseOfPyTorch) {
  const RunResult result = Run({});
  EXPECT_NEAR(result.loss, loss_, 1e-5 * loss_);
  ExpectGradients(result.gradients, 1e-4);
}

TEST_P(ModelTest, Fp16LossAndGradientsAreNearThoseOfPyTorch) {
  RunOptions options;
  options.dtype = DType::kF16;
  const RunResult result = Run(options);
  // fp16 keeps three bits more than bf16.
  EXPECT_NEAR(result.loss, loss_, 0.00125 * loss_);
  ExpectGradients(result.gradients, 0.0075);
}

TEST_P(ModelTest, Bf16LossAndGradientsAreNearThoseOfPyTorch) {
  RunOptions options;
  options.dtype = DType::kBF16;
  const RunResult result = Run(options);
  // bf16 keeps 8 bits: 0.4 % a rounding, a few dozen roundings in a row.
  EXPECT_NEAR(result.loss, loss_, 0.01 * loss_);
  ExpectGradients(result.gradients, 0.06);
}

TEST_P(ModelTest, SequencesOneByOneAddUpToTheMicroBatch) {
  const RunResult first = RunSequence(0, {});
  const RunResult second = RunSequence(1, {});
  EXPECT_NEAR(first.loss + second.loss, loss_, 1e-5 * loss_);
  std::map<std::string, std::vector<float>> sum = first.gradients;
  for (auto& [name, values] : sum) {
    for (size_t i = 0; i < values.size(); ++i) values[i] += second.gradients.at(name)[i];
  }
  ExpectGradients(sum, 1e-4);
}

TEST_P(ModelTest, LossAloneIsTheLossOfTheBackwardBitForBit) {
  const RunResult result = Run({});
  EXPECT_EQ(result.loss_only, result.loss);
}

TEST_P(ModelTest, CheckpointingChangesNoBit) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    RunOptions options;
    options.dtype = dtype;
    const RunResult plain = Run(options);
    options.checkpointing = true;
    ExpectSameBits(plain, Run(options));
  }
}

TEST_P(ModelTest, WhereInputsAndGradientsLieChangesNoBit) {
  for (bool checkpointing : {false, true}) {
    RunOptions options;
    options.checkpointing = checkpointing;
    const RunResult plain = Run(options);
    options.separate_buffers = true;
    ExpectSameBits(plain, Run(options));
  }
}

TEST_P(ModelTest, ThreadsChangeNoBit) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    RunOptions options;
    options.dtype = dtype;
    const RunResult plain = Run(options);
    options.threads = 3;
    ExpectSameBits(plain, Run(options));
  }
}

TEST_P(ModelTest, GradientsOfABlockLeaveFromTheMlpToTheNorm) {
  const RunResult result = Run({});
  for (size_t u = 1; u + 1 < reference_.table().units.size(); ++u) {
    const std::vector<RecordingSink::Range>& done = result.done[u];
    ASSERT_EQ(done.size(), 4u);
    EXPECT_EQ(done.front().end, reference_.table().units[u].length);
    for (size_t i = 1; i < done.size(); ++i) EXPECT_EQ(done[i].end, done[i - 1].begin);
    EXPECT_EQ(done.back().begin, 0);
  }
}

TEST_P(ModelTest, FrozenTensorsLeaveTheOthersGradientsAsTheyAre) {
  v1::ModelSpec spec = reference_.spec().model();
  spec.add_trainable("*norm*");
  if (gpt2()) spec.set_trainable(0, "*ln_*");
  const ModelTable frozen = MakeModelTable(spec).value();
  absl::StatusOr<RunResult> result = RunModel(frozen, flat_, tokens_, targets_, AsReference({}, 0));
  ASSERT_TRUE(result.ok()) << result.status();
  const RunResult plain = Run({});
  EXPECT_EQ(result->loss, plain.loss);
  int compared = 0;
  for (const UnitTable& unit : frozen.units) {
    for (const ParameterInfo& p : unit.parameters) {
      if (!p.trainable) continue;
      EXPECT_EQ(result->gradients[p.name], plain.gradients.at(p.name)) << p.name;
      ++compared;
    }
  }
  EXPECT_GT(compared, 2);
}

TEST_P(ModelTest, ANaNInAWeightReachesTheLoss) {
  flat_[1][0] = std::nanf("");
  EXPECT_TRUE(std::isnan(Run({}).loss));
}

// Models without documents of their own.
class UndividedTest : public ModelTest {};

INSTANTIATE_TEST_SUITE_P(References, UndividedTest,
                         testing::Values("gpt2", "llama", "llama_biased", "gpt2_dropout"),
                         [](const auto& info) { return info.param; });

TEST_P(UndividedTest, DocumentsThatAllStartAtTheSequencesStartChangeNoBit) {
  RunOptions options;
  options.document_start.assign(tokens_.size(), 0);
  ExpectSameBits(Run({}), Run(options));
}

// The model with dropout.
class DropoutTest : public ModelTest {};

INSTANTIATE_TEST_SUITE_P(References, DropoutTest, testing::Values("gpt2_dropout", "llama_dropout"),
                         [](const auto& info) { return info.param; });

TEST_P(DropoutTest, RatesCountOnlyInTraining) {
  v1::ModelSpec spec = reference_.spec().model();
  spec.clear_embd_pdrop();
  spec.clear_attn_pdrop();
  spec.clear_resid_pdrop();
  absl::StatusOr<RunResult> plain =
      RunModel(MakeModelTable(spec).value(), flat_, tokens_, targets_, {.dropout = true});
  absl::StatusOr<RunResult> evaluated =
      RunModel(reference_.table(), flat_, tokens_, targets_, {.dropout = false});
  ASSERT_TRUE(plain.ok() && evaluated.ok());
  ExpectSameBits(*plain, *evaluated);
  EXPECT_NE(plain->loss, Run({}).loss);
}

TEST_P(DropoutTest, EachRateStepSeedAndSampleHasItsOwnMask) {
  const v1::ModelSpec all = reference_.spec().model();
  std::vector<v1::ModelSpec> specs(3, all);
  specs[0].clear_embd_pdrop();
  specs[1].clear_attn_pdrop();
  specs[2].clear_resid_pdrop();
  const RunOptions usual = {.dropout = true, .seed = 5, .step = 7, .first_sample = 11};
  std::vector<double> losses;
  const auto run = [&](const v1::ModelSpec& spec, const RunOptions& options) {
    absl::StatusOr<RunResult> result =
        RunModel(MakeModelTable(spec).value(), flat_, tokens_, targets_, options);
    ASSERT_TRUE(result.ok()) << result.status();
    losses.push_back(result->loss);
  };
  run(all, usual);
  for (const v1::ModelSpec& spec : specs) run(spec, usual);
  run(all, {.dropout = true, .seed = 6, .step = 7, .first_sample = 11});
  run(all, {.dropout = true, .seed = 5, .step = 8, .first_sample = 11});
  run(all, {.dropout = true, .seed = 5, .step = 7, .first_sample = 12});
  for (size_t i = 0; i < losses.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(losses[i], losses[j]) << i << " and " << j;
  }
  run(all, usual);
  EXPECT_EQ(losses.back(), losses.front());
}

// The model whose position table is longer than its sequences.
class LongTableTest : public ModelTest {};

INSTANTIATE_TEST_SUITE_P(References, LongTableTest, testing::Values("gpt2_documents"),
                         [](const auto& info) { return info.param; });

TEST_P(LongTableTest, PositionsThatNoSequenceReachesHaveNoGradient) {
  const std::vector<float> gradient = Run({}).gradients.at("wpe.weight");
  const ModelConfig& c = reference_.table().config;
  ASSERT_GT(c.positions, c.sequence);
  ASSERT_EQ(gradient.size(), static_cast<size_t>(c.positions * c.hidden));
  for (int64_t i = c.sequence * c.hidden; i < c.positions * c.hidden; ++i) {
    EXPECT_EQ(gradient[i], 0.0f) << i;
  }
}

TEST(HeadBlocksTest, AVocabularyOfSeveralBlocksGivesTheGradientOfOne) {
  // A hidden size of 2^15 has blocks of 128 rows, so 257 words are three blocks, the last of one
  // row.
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(1 << 15);
  spec.set_layers(1);
  spec.set_heads(256);
  spec.set_intermediate_size(8);
  spec.set_sequence_length(2);
  spec.set_vocab_size(257);
  const ModelConfig config = MakeModelConfig(spec).value();
  EXPECT_EQ(HeadBlockRows(config), 128);
  const int64_t C = config.hidden, V = config.vocab, T = config.sequence;

  UnitTable unit;  // the tied head's: only its norm
  unit.kind = UnitKind::kHead;
  unit.parameters = {{.name = "ln_f.weight", .shape = {C}, .offset = 0, .size = C},
                     {.name = "ln_f.bias", .shape = {C}, .offset = C, .size = C}};
  unit.length = 2 * C;
  std::vector<float> params(2 * C, 1.0f), x(T * C), matrix(V * C), dx(T * C);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(0.7f * i);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = 0.01f * std::cos(0.3f * i);

  const ActivationTable activations =
      MakeActivationTable(config, UnitKind::kHead, 1, DType::kF32, false);
  std::vector<char> memory(activations.kept_bytes + activations.scratch_bytes + 64);
  const std::unique_ptr<Ops> ops = MakeCpuOps(1);
  const UnitContext context{ops.get(), DType::kF32, memory.data(),
                            memory.data() + activations.kept_bytes};
  const std::vector<int32_t> tokens = {0, 1}, targets = {256, 3};
  RecordingSink norm_sink(2 * C, DType::kF32);
  RecordingSink head_sink(RoundUp(V * C, 64), DType::kF32);
  double result = 0;
  const auto head = MakeHead(config, unit, /*matrix_trainable=*/true);
  ASSERT_TRUE(head->LossAndBackward(context, params.data(), matrix.data(),
                                    {1, tokens.data(), targets.data()}, x.data(), dx.data(),
                                    &norm_sink, &head_sink, 0, &result)
                  .ok());
  const std::vector<RecordingSink::Range> blocks = {
      {0, 128 * C}, {128 * C, 256 * C}, {256 * C, 257 * C}};
  EXPECT_EQ(head_sink.done(), blocks);

  // The same from the formulas, in fp64: dW = (softmax - onehot)^T norm(x).
  std::vector<double> normed(T * C), p(V);
  double loss = 0, error = 0, norm = 0;
  std::vector<double> gradient(V * C);
  for (int64_t t = 0; t < T; ++t) {
    double mean = 0, square = 0;
    for (int64_t i = 0; i < C; ++i) mean += x[t * C + i] / C;
    for (int64_t i = 0; i < C; ++i) square += std::pow(x[t * C + i] - mean, 2) / C;
    for (int64_t i = 0; i < C; ++i) {
      normed[t * C + i] = (x[t * C + i] - mean) / std::sqrt(square + 1e-5) + 1;
    }
    double sum = 0;
    for (int64_t v = 0; v < V; ++v) {
      double logit = 0;
      for (int64_t i = 0; i < C; ++i) logit += matrix[v * C + i] * normed[t * C + i];
      p[v] = std::exp(logit);
      sum += p[v];
    }
    loss -= std::log(p[targets[t]] / sum);
    for (int64_t v = 0; v < V; ++v) {
      const double d = p[v] / sum - (v == targets[t]);
      for (int64_t i = 0; i < C; ++i) gradient[v * C + i] += d * normed[t * C + i];
    }
  }
  const std::vector<float> seen = head_sink.Values();
  for (int64_t i = 0; i < V * C; ++i) {
    error += std::pow(seen[i] - gradient[i], 2);
    norm += std::pow(gradient[i], 2);
  }
  EXPECT_NEAR(result, loss, 1e-5 * loss);
  EXPECT_LE(std::sqrt(error / norm), 1e-4);
}

}  // namespace
}  // namespace zeroshard
