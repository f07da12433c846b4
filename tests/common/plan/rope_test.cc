#include "common/plan/rope.h"

#include <cmath>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

// Llama 3.2 1B's.
ModelConfig Llama32() {
  ModelConfig config;
  config.architecture = Architecture::kLlama;
  config.head_dim = 64;
  config.rope_theta = 500000.0f;
  return config;
}

double Plain(const ModelConfig& config, int i) {
  return std::pow(double{config.rope_theta}, -2.0 * i / static_cast<double>(config.head_dim));
}

TEST(RopeFrequenciesTest, WithoutScalingTheyArePowersOfTheta) {
  const ModelConfig config = Llama32();
  const std::vector<float> seen = RopeFrequencies(config);
  ASSERT_EQ(seen.size(), 32u);
  for (int i = 0; i < 32; ++i) EXPECT_NEAR(seen[i] / Plain(config, i), 1.0, 1e-6) << i;
  EXPECT_EQ(seen[0], 1.0f);
}

TEST(RopeFrequenciesTest, LinearDividesAll) {
  ModelConfig config = Llama32();
  config.rope_scale.kind = RopeKind::kLinear;
  config.rope_scale.factor = 4;
  const std::vector<float> seen = RopeFrequencies(config);
  for (int i = 0; i < 32; ++i) EXPECT_NEAR(seen[i] / (Plain(config, i) / 4), 1.0, 1e-6) << i;
}

// Published values (llama3 #299): either end of the blend, and within it.
TEST(RopeFrequenciesTest, Llama3HasThePublishedValues) {
  ModelConfig config = Llama32();
  config.rope_scale = {RopeKind::kLlama3, 32, 1, 4, 8192};
  const std::vector<float> seen = RopeFrequencies(config);
  const double published[] = {3.211446e-3, 1.290548e-3, 4.295568e-4, 9.708288e-5, 1.946164e-5};
  for (int i = 0; i < 5; ++i) EXPECT_NEAR(seen[14 + i] / published[i], 1.0, 1e-6) << 14 + i;
  for (int i = 0; i <= 14; ++i) EXPECT_NEAR(seen[i] / Plain(config, i), 1.0, 1e-6) << i;
  for (int i = 18; i < 32; ++i) EXPECT_NEAR(seen[i] / (Plain(config, i) / 32), 1.0, 1e-6) << i;
}

}  // namespace
}  // namespace zeroshard
