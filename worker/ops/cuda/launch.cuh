// The kernel of each.h, and its launch.
#pragma once

#include "worker/ops/cuda/each.h"
#include "worker/ops/cuda/launch.h"

namespace zeroshard::cuda {

template <bool kAligned, class F>
__global__ void __launch_bounds__(256) EachKernel(F f, int64_t rows, int64_t cols, EachPlan plan) {
  EachOfThread<kAligned>(f, rows, cols, plan, blockIdx.x, blockIdx.y, static_cast<int>(threadIdx.x),
                         static_cast<int>(threadIdx.y));
}

template <class F>
absl::Status LaunchEach(cudaStream_t stream, const char* what, const F& f, int64_t rows,
                        int64_t cols, bool aligned, int64_t packs_a_thread = 1) {
  if (rows <= 0 || cols <= 0) return absl::OkStatus();
  const EachPlan plan = PlanEach(rows, cols, aligned, packs_a_thread);
  const dim3 blocks(static_cast<unsigned>(plan.blocks_x), static_cast<unsigned>(plan.blocks_y));
  const dim3 threads(static_cast<unsigned>(plan.threads_x), static_cast<unsigned>(plan.threads_y));
  if (aligned) {
    EachKernel<true><<<blocks, threads, 0, stream>>>(f, rows, cols, plan);
  } else {
    EachKernel<false><<<blocks, threads, 0, stream>>>(f, rows, cols, plan);
  }
  return LaunchStatus(what);
}

// Of vectors of n elements.
template <class F>
absl::Status LaunchFlat(cudaStream_t stream, const char* what, const F& f, int64_t n,
                        std::initializer_list<const void*> pointers) {
  return LaunchEach(stream, what, Flat<F>{f}, 1, n, AreAligned(1, n, pointers));
}

}  // namespace zeroshard::cuda
