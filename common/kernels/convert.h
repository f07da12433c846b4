// Runs of values from one floating-point type to another.
#pragma once

#include <cstdint>

#include "common/rounding.h"
#include "common/types.h"

namespace zeroshard::cpu {

// n values of in_type into out_type (fp32, bf16 or fp16 each), rounded to nearest even; a NaN stays
// a NaN; equal types are copied bit by bit. `in` and `out` may be the same address where the types
// are equal, and overlap in no other way. The same bits for any thread count, alignment, length and
// instruction set. Reentrant; `threads` OpenMP threads, at least 1.
void Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type, int threads);

// n master weights into parameters of out_type as `rounding` says: what the optimizers write, made
// again from the state. As Convert otherwise.
void RoundParameters(const float* in, int64_t n, const Rounding& rounding, void* out,
                     DType out_type, int threads);

}  // namespace zeroshard::cpu
