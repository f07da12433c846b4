#include "worker/ops/cuda/column_sum.cuh"
#include "worker/ops/cuda/fold_team.cuh"
#include "worker/ops/cuda/launch.h"
#include "worker/ops/cuda/norms.h"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {
namespace {

constexpr int kBlock = 128;  // threads, unless a row's team is larger

template <int kThreads>
constexpr int kTeams = kThreads < kBlock ? kBlock / kThreads : 1;

template <int kThreads, bool kAligned, class T, bool kCenter>
__device__ void NormRow(const NormOp<T, kCenter>& op, int64_t row) {
  const ThreadCols<kAligned> mine{op.cols, threadIdx.x, kThreads};
  float center = 0;
  if constexpr (kCenter) center = op.Mean(FoldTeam<kThreads>(op.Sum(row, mine)));
  const float scale = op.Scale(FoldTeam<kThreads>(op.Squares(row, center, mine)));
  op.Write(row, center, scale, mine);
}

template <int kThreads, bool kAligned, class T, bool kCenter>
__device__ void NormRow(const NormGradOp<T, kCenter>& op, int64_t row) {
  const ThreadCols<kAligned> mine{op.cols, threadIdx.x, kThreads};
  float sums[2];
  op.Sums(row, mine, sums);
  if constexpr (kCenter) sums[0] = FoldTeam<kThreads>(sums[0]);
  sums[1] = FoldTeam<kThreads>(sums[1]);
  op.Write(row, sums, mine);
}

template <int kThreads, bool kAligned, class Op>
__global__ void __launch_bounds__(kThreads* kTeams<kThreads>) NormKernel(Op op, int64_t rows) {
  for (int64_t row = int64_t{blockIdx.x} * kTeams<kThreads> + threadIdx.y; row < rows;
       row += int64_t{gridDim.x} * kTeams<kThreads>) {
    NormRow<kThreads, kAligned>(op, row);
  }
}

template <int kThreads, class Op>
void LaunchTeams(cudaStream_t stream, const Op& op, int64_t rows, bool aligned) {
  const int64_t blocks = std::min<int64_t>(CeilDiv(rows, kTeams<kThreads>), 1 << 16);
  const dim3 threads(kThreads, kTeams<kThreads>);
  if (aligned) {
    NormKernel<kThreads, true><<<static_cast<unsigned>(blocks), threads, 0, stream>>>(op, rows);
  } else {
    NormKernel<kThreads, false><<<static_cast<unsigned>(blocks), threads, 0, stream>>>(op, rows);
  }
}

template <class Op>
absl::Status LaunchNorm(cudaStream_t stream, const char* what, const Op& op, int64_t rows,
                        bool aligned) {
  if (rows <= 0 || op.cols <= 0) return absl::OkStatus();
  switch (NormTeam(op.cols)) {
    case 32:
      LaunchTeams<32>(stream, op, rows, aligned);
      break;
    case 128:
      LaunchTeams<128>(stream, op, rows, aligned);
      break;
    default:
      LaunchTeams<512>(stream, op, rows, aligned);
  }
  return LaunchStatus(what);
}

template <bool kCenter>
absl::Status Forward(cudaStream_t stream, const char* what, const void* x, const void* weight,
                     const void* bias, int64_t rows, int64_t cols, float eps, DType dtype, void* y,
                     float* mean, float* rstd) {
  return ForType(dtype, what, [&](auto type) {
    using T = typename decltype(type)::Type;
    const NormOp<T, kCenter> op{static_cast<const T*>(x),
                                static_cast<const T*>(weight),
                                static_cast<const T*>(bias),
                                cols,
                                eps,
                                static_cast<T*>(y),
                                mean,
                                rstd};
    return LaunchNorm(stream, what, op, rows, AreAligned(rows, cols, {x, weight, bias, y}));
  });
}

// The weights' gradients come first, as they read all of dy and x, which dx may overwrite.
template <bool kCenter>
absl::Status Backward(cudaStream_t stream, const char* what, const void* dy, const void* x,
                      const void* weight, const float* mean, const float* rstd, int64_t rows,
                      int64_t cols, DType dtype, bool accumulate_dx, void* dx, void* d_weight,
                      void* d_bias, void* workspace) {
  return ForType(dtype, what, [&](auto type) {
    using T = typename decltype(type)::Type;
    using Terms = NormWeightTerms<T, kCenter>;
    const Terms terms{static_cast<const T*>(dy), static_cast<const T*>(x), mean, rstd, cols};
    const bool aligned = cols % kPack == 0 && AreAligned(rows, cols, {dy, x, weight, dx});
    std::array<T*, Terms::kSums> outs = {static_cast<T*>(d_weight)};
    if constexpr (kCenter) outs[1] = static_cast<T*>(d_bias);
    const absl::Status status = LaunchColumnSums<Terms::kSums, T>(
        stream, what, terms, rows, cols,
        aligned && AreAligned(1, cols, {d_weight, d_bias, workspace}), outs, workspace);
    if (!status.ok()) return status;
    const NormGradOp<T, kCenter> op{static_cast<const T*>(dy),
                                    static_cast<const T*>(x),
                                    static_cast<const T*>(weight),
                                    mean,
                                    rstd,
                                    cols,
                                    accumulate_dx,
                                    static_cast<T*>(dx)};
    return LaunchNorm(stream, what, op, rows, aligned);
  });
}

}  // namespace

absl::Status LayerNormForward(cudaStream_t stream, const void* x, const void* weight,
                              const void* bias, int64_t rows, int64_t cols, float eps, DType dtype,
                              void* y, float* mean, float* rstd) {
  return Forward<true>(stream, "LayerNormForward", x, weight, bias, rows, cols, eps, dtype, y, mean,
                       rstd);
}

absl::Status RmsNormForward(cudaStream_t stream, const void* x, const void* weight, int64_t rows,
                            int64_t cols, float eps, DType dtype, void* y, float* rstd) {
  return Forward<false>(stream, "RmsNormForward", x, weight, nullptr, rows, cols, eps, dtype, y,
                        nullptr, rstd);
}

int64_t NormBackwardWorkspace(int64_t rows, int64_t cols) {
  return 2 * ColumnSumWorkspace(rows, cols);
}

absl::Status LayerNormBackward(cudaStream_t stream, const void* dy, const void* x,
                               const void* weight, const float* mean, const float* rstd,
                               int64_t rows, int64_t cols, DType dtype, bool accumulate_dx,
                               void* dx, void* d_weight, void* d_bias, void* workspace) {
  return Backward<true>(stream, "LayerNormBackward", dy, x, weight, mean, rstd, rows, cols, dtype,
                        accumulate_dx, dx, d_weight, d_bias, workspace);
}

absl::Status RmsNormBackward(cudaStream_t stream, const void* dy, const void* x, const void* weight,
                             const float* rstd, int64_t rows, int64_t cols, DType dtype,
                             bool accumulate_dx, void* dx, void* d_weight, void* workspace) {
  return Backward<false>(stream, "RmsNormBackward", dy, x, weight, nullptr, rstd, rows, cols, dtype,
                         accumulate_dx, dx, d_weight, nullptr, workspace);
}

}  // namespace zeroshard::cuda
