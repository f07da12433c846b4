#include "common/status_macros.h"
#include "worker/ops/cuda/cross_entropy.h"
#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {
namespace {

template <class Finish>
__global__ void __launch_bounds__(kJoinColumns* kJoinParts)
    JoinKernel(ChunkSums in, int64_t chunks, int64_t rows, Finish finish) {
  __shared__ float maxima[kJoinParts][kJoinColumns], sums[kJoinParts][kJoinColumns];
  const int64_t col = int64_t{blockIdx.x} * kJoinColumns + threadIdx.x;
  OnlineSum total;
  if (col < rows) total = JoinChunks(in, rows, chunks, col, static_cast<int>(threadIdx.y));
  maxima[threadIdx.y][threadIdx.x] = total.max;
  sums[threadIdx.y][threadIdx.x] = total.sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= rows) return;
  for (int part = 1; part < kJoinParts; ++part) {
    total = Join(total, {maxima[part][threadIdx.x], sums[part][threadIdx.x]});
  }
  finish(total, col);
}

template <class Finish>
absl::Status LaunchJoin(cudaStream_t stream, const char* what, const ChunkSums& in, int64_t chunks,
                        int64_t rows, const Finish& finish) {
  const dim3 threads(kJoinColumns, kJoinParts);
  JoinKernel<<<static_cast<unsigned>(CeilDiv(rows, kJoinColumns)), threads, 0, stream>>>(
      in, chunks, rows, finish);
  return LaunchStatus(what);
}

constexpr int kLossThreads = 256;
constexpr int kLossTile = 1024;

// One block; its first thread adds, the others fetch.
__global__ void __launch_bounds__(kLossThreads)
    AddLossesKernel(const float* losses, const int32_t* targets, int64_t rows, double* sum) {
  __shared__ float values[kLossTile];
  __shared__ int32_t wanted[kLossTile];
  double total = 0;
  if (threadIdx.x == 0) total = *sum;
  for (int64_t begin = 0; begin < rows; begin += kLossTile) {
    const int64_t count = rows - begin < kLossTile ? rows - begin : kLossTile;
    for (int64_t i = threadIdx.x; i < count; i += kLossThreads) {
      values[i] = losses[begin + i];
      wanted[i] = targets[begin + i];
    }
    __syncthreads();
    if (threadIdx.x == 0) total = AddInOrder(values, wanted, count, total);
    __syncthreads();
  }
  if (threadIdx.x == 0) *sum = total;
}

struct Workspace {
  ChunkSums chunks;
  ColumnScales columns;
};

// Each array begins at a multiple of 16 bytes where `rows` is one of kPack.
Workspace SpaceOf(void* workspace, int64_t rows, int64_t chunks) {
  auto* const floats = static_cast<float*>(workspace);
  float* const columns = floats + 2 * chunks * rows;
  return {{floats, floats + chunks * rows}, {columns, columns + rows}};
}

}  // namespace

int64_t CrossEntropyWorkspace(int64_t rows, int64_t v) {
  return 2 * (CeilDiv(v, kVocabularyChunk) + 1) * rows * static_cast<int64_t>(sizeof(float));
}

absl::Status CrossEntropyColumns(cudaStream_t stream, void* logits, const int32_t* targets,
                                 int64_t rows, int64_t v, DType dtype, float gradient_scale,
                                 float* losses, void* workspace) {
  if (rows <= 0 || v <= 0) return absl::OkStatus();
  constexpr const char* kWhat = "CrossEntropyColumns";
  return ForType(dtype, kWhat, [&](auto type) {
    using T = typename decltype(type)::Type;
    auto* const typed = static_cast<T*>(logits);
    const int64_t chunks = CeilDiv(v, kVocabularyChunk);
    const Workspace space = SpaceOf(workspace, rows, chunks);
    const bool aligned = rows % kPack == 0 && AreAligned(v, rows, {logits, workspace});
    ZS_RETURN_IF_ERROR(LaunchEach(stream, kWhat, ChunkSumsOp<T>{typed, rows, v, space.chunks},
                                  chunks, rows, aligned));
    ZS_RETURN_IF_ERROR(LaunchJoin(stream, kWhat, space.chunks, chunks, rows,
                                  FinishLosses<T>{typed, targets, rows, losses, space.columns}));
    if (gradient_scale == 0) return absl::OkStatus();
    return LaunchEach(stream, kWhat,
                      SoftmaxGradOp<T>{typed, targets, rows, v, gradient_scale, space.columns},
                      chunks, rows, aligned);
  });
}

absl::Status SoftmaxPart(cudaStream_t stream, const void* logits, const int32_t* local_targets,
                         int64_t rows, int64_t v, DType dtype, float* part, void* workspace) {
  if (rows <= 0) return absl::OkStatus();
  constexpr const char* kWhat = "SoftmaxPart";
  return ForType(dtype, kWhat, [&](auto type) {
    using T = typename decltype(type)::Type;
    const auto* const typed = static_cast<const T*>(logits);
    const int64_t chunks = CeilDiv(v, kVocabularyChunk);  // 0 where all rows are padding
    const Workspace space = SpaceOf(workspace, rows, chunks);
    const bool aligned = rows % kPack == 0 && AreAligned(v, rows, {logits, workspace});
    ZS_RETURN_IF_ERROR(LaunchEach(stream, kWhat, ChunkSumsOp<T>{typed, rows, v, space.chunks},
                                  chunks, rows, aligned));
    return LaunchJoin(stream, kWhat, space.chunks, chunks, rows,
                      FinishPart<T>{typed, local_targets, rows, part});
  });
}

absl::Status CrossEntropyOfParts(cudaStream_t stream, const float* parts, int ranks, void* logits,
                                 const int32_t* targets, const int32_t* local_targets, int64_t rows,
                                 int64_t v, DType dtype, float gradient_scale, float* losses,
                                 void* workspace) {
  constexpr const char* kWhat = "CrossEntropyOfParts";
  if (ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(kWhat, ": parts of ", ranks, " ranks; wanted 1 or more"));
  }
  if (rows <= 0) return absl::OkStatus();
  return ForType(dtype, kWhat, [&](auto type) {
    using T = typename decltype(type)::Type;
    auto* const typed = static_cast<T*>(logits);
    const ColumnScales columns = SpaceOf(workspace, rows, 0).columns;
    ZS_RETURN_IF_ERROR(LaunchOneByOne(
        stream, kWhat, JoinPartsOp{parts, ranks, targets, rows, losses, columns}, rows));
    if (gradient_scale == 0) return absl::OkStatus();
    return LaunchEach(stream, kWhat,
                      SoftmaxGradOp<T>{typed, local_targets, rows, v, gradient_scale, columns},
                      CeilDiv(v, kVocabularyChunk), rows,
                      rows % kPack == 0 && AreAligned(v, rows, {logits, workspace}));
  });
}

absl::Status AddLosses(cudaStream_t stream, const float* losses, const int32_t* targets,
                       int64_t rows, double* sum) {
  if (rows <= 0) return absl::OkStatus();
  AddLossesKernel<<<1, kLossThreads, 0, stream>>>(losses, targets, rows, sum);
  return LaunchStatus("AddLosses");
}

}  // namespace zeroshard::cuda
