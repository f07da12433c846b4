// The CPU kernels other than matrix products, attention and cross-entropy, as free functions: each
// takes the arguments of the virtual method of the same name in worker/ops/ops.h (whose comments
// give shapes and formulas) and the number of OpenMP threads, at least 1.
//
// What holds for all of them:
// * dtype is fp32, bf16 or fp16; nothing else is accepted (asserted). Arithmetic is fp32; a result
// is
//   rounded once, to nearest even, and a NaN stays a NaN.
// * The same bits for any thread count, alignment and instruction set (fused multiply-adds are real
//   ones or emulated), and whether an element falls into a whole vector or a tail.
// * A sum over a row runs in 32 lanes (element i in lane i % 32) folded by halves; a sum over
// columns'
//   rows runs over 64 rows at a time, in order, and over those partial sums in order. The rows of
//   an embedding's gradient are added one by one, in order of position.
// * Reentrant: no state but Rope's cache of angles, which is locked. No pointer is kept.
// * Outputs may not overlap inputs unless ops.h or the comment here says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/kernels/adamw.h"
#include "common/kernels/convert.h"
#include "common/types.h"
#include "worker/ops/norm_accumulator.h"

namespace zeroshard::cpu {

// out is overwritten.
void ColumnSum(const void* x, int64_t rows, int64_t cols, DType dtype, void* out, DType out_type,
               int threads);

void LayerNormForward(const void* x, const void* weight, const void* bias, int64_t rows,
                      int64_t cols, float eps, DType dtype, void* y, float* mean, float* rstd,
                      int threads);
// dx may be dy or x.
void LayerNormBackward(const void* dy, const void* x, const void* weight, const float* mean,
                       const float* rstd, int64_t rows, int64_t cols, DType dtype,
                       bool accumulate_dx, void* dx, void* d_weight, void* d_bias, int threads);
void RmsNormForward(const void* x, const void* weight, int64_t rows, int64_t cols, float eps,
                    DType dtype, void* y, float* rstd, int threads);
// dx may be dy or x.
void RmsNormBackward(const void* dy, const void* x, const void* weight, const float* rstd,
                     int64_t rows, int64_t cols, DType dtype, bool accumulate_dx, void* dx,
                     void* d_weight, int threads);

// The exponential inside is within 2e-7 of its value relatively (worker/ops/exp-inl.h), so an
// activation is too for arguments around 0, and by 1e-7 * |argument| more far from it. y may be x.
void GeluForward(const void* x, int64_t n, DType dtype, void* y, int threads);
// dx may be dy or x.
void GeluBackward(const void* dy, const void* x, int64_t n, DType dtype, void* dx, int threads);
void SwiGluForward(const void* gate, const void* up, int64_t n, DType dtype, void* y, int threads);
void SwiGluBackward(const void* dy, const void* gate, const void* up, int64_t n, DType dtype,
                    void* d_gate, void* d_up, int threads);

// Sines and cosines of the fp32 angles are computed in fp64 and rounded to fp32.
void Rope(void* x, int64_t ld, int64_t batch, int64_t seq, int64_t heads, int64_t head_dim,
          const float* frequencies, int64_t first_position, bool inverse, DType dtype, int threads);

// Nothing overlaps. Fixed ranges a thread, at least 256 KiB each.
void Copy(void* to, const void* from, size_t bytes, int threads);
void Zero(void* to, size_t bytes, int threads);
// Strides are at least `bytes`, or any where rows is at most 1.
void CopyRows(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t rows,
              int64_t bytes, int threads);

void Add(const void* a, const void* b, int64_t n, DType dtype, void* y, int threads);

void EmbeddingForward(const int32_t* tokens, const void* tok, const void* pos, int64_t batch,
                      int64_t seq, int64_t cols, DType dtype, void* y, int threads);
void LocalIds(const int32_t* ids, int64_t n, int64_t begin, int64_t end, int32_t* local);
void LookupRows(const int32_t* local, const void* table, int64_t n, int64_t cols, DType dtype,
                void* y, int threads);
void EmbeddingBackwardRows(const void* dy, const int32_t* tokens, int64_t batch, int64_t seq,
                           int64_t cols, DType dtype, int32_t* ids, void* rows, int threads);
void PositionBackward(const void* dy, int64_t batch, int64_t seq, int64_t cols, DType dtype,
                      void* d_pos, int threads);

void AccumulateF32(const void* x, DType dtype, int64_t n, bool accumulate, float* acc, int threads);

// The same bits as Convert to `wire` and back.
void RoundInPlace(float* x, int64_t n, DType wire, int threads);
// The same bits as Convert for each rounding and AccumulateF32 for the sum, in one pass. `sum` is
// not the gradient.
void AddRounded(const void* sum, DType sum_type, int64_t n, DType wire, void* gradient,
                DType gradient_type, int threads);

void AddSquares(const void* x, int64_t n, DType dtype, NormAccumulator* acc, int threads);

}  // namespace zeroshard::cpu
