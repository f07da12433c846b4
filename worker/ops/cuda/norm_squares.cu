#include <algorithm>

#include "worker/ops/cuda/launch.h"
#include "worker/ops/cuda/norm_squares.h"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksAtOnce = kThreads / kSquareLanes;
constexpr int64_t kMaxBlocks = 1024;

// Lanes 0 to 7 of each eight threads: folded by halves, so all of them get the sum.
__device__ double FoldLanes(double sum) {
  for (int half = kSquareLanes / 2; half > 0; half /= 2) {
    sum += __shfl_xor_sync(~0u, sum, half);
  }
  return sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    SquaresKernel(const T* x, int64_t n, int64_t blocks, NormAccumulator* acc) {
  __shared__ uint64_t parts[kBlocksAtOnce][4];
  const int lane = static_cast<int>(threadIdx.x) % kSquareLanes;
  const int place = static_cast<int>(threadIdx.x) / kSquareLanes;
  NormAccumulator mine;
  // Every thread takes every turn: the shuffles need whole warps.
  for (int64_t first = int64_t{blockIdx.x} * kBlocksAtOnce; first < blocks;
       first += int64_t{gridDim.x} * kBlocksAtOnce) {
    const double sum = FoldLanes(LaneSquares(x, n, first + place, lane));
    if (lane == 0) AddBlock(sum, &mine);
  }
  if (lane == 0) {
    parts[place][0] = mine.low;
    parts[place][1] = mine.middle;
    parts[place][2] = mine.high;
    parts[place][3] = mine.nonfinite;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kBlocksAtOnce; ++i) {
    AddPart({parts[i][0], parts[i][1], parts[i][2], parts[i][3]}, &mine);
  }
  AddPartShared(mine, acc);
}

}  // namespace

absl::Status AddSquares(cudaStream_t stream, const void* x, int64_t n, DType dtype,
                        NormAccumulator* acc) {
  if (n <= 0) return absl::OkStatus();
  return ForType(dtype, "AddSquares", [&](auto type) {
    using T = typename decltype(type)::Type;
    const int64_t blocks = CeilDiv(n, kSquareBlock);
    const auto grid = static_cast<unsigned>(std::min(CeilDiv(blocks, kBlocksAtOnce), kMaxBlocks));
    SquaresKernel<<<grid, kThreads, 0, stream>>>(static_cast<const T*>(x), n, blocks, acc);
    return LaunchStatus("AddSquares");
  });
}

}  // namespace zeroshard::cuda
