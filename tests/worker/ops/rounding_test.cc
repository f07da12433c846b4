// Ops::RoundInPlace and AddRounded.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/ops.h"

namespace zeroshard::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// fp32 values, of which few are bf16 ones.
Values FineValues(int64_t size, uint32_t seed, double scale = 1) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(0, scale);
  Values values(static_cast<size_t>(size));
  for (double& value : values) value = static_cast<float>(normal(generator));
  return values;
}

double InWire(double value, DType wire) {
  return wire == DType::kBF16 ? RoundToBf16(value) : value;
}

std::vector<int64_t> SizesAndNone() {
  std::vector<int64_t> sizes = kSizes;
  sizes.push_back(0);
  return sizes;
}

TEST(RoundInPlaceTest, EveryValueBecomesTheNearestOfTheWire) {
  for (const DType wire : {DType::kF32, DType::kBF16}) {
    for (const int64_t n : SizesAndNone()) {
      const Values x_in = FineValues(n, 1);
      Values expected = x_in;
      for (double& value : expected) value = InWire(value, wire);
      for (const int threads : {1, 2, 3}) {
        const std::unique_ptr<Ops> ops = MakeCpuOps(threads);
        ForEachTarget([&](const std::string& target) {
          Tensor x(DType::kF32, x_in, threads);
          ops->RoundInPlace(x.floats(), n, wire);
          EXPECT_EQ(x.values(), expected) << n << " on " << target;
        });
      }
    }
  }
}

TEST(RoundInPlaceTest, TiesGoToTheEvenAndNoNumberIsLost) {
  const double tie = 0x1p-8, ulp = 0x1p-7;
  Tensor x(DType::kF32, {1 + tie, 1 + ulp + tie, -1 - tie, 1 + tie + 0x1p-20, -0.0, kInfinity,
                         std::numeric_limits<float>::max(), 0x1p-149, std::nan("")});
  MakeCpuOps(1)->RoundInPlace(x.floats(), 9, DType::kBF16);
  const Values actual = x.values();
  EXPECT_EQ(Values(actual.begin(), actual.end() - 1),
            (Values{1, 1 + 2 * ulp, -1, 1 + ulp, 0, kInfinity, kInfinity, 0}));
  EXPECT_TRUE(std::signbit(actual[4]));
  EXPECT_TRUE(std::isnan(actual[8]));
}

// gradient, where it is not of the wire type, holds values of it already.
TEST(AddRoundedTest, RoundsTheSumAndThenTheResult) {
  for (const DType wire : {DType::kF32, DType::kBF16}) {
    for (const DType sum_type : {DType::kF32, DType::kBF16}) {
      for (const DType gradient_type : {DType::kF32, wire}) {
        for (const int64_t n : SizesAndNone()) {
          Tensor sum(sum_type, FineValues(n, 2), 1), before(wire, FineValues(n, 3, 30));
          const Values sums = sum.values();
          Values expected = before.values();
          for (size_t i = 0; i < expected.size(); ++i) {
            const auto rounded = static_cast<float>(InWire(sums[i], wire));
            expected[i] = InWire(static_cast<float>(expected[i]) + rounded, wire);
          }
          for (const int threads : {1, 2, 3}) {
            const std::unique_ptr<Ops> ops = MakeCpuOps(threads);
            ForEachTarget([&](const std::string& target) {
              Tensor gradient(gradient_type, before.values(), threads);
              ops->AddRounded(sum.data(), sum_type, n, wire, gradient.data(), gradient_type);
              EXPECT_EQ(gradient.values(), expected) << n << " on " << target;
              EXPECT_EQ(sum.values(), sums);
            });
          }
        }
      }
    }
  }
}

// 1 + 2^-8 is a tie that becomes 1, and so is 1 + 2^-9; rounded once they would be 1 + 2^-7.
TEST(AddRoundedTest, RoundsTwice) {
  for (const DType gradient_type : {DType::kF32, DType::kBF16}) {
    Tensor sum(DType::kF32, Values{1 + 0x1p-8}), gradient(gradient_type, Values{0x1p-9});
    MakeCpuOps(1)->AddRounded(sum.data(), DType::kF32, 1, DType::kBF16, gradient.data(),
                              gradient_type);
    EXPECT_EQ(gradient.values(), Values{1});
  }
}

TEST(AddRoundedTest, KeepsWhatIsNotANumber) {
  for (const DType wire : {DType::kF32, DType::kBF16}) {
    Tensor sum(DType::kF32, {std::nan(""), 1, kInfinity, kInfinity});
    Tensor gradient(DType::kF32, {1, std::nan(""), 1, -kInfinity});
    MakeCpuOps(1)->AddRounded(sum.data(), DType::kF32, 4, wire, gradient.data(), DType::kF32);
    const Values actual = gradient.values();
    EXPECT_TRUE(std::isnan(actual[0]) && std::isnan(actual[1]) && std::isnan(actual[3]));
    EXPECT_EQ(actual[2], kInfinity);
  }
}

}  // namespace
}  // namespace zeroshard::cpu
