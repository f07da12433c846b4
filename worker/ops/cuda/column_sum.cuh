// Launches the two stages of column_sum.h.
#pragma once

#include <array>

#include "common/status_macros.h"
#include "worker/ops/cuda/column_sum.h"
#include "worker/ops/cuda/launch.cuh"

namespace zeroshard::cuda {

// partials [K, SumChunks(rows), cols]; `aligned`: of every row that f reads, and of the outputs.
template <int K, class T, class F>
absl::Status LaunchColumnSums(cudaStream_t stream, const char* what, const F& f, int64_t rows,
                              int64_t cols, bool aligned, const std::array<T*, K>& outs,
                              void* workspace) {
  const int64_t chunks = SumChunks(rows);
  auto* const partials = static_cast<float*>(workspace);
  const ChunkSumOp<K, F> sum{f, rows, cols, chunks, partials};
  ZS_RETURN_IF_ERROR(LaunchEach(stream, what, sum, chunks, cols, aligned));
  FoldSumOp<K, T> fold{partials, cols, chunks, {}};
  for (int k = 0; k < K; ++k) fold.outs[k] = outs[static_cast<size_t>(k)];
  return LaunchEach(stream, what, fold, K, cols, aligned);
}

}  // namespace zeroshard::cuda
