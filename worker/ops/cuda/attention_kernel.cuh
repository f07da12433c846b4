// One kernel around any block's body, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "worker/ops/cuda/attention_simt.cuh"
#include "worker/ops/cuda/attention_tile.h"

namespace zeroshard::cuda::attention {

// Body: a type with `static void Run(const DeviceSimt&, const P&, void* shared)`.
template <class Body, class P>
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ P p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Body::Run(DeviceSimt(), p, shared);
}

// blocks: 1 to 2^31 - 1. shared: bytes, up to what the GPU has (more than 48 KiB must be asked
// for).
template <class Body, class P>
cudaError_t Launch(cudaStream_t stream, const P& p, int64_t blocks, int shared) {
  const auto kernel = Kernel<Body, P>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(shared), stream>>>(p);
  return cudaGetLastError();
}

// f(T(), integral_constant<int, D>()) for what the tensor core kernels are compiled for: T bf16 or
// fp16, D 32, 64 or 128.
template <class F>
cudaError_t WithTile(DType dtype, int padded_dim, const F& f) {
  const auto of_type = [&](auto element) {
    switch (padded_dim) {
      case 32:
        return f(element, std::integral_constant<int, 32>());
      case 64:
        return f(element, std::integral_constant<int, 64>());
      case 128:
        return f(element, std::integral_constant<int, 128>());
      default:
        return cudaErrorInvalidValue;
    }
  };
  if (dtype == DType::kF32) return cudaErrorInvalidValue;
  return dtype == DType::kF16 ? of_type(Fp16()) : of_type(Bf16());
}

}  // namespace zeroshard::cuda::attention
