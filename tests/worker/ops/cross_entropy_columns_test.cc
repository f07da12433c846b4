#include "worker/ops/cross_entropy_columns.h"

#include <cmath>
#include <limits>
#include <memory>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/cpu_isa.h"
#include "worker/ops/ops.h"

namespace zeroshard {
namespace {

// Of column `col` of logits [v, rows].
double ColumnLoss(const std::vector<double>& logits, int64_t rows, int64_t v, int64_t col,
                  int32_t target) {
  if (target == -1) return 0;
  double most = logits[col], sum = 0;
  for (int64_t i = 0; i < v; ++i) most = std::max(most, logits[i * rows + col]);
  for (int64_t i = 0; i < v; ++i) sum += std::exp(logits[i * rows + col] - most);
  return most + std::log(sum) - logits[target * rows + col];
}

using Parameters = std::tuple<DType, int64_t, int64_t>;  // type, rows, v

class CrossEntropyColumnsTest : public testing::TestWithParam<Parameters> {
 protected:
  void SetUp() override { cpu::ApplyIsaCap(); }
  DType type() const { return std::get<0>(GetParam()); }
  int64_t rows() const { return std::get<1>(GetParam()); }
  int64_t v() const { return std::get<2>(GetParam()); }
  std::vector<int32_t> Targets() const {
    std::vector<int32_t> targets;
    for (int64_t r = 0; r < rows(); ++r) {
      targets.push_back(r % 4 == 3 ? -1 : static_cast<int32_t>((r * 7919 + v() - 1) % v()));
    }
    return targets;
  }
};

INSTANTIATE_TEST_SUITE_P(Shapes, CrossEntropyColumnsTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(1, 7, 64, 150),
                                          testing::Values(1, 5, 128, 129, 1000)));

TEST_P(CrossEntropyColumnsTest, LossAndGradientAreThoseOfTheDefinition) {
  const std::vector<int32_t> targets = Targets();
  TypedValues logits = TypedValues::Random(rows() * v(), type(), 11, 8);
  const std::vector<double> at = logits.AsDoubles();
  std::vector<float> losses(rows(), -1), losses_only(rows(), -1);
  cpu::CrossEntropyColumns(logits.data(), targets.data(), rows(), v(), type(), false,
                           losses_only.data(), 1);
  EXPECT_EQ(logits.AsDoubles(), at) << "without the gradient the logits stay";
  cpu::CrossEntropyColumns(logits.data(), targets.data(), rows(), v(), type(), true, losses.data(),
                           1);
  EXPECT_EQ(losses, losses_only);

  for (int64_t r = 0; r < rows(); ++r) {
    const double wanted = ColumnLoss(at, rows(), v(), r, targets[r]);
    EXPECT_NEAR(losses[r], wanted, 2e-6 * (1 + wanted)) << r;
    for (int64_t i = 0; i < v(); ++i) {
      if (v() > 5 && i % 97 != 0 && i != targets[r] && i != v() - 1) continue;
      constexpr double kStep = 1e-5;
      std::vector<double> column(v());
      for (int64_t j = 0; j < v(); ++j) column[j] = at[j * rows() + r];
      column[i] += kStep;
      const double up = ColumnLoss(column, 1, v(), 0, targets[r]);
      column[i] -= 2 * kStep;
      const double slope = (up - ColumnLoss(column, 1, v(), 0, targets[r])) / (2 * kStep);
      ASSERT_NEAR(logits[i * rows() + r], slope,
                  (RoundingOf(type()) + 2e-6) * std::abs(slope) + 2e-7)
          << "row " << r << " element " << i;
    }
  }
}

// In fp32 a power of two changes no mantissa; a 16-bit gradient is that, rounded once.
TEST_P(CrossEntropyColumnsTest, TheGradientIsScaledBeforeItIsRounded) {
  const std::vector<int32_t> targets = Targets();
  const TypedValues given = TypedValues::Random(rows() * v(), type(), 12, 4);
  TypedValues exact(rows() * v(), DType::kF32), scaled = given;
  for (int64_t i = 0; i < exact.count(); ++i) exact.Set(i, static_cast<float>(given[i]));
  std::vector<float> losses(rows());
  cpu::CrossEntropyColumns(exact.data(), targets.data(), rows(), v(), DType::kF32, 1, losses.data(),
                           1);
  const std::vector<float> unscaled = losses;
  cpu::CrossEntropyColumns(scaled.data(), targets.data(), rows(), v(), type(), 0x1p12f,
                           losses.data(), 1);
  EXPECT_EQ(losses, unscaled) << "losses are not scaled";
  for (int64_t i = 0; i < exact.count(); ++i) {
    const double wanted = exact[i] * 0x1p12;
    if (type() == DType::kF32) {
      ASSERT_EQ(scaled[i], wanted) << i;
    } else {
      ASSERT_NEAR(scaled[i], wanted, RoundingOf(type()) * std::abs(wanted) + 0x1p-25) << i;
    }
  }
}

TEST_P(CrossEntropyColumnsTest, HasTheSameBitsForAnyThreadCountAndAnyNeighbours) {
  const std::vector<int32_t> targets = Targets();
  const TypedValues logits = TypedValues::Random(rows() * v(), type(), 12, 8);
  TypedValues wanted = logits;
  std::vector<float> wanted_losses(rows());
  cpu::CrossEntropyColumns(wanted.data(), targets.data(), rows(), v(), type(), true,
                           wanted_losses.data(), 1);
  TypedValues seen = logits;
  std::vector<float> losses(rows());
  cpu::CrossEntropyColumns(seen.data(), targets.data(), rows(), v(), type(), true, losses.data(),
                           3);
  EXPECT_EQ(seen.AsDoubles(), wanted.AsDoubles());
  EXPECT_EQ(losses, wanted_losses);
  // Each column alone.
  for (int64_t r = 0; r < rows(); r += 13) {
    TypedValues column(v(), type());
    for (int64_t i = 0; i < v(); ++i) column.Set(i, static_cast<float>(logits[i * rows() + r]));
    float loss = -1;
    cpu::CrossEntropyColumns(column.data(), &targets[r], 1, v(), type(), true, &loss, 1);
    EXPECT_EQ(loss, wanted_losses[r]);
    for (int64_t i = 0; i < v(); ++i) ASSERT_EQ(column[i], wanted[i * rows() + r]);
  }
}

class NonFiniteLogitTest : public CrossEntropyColumnsTest {};

INSTANTIATE_TEST_SUITE_P(Shapes, NonFiniteLogitTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                                          testing::Values(7, 150), testing::Values(1, 129)));

TEST_P(NonFiniteLogitTest, SpoilsItsColumnAndNoOther) {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (const float value : bad) {
    for (const int64_t at : {int64_t{0}, v() / 2, v() - 1}) {
      const std::vector<int32_t> targets(rows(), 0);
      TypedValues logits = TypedValues::Random(rows() * v(), type(), 13, 8);
      logits.Set(at * rows() + 4, value);
      std::vector<float> losses(rows());
      cpu::CrossEntropyColumns(logits.data(), targets.data(), rows(), v(), type(), true,
                               losses.data(), 2);
      for (int64_t r = 0; r < rows(); ++r) {
        EXPECT_EQ(std::isnan(losses[r]), r == 4);
        for (int64_t i = 0; i < v(); ++i) {
          ASSERT_EQ(std::isnan(logits[i * rows() + r]), r == 4) << "row " << r << " element " << i;
        }
      }
    }
  }
}

TEST(CrossEntropyColumnsSumTest, AsManyLogitsAsAVocabularyKeepTheSumExact) {
  cpu::ApplyIsaCap();
  constexpr int64_t kV = 50257, kRows = 3;
  const TypedValues random = TypedValues::Random(kV * kRows, DType::kF32, 14, 2);
  TypedValues logits = random;
  const std::vector<int32_t> targets = {0, 17, 50256};
  std::vector<float> losses(kRows);
  cpu::CrossEntropyColumns(logits.data(), targets.data(), kRows, kV, DType::kF32, true,
                           losses.data(), 1);
  for (int64_t r = 0; r < kRows; ++r) {
    EXPECT_NEAR(losses[r], ColumnLoss(random.AsDoubles(), kRows, kV, r, targets[r]), 1e-5);
    double sum = 0;
    for (int64_t i = 0; i < kV; ++i) sum += logits[i * kRows + r];
    EXPECT_NEAR(sum, 0, 5e-6) << "a softmax less a one";
  }
}

TEST(CrossEntropyColumnsSumTest, LargeLogitsNeitherOverflowNorVanish) {
  cpu::ApplyIsaCap();
  // Column 0: 300 against 299 and small ones; column 1 grows block after block.
  constexpr int64_t kV = 400;
  TypedValues logits(kV * 2, DType::kF32);
  for (int64_t i = 0; i < kV; ++i) {
    logits.Set(2 * i, i == 7 ? 300.0f : i == 390 ? 299.0f : -300.0f);
    logits.Set(2 * i + 1, static_cast<float>(i));
  }
  const std::vector<double> at = logits.AsDoubles();
  const std::vector<int32_t> targets = {390, 399};
  std::vector<float> losses(2);
  cpu::CrossEntropyColumns(logits.data(), targets.data(), 2, kV, DType::kF32, true, losses.data(),
                           1);
  EXPECT_NEAR(losses[0], ColumnLoss(at, 2, kV, 0, 390), 1e-6);
  EXPECT_NEAR(losses[1], ColumnLoss(at, 2, kV, 1, 399), 1e-6);
}

TEST(AddLossesTest, AddsThoseThatCountInOrderInFp64) {
  const std::unique_ptr<Ops> ops = MakeCpuOps(3);
  // 2^53 + 1 is no fp64 and falls back to 2^53.
  const float big = 0x1p53f, nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<int32_t> all = {0, 5, 2}, first_two = {0, 5, -1}, last_two = {-1, 0, 7};
  const auto sum = [&](double sum, std::vector<float> losses, const std::vector<int32_t>& targets) {
    ops->AddLosses(losses.data(), targets.data(), static_cast<int64_t>(losses.size()), &sum);
    return sum;
  };
  EXPECT_EQ(sum(0, {1, 1, big}, all), 0x1p53 + 2);
  EXPECT_EQ(sum(0, {big, 1, 1}, all), 0x1p53);
  EXPECT_EQ(sum(1, {1, big, nan}, first_two), 0x1p53 + 2);
  EXPECT_EQ(sum(0.25, {nan, 1, 0.5f}, last_two), 1.75);
  EXPECT_EQ(sum(0.25, {nan}, {-1}), 0.25);
  EXPECT_EQ(sum(0.25, {}, {}), 0.25);
  // More bits than a sum in fp32 would keep.
  EXPECT_EQ(sum(0x1p30, {0x1p-20f}, {1}), 0x1p30 + 0x1p-20);
}

}  // namespace
}  // namespace zeroshard
