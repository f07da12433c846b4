// The CUDA kernels other than matrix products and attention, as free functions: each takes the
// stream it works on, and the arguments of the virtual method of the same name in worker/ops/ops.h
// (whose comments give shapes and formulas).
//
// What holds for all of them:
// * They enqueue work and return at once; nothing waits for the device. Pointers are device memory.
// * OK, INVALID_ARGUMENT for an element type that is not fp32, bf16 or fp16, or the error of the
//   launch (launch.h).
// * Arithmetic is fp32; a result is rounded once, to nearest even (of fp16, to infinity from 65520
//   on), and a NaN stays a NaN.
// * The same bits on every run, for any alignment and on any GPU: sums have a fixed order, and no
//   atomic operation is on a floating-point number. 16-byte aligned pointers (and row lengths that
//   are multiples of 8 elements) are fast.
// * Thread-safe; no state, no pointer is kept. Outputs may not overlap inputs unless ops.h or the
//   comment here says so.
// * Functions that take a workspace say how many bytes it needs; it is scratch, 256-byte aligned,
//   and may be shared by all calls on one stream.
//
// Against the CPU's kernels (worker/ops/vector_ops.h): bit-identical but for LayerNormForward,
// RmsNormForward, the norms' dx, the activations, CrossEntropyColumns and its two parts, whose sums
// have another order or whose exponential is the GPU's (exp.h gives its bound).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/ops/ops.h"

namespace zeroshard::cuda {

int64_t ColumnSumWorkspace(int64_t rows, int64_t cols);
absl::Status ColumnSum(cudaStream_t stream, const void* x, int64_t rows, int64_t cols, DType dtype,
                       void* out, DType out_type, void* workspace);

absl::Status LayerNormForward(cudaStream_t stream, const void* x, const void* weight,
                              const void* bias, int64_t rows, int64_t cols, float eps, DType dtype,
                              void* y, float* mean, float* rstd);
absl::Status RmsNormForward(cudaStream_t stream, const void* x, const void* weight, int64_t rows,
                            int64_t cols, float eps, DType dtype, void* y, float* rstd);
// Of both backward functions.
int64_t NormBackwardWorkspace(int64_t rows, int64_t cols);
// dx may be dy or x.
absl::Status LayerNormBackward(cudaStream_t stream, const void* dy, const void* x,
                               const void* weight, const float* mean, const float* rstd,
                               int64_t rows, int64_t cols, DType dtype, bool accumulate_dx,
                               void* dx, void* d_weight, void* d_bias, void* workspace);
absl::Status RmsNormBackward(cudaStream_t stream, const void* dy, const void* x, const void* weight,
                             const float* rstd, int64_t rows, int64_t cols, DType dtype,
                             bool accumulate_dx, void* dx, void* d_weight, void* workspace);

// y may be x, dx may be dy or x.
absl::Status GeluForward(cudaStream_t stream, const void* x, int64_t n, DType dtype, void* y);
absl::Status GeluBackward(cudaStream_t stream, const void* dy, const void* x, int64_t n,
                          DType dtype, void* dx);
absl::Status SwiGluForward(cudaStream_t stream, const void* gate, const void* up, int64_t n,
                           DType dtype, void* y);
absl::Status SwiGluBackward(cudaStream_t stream, const void* dy, const void* gate, const void* up,
                            int64_t n, DType dtype, void* d_gate, void* d_up);

// cosines and sines [positions, half] of float(position) * frequencies[i], position from 0 on.
absl::Status RopeTables(cudaStream_t stream, const float* frequencies, int64_t half,
                        int64_t positions, float* cosines, float* sines);
// With tables of at least first_position + seq positions.
absl::Status Rope(cudaStream_t stream, void* x, int64_t ld, int64_t batch, int64_t seq,
                  int64_t heads, int64_t head_dim, const float* cosines, const float* sines,
                  int64_t first_position, bool inverse, DType dtype);

absl::Status Dropout(cudaStream_t stream, const DropoutArgs& args, const void* x, int64_t batch,
                     int64_t per_sample, DType dtype, void* y);

absl::Status Add(cudaStream_t stream, const void* a, const void* b, int64_t n, DType dtype,
                 void* y);

absl::Status EmbeddingForward(cudaStream_t stream, const int32_t* tokens, const void* tok,
                              const void* pos, int64_t batch, int64_t seq, int64_t cols,
                              DType dtype, void* y);
// Bytes for `count` = batch * seq tokens, below 2^31; the error of the device where it has none.
absl::StatusOr<int64_t> EmbeddingBackwardWorkspace(int64_t count);
// INVALID_ARGUMENT where the workspace's bytes are too few.
absl::Status EmbeddingBackwardRows(cudaStream_t stream, const void* dy, const int32_t* tokens,
                                   int64_t batch, int64_t seq, int64_t cols, DType dtype,
                                   int32_t* ids, void* rows, void* workspace,
                                   int64_t workspace_bytes);
// The workspace is ColumnSumWorkspace(batch, seq * cols).
absl::Status PositionBackward(cudaStream_t stream, const void* dy, int64_t batch, int64_t seq,
                              int64_t cols, DType dtype, void* d_pos, void* workspace);

absl::Status LocalIds(cudaStream_t stream, const int32_t* ids, int64_t n, int64_t begin,
                      int64_t end, int32_t* local);
absl::Status LookupRows(cudaStream_t stream, const int32_t* local, const void* table, int64_t n,
                        int64_t cols, DType dtype, void* y);

// Of these three.
int64_t CrossEntropyWorkspace(int64_t rows, int64_t v);
absl::Status CrossEntropyColumns(cudaStream_t stream, void* logits, const int32_t* targets,
                                 int64_t rows, int64_t v, DType dtype, float gradient_scale,
                                 float* losses, void* workspace);
absl::Status SoftmaxPart(cudaStream_t stream, const void* logits, const int32_t* local_targets,
                         int64_t rows, int64_t v, DType dtype, float* part, void* workspace);
// INVALID_ARGUMENT where there is no rank.
absl::Status CrossEntropyOfParts(cudaStream_t stream, const float* parts, int ranks, void* logits,
                                 const int32_t* targets, const int32_t* local_targets, int64_t rows,
                                 int64_t v, DType dtype, float gradient_scale, float* losses,
                                 void* workspace);
absl::Status AddLosses(cudaStream_t stream, const float* losses, const int32_t* targets,
                       int64_t rows, double* sum);

// `in` may be `out` where the types are equal.
absl::Status Convert(cudaStream_t stream, const void* in, DType in_type, int64_t n, void* out,
                     DType out_type);
absl::Status AccumulateF32(cudaStream_t stream, const void* x, DType dtype, int64_t n,
                           bool accumulate, float* acc);
absl::Status RoundInPlace(cudaStream_t stream, float* x, int64_t n, DType wire);
absl::Status AddRounded(cudaStream_t stream, const void* sum, DType sum_type, int64_t n, DType wire,
                        void* gradient, DType gradient_type);

absl::Status AdamW(cudaStream_t stream, const AdamWArgs& args, int64_t n, const void* grad,
                   DType grad_type, float* master, float* exp_avg, float* exp_avg_sq, void* param,
                   DType param_type);

absl::Status ScatterRows(cudaStream_t stream, const int32_t* ids, const void* rows, int64_t n,
                         int64_t cols, DType dtype, void* table);
absl::Status AccumulateRows(cudaStream_t stream, const int32_t* ids, const void* rows, int64_t n,
                            int64_t cols, DType dtype, float* table);
// A row's slot is whichever is free first: it differs from run to run, the sums do not.
absl::Status FoldRows(cudaStream_t stream, const RowSums& sums, const int32_t* ids,
                      const void* rows, int64_t n, DType dtype);
absl::Status JoinRows(cudaStream_t stream, const RowSums& sums, DType wire, void* gradient,
                      DType gradient_type);
absl::Status ClearRows(cudaStream_t stream, const RowSums& sums);

absl::Status AddSquares(cudaStream_t stream, const void* x, int64_t n, DType dtype,
                        NormAccumulator* acc);

}  // namespace zeroshard::cuda
