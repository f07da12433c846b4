#include "common/plan/rope.h"

#include <cmath>

namespace zeroshard {

std::vector<float> RopeFrequencies(const ModelConfig& config) {
  std::vector<float> frequencies(static_cast<size_t>(config.head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    const auto power = static_cast<float>(
        std::pow(static_cast<double>(config.rope_theta), static_cast<double>(exponent)));
    frequencies[i] = 1.0f / power;
  }
  return frequencies;
}

}  // namespace zeroshard
