#include "worker/generate/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

// How often each id is drawn over many positions.
std::map<int32_t, double> Shares(const std::vector<float>& logits, const SamplingOptions& options,
                                 int64_t draws = 40000) {
  std::map<int32_t, double> shares;
  for (int64_t position = 0; position < draws; ++position) {
    shares[*SampleToken(logits, options, position)] += 1.0 / static_cast<double>(draws);
  }
  return shares;
}

TEST(SamplerTest, TemperatureZeroIsTheLikeliestAndOfEqualOnesTheLowest) {
  EXPECT_EQ(*SampleToken({1, 3, 2, 3}, {}, 0), 1);
  EXPECT_EQ(*SampleToken({-5, -7}, {.top_k = 1, .seed = 9}, 3), 0);
}

TEST(SamplerTest, DrawsInTheProportionsOfTheSoftmax) {
  const std::vector<float> logits = {0, 1, -2, 3, 2.5f, -std::numeric_limits<float>::infinity()};
  for (const double temperature : {0.5, 1.0, 4.0}) {
    double sum = 0;
    for (const float x : logits) sum += std::exp(x / temperature);
    auto shares = Shares(logits, {.temperature = temperature, .seed = 11});
    for (size_t i = 0; i < logits.size(); ++i) {
      const double wanted = std::exp(logits[i] / temperature) / sum;
      const double deviation = std::sqrt(wanted * (1 - wanted) / 40000);
      EXPECT_NEAR(shares[static_cast<int32_t>(i)], wanted, 5 * deviation) << temperature;
    }
  }
}

TEST(SamplerTest, TopKLeavesTheLikeliestInTheirProportions) {
  // Of the two equal ones at the edge the lower id stays.
  auto shares = Shares({1, 2, 1, 0, 1.5f}, {.temperature = 1, .top_k = 3, .seed = 5});
  const double sum = std::exp(1) + std::exp(2) + std::exp(1.5);
  EXPECT_NEAR(shares[0], std::exp(1) / sum, 0.015);
  EXPECT_NEAR(shares[1], std::exp(2) / sum, 0.015);
  EXPECT_NEAR(shares[4], std::exp(1.5) / sum, 0.015);
  EXPECT_EQ(shares.count(2) + shares.count(3), 0U);
}

TEST(SamplerTest, SeedAndPositionAloneDecide) {
  const std::vector<float> logits(1000, 0.0f);
  const SamplingOptions options{.temperature = 1, .seed = 21};
  int same_next = 0, same_seed = 0;
  for (int64_t position = 0; position < 200; ++position) {
    const int32_t token = *SampleToken(logits, options, position);
    EXPECT_EQ(*SampleToken(logits, options, position), token);
    same_next += *SampleToken(logits, options, position + 1) == token;
    same_seed += *SampleToken(logits, {.temperature = 1, .seed = 22}, position) == token;
  }
  EXPECT_LT(same_next, 5);
  EXPECT_LT(same_seed, 5);
}

TEST(SamplerTest, AVanishingTemperatureIsTheLikeliest) {
  for (int64_t position = 0; position < 50; ++position) {
    EXPECT_EQ(*SampleToken({1, 2, 1.9f}, {.temperature = 1e-300, .seed = 1}, position), 1);
  }
}

TEST(SamplerTest, BrokenLogitsAreAnError) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  for (const double temperature : {0.0, 1.0}) {
    const SamplingOptions options{.temperature = temperature};
    EXPECT_THAT(std::string(SampleToken({1, nan, 2}, options, 7).status().message()),
                HasSubstr("position 7 are not finite (NaN for token 1)"));
    EXPECT_EQ(SampleToken({1, inf}, options, 7).status().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(SampleToken({-inf, -inf}, options, 7).status().code(), absl::StatusCode::kInternal);
    EXPECT_EQ(SampleToken({}, options, 7).status().code(), absl::StatusCode::kInternal);
  }
}

TEST(SamplerTest, OptionsAreChecked) {
  EXPECT_TRUE(CheckSampling({.temperature = 0.7, .top_k = 40}).ok());
  for (const SamplingOptions& options :
       {SamplingOptions{.temperature = -0.1},
        SamplingOptions{.temperature = std::numeric_limits<double>::quiet_NaN()},
        SamplingOptions{.temperature = std::numeric_limits<double>::infinity()},
        SamplingOptions{.top_k = -1}}) {
    EXPECT_EQ(CheckSampling(options).code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace zeroshard
