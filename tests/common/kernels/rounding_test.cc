#include "common/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "common/kernels/adamw.h"
#include "common/kernels/convert.h"
#include "common/kernels/sgd.h"
#include "tests/worker/ops/vector_test_util.h"

namespace zeroshard::cpu {
namespace {

Rounding Stochastic(uint64_t seed, int unit = 0, int64_t first = 0) {
  Rounding rounding;
  rounding.stochastic = true;
  rounding.seed = seed;
  return rounding.At(unit, first);
}

Values Round(const Values& values, const Rounding& rounding, int skip = 0, int threads = 1) {
  const Tensor in(DType::kF32, values, skip);
  Tensor out(DType::kBF16, static_cast<int64_t>(values.size()), skip);
  RoundParameters(static_cast<const float*>(in.data()), static_cast<int64_t>(values.size()),
                  rounding, out.data(), DType::kBF16, threads);
  return out.values();
}

// Of all 24 significant bits; RandomValues has such as every type can hold.
Values Fine(int64_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Values values(static_cast<size_t>(n));
  for (double& value : values) value = normal(generator);
  return values;
}

// MurmurHash3_x86_32 of no bytes is the finaliser of its seed: published test values of it.
TEST(RoundingTest, MixIsMurmursFinaliser) {
  EXPECT_EQ(Mix(0), 0u);
  EXPECT_EQ(Mix(1), 0x514E28B7u);
  EXPECT_EQ(Mix(0xFFFFFFFFu), 0x81F16F39u);
}

// The two values of 8 significant bits around an fp32 one.
std::pair<double, double> Neighbours(double value) {
  int exponent = 0;
  std::frexp(value, &exponent);
  const double unit = std::ldexp(1.0, exponent - 8);
  return {std::floor(value / unit) * unit, std::ceil(value / unit) * unit};
}

TEST(RoundingTest, EveryResultIsOneOfTheTwoNeighbours) {
  const Values values = Fine(5000, 11);
  const Values rounded = Round(values, Stochastic(3));
  int up = 0, down = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const auto [low, high] = Neighbours(static_cast<float>(values[i]));
    ASSERT_TRUE(rounded[i] == low || rounded[i] == high) << values[i] << " to " << rounded[i];
    ++(rounded[i] == high ? up : down);
  }
  EXPECT_GT(up, 2000);
  EXPECT_GT(down, 2000);
}

// A share f of the way from one bf16 to the next goes up with probability f: within five standard
// deviations of the binomial distribution.
TEST(RoundingTest, TheExpectationIsTheValue) {
  constexpr int kCount = 200000;
  for (const double share : {0.03125, 0.25, 0.5, 0.75, 0.984375}) {
    for (const double sign : {1.0, -1.0}) {
      const Values rounded = Round(Values(kCount, sign * (1 + share / 128)), Stochastic(5));
      int away = 0;
      for (const double value : rounded) away += value == sign * (1 + 1.0 / 128) ? 1 : 0;
      EXPECT_NEAR(away, kCount * share, 5 * std::sqrt(kCount * share * (1 - share)))
          << sign << " " << share;
    }
  }
}

// The same with one element whose value changes from step to step, as a weight's does.
TEST(RoundingTest, TheExpectationHoldsFromStepToStep) {
  constexpr int kSteps = 20000;
  double excess = 0;
  for (int step = 0; step < kSteps; ++step) {
    const float value = 1 + static_cast<float>(step) * 0x1p-23f;
    excess += Round({value}, Stochastic(6, 1, 77))[0] - static_cast<double>(value);
  }
  // Errors of a uniform share have at most half a unit's deviation.
  EXPECT_LT(std::abs(excess), 5 * std::sqrt(kSteps) * 0.5 / 128);
  EXPECT_NE(excess, 0);
}

TEST(RoundingTest, WhatBf16HoldsStays) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Values exact = {0, -0.0, 1, -2.5, 1.0078125, 0x1p-126, 0x1p-133, infinity, -infinity};
  for (uint64_t seed = 0; seed < 50; ++seed) {
    EXPECT_EQ(Round(exact, Stochastic(seed)), exact);
    const float nans[] = {std::nanf("1"), -std::nanf("0x7fffff")};
    for (const float nan : nans) EXPECT_TRUE(std::isnan(Round({nan}, Stochastic(seed))[0]));
  }
}

TEST(RoundingTest, SeedUnitAndElementChangeIt) {
  const Values values(256, 1.00390625);
  const Values base = Round(values, Stochastic(1, 2, 0));
  EXPECT_EQ(Round(values, Stochastic(1, 2, 0)), base);
  EXPECT_NE(Round(values, Stochastic(2, 2, 0)), base);
  EXPECT_NE(Round(values, Stochastic(uint64_t{1} << 32 | 1, 2, 0)), base);
  EXPECT_NE(Round(values, Stochastic(1, 3, 0)), base);
  EXPECT_NE(Round(values, Stochastic(1, 2, 1)), base);
  EXPECT_NE(Round(values, Stochastic(1, 2, int64_t{1} << 32)), base);
}

// One value at a time, by the formula that the GPU computes too.
TEST(RoundingTest, EveryInstructionSetSplitAndThreadGivesTheFormulasBits) {
  const Values values = Fine(70001, 12);
  // The second passes a multiple of 2^32 within a vector.
  for (const int64_t first : {int64_t{0}, (int64_t{3} << 32) - 5, int64_t{64}}) {
    const Rounding rounding = Stochastic(987654321987, 4, first);
    const uint32_t key = RoundingKey(rounding);
    Values expected(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<float>(values[i]);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bits = uint32_t{StochasticBf16(bits, key, static_cast<uint64_t>(first) + i)} << 16;
      float rounded;
      std::memcpy(&rounded, &bits, 4);
      expected[i] = rounded;
    }
    ForEachTarget([&](const std::string& target) {
      EXPECT_EQ(Round(values, rounding), expected) << target;
      EXPECT_EQ(Round(values, rounding, 3), expected) << target;
      EXPECT_EQ(Round(values, rounding, 0, 3), expected) << target;
      const Values part(values.begin() + 1001, values.begin() + 1020);
      EXPECT_EQ(Round(part, rounding.From(1001)),
                Values(expected.begin() + 1001, expected.begin() + 1020))
          << target;
    });
  }
}

// What a resumed job makes of its master weights is what the optimizer had written.
TEST(RoundingTest, OptimizersWriteWhatIsMadeOfTheirMasterWeightsAgain) {
  constexpr int64_t kSize = 40000;
  const Rounding rounding = Stochastic(9, 1, 128);
  const Values from = Fine(kSize, 13), gradient = RandomValues(kSize, 14);
  ForEachTarget([&](const std::string& target) {
    Tensor master(DType::kF32, from), exp_avg(DType::kF32, Values(kSize));
    Tensor exp_avg_sq(DType::kF32, Values(kSize)), param(DType::kBF16, kSize);
    const Tensor grad(DType::kBF16, gradient);
    AdamWArgs adamw;
    adamw.learning_rate = 1e-3f;
    adamw.rounding = rounding;
    AdamW(adamw, kSize, grad.data(), DType::kBF16, master.floats(), exp_avg.floats(),
          exp_avg_sq.floats(), param.data(), DType::kBF16, 2);
    EXPECT_EQ(param.values(), Round(master.values(), rounding)) << target;
    EXPECT_NE(param.values(), Round(master.values(), Rounding())) << target;

    SgdArgs sgd;
    sgd.learning_rate = 1e-3f;
    sgd.rounding = rounding;
    Sgd(sgd, kSize, grad.data(), DType::kBF16, master.floats(), exp_avg.floats(), param.data(),
        DType::kBF16, 2);
    EXPECT_EQ(param.values(), Round(master.values(), rounding)) << target;
  });
}

TEST(RoundingTest, OtherTypesAreRoundedToNearest) {
  const Values values = Fine(100, 15);
  const Tensor in(DType::kF32, values);
  for (const DType type : {DType::kF32, DType::kF16}) {
    Tensor out(type, 100);
    RoundParameters(static_cast<const float*>(in.data()), 100, Stochastic(1), out.data(), type, 1);
    EXPECT_EQ(out.values(), Tensor(type, values).values());
  }
}

}  // namespace
}  // namespace zeroshard::cpu
