#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/status_macros.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/errors.h"
#include "worker/device/cuda/make_cuda_device.h"

namespace zeroshard::cuda {
namespace {

static_assert(std::is_same_v<StreamHandle, cudaStream_t>);
static_assert(std::is_same_v<EventHandle, cudaEvent_t>);
static_assert(std::is_same_v<PoolHandle, cudaMemPool_t>);

constexpr bool Same(Error ours, cudaError_t theirs) { return static_cast<int>(ours) == theirs; }
static_assert(Same(Error::kOk, cudaSuccess));
static_assert(Same(Error::kInvalidValue, cudaErrorInvalidValue));
static_assert(Same(Error::kOutOfMemory, cudaErrorMemoryAllocation));
static_assert(Same(Error::kInitialization, cudaErrorInitializationError));
static_assert(Same(Error::kStubLibrary, cudaErrorStubLibrary));
static_assert(Same(Error::kInsufficientDriver, cudaErrorInsufficientDriver));
static_assert(Same(Error::kDevicesUnavailable, cudaErrorDevicesUnavailable));
static_assert(Same(Error::kNoDevice, cudaErrorNoDevice));
static_assert(Same(Error::kInvalidDevice, cudaErrorInvalidDevice));
static_assert(Same(Error::kNoKernelImage, cudaErrorNoKernelImageForDevice));
static_assert(Same(Error::kEccUncorrectable, cudaErrorECCUncorrectable));
static_assert(Same(Error::kNvlinkUncorrectable, cudaErrorNvlinkUncorrectable));
static_assert(Same(Error::kContained, cudaErrorContained));
static_assert(Same(Error::kOperatingSystem, cudaErrorOperatingSystem));
static_assert(Same(Error::kNotReady, cudaErrorNotReady));
static_assert(Same(Error::kIllegalAddress, cudaErrorIllegalAddress));
static_assert(Same(Error::kLaunchOutOfResources, cudaErrorLaunchOutOfResources));
static_assert(Same(Error::kLaunchTimeout, cudaErrorLaunchTimeout));
static_assert(Same(Error::kAssert, cudaErrorAssert));
static_assert(Same(Error::kHardwareStack, cudaErrorHardwareStackError));
static_assert(Same(Error::kIllegalInstruction, cudaErrorIllegalInstruction));
static_assert(Same(Error::kMisalignedAddress, cudaErrorMisalignedAddress));
static_assert(Same(Error::kInvalidAddressSpace, cudaErrorInvalidAddressSpace));
static_assert(Same(Error::kInvalidPc, cudaErrorInvalidPc));
static_assert(Same(Error::kLaunchFailure, cudaErrorLaunchFailure));
static_assert(Same(Error::kTensorMemoryLeak, cudaErrorTensorMemoryLeak));
static_assert(Same(Error::kSystemNotReady, cudaErrorSystemNotReady));
static_assert(Same(Error::kSystemDriverMismatch, cudaErrorSystemDriverMismatch));
static_assert(Same(Error::kMpsClientTerminated, cudaErrorMpsClientTerminated));
static_assert(Same(Error::kExternalDevice, cudaErrorExternalDevice));
static_assert(Same(Error::kUnknown, cudaErrorUnknown));

// The last error is a thread's, and the next check of a kernel would find it.
Error Took(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<Error>(error);
}

class LinkedRuntime : public Runtime {
 public:
  const char* ErrorName(Error error) override {
    return cudaGetErrorName(static_cast<cudaError_t>(error));
  }
  const char* ErrorText(Error error) override {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
  }
  Error DriverVersion(int* version) override { return Took(cudaDriverGetVersion(version)); }
  Error RuntimeVersion(int* version) override { return Took(cudaRuntimeGetVersion(version)); }
  Error DeviceCount(int* count) override { return Took(cudaGetDeviceCount(count)); }
  Error Properties(int ordinal, DeviceProperties* properties) override {
    cudaDeviceProp found;
    if (const Error error = Took(cudaGetDeviceProperties(&found, ordinal)); error != Error::kOk) {
      return error;
    }
    *properties = {.name = found.name,
                   .major = found.major,
                   .minor = found.minor,
                   .total_bytes = found.totalGlobalMem,
                   .multiprocessors = found.multiProcessorCount,
                   .memory_pools = found.memoryPoolsSupported != 0};
    return Error::kOk;
  }
  Error SetDevice(int ordinal) override { return Took(cudaSetDevice(ordinal)); }
  Error MemoryInfo(size_t* free, size_t* total) override {
    return Took(cudaMemGetInfo(free, total));
  }

  Error CreatePool(int ordinal, PoolHandle* pool) override {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.handleTypes = cudaMemHandleTypeNone;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = ordinal;
    if (const Error error = Took(cudaMemPoolCreate(pool, &properties)); error != Error::kOk) {
      return error;
    }
    uint64_t keep = std::numeric_limits<uint64_t>::max();
    return Took(cudaMemPoolSetAttribute(*pool, cudaMemPoolAttrReleaseThreshold, &keep));
  }
  Error DestroyPool(PoolHandle pool) override { return Took(cudaMemPoolDestroy(pool)); }
  Error TrimPool(PoolHandle pool, size_t keep_bytes) override {
    return Took(cudaMemPoolTrimTo(pool, keep_bytes));
  }
  Error AllocateAsync(void** data, size_t bytes, PoolHandle pool, StreamHandle stream) override {
    return Took(cudaMallocFromPoolAsync(data, bytes, pool, stream));
  }
  Error FreeAsync(void* data, StreamHandle stream) override {
    return Took(cudaFreeAsync(data, stream));
  }
  Error HostAllocate(void** data, size_t bytes) override {
    return Took(cudaHostAlloc(data, bytes, cudaHostAllocPortable));
  }
  Error HostFree(void* data) override { return Took(cudaFreeHost(data)); }
  Error SetAsync(void* data, int value, size_t bytes, StreamHandle stream) override {
    return Took(cudaMemsetAsync(data, value, bytes, stream));
  }
  Error CopyAsync(void* to, const void* from, size_t bytes, StreamHandle stream) override {
    return Took(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
  }

  Error CreateStream(bool high_priority, StreamHandle* stream) override {
    int least = 0, greatest = 0;
    if (const Error error = Took(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        error != Error::kOk) {
      return error;
    }
    return Took(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking,
                                             high_priority ? greatest : least));
  }
  Error DestroyStream(StreamHandle stream) override { return Took(cudaStreamDestroy(stream)); }
  Error SynchronizeStream(StreamHandle stream) override {
    return Took(cudaStreamSynchronize(stream));
  }
  Error WaitEvent(StreamHandle stream, EventHandle event) override {
    return Took(cudaStreamWaitEvent(stream, event, cudaEventWaitDefault));
  }
  void NameStream(StreamHandle stream, const std::string& name) override {
    nvtxNameCudaStreamA(stream, name.c_str());
  }

  Error CreateEvent(EventHandle* event) override {
    return Took(cudaEventCreateWithFlags(event, cudaEventDisableTiming | cudaEventBlockingSync));
  }
  Error DestroyEvent(EventHandle event) override { return Took(cudaEventDestroy(event)); }
  Error RecordEvent(EventHandle event, StreamHandle stream) override {
    return Took(cudaEventRecord(event, stream));
  }
  Error QueryEvent(EventHandle event) override { return Took(cudaEventQuery(event)); }
  Error SynchronizeEvent(EventHandle event) override { return Took(cudaEventSynchronize(event)); }
  Error CreateTimedEvent(EventHandle* event) override {
    return Took(cudaEventCreateWithFlags(event, cudaEventBlockingSync));
  }
  Error ElapsedTime(EventHandle from, EventHandle to, float* milliseconds) override {
    return Took(cudaEventElapsedTime(milliseconds, from, to));
  }
};

}  // namespace

Runtime* RealRuntime() {
  static LinkedRuntime* const runtime = new LinkedRuntime();  // events outlive main's statics
  return runtime;
}

absl::Status CallStatus(int error, const char* call, const char* file, int line) {
  return ErrorStatus(RealRuntime(), static_cast<Error>(error), call, file, line);
}

}  // namespace zeroshard::cuda

namespace zeroshard {

absl::StatusOr<std::unique_ptr<Device>> MakeCudaDevice(int ordinal) {
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<Device> device,
                      cuda::CudaDevice::Create(cuda::RealRuntime(), ordinal));
  return device;
}

absl::StatusOr<uint64_t> CudaMemoryBytes(int ordinal) {
  absl::StatusOr<cuda::DeviceProperties> found = cuda::ProbeDevice(cuda::RealRuntime(), ordinal);
  if (!found.ok()) return found.status();
  return found->total_bytes;
}

absl::Status CheckCudaDevice(int ordinal) {
  return cuda::ProbeDevice(cuda::RealRuntime(), ordinal).status();
}

}  // namespace zeroshard
