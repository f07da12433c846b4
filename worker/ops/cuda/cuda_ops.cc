#include "worker/ops/cuda/cuda_ops.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/ops/cuda/attention.h"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard {
namespace cuda {
namespace {

absl::Status CheckType(DType type) {
  if (IsFloat(type)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("kernels for GPUs take fp32, bf16 and fp16 elements, not ", NameOf(type)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaOps>> CudaOps::Create(CudaDevice* device, bool allow_tf32) {
  ZS_RETURN_IF_ERROR(device->MakeCurrent());
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<MatmulLibrary> library, MatmulLibrary::Create(allow_tf32));
  auto ops = std::unique_ptr<CudaOps>(new CudaOps(device, std::move(library)));
  ZS_RETURN_IF_ERROR(ops->scratch_.Get(kMatmulWorkspace).status());
  return ops;
}

absl::StatusOr<cudaStream_t> CudaOps::Stream() {
  ZS_RETURN_IF_ERROR(first_error_);
  ZS_RETURN_IF_ERROR(device_->MakeCurrent());
  return device_->compute()->handle();
}

template <typename Work>
void CudaOps::Do(const Work& work) {
  const absl::StatusOr<cudaStream_t> stream = Stream();
  const absl::Status status = stream.ok() ? work(*stream) : stream.status();
  if (status.ok()) return;
  if (first_error_.ok()) first_error_ = status;
  device_->compute()->AddError(first_error_);
}

template <typename Work>
void CudaOps::DoWithScratch(int64_t bytes, const Work& work) {
  Do([&](cudaStream_t stream) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(void* const scratch, scratch_.Get(bytes));
    return work(stream, scratch);
  });
}

absl::Status CudaOps::Matmul(const MatmulArgs& args) {
  ZS_RETURN_IF_ERROR(CheckType(args.ab_type));
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  ZS_ASSIGN_OR_RETURN(void* const scratch, scratch_.Get(kMatmulWorkspace));
  return library_->Run(stream, args, scratch);
}

absl::Status CudaOps::MatmulGeluBackward(const MatmulArgs& args, const void* x) {
  ZS_RETURN_IF_ERROR(CheckType(args.ab_type));
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  ZS_ASSIGN_OR_RETURN(void* const scratch, scratch_.Get(kMatmulWorkspace));
  ZS_ASSIGN_OR_RETURN(const bool done, library_->RunTimesGeluSlope(stream, args, x, scratch));
  return done ? absl::OkStatus() : Ops::MatmulGeluBackward(args, x);
}

absl::Status CudaOps::AttentionForward(const AttentionArgs& args, void* out, float* lse) {
  ZS_RETURN_IF_ERROR(CheckType(args.dtype));
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  return cuda::AttentionForward(stream, args, out, lse);
}

absl::Status CudaOps::AttentionBackward(const AttentionArgs& args, const void* out,
                                        const void* d_out, const float* lse, void* d_q, void* d_k,
                                        void* d_v) {
  ZS_RETURN_IF_ERROR(CheckType(args.dtype));
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  ZS_ASSIGN_OR_RETURN(void* const scratch, scratch_.Get(AttentionBackwardWorkspace(args)));
  return cuda::AttentionBackward(stream, args, out, d_out, lse, d_q, d_k, d_v, scratch);
}

absl::Status CudaOps::CachedAttention(const CachedAttentionArgs& args, void* out) {
  ZS_RETURN_IF_ERROR(CheckType(args.dtype));
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  return cuda::CachedAttention(stream, args, out);
}

void CudaOps::ColumnSum(const void* x, int64_t rows, int64_t cols, DType dtype, void* out,
                        DType out_type) {
  DoWithScratch(ColumnSumWorkspace(rows, cols), [&](cudaStream_t stream, void* scratch) {
    return cuda::ColumnSum(stream, x, rows, cols, dtype, out, out_type, scratch);
  });
}

void CudaOps::LayerNormForward(const void* x, const void* weight, const void* bias, int64_t rows,
                               int64_t cols, float eps, DType dtype, void* y, float* mean,
                               float* rstd) {
  Do([&](cudaStream_t stream) {
    return cuda::LayerNormForward(stream, x, weight, bias, rows, cols, eps, dtype, y, mean, rstd);
  });
}

void CudaOps::LayerNormBackward(const void* dy, const void* x, const void* weight,
                                const float* mean, const float* rstd, int64_t rows, int64_t cols,
                                DType dtype, bool accumulate_dx, void* dx, void* d_weight,
                                void* d_bias) {
  DoWithScratch(NormBackwardWorkspace(rows, cols), [&](cudaStream_t stream, void* scratch) {
    return cuda::LayerNormBackward(stream, dy, x, weight, mean, rstd, rows, cols, dtype,
                                   accumulate_dx, dx, d_weight, d_bias, scratch);
  });
}

void CudaOps::RmsNormForward(const void* x, const void* weight, int64_t rows, int64_t cols,
                             float eps, DType dtype, void* y, float* rstd) {
  Do([&](cudaStream_t stream) {
    return cuda::RmsNormForward(stream, x, weight, rows, cols, eps, dtype, y, rstd);
  });
}

void CudaOps::RmsNormBackward(const void* dy, const void* x, const void* weight, const float* rstd,
                              int64_t rows, int64_t cols, DType dtype, bool accumulate_dx, void* dx,
                              void* d_weight) {
  DoWithScratch(NormBackwardWorkspace(rows, cols), [&](cudaStream_t stream, void* scratch) {
    return cuda::RmsNormBackward(stream, dy, x, weight, rstd, rows, cols, dtype, accumulate_dx, dx,
                                 d_weight, scratch);
  });
}

void CudaOps::GeluForward(const void* x, int64_t n, DType dtype, void* y) {
  Do([&](cudaStream_t stream) { return cuda::GeluForward(stream, x, n, dtype, y); });
}

void CudaOps::GeluBackward(const void* dy, const void* x, int64_t n, DType dtype, void* dx) {
  Do([&](cudaStream_t stream) { return cuda::GeluBackward(stream, dy, x, n, dtype, dx); });
}

void CudaOps::SwiGluForward(const void* gate, const void* up, int64_t n, DType dtype, void* y) {
  Do([&](cudaStream_t stream) { return cuda::SwiGluForward(stream, gate, up, n, dtype, y); });
}

void CudaOps::SwiGluBackward(const void* dy, const void* gate, const void* up, int64_t n,
                             DType dtype, void* d_gate, void* d_up) {
  Do([&](cudaStream_t stream) {
    return cuda::SwiGluBackward(stream, dy, gate, up, n, dtype, d_gate, d_up);
  });
}

void CudaOps::Rope(void* x, int64_t ld, int64_t batch, int64_t seq, int64_t heads, int64_t head_dim,
                   const float* frequencies, int64_t first_position, bool inverse, DType dtype) {
  Do([&](cudaStream_t stream) -> absl::Status {
    if (batch * seq * heads * head_dim == 0) return absl::OkStatus();
    ZS_ASSIGN_OR_RETURN(const RopeCache::Tables tables,
                        rope_.Get(stream, frequencies, head_dim / 2, first_position + seq));
    return cuda::Rope(stream, x, ld, batch, seq, heads, head_dim, tables.cosines, tables.sines,
                      first_position, inverse, dtype);
  });
}

void CudaOps::Dropout(const DropoutArgs& args, const void* x, int64_t batch, int64_t per_sample,
                      DType dtype, void* y) {
  Do([&](cudaStream_t stream) {
    return cuda::Dropout(stream, args, x, batch, per_sample, dtype, y);
  });
}

void CudaOps::Copy(void* to, const void* from, size_t bytes) {
  Do([&](cudaStream_t stream) {
    if (bytes == 0) return absl::OkStatus();
    return ZS_CUDA_CALL(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
  });
}

void CudaOps::Zero(void* to, size_t bytes) {
  Do([&](cudaStream_t stream) {
    if (bytes == 0) return absl::OkStatus();
    return ZS_CUDA_CALL(cudaMemsetAsync(to, 0, bytes, stream));
  });
}

void CudaOps::CopyRows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                       int64_t rows, int64_t bytes) {
  Do([&](cudaStream_t stream) {
    if (rows == 0 || bytes == 0) return absl::OkStatus();
    return ZS_CUDA_CALL(cudaMemcpy2DAsync(
        to, static_cast<size_t>(to_stride), from, static_cast<size_t>(from_stride),
        static_cast<size_t>(bytes), static_cast<size_t>(rows), cudaMemcpyDeviceToDevice, stream));
  });
}

void CudaOps::Add(const void* a, const void* b, int64_t n, DType dtype, void* y) {
  Do([&](cudaStream_t stream) { return cuda::Add(stream, a, b, n, dtype, y); });
}

void CudaOps::EmbeddingForward(const int32_t* tokens, const void* tok, const void* pos,
                               int64_t batch, int64_t seq, int64_t cols, DType dtype, void* y) {
  Do([&](cudaStream_t stream) {
    return cuda::EmbeddingForward(stream, tokens, tok, pos, batch, seq, cols, dtype, y);
  });
}

void CudaOps::EmbeddingBackwardRows(const void* dy, const int32_t* tokens, int64_t batch,
                                    int64_t seq, int64_t cols, DType dtype, int32_t* ids,
                                    void* rows) {
  const absl::StatusOr<int64_t> bytes = EmbeddingBackwardWorkspace(batch * seq);
  DoWithScratch(bytes.value_or(0), [&](cudaStream_t stream, void* scratch) {
    if (!bytes.ok()) return bytes.status();
    return cuda::EmbeddingBackwardRows(stream, dy, tokens, batch, seq, cols, dtype, ids, rows,
                                       scratch, *bytes);
  });
}

void CudaOps::PositionBackward(const void* dy, int64_t batch, int64_t seq, int64_t cols,
                               DType dtype, void* d_pos) {
  DoWithScratch(ColumnSumWorkspace(batch, seq * cols), [&](cudaStream_t stream, void* scratch) {
    return cuda::PositionBackward(stream, dy, batch, seq, cols, dtype, d_pos, scratch);
  });
}

void CudaOps::CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v,
                                  DType dtype, float gradient_scale, float* losses) {
  DoWithScratch(CrossEntropyWorkspace(rows, v), [&](cudaStream_t stream, void* scratch) {
    return cuda::CrossEntropyColumns(stream, logits, targets, rows, v, dtype, gradient_scale,
                                     losses, scratch);
  });
}

absl::Status CudaOps::LocalIds(const int32_t* ids, int64_t n, int64_t begin, int64_t end,
                               int32_t* local) {
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  return cuda::LocalIds(stream, ids, n, begin, end, local);
}

absl::Status CudaOps::LookupRows(const int32_t* local, const void* table, int64_t n, int64_t cols,
                                 DType dtype, void* y) {
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  return cuda::LookupRows(stream, local, table, n, cols, dtype, y);
}

absl::Status CudaOps::SoftmaxPart(const void* logits, const int32_t* local_targets, int64_t rows,
                                  int64_t v, DType dtype, float* part) {
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  ZS_ASSIGN_OR_RETURN(void* const scratch, scratch_.Get(CrossEntropyWorkspace(rows, v)));
  return cuda::SoftmaxPart(stream, logits, local_targets, rows, v, dtype, part, scratch);
}

absl::Status CudaOps::CrossEntropyOfParts(const float* parts, int ranks, void* logits,
                                          const int32_t* targets, const int32_t* local_targets,
                                          int64_t rows, int64_t v, DType dtype,
                                          float gradient_scale, float* losses) {
  ZS_ASSIGN_OR_RETURN(const cudaStream_t stream, Stream());
  ZS_ASSIGN_OR_RETURN(void* const scratch, scratch_.Get(CrossEntropyWorkspace(rows, v)));
  return cuda::CrossEntropyOfParts(stream, parts, ranks, logits, targets, local_targets, rows, v,
                                   dtype, gradient_scale, losses, scratch);
}

void CudaOps::Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type) {
  Do([&](cudaStream_t stream) { return cuda::Convert(stream, in, in_type, n, out, out_type); });
}

void CudaOps::AccumulateF32(const void* x, DType dtype, int64_t n, bool accumulate, float* acc) {
  Do([&](cudaStream_t stream) {
    return cuda::AccumulateF32(stream, x, dtype, n, accumulate, acc);
  });
}

void CudaOps::AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type,
                    float* master, float* exp_avg, float* exp_avg_sq, void* param,
                    DType param_type) {
  Do([&](cudaStream_t stream) {
    return cuda::AdamW(stream, args, n, grad, grad_type, master, exp_avg, exp_avg_sq, param,
                       param_type);
  });
}

void CudaOps::AddLosses(const float* losses, const int32_t* targets, int64_t rows, double* sum) {
  Do([&](cudaStream_t stream) { return cuda::AddLosses(stream, losses, targets, rows, sum); });
}

void CudaOps::RoundInPlace(float* x, int64_t n, DType wire) {
  Do([&](cudaStream_t stream) { return cuda::RoundInPlace(stream, x, n, wire); });
}

void CudaOps::AddRounded(const void* sum, DType sum_type, int64_t n, DType wire, void* gradient,
                         DType gradient_type) {
  Do([&](cudaStream_t stream) {
    return cuda::AddRounded(stream, sum, sum_type, n, wire, gradient, gradient_type);
  });
}

void CudaOps::ScatterRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols,
                          DType dtype, void* table) {
  Do([&](cudaStream_t stream) {
    return cuda::ScatterRows(stream, ids, rows, n, cols, dtype, table);
  });
}

void CudaOps::AccumulateRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols,
                             DType dtype, float* table) {
  Do([&](cudaStream_t stream) {
    return cuda::AccumulateRows(stream, ids, rows, n, cols, dtype, table);
  });
}

void CudaOps::FoldRows(const RowSums& sums, const int32_t* ids, const void* rows, int64_t n,
                       DType dtype) {
  Do([&](cudaStream_t stream) { return cuda::FoldRows(stream, sums, ids, rows, n, dtype); });
}

void CudaOps::JoinRows(const RowSums& sums, DType wire, void* gradient, DType gradient_type) {
  Do([&](cudaStream_t stream) {
    return cuda::JoinRows(stream, sums, wire, gradient, gradient_type);
  });
}

void CudaOps::ClearRows(const RowSums& sums) {
  Do([&](cudaStream_t stream) { return cuda::ClearRows(stream, sums); });
}

void CudaOps::AddSquares(const void* x, int64_t n, DType dtype, NormAccumulator* acc) {
  Do([&](cudaStream_t stream) { return cuda::AddSquares(stream, x, n, dtype, acc); });
}

std::string CudaOps::Fingerprint() const {
  const DeviceProperties& gpu = device_->properties();
  return absl::StrCat("cuda ", gpu.name, " sm_", gpu.major, gpu.minor, " cublaslt ",
                      MatmulLibrary::version(), " runtime ", CUDART_VERSION,
                      library_->allow_tf32() ? " tf32" : "");
}

}  // namespace cuda

absl::StatusOr<std::unique_ptr<Ops>> MakeCudaOps(Device* device, bool allow_tf32) {
  cuda::CudaDevice* const gpu = cuda::AsCudaDevice(device);
  if (gpu == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("CUDA kernels on the device \"", device->name(),
                                                   "\": wanted one of MakeCudaDevice"));
  }
  return cuda::CudaOps::Create(gpu, allow_tf32);
}

}  // namespace zeroshard
