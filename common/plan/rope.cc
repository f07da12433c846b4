#include "common/plan/rope.h"

#include <cmath>
#include <numbers>

namespace zeroshard {
namespace {

float Llama3(const RopeScale& scale, float frequency) {
  const auto original = static_cast<float>(scale.original_positions);
  const float wave_length = static_cast<float>(2 * std::numbers::pi) / frequency;
  if (wave_length < original / scale.high_freq_factor) return frequency;
  if (wave_length > original / scale.low_freq_factor) return frequency / scale.factor;
  const float smooth = (original / wave_length - scale.low_freq_factor) /
                       (scale.high_freq_factor - scale.low_freq_factor);
  return (1.0f - smooth) * frequency / scale.factor + smooth * frequency;
}

float Stretch(const RopeScale& scale, float frequency) {
  switch (scale.kind) {
    case RopeKind::kLinear:
      return frequency / scale.factor;
    case RopeKind::kLlama3:
      return Llama3(scale, frequency);
    case RopeKind::kDefault:
      break;
  }
  return frequency;
}

}  // namespace

std::vector<float> RopeFrequencies(const ModelConfig& config) {
  std::vector<float> frequencies(static_cast<size_t>(config.head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    const auto power = static_cast<float>(
        std::pow(static_cast<double>(config.rope_theta), static_cast<double>(exponent)));
    frequencies[i] = Stretch(config.rope_scale, 1.0f / power);
  }
  return frequencies;
}

}  // namespace zeroshard
