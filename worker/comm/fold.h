// The sum of a reduce-scatter and an all-reduce, in the one order that makes all ranks and all
// world sizes agree (architecture, section 5b).
#pragma once

#include <cstdint>

#include "absl/types/span.h"
#include "common/types.h"

namespace zeroshard {

// out[i] = round(((start + c_0[i]) + c_1[i]) + ...) for i < count, in fp32 and in the order of
// `contributions`; start is out[i] where `accumulate`, else +0. `type` (fp32, bf16 or fp16) is that
// of every contribution; output_type is fp32, or `type`, rounded once to nearest even (NaN stays
// NaN). `out` may be one of the contributions where the types are the same; other overlaps are not
// allowed. Thread-safe; any alignment of at least the element's.
void FoldInRankOrder(absl::Span<const void* const> contributions, DType type, int64_t count,
                     bool accumulate, void* out, DType output_type);

}  // namespace zeroshard
