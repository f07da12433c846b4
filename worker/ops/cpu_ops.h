// The kernels of the CPU backend behind the Ops interface: matrix products and attention over the
// primitives and scratch memory that this instance owns, everything else as free functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/ops/ops.h"
#include "worker/ops/product.h"

namespace zeroshard::cpu {

class CpuOps : public Ops {
 public:
  // Throws nothing; CpuIsSupported() (worker/ops/cpu_isa.h) says beforehand whether kernels will
  // run.
  explicit CpuOps(int threads);

  // INVALID_ARGUMENT for arguments that cannot be, RESOURCE_EXHAUSTED without memory,
  // FAILED_PRECONDITION on a processor that is not supported, INTERNAL where oneDNN fails.
  absl::Status Matmul(const MatmulArgs& args) override;
  absl::Status AttentionForward(const AttentionArgs& args, void* out, float* lse) override;
  absl::Status AttentionBackward(const AttentionArgs& args, const void* out, const void* d_out,
                                 const float* lse, void* d_q, void* d_k, void* d_v) override;
  absl::Status CachedAttention(const CachedAttentionArgs& args, void* out) override;

  void ColumnSum(const void* x, int64_t rows, int64_t cols, DType dtype, void* out,
                 DType out_type) override;
  void LayerNormForward(const void* x, const void* weight, const void* bias, int64_t rows,
                        int64_t cols, float eps, DType dtype, void* y, float* mean,
                        float* rstd) override;
  void LayerNormBackward(const void* dy, const void* x, const void* weight, const float* mean,
                         const float* rstd, int64_t rows, int64_t cols, DType dtype,
                         bool accumulate_dx, void* dx, void* d_weight, void* d_bias) override;
  void RmsNormForward(const void* x, const void* weight, int64_t rows, int64_t cols, float eps,
                      DType dtype, void* y, float* rstd) override;
  void RmsNormBackward(const void* dy, const void* x, const void* weight, const float* rstd,
                       int64_t rows, int64_t cols, DType dtype, bool accumulate_dx, void* dx,
                       void* d_weight) override;
  void GeluForward(const void* x, int64_t n, DType dtype, void* y) override;
  void GeluBackward(const void* dy, const void* x, int64_t n, DType dtype, void* dx) override;
  void SwiGluForward(const void* gate, const void* up, int64_t n, DType dtype, void* y) override;
  void SwiGluBackward(const void* dy, const void* gate, const void* up, int64_t n, DType dtype,
                      void* d_gate, void* d_up) override;
  void Rope(void* x, int64_t ld, int64_t batch, int64_t seq, int64_t heads, int64_t head_dim,
            const float* frequencies, int64_t first_position, bool inverse, DType dtype) override;
  void Dropout(const DropoutArgs& args, const void* x, int64_t batch, int64_t per_sample,
               DType dtype, void* y) override;
  void Copy(void* to, const void* from, size_t bytes) override;
  void Zero(void* to, size_t bytes) override;
  void CopyRows(void* to, int64_t to_stride, const void* from, int64_t from_stride, int64_t rows,
                int64_t bytes) override;
  void Add(const void* a, const void* b, int64_t n, DType dtype, void* y) override;
  void EmbeddingForward(const int32_t* tokens, const void* tok, const void* pos, int64_t batch,
                        int64_t seq, int64_t cols, DType dtype, void* y) override;
  void EmbeddingBackwardRows(const void* dy, const int32_t* tokens, int64_t batch, int64_t seq,
                             int64_t cols, DType dtype, int32_t* ids, void* rows) override;
  void PositionBackward(const void* dy, int64_t batch, int64_t seq, int64_t cols, DType dtype,
                        void* d_pos) override;
  void CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v,
                           DType dtype, float gradient_scale, float* losses) override;
  absl::Status LocalIds(const int32_t* ids, int64_t n, int64_t begin, int64_t end,
                        int32_t* local) override;
  absl::Status LookupRows(const int32_t* local, const void* table, int64_t n, int64_t cols,
                          DType dtype, void* y) override;
  absl::Status SoftmaxPart(const void* logits, const int32_t* local_targets, int64_t rows,
                           int64_t v, DType dtype, float* part) override;
  absl::Status CrossEntropyOfParts(const float* parts, int ranks, void* logits,
                                   const int32_t* targets, const int32_t* local_targets,
                                   int64_t rows, int64_t v, DType dtype, float gradient_scale,
                                   float* losses) override;
  void Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type) override;
  void AccumulateF32(const void* x, DType dtype, int64_t n, bool accumulate, float* acc) override;
  void AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type, float* master,
             float* exp_avg, float* exp_avg_sq, void* param, DType param_type) override;
  void AddLosses(const float* losses, const int32_t* targets, int64_t rows, double* sum) override;
  void RoundInPlace(float* x, int64_t n, DType wire) override;
  void AddRounded(const void* sum, DType sum_type, int64_t n, DType wire, void* gradient,
                  DType gradient_type) override;
  void ScatterRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols, DType dtype,
                   void* table) override;
  void AccumulateRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols, DType dtype,
                      float* table) override;
  void FoldRows(const RowSums& sums, const int32_t* ids, const void* rows, int64_t n,
                DType dtype) override;
  void JoinRows(const RowSums& sums, DType wire, void* gradient, DType gradient_type) override;
  void ClearRows(const RowSums& sums) override;
  void AddSquares(const void* x, int64_t n, DType dtype, NormAccumulator* acc) override;

  std::string Fingerprint() const override;
  double MatmulSeconds() const override { return matmul_seconds_; }

 private:
  const int threads_;
  const absl::Status supported_;
  std::vector<ProductContext> contexts_;  // one a thread
  double matmul_seconds_ = 0;
};

}  // namespace zeroshard::cpu
