// The kernels of the CUDA backend behind the Ops interface.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/ops/cuda/cuda_ops_rope.h"
#include "worker/ops/cuda/cuda_ops_scratch.h"
#include "worker/ops/cuda/matmul.h"
#include "worker/ops/ops.h"

namespace zeroshard {

// Over the compute stream of a CUDA device, which outlives them. allow_tf32: products of fp32
// operands in TF32. Takes 32 MiB of scratch memory (kBuffers) at once, more when an operation needs
// it. INVALID_ARGUMENT for another kind of device, FAILED_PRECONDITION where cuBLASLt cannot use
// the GPU, RESOURCE_EXHAUSTED.
absl::StatusOr<std::unique_ptr<Ops>> MakeCudaOps(Device* device, bool allow_tf32 = false);

namespace cuda {

// Everything is enqueued on the compute stream in the order of the calls, and returns at once. The
// first error of a method without a status stays: this instance does nothing from there on, its
// methods with a status return it, and every Record of the stream has it once there was another
// call.
class CudaOps : public Ops {
 public:
  static absl::StatusOr<std::unique_ptr<CudaOps>> Create(CudaDevice* device, bool allow_tf32);

  // INVALID_ARGUMENT for arguments that cannot be, RESOURCE_EXHAUSTED without memory,
  // FAILED_PRECONDITION on a device that an earlier error has made unusable, UNIMPLEMENTED for a
  // product that cuBLASLt has no kernel for, INTERNAL where a launch fails.
  absl::Status Matmul(const MatmulArgs& args) override;
  // In bf16 in one pass where cuBLASLt has a kernel: the product is then not rounded before.
  absl::Status MatmulGeluBackward(const MatmulArgs& args, const void* x) override;
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

  // "cuda NVIDIA H200 sm_90 cublaslt 130002 runtime 13000", and "tf32" where it is allowed.
  std::string Fingerprint() const override;
  double MatmulSeconds() const override { return 0; }

 private:
  CudaOps(CudaDevice* device, std::unique_ptr<MatmulLibrary> library)
      : device_(device), library_(std::move(library)), scratch_(device), rope_(device) {}

  // The stream, on a thread whose device is this one; the errors that stay.
  absl::StatusOr<cudaStream_t> Stream();
  // Of methods without a status: what `work(stream)` and what `work(stream, scratch)` enqueue.
  template <typename Work>
  void Do(const Work& work);
  template <typename Work>
  void DoWithScratch(int64_t bytes, const Work& work);

  CudaDevice* const device_;
  const std::unique_ptr<MatmulLibrary> library_;
  Scratch scratch_;
  RopeCache rope_;
  absl::Status first_error_;
};

}  // namespace cuda
}  // namespace zeroshard
