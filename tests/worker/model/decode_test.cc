// Inference through a key/value cache against transformers' logits (tests/reference).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/reference/reference.h"
#include "tests/worker/model/model_runner.h"

namespace zeroshard {
namespace {

class DecodeTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    absl::StatusOr<Reference> loaded = Reference::Load(GetParam());
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    reference_ = *std::move(loaded);
    for (const UnitTable& unit : reference_.table().units) {
      flat_.push_back(reference_.FlatUnit("initial", unit).value());
    }
    const std::vector<int32_t> tokens = reference_.Ints("gradient.tokens").value();
    sequence_ = reference_.table().config.sequence;
    for (int64_t b = 0; b < 2; ++b) {
      rows_.emplace_back(tokens.begin() + b * sequence_, tokens.begin() + (b + 1) * sequence_);
    }
    wanted_ = reference_.Floats("logits").value();
    positions_ = reference_.Ints("logits.positions").value();
    largest_ = 0;
    for (float logit : wanted_) largest_ = std::max(largest_, std::fabs(logit));
  }

  std::vector<float> Logits(int64_t b, const std::vector<int64_t>& pieces,
                            const RunOptions& options = {}) const {
    auto logits = DecodeModel(reference_.table(), flat_, rows_[b], pieces, sequence_, options);
    EXPECT_TRUE(logits.ok()) << logits.status();
    return logits.ok() ? *std::move(logits) : std::vector<float>();
  }

  // At the reference's positions, as a share of its largest logit.
  void ExpectReference(const std::vector<int64_t>& pieces, const RunOptions& options,
                       double tolerance) const {
    const size_t V = static_cast<size_t>(reference_.table().config.vocab);
    ASSERT_EQ(wanted_.size(), rows_.size() * positions_.size() * V);
    for (size_t b = 0; b < rows_.size(); ++b) {
      const std::vector<float> seen = Logits(static_cast<int64_t>(b), pieces, options);
      ASSERT_EQ(seen.size(), rows_[b].size() * V);
      for (size_t p = 0; p < positions_.size(); ++p) {
        const float* wanted = wanted_.data() + (b * positions_.size() + p) * V;
        const float* found = seen.data() + static_cast<size_t>(positions_[p]) * V;
        double error = 0;
        for (size_t v = 0; v < V; ++v) {
          error = std::max<double>(error, std::fabs(found[v] - wanted[v]));
        }
        EXPECT_LE(error, tolerance * largest_) << "position " << positions_[p];
      }
    }
  }

  std::vector<int64_t> OneByOne() const { return std::vector<int64_t>(sequence_, 1); }

  Reference reference_;
  std::vector<std::vector<float>> flat_;
  std::vector<std::vector<int32_t>> rows_;
  int64_t sequence_ = 0;
  std::vector<float> wanted_;
  std::vector<int32_t> positions_;
  float largest_ = 0;
};

// The references whose logits are those of plain causal attention without dropout.
INSTANTIATE_TEST_SUITE_P(References, DecodeTest,
                         testing::Values("gpt2", "llama", "llama_tied", "llama_biased", "qwen2"),
                         [](const auto& info) { return info.param; });

TEST_P(DecodeTest, LogitsOfAWholeSequenceAreThoseOfTransformers) {
  ExpectReference({sequence_}, {}, 1e-5);
}

TEST_P(DecodeTest, LogitsTokenByTokenAreThoseOfTransformers) {
  ExpectReference(OneByOne(), {}, 1e-5);
}

TEST_P(DecodeTest, LogitsInPiecesAreThoseOfTransformers) {
  ExpectReference({100, 1, 1, sequence_ - 102}, {}, 1e-5);
  ExpectReference({1, sequence_ - 1}, {}, 1e-5);
}

TEST_P(DecodeTest, Bf16IsNearTransformers) {
  RunOptions options;
  options.dtype = DType::kBF16;
  ExpectReference({sequence_ - 20, 5, 15}, options, 0.04);
  ExpectReference(OneByOne(), options, 0.04);
}

TEST_P(DecodeTest, Fp16IsNearerTransformersThanBf16) {
  RunOptions options;
  options.dtype = DType::kF16;
  ExpectReference({sequence_ - 20, 5, 15}, options, 0.005);
  ExpectReference(OneByOne(), options, 0.005);
}

TEST_P(DecodeTest, ThreadsAndCheckpointingChangeNoBit) {
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    RunOptions options;
    options.dtype = dtype;
    const std::vector<int64_t> pieces = {100, 1, sequence_ - 101};
    const std::vector<float> plain = Logits(0, pieces, options);
    options.threads = 3;
    options.checkpointing = true;
    const std::vector<float> other = Logits(0, pieces, options);
    ASSERT_EQ(plain.size(), other.size());
    EXPECT_EQ(std::memcmp(plain.data(), other.data(), plain.size() * sizeof(float)), 0);
  }
}

TEST_P(DecodeTest, ABlockWithoutAPastGivesForwardsBits) {
  const ModelConfig& c = reference_.table().config;
  const std::unique_ptr<Ops> ops = MakeCpuOps(1);
  const Model model = MakeModel(reference_.table(), /*checkpointing=*/false);
  const ActivationTable table =
      MakeActivationTable(c, UnitKind::kBlock, 1, DType::kF32, /*checkpointing=*/false);
  std::vector<char> kept(static_cast<size_t>(table.kept_bytes));
  std::vector<char> scratch(static_cast<size_t>(
      std::max(table.scratch_bytes, DecodeScratchBytes(c, sequence_, DType::kF32))));
  const auto size = static_cast<size_t>(sequence_ * c.hidden);
  std::vector<float> x(size), trained(size), decoded(size);
  for (size_t i = 0; i < size; ++i) x[i] = std::sin(0.7f * static_cast<float>(i));
  MicroBatch mb;
  mb.batch = 1;
  const UnitContext context{ops.get(), DType::kF32, kept.data(), scratch.data()};
  ASSERT_TRUE(
      model.blocks[0]->Forward(context, flat_[1].data(), mb, x.data(), trained.data()).ok());
  std::vector<float> keys(static_cast<size_t>(sequence_ * c.kv_heads * c.head_dim));
  std::vector<float> values(keys.size());
  ASSERT_TRUE(model.blocks[0]
                  ->Decode(context, flat_[1].data(), 0, sequence_,
                           {keys.data(), values.data(), sequence_}, x.data(), decoded.data())
                  .ok());
  EXPECT_EQ(std::memcmp(trained.data(), decoded.data(), size * sizeof(float)), 0);
}

TEST_P(DecodeTest, PositionsThatDoNotFitTheCacheAreRefused) {
  for (const auto& pieces : {std::vector<int64_t>{11}, std::vector<int64_t>{10, 1}}) {
    const absl::Status status =
        DecodeModel(reference_.table(), flat_, rows_[0], pieces, /*capacity=*/10, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr("cache of 10 positions"));
  }
}

TEST(DecodePositionsTest, Gpt2GoesOnBeyondTheTrainedSequenceButNotBeyondItsTable) {
  const Reference reference = Reference::Load("gpt2_documents").value();
  const ModelConfig& c = reference.table().config;
  ASSERT_GT(c.positions, c.sequence);
  std::vector<std::vector<float>> flat;
  for (const UnitTable& unit : reference.table().units) {
    flat.push_back(reference.FlatUnit("initial", unit).value());
  }
  const std::vector<int32_t> tokens(c.positions + 1, 3);
  EXPECT_TRUE(
      DecodeModel(reference.table(), flat, tokens, {c.positions}, c.positions + 1, {}).ok());
  const absl::Status status =
      DecodeModel(reference.table(), flat, tokens, {c.positions, 1}, c.positions + 1, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("160 positions"));
}

}  // namespace
}  // namespace zeroshard
