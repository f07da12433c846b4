// Frequencies of the rotary position embedding (Su et al. 2021, section 3.4.2). Pure;
// thread-safe.
#pragma once

#include <vector>

#include "common/plan/model_table.h"

namespace zeroshard {

// head_dim / 2 frequencies in radians per position: theta^(-2i / head_dim), rounded to fp32 after
// each step (exponent, power, reciprocal) as PyTorch models do, which were trained with such.
std::vector<float> RopeFrequencies(const ModelConfig& config);

}  // namespace zeroshard
