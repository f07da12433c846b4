// Frequencies of the rotary position embedding (Su et al. 2021, section 3.4.2). Pure;
// thread-safe.
#pragma once

#include <vector>

#include "common/plan/model_table.h"

namespace zeroshard {

// head_dim / 2 frequencies in radians per position: theta^(-2i / head_dim), then stretched as
// config.rope_scale says:
//   linear  divided by the factor (Chen et al. 2023, "Extending Context Window of Large Language
//           Models via Positional Interpolation", section 2.3)
//   llama3  with the wave length w = 2 pi / frequency and L = original_positions: as they are where
//           w < L / high_freq_factor, divided by the factor where w > L / low_freq_factor, and in
//           between a blend of the two by (L / w - low) / (high - low) (as Llama 3.1's reference
//           code and Hugging Face's "llama3" do)
// Each step is rounded to fp32 as PyTorch models do, which were trained with such.
std::vector<float> RopeFrequencies(const ModelConfig& config);

}  // namespace zeroshard
