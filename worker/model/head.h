// The final norm, the head matrix and the loss.
#pragma once

#include <memory>

#include "worker/model/tensor_part.h"
#include "worker/model/unit.h"

namespace zeroshard {

// Vocabulary rows whose gradient is computed and handed out at a time: about 2^22 elements, a
// multiple of 64 rows, at most all V. Measured: products of that size run at full speed, and their
// operands stay in the cache.
int64_t HeadBlockRows(const ModelConfig& config);

// `unit`: the head's table; `matrix_trainable`: whether the matrix given as lm_head is trained.
std::unique_ptr<HeadUnit> MakeHead(const ModelConfig& config, const UnitTable& unit,
                                   bool matrix_trainable, const TensorPart& part = {});

}  // namespace zeroshard
