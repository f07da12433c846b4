// Whole models on a GPU against PyTorch's and transformers' values (tests/reference), as
// tests/worker/model does on the CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_replace.h"
#include "gtest/gtest.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/reference/reference.h"
#include "tests/worker/model/model_runner.h"

namespace zeroshard {
namespace {

double Norm(const std::vector<float>& values) {
  double sum = 0;
  for (float value : values) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

class GpuModel : public GpuFixture, public testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    GpuFixture::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    absl::StatusOr<Reference> loaded = Reference::Load(GetParam());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    reference_ = *std::move(loaded);
    for (const UnitTable& unit : reference_.table().units)
      flat_.push_back(reference_.FlatUnit("initial", unit).value());
    tokens_ = reference_.Ints("gradient.tokens").value();
    targets_ = reference_.Ints("gradient.targets").value();
  }

  RunOptions Options(DType dtype) {
    RunOptions options;
    options.dtype = dtype;
    options.device = device_.get();
    options.ops = ops_.get();
    if (auto starts = reference_.Ints("gradient.document_start"); starts.ok())
      options.document_start = *std::move(starts);
    options.dropout = reference_.table().config.attn_pdrop > 0;
    options.seed = reference_.spec().seed();
    return options;
  }

  RunResult Run(const RunOptions& options) {
    absl::StatusOr<RunResult> result =
        RunModel(reference_.table(), flat_, tokens_, targets_, options);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *std::move(result) : RunResult();
  }

  // As ModelTest of tests/worker/model: a key's bias without rotary positions has no gradient but
  // rounding, and is measured by the query's.
  void ExpectReference(const RunResult& seen, double loss_tolerance, double tolerance) {
    const double loss = reference_.Floats("gradient.loss").value().at(0);
    EXPECT_NEAR(seen.loss, loss, loss_tolerance * loss);
    const bool gpt2 = reference_.table().config.architecture == Architecture::kGpt2;
    for (const UnitTable& unit : reference_.table().units) {
      for (const ParameterInfo& p : unit.parameters) {
        const auto found = seen.gradients.find(p.name);
        ASSERT_NE(found, seen.gradients.end()) << p.name;
        std::vector<float> error = reference_.Tensor("gradient", p.name).value();
        ASSERT_EQ(found->second.size(), error.size()) << p.name;
        for (size_t i = 0; i < error.size(); ++i) error[i] -= found->second[i];
        const std::string measure =
            gpt2 ? absl::StrReplaceAll(p.name, {{"attn.k.bias", "attn.q.bias"}}) : p.name;
        EXPECT_LE(Norm(error), tolerance * Norm(reference_.Tensor("gradient", measure).value()))
            << p.name;
      }
    }
  }

  Reference reference_;
  std::vector<std::vector<float>> flat_;
  std::vector<int32_t> tokens_, targets_;
};

INSTANTIATE_TEST_SUITE_P(References, GpuModel, testing::ValuesIn(ReferenceNames()),
                         [](const auto& info) { return info.param; });

TEST_P(GpuModel, Fp32LossAndGradientsAreThoseOfPyTorch) {
  ExpectReference(Run(Options(DType::kF32)), 1e-5, 1e-4);
}

TEST_P(GpuModel, Bf16LossAndGradientsAreNearThoseOfPyTorch) {
  // bf16 keeps 8 bits: 0.4 % a rounding, a few dozen roundings in a row.
  ExpectReference(Run(Options(DType::kBF16)), 0.01, 0.06);
}

TEST_P(GpuModel, Fp16LossAndGradientsAreNearThoseOfPyTorch) {
  // fp16 keeps 11 bits.
  ExpectReference(Run(Options(DType::kF16)), 0.00125, 0.0075);
}

TEST_P(GpuModel, NeitherARepetitionNorCheckpointingChangesABit) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    RunOptions options = Options(dtype);
    const RunResult first = Run(options);
    EXPECT_EQ(first.loss, first.loss_only);
    for (const bool checkpointing : {false, true}) {
      options.checkpointing = checkpointing;
      const RunResult again = Run(options);
      EXPECT_EQ(again.loss, first.loss);
      ASSERT_EQ(again.gradients.size(), first.gradients.size());
      for (const auto& [name, values] : first.gradients) {
        const std::vector<float>& other = again.gradients.at(name);
        ASSERT_EQ(other.size(), values.size()) << name;
        EXPECT_EQ(std::memcmp(values.data(), other.data(), values.size() * sizeof(float)), 0)
            << name;
      }
    }
  }
}

class GpuDecode : public GpuModel {};
INSTANTIATE_TEST_SUITE_P(References, GpuDecode,
                         testing::Values("gpt2", "llama", "llama_tied", "llama_biased", "qwen2"),
                         [](const auto& info) { return info.param; });

// At once and token by token through the cache, within a share of the largest logit.
TEST_P(GpuDecode, LogitsAreThoseOfTransformers) {
  const int64_t sequence = reference_.table().config.sequence;
  const auto vocab = static_cast<size_t>(reference_.table().config.vocab);
  const std::vector<float> wanted = reference_.Floats("logits").value();
  const std::vector<int32_t> positions = reference_.Ints("logits.positions").value();
  float largest = 0;
  for (float logit : wanted) largest = std::max(largest, std::fabs(logit));
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& pieces :
         {std::vector<int64_t>{sequence}, std::vector<int64_t>(static_cast<size_t>(sequence), 1)}) {
      for (int64_t b = 0; b < 2; ++b) {
        const std::vector<int32_t> row(tokens_.begin() + b * sequence,
                                       tokens_.begin() + (b + 1) * sequence);
        const auto logits =
            DecodeModel(reference_.table(), flat_, row, pieces, sequence, Options(dtype));
        ASSERT_TRUE(logits.ok()) << logits.status();
        const double tolerance = dtype == DType::kF32    ? 1e-5
                                 : dtype == DType::kBF16 ? 0.05
                                                         : 0.00625;
        for (size_t p = 0; p < positions.size(); ++p) {
          const float* expected =
              wanted.data() + (static_cast<size_t>(b) * positions.size() + p) * vocab;
          const float* seen = logits->data() + static_cast<size_t>(positions[p]) * vocab;
          for (size_t v = 0; v < vocab; ++v)
            ASSERT_NEAR(seen[v], expected[v], tolerance * largest) << "position " << positions[p];
        }
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
