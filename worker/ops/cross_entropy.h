// Softmax cross-entropy of logits stored a row a sample.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace zeroshard::cpu {

// Ops::CrossEntropy on `threads` OpenMP threads (at least 1). logits [rows, v] (fp32 or bf16),
// targets and losses [rows]. A target is -1 (loss and gradient are zero) or in [0, v); any other
// gives a NaN loss and, with `gradient`, NaN gradients, so that it cannot pass for data. A row is
// summed in fp32 in a fixed order, whatever the threads and the alignment; a NaN logit gives a NaN
// loss. Reentrant.
void CrossEntropy(void* logits, const int32_t* targets, int64_t rows, int64_t v, DType dtype,
                  bool gradient, float* losses, int threads);

}  // namespace zeroshard::cpu
