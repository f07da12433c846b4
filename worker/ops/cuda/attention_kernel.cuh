// One kernel around any block's body, and its launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "worker/ops/cuda/attention_params.h"
#include "worker/ops/cuda/attention_simt.cuh"
#include "worker/ops/cuda/attention_tile.h"

namespace zeroshard::cuda::attention {

// Body: a type with `static void Run(const DeviceSimt&, const Params&, void* shared)`.
template <class Body>
__global__ void __launch_bounds__(kThreads) Kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) unsigned char shared[];
  Body::Run(DeviceSimt(), p, shared);
}

// blocks: 1 to 2^31 - 1. shared: bytes, up to what the GPU has (more than 48 KiB must be asked
// for).
template <class Body>
cudaError_t Launch(cudaStream_t stream, const Params& p, int64_t blocks, int shared) {
  const cudaError_t error =
      cudaFuncSetAttribute(Kernel<Body>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  Kernel<Body><<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(shared), stream>>>(p);
  return cudaGetLastError();
}

}  // namespace zeroshard::cuda::attention
