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

template <bool kAligned, class F>
absl::Status LaunchPlan(cudaStream_t stream, const char* what, const F& f, int64_t rows,
                        int64_t cols, int64_t packs_a_thread) {
  if (rows <= 0 || cols <= 0) return absl::OkStatus();
  const EachPlan plan = PlanEach(rows, cols, kAligned, packs_a_thread);
  const dim3 blocks(static_cast<unsigned>(plan.blocks_x), static_cast<unsigned>(plan.blocks_y));
  const dim3 threads(static_cast<unsigned>(plan.threads_x), static_cast<unsigned>(plan.threads_y));
  EachKernel<kAligned><<<blocks, threads, 0, stream>>>(f, rows, cols, plan);
  return LaunchStatus(what);
}

template <class F>
absl::Status LaunchEach(cudaStream_t stream, const char* what, const F& f, int64_t rows,
                        int64_t cols, bool aligned, int64_t packs_a_thread = 1) {
  return aligned ? LaunchPlan<true>(stream, what, f, rows, cols, packs_a_thread)
                 : LaunchPlan<false>(stream, what, f, rows, cols, packs_a_thread);
}

// Of vectors of n elements.
template <class F>
absl::Status LaunchFlat(cudaStream_t stream, const char* what, const F& f, int64_t n,
                        std::initializer_list<const void*> pointers) {
  return LaunchEach(stream, what, Flat<F>{f}, 1, n, AreAligned(1, n, pointers));
}

// Of n elements that are not taken in packs.
template <class F>
absl::Status LaunchOneByOne(cudaStream_t stream, const char* what, const F& f, int64_t n) {
  return LaunchPlan<false>(stream, what, OneByOne<F>{f}, 1, n, 1);
}

}  // namespace zeroshard::cuda
