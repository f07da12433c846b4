// A table's gradient as rows, on the host: the methods of the same names in worker/ops/ops.h, whose
// comments give shapes. dtype, wire and gradient_type are fp32, bf16 or fp16 (asserted). Up to
// `threads` OpenMP threads, each with whole rows: the same bits for any number. Reentrant; two
// calls may not share a table or RowSums.
#pragma once

#include <cstdint>

#include "common/types.h"
#include "worker/ops/ops.h"

namespace zeroshard::cpu {

// Every id is a row of the table (not checked: EmbeddingBackwardRows wrote them).
void ScatterRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols, DType dtype,
                 void* table, int threads);
void AccumulateRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols, DType dtype,
                    float* table, int threads);

// Columns of a row that this rank does not own are neither read nor written, in `rows` or in sums.
// Slots are given in the order of the ids. More rows than sums.capacity are asserted against.
void FoldRows(const RowSums& sums, const int32_t* ids, const void* rows, int64_t n, DType dtype,
              int threads);
void JoinRows(const RowSums& sums, DType wire, void* gradient, DType gradient_type, int threads);
// What lies in sums.sums stays there; FoldRows starts a row from zero.
void ClearRows(const RowSums& sums);

}  // namespace zeroshard::cpu
