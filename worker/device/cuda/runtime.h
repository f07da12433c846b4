// The calls of the CUDA runtime that this folder makes, as an interface: everything but
// real_runtime.cc compiles without CUDA's headers, and tests drive it with a runtime of their own.
#pragma once

#include <cstddef>
#include <string>

// CUDA's own handle types: what cudaStream_t, cudaEvent_t and cudaMemPool_t point to.
struct CUstream_st;
struct CUevent_st;
struct CUmemPoolHandle_st;

namespace zeroshard::cuda {

using StreamHandle = CUstream_st*;
using EventHandle = CUevent_st*;
using PoolHandle = CUmemPoolHandle_st*;

// The values of cudaError_t that are treated differently; any other value of it may occur.
enum class Error : int {
  kOk = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInitialization = 3,
  kStubLibrary = 34,
  kInsufficientDriver = 35,
  kDevicesUnavailable = 46,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kNoKernelImage = 209,
  kEccUncorrectable = 214,
  kNvlinkUncorrectable = 220,
  kContained = 226,
  kOperatingSystem = 304,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kAssert = 710,
  kHardwareStack = 714,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kInvalidAddressSpace = 717,
  kInvalidPc = 718,
  kLaunchFailure = 719,
  kTensorMemoryLeak = 721,
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
  kMpsClientTerminated = 810,
  kExternalDevice = 911,
  kUnknown = 999,
};

struct DeviceProperties {
  std::string name;          // "NVIDIA H100 80GB HBM3"
  int major = 0, minor = 0;  // compute capability
  size_t total_bytes = 0;
  int multiprocessors = 0;
  bool memory_pools = false;  // stream-ordered allocation
};

// Thread-safe. Each call is the runtime's function of that name; an error that is not sticky is
// taken out of the runtime's "last error", so that it is not blamed on a later kernel.
class Runtime {
 public:
  virtual ~Runtime() = default;

  virtual const char* ErrorName(Error error) = 0;
  virtual const char* ErrorText(Error error) = 0;
  // As CUDA writes them: 13000 is 13.0. The driver's is 0 where there is none.
  virtual Error DriverVersion(int* version) = 0;
  virtual Error RuntimeVersion(int* version) = 0;
  virtual Error DeviceCount(int* count) = 0;
  virtual Error Properties(int ordinal, DeviceProperties* properties) = 0;
  // Of the calling thread. Makes the device's context where there is none yet.
  virtual Error SetDevice(int ordinal) = 0;
  virtual Error MemoryInfo(size_t* free, size_t* total) = 0;

  virtual Error CreatePool(int ordinal, PoolHandle* pool) = 0;  // one that keeps what is freed
  virtual Error DestroyPool(PoolHandle pool) = 0;
  virtual Error TrimPool(PoolHandle pool, size_t keep_bytes) = 0;
  virtual Error AllocateAsync(void** data, size_t bytes, PoolHandle pool, StreamHandle stream) = 0;
  virtual Error FreeAsync(void* data, StreamHandle stream) = 0;
  virtual Error HostAllocate(void** data, size_t bytes) = 0;  // pinned, for every context
  virtual Error HostFree(void* data) = 0;
  virtual Error SetAsync(void* data, int value, size_t bytes, StreamHandle stream) = 0;
  virtual Error CopyAsync(void* to, const void* from, size_t bytes, StreamHandle stream) = 0;

  // Streams that do not order with the legacy default stream.
  virtual Error CreateStream(bool high_priority, StreamHandle* stream) = 0;
  virtual Error DestroyStream(StreamHandle stream) = 0;
  virtual Error SynchronizeStream(StreamHandle stream) = 0;
  virtual Error WaitEvent(StreamHandle stream, EventHandle event) = 0;
  virtual void NameStream(StreamHandle stream, const std::string& name) = 0;  // for profilers

  // Events without timing, whose Synchronize sleeps instead of spinning.
  virtual Error CreateEvent(EventHandle* event) = 0;
  virtual Error DestroyEvent(EventHandle event) = 0;
  virtual Error RecordEvent(EventHandle event, StreamHandle stream) = 0;
  virtual Error QueryEvent(EventHandle event) = 0;
  virtual Error SynchronizeEvent(EventHandle event) = 0;
  // With timing. Of two that are done: the time in between.
  virtual Error CreateTimedEvent(EventHandle* event) = 0;
  virtual Error ElapsedTime(EventHandle from, EventHandle to, float* milliseconds) = 0;
};

}  // namespace zeroshard::cuda
