// Sums over the threads of a warp or a block in a fixed order.
#pragma once

namespace zeroshard::cuda {

// By halves: lane i and i ^ 16, then i ^ 8 ...; every lane gets the same bits, as a + b = b + a.
__device__ inline float FoldWarp(float value) {
  for (int half = 16; half > 0; half /= 2) value += __shfl_xor_sync(~0u, value, half);
  return value;
}

// Over the kThreads threads along x of a block: of each warp, then of the warps. With 32, a block
// may have several teams along y, and they do not wait for each other; else it is one team, and all
// of it calls.
template <int kThreads>
__device__ float FoldTeam(float value) {
  value = FoldWarp(value);
  if constexpr (kThreads > 32) {
    constexpr unsigned kWarps = kThreads / 32;
    __shared__ float warps[kWarps];
    __syncthreads();  // the sum before this one has been read
    const unsigned lane = threadIdx.x % 32;
    if (lane == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    value = FoldWarp(lane < kWarps ? warps[lane] : 0.0f);
  }
  return value;
}

}  // namespace zeroshard::cuda
