#include "worker/ops/norm_accumulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

using Wide = unsigned __int128;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool Same(const NormAccumulator& a, const NormAccumulator& b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

Wide Pair(uint64_t high, uint64_t low) { return (static_cast<Wide>(high) << 64) | low; }

// mantissa * 2^exponent with a full 53-bit mantissa.
std::vector<double> RandomBlocks(int count, int lowest, int highest, uint32_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<double> blocks;
  for (int i = 0; i < count; ++i) {
    const int exponent = lowest + static_cast<int>(generator() % (highest - lowest));
    blocks.push_back(std::ldexp(static_cast<double>(generator() >> 11), exponent - 53));
  }
  return blocks;
}

// floor(value * 2^shift), from the bits of value.
Wide Fixed(double value, int shift) {
  int exponent = 0;
  const auto mantissa = static_cast<uint64_t>(std::ldexp(std::frexp(value, &exponent), 53));
  const int left = exponent - 53 + shift;
  if (left >= 0) return static_cast<Wide>(mantissa) << left;
  return left > -64 ? static_cast<Wide>(mantissa >> -left) : 0;
}

TEST(NormAccumulatorTest, SmallBlocksAddAsIntegersBelowTheirLastPlace) {
  NormAccumulator acc;
  Wide expected = 0;
  for (const double block : RandomBlocks(5000, -170, 15, 1)) {
    acc.AddBlock(block);
    expected += Fixed(block, 96);
  }
  EXPECT_EQ(acc.high, 0u);
  EXPECT_TRUE(Pair(acc.middle, acc.low) == expected);
  EXPECT_NEAR(acc.Value(), std::ldexp(static_cast<double>(expected), -96), 1e-15 * acc.Value());
  EXPECT_EQ(acc.nonfinite, 0u);
}

TEST(NormAccumulatorTest, LargeBlocksAddAsIntegersAboveTheLowestWord) {
  NormAccumulator acc;
  Wide expected = 0;  // in units of 2^-32: the last place of these blocks is no lower
  for (const double block : RandomBlocks(5000, 21, 82, 2)) {
    acc.AddBlock(block);
    expected += Fixed(block, 32);
  }
  EXPECT_EQ(acc.low, 0u);
  EXPECT_TRUE(Pair(acc.high, acc.middle) == expected);
  EXPECT_NEAR(acc.Value(), std::ldexp(static_cast<double>(expected), -32), 1e-15 * acc.Value());
}

TEST(NormAccumulatorTest, PowersOfTwoLandOnTheirBit) {
  for (int power = -96; power < 96; ++power) {
    NormAccumulator acc;
    acc.AddBlock(std::ldexp(1.0, power));
    const uint64_t words[3] = {acc.low, acc.middle, acc.high};
    for (int word = 0; word < 3; ++word) {
      const int bit = power + 96 - 64 * word;
      EXPECT_EQ(words[word], bit >= 0 && bit < 64 ? uint64_t{1} << bit : 0u) << power;
    }
    EXPECT_EQ(acc.Value(), std::ldexp(1.0, power));
  }
}

TEST(NormAccumulatorTest, ValueRoundsToNearestEven) {
  const double one = 1, half_step = std::ldexp(1.0, -53);
  const auto value = [](std::initializer_list<double> blocks) {
    NormAccumulator acc;
    for (const double block : blocks) acc.AddBlock(block);
    return acc.Value();
  };
  EXPECT_EQ(value({one, half_step}), 1);  // a tie: to even
  EXPECT_EQ(value({one, half_step, std::ldexp(1.0, -96)}), 1 + 2 * half_step);
  EXPECT_EQ(value({one, 2 * half_step, half_step}), 1 + 4 * half_step);
  EXPECT_EQ(value({std::ldexp(1.0, 90), std::ldexp(1.0, 37), std::ldexp(1.0, -96)}),
            std::ldexp(1 + 2 * half_step, 90));
  EXPECT_EQ(value({}), 0);
}

TEST(NormAccumulatorTest, OrderAndGroupingDoNotMatter) {
  std::vector<double> blocks = RandomBlocks(3000, -120, 100, 3);  // some past the range
  blocks.push_back(kInfinity);
  NormAccumulator straight;
  for (const double block : blocks) straight.AddBlock(block);
  ASSERT_GT(straight.nonfinite, 1u);
  std::mt19937 generator(4);
  for (int round = 0; round < 5; ++round) {
    std::shuffle(blocks.begin(), blocks.end(), generator);
    NormAccumulator parts[7], sum;
    for (size_t i = 0; i < blocks.size(); ++i) parts[i * i % 7].AddBlock(blocks[i]);
    for (const NormAccumulator& part : parts) sum.Add(part);
    EXPECT_TRUE(Same(sum, straight));
  }
}

TEST(NormAccumulatorTest, WhatIsNotFiniteOrTooLargeIsCounted) {
  for (const double block : {kInfinity, static_cast<double>(NAN), -static_cast<double>(NAN),
                             std::ldexp(1.0, 96), std::numeric_limits<double>::max()}) {
    NormAccumulator acc;
    acc.AddBlock(2);
    acc.AddBlock(block);
    EXPECT_EQ(acc.nonfinite, 1u) << block;
    EXPECT_EQ(acc.Value(), kInfinity);
  }
  NormAccumulator full;
  full.AddBlock(std::nextafter(std::ldexp(1.0, 96), 0));
  EXPECT_EQ(full.nonfinite, 0u);
  full.AddBlock(std::ldexp(1.0, 60));  // the sum passes 2^96
  EXPECT_EQ(full.nonfinite, 1u);
}

TEST(NormAccumulatorTest, TheCountSaturates) {
  NormAccumulator acc, other;
  acc.nonfinite = UINT64_MAX - 1;
  other.nonfinite = 5;
  acc.Add(other);
  EXPECT_EQ(acc.nonfinite, UINT64_MAX);
  acc.AddBlock(kInfinity);
  EXPECT_EQ(acc.nonfinite, UINT64_MAX);
}

NormAccumulator SquaresOf(const Values& in, DType dtype = DType::kF32, int threads = 1,
                          int skip = 0) {
  Tensor x(dtype, in, skip);
  NormAccumulator acc;
  AddSquares(x.data(), static_cast<int64_t>(in.size()), dtype, &acc, threads);
  return acc;
}

TEST(AddSquaresTest, WholeNumbersGiveTheExactSum) {
  for (const int64_t n : kSizes) {
    Values x(static_cast<size_t>(n));
    uint64_t expected = 0;
    std::mt19937 generator(5);
    for (double& value : x) {
      const int whole = static_cast<int>(generator() % 511) - 255;
      value = whole;
      expected += static_cast<uint64_t>(whole * whole);
    }
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      EXPECT_EQ(SquaresOf(x, dtype).Value(), static_cast<double>(expected));
    }
  }
}

// Lane i % 8 in fp64, folded by halves, for each block of 64, padded with zeros.
TEST(AddSquaresTest, IsTheDocumentedOrderOfEveryBlock) {
  for (const int64_t n : kSizes) {
    Values x = RandomValues(n, 6, 1e-3);
    for (double& value : x) value = static_cast<float>(value * 1.2345);
    NormAccumulator expected;
    for (size_t begin = 0; begin < x.size(); begin += 64) {
      double lanes[8] = {};
      for (size_t i = begin; i < std::min(begin + 64, x.size()); ++i) lanes[i % 8] += x[i] * x[i];
      for (size_t half = 4; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      }
      expected.AddBlock(lanes[0]);
    }
    ForEachTarget([&](const std::string& target) {
      for (const int threads : {1, 2, 3}) {
        EXPECT_TRUE(Same(SquaresOf(x, DType::kF32, threads, threads - 1), expected))
            << target << " " << n;
      }
    });
  }
}

TEST(AddSquaresTest, AnySplitAtSixtyFourGivesTheSameBits) {
  const Values x = RandomValues(50001, 7);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const NormAccumulator whole = SquaresOf(x, dtype);
    NormAccumulator sum;
    for (size_t begin = x.size() / 64 * 64;; begin -= 64 * 71) {  // from the end backwards
      const size_t size = std::min<size_t>(64 * 71, x.size() - begin);
      sum.Add(SquaresOf(Values(x.begin() + static_cast<int64_t>(begin),
                               x.begin() + static_cast<int64_t>(begin + size)),
                        dtype));
      if (begin == 0) break;
      if (begin < 64 * 71) {
        sum.Add(SquaresOf(Values(x.begin(), x.begin() + static_cast<int64_t>(begin)), dtype));
        break;
      }
    }
    EXPECT_TRUE(Same(sum, whole));
  }
}

TEST(AddSquaresTest, OneBadElementIsSeenWhereverItIs) {
  for (const double bad : {kInfinity, -kInfinity, static_cast<double>(NAN), 3e38}) {
    for (const size_t at : {size_t{0}, size_t{63}, size_t{64}, size_t{999}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        Values x = RandomValues(1000, 8);
        x[at] = bad;
        EXPECT_EQ(SquaresOf(x, dtype).nonfinite, 1u) << bad << " at " << at;
      }
    }
  }
}

TEST(AddSquaresTest, TinyAndHugeGradientsKeepTheirNorm) {
  for (const int exponent : {-27, 37}) {
    Values x = RandomValues(20000, 9);
    for (double& value : x) value = std::ldexp(value, exponent);
    const double expected = Dot(x, x);
    EXPECT_NEAR(SquaresOf(x).Value() / expected, 1, 1e-12) << exponent;
  }
}

}  // namespace
}  // namespace zeroshard::cpu
