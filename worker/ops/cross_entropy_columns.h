// Softmax cross-entropy of logits that are stored with the vocabulary outermost, and its sum.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace zeroshard::cpu {

// Ops::CrossEntropyColumns on `threads` OpenMP threads (at least 1). logits [v, rows], targets and
// losses [rows]; dtype fp32, bf16 or fp16. A target is -1 (loss and gradient are zero) or in [0,
// v). Each column is summed in a fixed order: the exponentials of 128 rows at a time, against the
// largest logit so far (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"); so
// the bits do not depend on the threads or on the vector length. Reentrant.
void CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v, DType dtype,
                         float gradient_scale, float* losses, int threads);

// Ops::SoftmaxPart and Ops::CrossEntropyOfParts, with the same order of additions within a rank and
// the parts joined from rank 0 on. Reentrant.
void SoftmaxPart(const void* logits, const int32_t* local_targets, int64_t rows, int64_t v,
                 DType dtype, float* part, int threads);
void CrossEntropyOfParts(const float* parts, int ranks, void* logits, const int32_t* targets,
                         const int32_t* local_targets, int64_t rows, int64_t v, DType dtype,
                         float gradient_scale, float* losses, int threads);

// Ops::AddLosses; one after the other, as the order is part of the result. Reentrant.
void AddLosses(const float* losses, const int32_t* targets, int64_t rows, double* sum);

}  // namespace zeroshard::cpu
