// The GPUs of this machine. Only where CUDA is built (ZEROSHARD_HAS_CUDA): zeroshard_device_cuda.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device/cuda/runtime.h"
#include "worker/device/device.h"

namespace zeroshard {

// GPU `ordinal` of those that CUDA_VISIBLE_DEVICES leaves. Errors as cuda::ProbeDevice has them,
// RESOURCE_EXHAUSTED where the GPU has no room for a context. One device of a GPU a process at a
// time is the rule; several work.
absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal);

// The same errors, as far as they show without touching the GPU.
absl::Status CheckCudaDevice(int ordinal);

// All of its memory, in use or not; the same errors.
absl::StatusOr<uint64_t> CudaMemoryBytes(int ordinal);

namespace cuda {

// The CUDA runtime, linked statically: a program with it starts without any driver.
Runtime* RealRuntime();

// For callers of the runtime itself: ZS_CUDA_CALL(cudaMemcpy2DAsync(...)), also of kernels
// (ZS_CUDA_CALL(cudaGetLastError())).
absl::Status CallStatus(int error, const char* call, const char* file, int line);

}  // namespace cuda
}  // namespace zeroshard

#define ZS_CUDA_CALL(call) \
  ::zeroshard::cuda::CallStatus(static_cast<int>(call), #call, __FILE__, __LINE__)
