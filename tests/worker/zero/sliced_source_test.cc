#include "worker/zero/sliced_source.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"
#include "worker/zero/squares.h"

namespace zeroshard {
namespace {

// Five words on four ranks: the last rank has none. One key and value head: all have it.
ModelTable TinyModel() {
  v1::ModelSpec spec;
  spec.set_architecture("llama");
  spec.set_hidden_size(64);
  spec.set_layers(1);
  spec.set_heads(4);
  spec.set_kv_heads(1);
  spec.set_intermediate_size(96);
  spec.set_sequence_length(8);
  spec.set_vocab_size(5);
  spec.set_attention_bias(true);
  spec.set_tie_embeddings(true);
  return *MakeModelTable(spec);
}

// A number that tells tensor and element; never 0.
class NumberedSource : public ParameterSource {
 public:
  static float Value(const std::string& tensor, int64_t element) {
    return static_cast<float>(tensor.size()) + 1e-3f * static_cast<float>(element % 4099);
  }
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    EXPECT_GE(begin, 0);
    EXPECT_LE(end, tensor.size);
    for (int64_t i = begin; i < end; ++i) out[i - begin] = Value(tensor.name, i);
    return absl::OkStatus();
  }
  void DropPages() const override { ++drops; }
  mutable int drops = 0;
};

TEST(SlicedSource, HasTheRowsOfTheSliceAndZerosForPadding) {
  const ModelTable full = TinyModel();
  const NumberedSource numbers;
  for (int rank = 0; rank < 4; ++rank) {
    const TensorRank slice = MakeTensorRank(full, 4, rank);
    const SlicedSource source(&full, &slice, &numbers);
    for (size_t u = 0; u < full.units.size(); ++u) {
      for (size_t i = 0; i < full.units[u].parameters.size(); ++i) {
        const ParameterInfo& p = slice.model.units[u].parameters[i];
        const TensorSlice& rows = slice.slices[u][i];
        const int64_t row = p.size / p.shape[0];
        std::vector<float> seen(static_cast<size_t>(p.size), -1.0f);
        // In two parts that end anywhere.
        const int64_t middle = p.size / 3;
        ASSERT_TRUE(source.Read(p, 0, middle, seen.data()).ok());
        ASSERT_TRUE(source.Read(p, middle, p.size, seen.data() + middle).ok());
        for (int64_t e = 0; e < p.size; ++e) {
          const int64_t at = rows.begin * row + e;
          const float wanted = at < rows.end * row ? NumberedSource::Value(p.name, at) : 0.0f;
          ASSERT_EQ(seen[static_cast<size_t>(e)], wanted) << p.name << " " << e << " of " << rank;
        }
      }
    }
    source.DropPages();
  }
  EXPECT_EQ(numbers.drops, 4);
}

TEST(SlicedSource, ATensorThatTheSliceHasNotInThisShapeIsRefused) {
  const ModelTable full = TinyModel();
  const NumberedSource numbers;
  const TensorRank slice = MakeTensorRank(full, 4, 1);
  const SlicedSource source(&full, &slice, &numbers);
  std::vector<float> out(1 << 14);
  const ParameterInfo& whole = *full.units[1].Find("mlp.up.weight");
  const absl::Status shape = source.Read(whole, 0, 10, out.data());
  EXPECT_EQ(shape.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shape.message()), testing::HasSubstr("blocks.0.mlp.up.weight"));
  ParameterInfo other = *slice.model.units[1].Find("mlp.up.weight");
  EXPECT_FALSE(source.Read(other, 0, other.size + 1, out.data()).ok());
  other.name = "blocks.7.mlp.up.weight";
  EXPECT_FALSE(source.Read(other, 0, 10, out.data()).ok());
}

// Whole numbers, whose squares are exact: every element of the full tensors counts once, in parts
// that end at any multiple of 64.
TEST(GradientSquares, OfATensorGroupCountEveryElementOnce) {
  const ModelTable full = TinyModel();
  const auto device = MakeCpuDevice();
  const auto ops = MakeCpuOps(1);
  const auto value = [](const ParameterInfo& p, int64_t element) {
    return static_cast<float>(1 + (element + static_cast<int64_t>(p.name.size())) % 7);
  };
  double wanted = 0;
  for (const UnitTable& unit : full.units) {
    for (const ParameterInfo& p : unit.parameters) {
      for (int64_t e = 0; e < p.size; ++e) wanted += std::pow(value(p, e), 2);
    }
  }
  NormAccumulator sum;
  for (int rank = 0; rank < 4; ++rank) {
    const TensorRank slice = MakeTensorRank(full, 4, rank);
    auto squares = *GradientSquares::Create(full.units.size(), device.get(), ops.get(), &slice);
    squares->Begin();
    for (size_t u = 0; u < full.units.size(); ++u) {
      const int64_t length = slice.model.units[u].length;
      std::vector<float> gradient(static_cast<size_t>(length));
      for (const SliceRun& run : FullRuns(slice, u, {0, length})) {
        const ParameterInfo& p = full.units[u].parameters[static_cast<size_t>(run.parameter)];
        for (int64_t i = 0; i < run.size; ++i)
          gradient[static_cast<size_t>(run.local + i)] = value(p, run.element + i);
      }
      for (int64_t begin = 0; begin < length; begin += 192) {
        const int64_t end = std::min(length, begin + 192);
        squares->Add(static_cast<int>(u), {begin, end}, gradient.data() + begin, DType::kF32);
      }
    }
    ASSERT_TRUE(squares->Read().Wait().ok());
    for (size_t u = 0; u < full.units.size(); ++u) sum.Add(squares->Of(u));
  }
  EXPECT_EQ(sum.Value(), wanted);
}

}  // namespace
}  // namespace zeroshard
