#include "worker/ops/cpu_ops.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <new>

#include "absl/strings/str_cat.h"
#include "worker/ops/attention.h"
#include "worker/ops/cached_attention.h"
#include "worker/ops/cpu_isa.h"
#include "worker/ops/cross_entropy_columns.h"
#include "worker/ops/dropout.h"
#include "worker/ops/matmul.h"
#include "worker/ops/rows.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard {
namespace cpu {
namespace {

// Runs what may throw and says where it failed.
template <typename Work>
absl::Status Guarded(const char* what, const Work& work) {
  try {
    work();
    return absl::OkStatus();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": no host memory left for scratch space; use a smaller micro-batch"));
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat(what, ": ", e.what(), " (", Fingerprint(), ")"));
  }
}

}  // namespace

CpuOps::CpuOps(int threads)
    : threads_(std::max(threads, 1)),
      supported_(CpuIsSupported()),
      contexts_(static_cast<size_t>(threads_)) {}

absl::Status CpuOps::Matmul(const MatmulArgs& args) {
  if (!supported_.ok()) return supported_;
  if (absl::Status status = CheckMatmul(args); !status.ok()) return status;
  const auto start = std::chrono::steady_clock::now();
  absl::Status status = Guarded("matrix product", [&] { cpu::Matmul(args, threads_, &contexts_); });
  matmul_seconds_ +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return status;
}

absl::Status CpuOps::AttentionForward(const AttentionArgs& args, void* out, float* lse) {
  if (!supported_.ok()) return supported_;
  if (absl::Status status = CheckAttention(args); !status.ok()) return status;
  return Guarded("attention forward",
                 [&] { cpu::AttentionForward(args, out, lse, threads_, &contexts_); });
}

absl::Status CpuOps::AttentionBackward(const AttentionArgs& args, const void* out,
                                       const void* d_out, const float* lse, void* d_q, void* d_k,
                                       void* d_v) {
  if (!supported_.ok()) return supported_;
  if (absl::Status status = CheckAttention(args); !status.ok()) return status;
  return Guarded("attention backward", [&] {
    cpu::AttentionBackward(args, out, d_out, lse, d_q, d_k, d_v, threads_, &contexts_);
  });
}

absl::Status CpuOps::CachedAttention(const CachedAttentionArgs& args, void* out) {
  if (!supported_.ok()) return supported_;
  if (absl::Status status = CheckCachedAttention(args); !status.ok()) return status;
  return Guarded("cached attention",
                 [&] { cpu::CachedAttention(args, out, threads_, &contexts_); });
}

void CpuOps::ColumnSum(const void* x, int64_t rows, int64_t cols, DType dtype, void* out,
                       DType out_type) {
  cpu::ColumnSum(x, rows, cols, dtype, out, out_type, threads_);
}

void CpuOps::LayerNormForward(const void* x, const void* weight, const void* bias, int64_t rows,
                              int64_t cols, float eps, DType dtype, void* y, float* mean,
                              float* rstd) {
  cpu::LayerNormForward(x, weight, bias, rows, cols, eps, dtype, y, mean, rstd, threads_);
}

void CpuOps::LayerNormBackward(const void* dy, const void* x, const void* weight, const float* mean,
                               const float* rstd, int64_t rows, int64_t cols, DType dtype,
                               bool accumulate_dx, void* dx, void* d_weight, void* d_bias) {
  cpu::LayerNormBackward(dy, x, weight, mean, rstd, rows, cols, dtype, accumulate_dx, dx, d_weight,
                         d_bias, threads_);
}

void CpuOps::RmsNormForward(const void* x, const void* weight, int64_t rows, int64_t cols,
                            float eps, DType dtype, void* y, float* rstd) {
  cpu::RmsNormForward(x, weight, rows, cols, eps, dtype, y, rstd, threads_);
}

void CpuOps::RmsNormBackward(const void* dy, const void* x, const void* weight, const float* rstd,
                             int64_t rows, int64_t cols, DType dtype, bool accumulate_dx, void* dx,
                             void* d_weight) {
  cpu::RmsNormBackward(dy, x, weight, rstd, rows, cols, dtype, accumulate_dx, dx, d_weight,
                       threads_);
}

void CpuOps::GeluForward(const void* x, int64_t n, DType dtype, void* y) {
  cpu::GeluForward(x, n, dtype, y, threads_);
}

void CpuOps::GeluBackward(const void* dy, const void* x, int64_t n, DType dtype, void* dx) {
  cpu::GeluBackward(dy, x, n, dtype, dx, threads_);
}

void CpuOps::SwiGluForward(const void* gate, const void* up, int64_t n, DType dtype, void* y) {
  cpu::SwiGluForward(gate, up, n, dtype, y, threads_);
}

void CpuOps::SwiGluBackward(const void* dy, const void* gate, const void* up, int64_t n,
                            DType dtype, void* d_gate, void* d_up) {
  cpu::SwiGluBackward(dy, gate, up, n, dtype, d_gate, d_up, threads_);
}

void CpuOps::Rope(void* x, int64_t ld, int64_t batch, int64_t seq, int64_t heads, int64_t head_dim,
                  const float* frequencies, int64_t first_position, bool inverse, DType dtype) {
  cpu::Rope(x, ld, batch, seq, heads, head_dim, frequencies, first_position, inverse, dtype,
            threads_);
}

void CpuOps::Dropout(const DropoutArgs& args, const void* x, int64_t batch, int64_t per_sample,
                     DType dtype, void* y) {
  cpu::Dropout(args, x, batch, per_sample, dtype, y, threads_);
}

void CpuOps::Copy(void* to, const void* from, size_t bytes) {
  cpu::Copy(to, from, bytes, threads_);
}

void CpuOps::Zero(void* to, size_t bytes) { cpu::Zero(to, bytes, threads_); }

void CpuOps::CopyRows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                      int64_t rows, int64_t bytes) {
  cpu::CopyRows(to, to_stride, from, from_stride, rows, bytes, threads_);
}

void CpuOps::Add(const void* a, const void* b, int64_t n, DType dtype, void* y) {
  cpu::Add(a, b, n, dtype, y, threads_);
}

void CpuOps::EmbeddingForward(const int32_t* tokens, const void* tok, const void* pos,
                              int64_t batch, int64_t seq, int64_t cols, DType dtype, void* y) {
  cpu::EmbeddingForward(tokens, tok, pos, batch, seq, cols, dtype, y, threads_);
}

void CpuOps::EmbeddingBackwardRows(const void* dy, const int32_t* tokens, int64_t batch,
                                   int64_t seq, int64_t cols, DType dtype, int32_t* ids,
                                   void* rows) {
  cpu::EmbeddingBackwardRows(dy, tokens, batch, seq, cols, dtype, ids, rows, threads_);
}

void CpuOps::PositionBackward(const void* dy, int64_t batch, int64_t seq, int64_t cols, DType dtype,
                              void* d_pos) {
  cpu::PositionBackward(dy, batch, seq, cols, dtype, d_pos, threads_);
}

void CpuOps::CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v,
                                 DType dtype, float gradient_scale, float* losses) {
  cpu::CrossEntropyColumns(logits, targets, rows, v, dtype, gradient_scale, losses, threads_);
}

absl::Status CpuOps::LocalIds(const int32_t* ids, int64_t n, int64_t begin, int64_t end,
                              int32_t* local) {
  cpu::LocalIds(ids, n, begin, end, local);
  return absl::OkStatus();
}

absl::Status CpuOps::LookupRows(const int32_t* local, const void* table, int64_t n, int64_t cols,
                                DType dtype, void* y) {
  cpu::LookupRows(local, table, n, cols, dtype, y, threads_);
  return absl::OkStatus();
}

absl::Status CpuOps::SoftmaxPart(const void* logits, const int32_t* local_targets, int64_t rows,
                                 int64_t v, DType dtype, float* part) {
  cpu::SoftmaxPart(logits, local_targets, rows, v, dtype, part, threads_);
  return absl::OkStatus();
}

absl::Status CpuOps::CrossEntropyOfParts(const float* parts, int ranks, void* logits,
                                         const int32_t* targets, const int32_t* local_targets,
                                         int64_t rows, int64_t v, DType dtype, float gradient_scale,
                                         float* losses) {
  cpu::CrossEntropyOfParts(parts, ranks, logits, targets, local_targets, rows, v, dtype,
                           gradient_scale, losses, threads_);
  return absl::OkStatus();
}

void CpuOps::Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type) {
  cpu::Convert(in, in_type, n, out, out_type, threads_);
}

void CpuOps::AccumulateF32(const void* x, DType dtype, int64_t n, bool accumulate, float* acc) {
  cpu::AccumulateF32(x, dtype, n, accumulate, acc, threads_);
}

void CpuOps::AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type,
                   float* master, float* exp_avg, float* exp_avg_sq, void* param,
                   DType param_type) {
  cpu::AdamW(args, n, grad, grad_type, master, exp_avg, exp_avg_sq, param, param_type, threads_);
}

void CpuOps::AddLosses(const float* losses, const int32_t* targets, int64_t rows, double* sum) {
  cpu::AddLosses(losses, targets, rows, sum);
}

void CpuOps::RoundInPlace(float* x, int64_t n, DType wire) {
  cpu::RoundInPlace(x, n, wire, threads_);
}

void CpuOps::AddRounded(const void* sum, DType sum_type, int64_t n, DType wire, void* gradient,
                        DType gradient_type) {
  cpu::AddRounded(sum, sum_type, n, wire, gradient, gradient_type, threads_);
}

void CpuOps::ScatterRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols, DType dtype,
                         void* table) {
  cpu::ScatterRows(ids, rows, n, cols, dtype, table, threads_);
}

void CpuOps::AccumulateRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols,
                            DType dtype, float* table) {
  cpu::AccumulateRows(ids, rows, n, cols, dtype, table, threads_);
}

void CpuOps::FoldRows(const RowSums& sums, const int32_t* ids, const void* rows, int64_t n,
                      DType dtype) {
  cpu::FoldRows(sums, ids, rows, n, dtype, threads_);
}

void CpuOps::JoinRows(const RowSums& sums, DType wire, void* gradient, DType gradient_type) {
  cpu::JoinRows(sums, wire, gradient, gradient_type, threads_);
}

void CpuOps::ClearRows(const RowSums& sums) { cpu::ClearRows(sums); }

void CpuOps::AddSquares(const void* x, int64_t n, DType dtype, NormAccumulator* acc) {
  cpu::AddSquares(x, n, dtype, acc, threads_);
}

std::string CpuOps::Fingerprint() const { return cpu::Fingerprint(); }

}  // namespace cpu

std::unique_ptr<Ops> MakeCpuOps(int threads) { return std::make_unique<cpu::CpuOps>(threads); }

}  // namespace zeroshard
