#include "worker/ops/cross_entropy.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/cpu_isa.h"

namespace zeroshard {
namespace {

double LossOf(const std::vector<double>& logits, int64_t row, int64_t v, int32_t target) {
  if (target == -1) return 0;
  const double* x = logits.data() + row * v;
  double most = x[0], sum = 0;
  for (int64_t i = 1; i < v; ++i) most = std::max(most, x[i]);
  for (int64_t i = 0; i < v; ++i) sum += std::exp(x[i] - most);
  return most + std::log(sum) - x[target];
}

class CrossEntropyTest : public testing::TestWithParam<std::tuple<DType, int64_t>> {
 protected:
  void SetUp() override { cpu::ApplyIsaCap(); }
  DType type() const { return std::get<0>(GetParam()); }
  int64_t v() const { return std::get<1>(GetParam()); }
  std::vector<int32_t> Targets(int64_t rows) const {
    std::vector<int32_t> targets;
    for (int64_t r = 0; r < rows; ++r) {
      targets.push_back(r % 4 == 3 ? -1 : static_cast<int32_t>((r * 7919 + v() - 1) % v()));
    }
    return targets;
  }
};

TEST_P(CrossEntropyTest, LossAndGradientAreThoseOfTheDefinition) {
  constexpr int64_t kRows = 6;
  const std::vector<int32_t> targets = Targets(kRows);
  TypedValues logits = TypedValues::Random(kRows * v(), type(), 11, 8);
  const std::vector<double> at = logits.AsDoubles();
  std::vector<float> losses(kRows, -1), losses_only(kRows, -1);

  cpu::CrossEntropy(logits.data(), targets.data(), kRows, v(), type(), false, losses_only.data(),
                    1);
  EXPECT_EQ(logits.AsDoubles(), at) << "without the gradient the logits stay";
  cpu::CrossEntropy(logits.data(), targets.data(), kRows, v(), type(), true, losses.data(), 1);
  EXPECT_EQ(losses, losses_only);

  for (int64_t r = 0; r < kRows; ++r) {
    const int32_t target = targets[static_cast<size_t>(r)];
    const double wanted = LossOf(at, r, v(), target);
    EXPECT_NEAR(losses[static_cast<size_t>(r)], wanted, 2e-6 * (1 + wanted));
    // Central differences; all of a short row, some of a long one and always the target.
    for (int64_t i = 0; i < v(); ++i) {
      if (v() > 100 && i % 997 != 0 && i != target && i != v() - 1) continue;
      constexpr double kStep = 1e-5;
      std::vector<double> moved = at;
      moved[static_cast<size_t>(r * v() + i)] += kStep;
      const double up = LossOf(moved, r, v(), target);
      moved[static_cast<size_t>(r * v() + i)] -= 2 * kStep;
      const double slope = (up - LossOf(moved, r, v(), target)) / (2 * kStep);
      ASSERT_NEAR(logits[r * v() + i], slope,
                  (RoundingOf(type()) + 2e-6) * std::abs(slope) + 1e-8 + 1e-7)
          << "row " << r << " element " << i;
    }
  }
}

TEST_P(CrossEntropyTest, HasTheSameBitsForAnyThreadCountAndAlignment) {
  constexpr int64_t kRows = 37;
  const std::vector<int32_t> targets = Targets(kRows);
  TypedValues wanted = TypedValues::Random(kRows * v(), type(), 12, 8);
  const TypedValues logits = wanted;
  std::vector<float> wanted_losses(kRows);
  cpu::CrossEntropy(wanted.data(), targets.data(), kRows, v(), type(), true, wanted_losses.data(),
                    1);
  for (const int threads : {1, 2, 3, 4}) {
    TypedValues moved(kRows * v() + threads, type());
    for (int64_t i = 0; i < kRows * v(); ++i) moved.Set(i + threads, static_cast<float>(logits[i]));
    std::vector<float> losses(kRows);
    char* start = static_cast<char*>(moved.data()) + static_cast<size_t>(threads) * SizeOf(type());
    cpu::CrossEntropy(start, targets.data(), kRows, v(), type(), true, losses.data(), threads);
    EXPECT_EQ(losses, wanted_losses) << threads;
    for (int64_t i = 0; i < kRows * v(); ++i) ASSERT_EQ(moved[i + threads], wanted[i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CrossEntropyTest,
                         testing::Combine(testing::Values(DType::kF32, DType::kBF16),
                                          testing::Values(1, 2, 17, 64, 257, 50257)),
                         [](const auto& info) {
                           return std::string(NameOf(std::get<0>(info.param))) + "V" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(CrossEntropyEdges, IgnoredRowsHaveNoLossAndNoGradientWhateverTheyHold) {
  float logits[3] = {1, std::numeric_limits<float>::quiet_NaN(), 3};
  const int32_t target = -1;
  float loss = 9;
  cpu::CrossEntropy(logits, &target, 1, 3, DType::kF32, true, &loss, 1);
  EXPECT_EQ(loss, 0);
  for (const float gradient : logits) EXPECT_EQ(gradient, 0);
}

TEST(CrossEntropyEdges, NanAndInfinityAreSeen) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    for (int at = 0; at < 40; at += 13) {
      std::vector<float> logits(40, 0.5f);
      logits[static_cast<size_t>(at)] = bad;
      const int32_t target = 5;
      float loss = 0;
      cpu::CrossEntropy(logits.data(), &target, 1, 40, DType::kF32, true, &loss, 1);
      EXPECT_FALSE(std::isfinite(loss)) << bad << " at " << at;
    }
  }
}

TEST(CrossEntropyEdges, LargeLogitsDoNotOverflow) {
  std::vector<float> logits = {3e38f, -3e38f, 0};
  const int32_t target = 0;
  float loss = -1;
  cpu::CrossEntropy(logits.data(), &target, 1, 3, DType::kF32, true, &loss, 1);
  EXPECT_EQ(loss, 0);
  EXPECT_EQ(logits, (std::vector<float>{0, 0, 0}));
}

TEST(CrossEntropyEdges, UnknownTargetCannotPassForData) {
  for (const int32_t target : {3, -2, 1 << 30}) {
    std::vector<float> logits = {1, 2, 3};
    float loss = 0;
    cpu::CrossEntropy(logits.data(), &target, 1, 3, DType::kF32, true, &loss, 1);
    EXPECT_TRUE(std::isnan(loss)) << target;
    EXPECT_TRUE(std::isnan(logits[0])) << target;
  }
}

}  // namespace
}  // namespace zeroshard
