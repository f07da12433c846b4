#include "common/kernels/init.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <string>
#include <vector>

#include "common/kernels/philox.h"

namespace zeroshard {
namespace {

std::vector<float> Normal(uint64_t seed, const std::string& name, int64_t begin, int64_t end,
                          float std = 1) {
  std::vector<float> values(static_cast<size_t>(end - begin));
  InitNormal(seed, name, begin, end, std, values.data());
  return values;
}

// The vectors published with Random123 (kat_vectors, philox4x32 10).
TEST(PhiloxTest, GivesThePublishedAnswers) {
  using cpu::Philox4x32;
  using cpu::PhiloxCounter;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(InitNormalTest, AnyRangeGivesTheSameValues) {
  const auto whole = Normal(1, "wte", 0, 1000, 0.02f);
  for (const int64_t begin : {0, 1, 2, 3, 4, 5, 127}) {
    for (const int64_t size : {0, 1, 2, 3, 4, 5, 873}) {
      if (begin + size > 1000) continue;
      EXPECT_EQ(Normal(1, "wte", begin, begin + size, 0.02f),
                std::vector<float>(whole.begin() + begin, whole.begin() + begin + size));
    }
  }
}

// Box-Muller from the documented words, with the C library's functions.
TEST(InitNormalTest, IsTheDocumentedTransform) {
  const uint64_t seed = 0x123456789ABCDEF0;
  uint64_t hash = 14695981039346656037u;  // FNV-1a, 64 bits
  for (const char c : std::string("h.0.attn.weight")) {
    hash ^= static_cast<uint8_t>(c);
    hash *= 1099511628211u;
  }
  for (const uint64_t first : {uint64_t{0}, uint64_t{1} << 36}) {
    const auto values = Normal(seed, "h.0.attn.weight", static_cast<int64_t>(first),
                               static_cast<int64_t>(first) + 4000, 0.5f);
    for (size_t i = 0; i < values.size(); i += 2) {
      const uint64_t block = (first + i) / 4;
      const auto words =
          cpu::Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                           static_cast<uint32_t>(hash), static_cast<uint32_t>(hash >> 32)},
                          {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
      const double radius = std::sqrt(-2 * std::log((words[i % 4] + 1.0) / std::pow(2, 32)));
      const double angle = 2 * std::numbers::pi * words[i % 4 + 1] / std::pow(2, 32);
      ASSERT_NEAR(values[i], 0.5 * radius * std::cos(angle), 2e-7 * radius);
      ASSERT_NEAR(values[i + 1], 0.5 * radius * std::sin(angle), 2e-7 * radius);
    }
  }
}

TEST(InitNormalTest, IsNormal) {
  constexpr int64_t kCount = 200000;
  auto values = Normal(7, "mlp.weight", 0, kCount);
  double mean = 0, square = 0, fourth = 0, neighbours = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i];
    mean += value / kCount;
    square += value * value / kCount;
    fourth += std::pow(value, 4) / kCount;
    if (i > 0) neighbours += value * values[i - 1] / kCount;
  }
  // Five standard errors each: 1, sqrt 2, sqrt 96 and 1, over sqrt n.
  const double error = 1 / std::sqrt(static_cast<double>(kCount));
  EXPECT_NEAR(mean, 0, 5 * error);
  EXPECT_NEAR(square, 1, 5 * std::sqrt(2.0) * error);
  EXPECT_NEAR(fourth, 3, 5 * std::sqrt(96.0) * error);
  EXPECT_NEAR(neighbours, 0, 5 * error);
  // Kolmogorov-Smirnov, p = 0.001.
  std::sort(values.begin(), values.end());
  double distance = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double cumulative = std::erfc(-values[i] / std::numbers::sqrt2) / 2;
    distance = std::max({distance, std::abs(cumulative - static_cast<double>(i) / kCount),
                         std::abs(cumulative - static_cast<double>(i + 1) / kCount)});
  }
  EXPECT_LT(distance, 1.95 * error);
}

TEST(InitNormalTest, SeedNameAndElementEachChangeTheValues) {
  std::set<std::vector<float>> distinct;
  for (const uint64_t seed : {uint64_t{1}, uint64_t{2}, uint64_t{1} << 32}) {
    for (const char* name : {"a", "b", ""}) {
      for (const int64_t begin : {int64_t{0}, int64_t{4}, int64_t{1} << 34, int64_t{1} << 40}) {
        distinct.insert(Normal(seed, name, begin, begin + 4));
      }
    }
  }
  EXPECT_EQ(distinct.size(), 3u * 3 * 4);
}

TEST(InitNormalTest, TheDeviationScalesAndZeroGivesZeros) {
  const auto one = Normal(3, "w", 0, 100), half = Normal(3, "w", 0, 100, 0.5f);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(half[i], one[i] / 2);
  for (const float value : Normal(3, "w", 0, 10, 0)) EXPECT_EQ(value, 0);
}

}  // namespace
}  // namespace zeroshard
