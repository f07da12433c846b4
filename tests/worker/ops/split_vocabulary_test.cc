// What ranks do that have some of a vocabulary each, against the same with all of it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/cpu_isa.h"
#include "worker/ops/cross_entropy_columns.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard {
namespace {

using Parameters = std::tuple<DType, int64_t, int64_t, int>;  // type, columns, vocabulary, ranks

class SplitVocabularyTest : public testing::TestWithParam<Parameters> {
 protected:
  void SetUp() override { cpu::ApplyIsaCap(); }
  DType type() const { return std::get<0>(GetParam()); }
  int64_t columns() const { return std::get<1>(GetParam()); }
  int64_t v() const { return std::get<2>(GetParam()); }
  int ranks() const { return std::get<3>(GetParam()); }
  int64_t Begin(int rank) const { return std::min(v(), rank * CeilDiv(v(), ranks())); }

  std::vector<int32_t> Targets() const {
    std::vector<int32_t> targets;
    for (int64_t r = 0; r < columns(); ++r)
      targets.push_back(r % 4 == 3 ? -1 : static_cast<int32_t>((r * 7919 + v() - 1) % v()));
    return targets;
  }

  struct Split {
    std::vector<double> gradient;            // [v, columns]
    std::vector<std::vector<float>> losses;  // by rank
  };
  // The ranks one after the other, on the rows that each has.
  Split Run(const TypedValues& logits, const std::vector<int32_t>& targets, float scale) const {
    const int64_t n = columns();
    const size_t element = SizeOf(type());
    TypedValues copy = logits;
    std::vector<float> parts(static_cast<size_t>(ranks() * 3 * n), -7.0f);
    std::vector<std::vector<int32_t>> local(static_cast<size_t>(ranks()));
    const auto rows_of = [&](int rank) {
      return static_cast<char*>(copy.data()) + static_cast<size_t>(Begin(rank) * n) * element;
    };
    Split split;
    for (int rank = 0; rank < ranks(); ++rank) {
      auto& mine = local[static_cast<size_t>(rank)];
      mine.resize(targets.size());
      cpu::LocalIds(targets.data(), n, Begin(rank), Begin(rank + 1), mine.data());
      cpu::SoftmaxPart(rows_of(rank), mine.data(), n, Begin(rank + 1) - Begin(rank), type(),
                       parts.data() + rank * 3 * n, 1);
    }
    for (int rank = 0; rank < ranks(); ++rank) {
      split.losses.emplace_back(targets.size(), -1.0f);
      cpu::CrossEntropyOfParts(parts.data(), ranks(), rows_of(rank), targets.data(),
                               local[static_cast<size_t>(rank)].data(), n,
                               Begin(rank + 1) - Begin(rank), type(), scale,
                               split.losses.back().data(), 1);
    }
    split.gradient = copy.AsDoubles();
    return split;
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, SplitVocabularyTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(1, 70, 150),
                                          testing::Values(1, 5, 257, 1000),
                                          testing::Values(1, 2, 4)));

TEST_P(SplitVocabularyTest, LossesAndGradientsAreThoseOfTheWholeVocabulary) {
  const std::vector<int32_t> targets = Targets();
  const TypedValues logits = TypedValues::Random(columns() * v(), type(), 11, 8);
  TypedValues whole = logits;
  std::vector<float> losses(targets.size());
  cpu::CrossEntropyColumns(whole.data(), targets.data(), columns(), v(), type(), 2.0f,
                           losses.data(), 1);
  const std::vector<double> wanted = whole.AsDoubles();
  const Split split = Run(logits, targets, 2.0f);
  // Two numbers that are near each other may be rounded to neighbours of the type; and of a
  // target's probability near 1, 1 is taken.
  const double spacing = type() == DType::kF32 ? 1e-6 : type() == DType::kBF16 ? 0x1p-7 : 0x1p-9;
  for (const std::vector<float>& seen : split.losses) {
    EXPECT_EQ(seen, split.losses[0]);
    for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(seen[i], losses[i], 2e-6 * 16) << i;
  }
  for (size_t i = 0; i < wanted.size(); ++i)
    ASSERT_NEAR(split.gradient[i], wanted[i], spacing * std::abs(wanted[i]) + 1e-6) << i;
  if (ranks() == 1) {
    EXPECT_EQ(split.losses[0], losses);
    EXPECT_EQ(split.gradient, wanted);
  }
}

TEST_P(SplitVocabularyTest, WithoutTheGradientTheLogitsStay) {
  const std::vector<int32_t> targets = Targets();
  const TypedValues logits = TypedValues::Random(columns() * v(), type(), 12, 8);
  EXPECT_EQ(Run(logits, targets, 0).gradient, TypedValues(logits).AsDoubles());
}

TEST_P(SplitVocabularyTest, ALogitThatIsNotFinitePoisonsItsColumnOnEveryRank) {
  std::vector<int32_t> targets = Targets();
  targets[0] = 0;
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    TypedValues logits = TypedValues::Random(columns() * v(), type(), 13, 8);
    logits.Set((v() - 1) * columns(), bad);  // the last row of the first column
    const Split split = Run(logits, targets, 1.0f);
    for (const std::vector<float>& losses : split.losses) {
      EXPECT_TRUE(std::isnan(losses[0]));
      if (columns() > 1) {
        EXPECT_TRUE(std::isfinite(losses[1]));
      }
    }
    for (int64_t row = 0; row < v(); ++row)
      EXPECT_TRUE(std::isnan(split.gradient[static_cast<size_t>(row * columns())]));
  }
}

TEST(SplitVocabulary, RowsOfOtherRanksAreZeroAndHaveNoGradient) {
  const std::vector<int32_t> tokens = {9, 4, 5, 4, 7, 3};
  std::vector<int32_t> local(tokens.size());
  cpu::LocalIds(tokens.data(), 6, 4, 8, local.data());
  EXPECT_EQ(local, (std::vector<int32_t>{-1, 0, 1, 0, 3, -1}));

  constexpr int64_t kCols = 3;
  std::vector<float> table(4 * kCols), y(6 * kCols, -1.0f);
  for (size_t i = 0; i < table.size(); ++i) table[i] = 1.0f + static_cast<float>(i);
  cpu::LookupRows(local.data(), table.data(), 6, kCols, DType::kF32, y.data(), 1);
  EXPECT_EQ(y, (std::vector<float>{0, 0, 0, 1, 2, 3, 4, 5, 6, 1, 2, 3, 10, 11, 12, 0, 0, 0}));

  std::vector<float> dy(6 * kCols), rows(6 * kCols, -1.0f);
  for (size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(i);
  std::vector<int32_t> ids(6, -7);
  cpu::EmbeddingBackwardRows(dy.data(), local.data(), 2, 3, kCols, DType::kF32, ids.data(),
                             rows.data(), 1);
  EXPECT_EQ(ids, (std::vector<int32_t>{0, 1, 3, -1, -1, -1}));
  EXPECT_EQ(rows, (std::vector<float>{3 + 9, 4 + 10, 5 + 11, 6, 7, 8, 12, 13, 14, 0, 0, 0, 0, 0, 0,
                                      0, 0, 0}));
}

}  // namespace
}  // namespace zeroshard
