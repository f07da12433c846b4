#include "worker/ops/cuda/column_sum.cuh"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {

int64_t ColumnSumWorkspace(int64_t rows, int64_t cols) {
  return SumChunks(rows) * cols * static_cast<int64_t>(sizeof(float));
}

absl::Status ColumnSum(cudaStream_t stream, const void* x, int64_t rows, int64_t cols, DType dtype,
                       void* out, DType out_type, void* workspace) {
  return ForType(dtype, "ColumnSum", [&](auto from) {
    return ForType(out_type, "ColumnSum", [&](auto to) {
      using From = typename decltype(from)::Type;
      using To = typename decltype(to)::Type;
      const ColumnTerms<From> terms{static_cast<const From*>(x), cols};
      // The partial sums have several rows even where x has one.
      const bool aligned = cols % kPack == 0 && AreAligned(rows, cols, {x, out, workspace});
      return LaunchColumnSums<1, To>(stream, "ColumnSum", terms, rows, cols, aligned,
                                     {static_cast<To*>(out)}, workspace);
    });
  });
}

absl::Status PositionBackward(cudaStream_t stream, const void* dy, int64_t batch, int64_t seq,
                              int64_t cols, DType dtype, void* d_pos, void* workspace) {
  return ColumnSum(stream, dy, batch, seq * cols, dtype, d_pos, dtype, workspace);
}

}  // namespace zeroshard::cuda
