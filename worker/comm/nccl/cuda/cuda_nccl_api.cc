#include "worker/comm/nccl/cuda/cuda_nccl_api.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/comm/nccl/cuda/fold_kernel.h"
#include "worker/comm/nccl/cuda/nccl_library.h"
#include "worker/comm/nccl/nccl_operation.h"
#include "worker/device/cuda/event.h"
#include "worker/device/cuda/stream.h"

namespace zeroshard {
namespace {

constexpr bool Same(NcclResult ours, ncclResult_t theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}
static_assert(Same(NcclResult::kSuccess, ncclSuccess));
static_assert(Same(NcclResult::kUnhandledCudaError, ncclUnhandledCudaError));
static_assert(Same(NcclResult::kSystemError, ncclSystemError));
static_assert(Same(NcclResult::kInternalError, ncclInternalError));
static_assert(Same(NcclResult::kInvalidArgument, ncclInvalidArgument));
static_assert(Same(NcclResult::kInvalidUsage, ncclInvalidUsage));
static_assert(Same(NcclResult::kRemoteError, ncclRemoteError));
static_assert(Same(NcclResult::kInProgress, ncclInProgress));
static_assert(kNcclIdBytes == NCCL_UNIQUE_ID_BYTES);

// Sums leave the other SMs to the computation that runs beside them.
constexpr int kFoldBlocksPerMultiprocessor = 2;

NcclResult Result(ncclResult_t result) { return static_cast<NcclResult>(result); }
ncclComm_t Native(NcclComm* comm) { return reinterpret_cast<ncclComm_t>(comm); }
cudaStream_t Native(NcclStream* stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Native(NcclMark* mark) { return reinterpret_cast<cudaEvent_t>(mark); }

ncclDataType_t Native(DType type) {
  switch (type) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF16:
      return ncclFloat16;
    case DType::kI32:
      return ncclInt32;
    case DType::kU8:
      return ncclUint8;
  }
  return ncclUint8;
}

// The last error is a thread's, and the next launch's check would find it.
cuda::Error Took(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return static_cast<cuda::Error>(error);
}

// An operation as the device's streams see it: they wait on the GPU for its mark.
class OperationEvent : public cuda::GpuEvent {
 public:
  explicit OperationEvent(std::shared_ptr<NcclOperation> operation)
      : operation_(std::move(operation)) {}
  bool Done() const override { return operation_->Done(); }
  absl::Status Wait() override { return operation_->Wait(); }
  bool Recorded() const override { return operation_->Launched(); }
  absl::StatusOr<cuda::EventHandle> AwaitRecorded() override {
    NcclMark* const mark = operation_->AwaitLaunched();
    if (mark == nullptr) ZS_RETURN_IF_ERROR(operation_->Wait());
    return Native(mark);
  }

 private:
  const std::shared_ptr<NcclOperation> operation_;
};

class CudaNcclApi : public NcclApi {
 public:
  CudaNcclApi(const NcclLibrary& nccl, cuda::CudaDevice* device)
      : nccl_(nccl), device_(device), context_(device->context()) {}
  ~CudaNcclApi() override {
    for (cudaEvent_t mark : marks_) cudaEventDestroy(mark);
  }

  void EnterThread() override { context_->Enter().IgnoreError(); }

  NcclResult Version(int* version) override { return Result(nccl_.ncclGetVersion(version)); }
  NcclResult MakeUniqueId(std::string* id) override {
    ncclUniqueId native;
    const ncclResult_t result = nccl_.ncclGetUniqueId(&native);
    id->assign(native.internal, sizeof(native.internal));
    return Result(result);
  }
  NcclResult InitRank(int size, const std::string& id, int rank, NcclComm** comm) override {
    ncclUniqueId native;
    if (id.size() != sizeof(native.internal)) return NcclResult::kInvalidArgument;
    std::memcpy(native.internal, id.data(), sizeof(native.internal));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t made = nullptr;
    const ncclResult_t result = nccl_.ncclCommInitRankConfig(&made, size, native, rank, &config);
    *comm = reinterpret_cast<NcclComm*>(made);
    return Result(result);
  }
  NcclResult AsyncError(NcclComm* comm, NcclResult* state) override {
    ncclResult_t native = ncclSuccess;
    const ncclResult_t result = nccl_.ncclCommGetAsyncError(Native(comm), &native);
    *state = Result(native);
    return Result(result);
  }
  NcclResult Finalize(NcclComm* comm) override {
    return Result(nccl_.ncclCommFinalize(Native(comm)));
  }
  NcclResult Destroy(NcclComm* comm) override {
    return Result(nccl_.ncclCommDestroy(Native(comm)));
  }
  NcclResult Abort(NcclComm* comm) override { return Result(nccl_.ncclCommAbort(Native(comm))); }
  std::string Describe(NcclResult result, NcclComm* comm) override {
    const char* last = nccl_.ncclGetLastError(Native(comm));
    std::string text = nccl_.ncclGetErrorString(static_cast<ncclResult_t>(result));
    if (last != nullptr && *last != '\0') absl::StrAppend(&text, " (", last, ")");
    return text;
  }

  NcclResult Register(NcclComm* comm, void* data, size_t bytes, void** handle) override {
    return Result(nccl_.ncclCommRegister(Native(comm), data, bytes, handle));
  }
  NcclResult Deregister(NcclComm* comm, void* handle) override {
    return Result(nccl_.ncclCommDeregister(Native(comm), handle));
  }

  NcclResult GroupStart() override { return Result(nccl_.ncclGroupStart()); }
  NcclResult GroupEnd() override { return Result(nccl_.ncclGroupEnd()); }
  NcclResult AllGather(const void* send, void* receive, int64_t count, DType type, NcclComm* comm,
                       NcclStream* stream) override {
    return Result(nccl_.ncclAllGather(send, receive, static_cast<size_t>(count), Native(type),
                                      Native(comm), Native(stream)));
  }
  NcclResult ReduceScatter(const void* send, void* receive, int64_t count, DType type,
                           NcclComm* comm, NcclStream* stream) override {
    return Result(nccl_.ncclReduceScatter(send, receive, static_cast<size_t>(count), Native(type),
                                          ncclSum, Native(comm), Native(stream)));
  }
  NcclResult AllReduce(const void* send, void* receive, int64_t count, DType type, NcclComm* comm,
                       NcclStream* stream) override {
    return Result(nccl_.ncclAllReduce(send, receive, static_cast<size_t>(count), Native(type),
                                      ncclSum, Native(comm), Native(stream)));
  }
  NcclResult Broadcast(void* buffer, int64_t count, DType type, int root, NcclComm* comm,
                       NcclStream* stream) override {
    return Result(nccl_.ncclBroadcast(buffer, buffer, static_cast<size_t>(count), Native(type),
                                      root, Native(comm), Native(stream)));
  }
  NcclResult Send(const void* buffer, int64_t count, DType type, int peer, NcclComm* comm,
                  NcclStream* stream) override {
    return Result(nccl_.ncclSend(buffer, static_cast<size_t>(count), Native(type), peer,
                                 Native(comm), Native(stream)));
  }
  NcclResult Receive(void* buffer, int64_t count, DType type, int peer, NcclComm* comm,
                     NcclStream* stream) override {
    return Result(nccl_.ncclRecv(buffer, static_cast<size_t>(count), Native(type), peer,
                                 Native(comm), Native(stream)));
  }

  absl::StatusOr<NcclStream*> NewStream() override {
    auto stream = device_->NewCudaStream("comm");
    cuda::StreamHandle handle = nullptr;
    ZS_ASSIGN_OR_RETURN(handle, stream->handle());
    std::lock_guard lock(mutex_);
    streams_.emplace_back(handle, std::move(stream));
    return reinterpret_cast<NcclStream*>(handle);
  }
  void DeleteStream(NcclStream* stream) override {
    std::lock_guard lock(mutex_);
    std::erase_if(streams_, [&](const auto& owned) { return owned.first == Native(stream); });
  }
  absl::StatusOr<bool> WaitFor(NcclStream* stream, const Event& event) override {
    cuda::GpuEvent* const gpu = cuda::AsGpuEvent(event);
    if (gpu == nullptr || !gpu->Recorded()) return false;
    cuda::EventHandle native = nullptr;
    ZS_ASSIGN_OR_RETURN(native, gpu->AwaitRecorded());
    if (native == nullptr) return false;
    ZS_RETURN_IF_ERROR(
        ZS_CUDA_STATUS(context_, Took(cudaStreamWaitEvent(Native(stream), native, 0))));
    return true;
  }
  absl::Status Copy(void* to, const void* from, size_t bytes, NcclStream* stream) override {
    return ZS_CUDA_STATUS(
        context_, Took(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Native(stream))));
  }
  absl::Status Fold(const FoldArgs& args, NcclStream* stream) override {
    const int blocks = kFoldBlocksPerMultiprocessor * device_->properties().multiprocessors;
    return ZS_CUDA_STATUS(context_, Took(LaunchFold(args, blocks, Native(stream))));
  }

  absl::StatusOr<NcclMark*> Mark(NcclStream* stream) override {
    cudaEvent_t mark = nullptr;
    {
      std::lock_guard lock(mutex_);
      if (!marks_.empty()) {
        mark = marks_.back();
        marks_.pop_back();
      }
    }
    if (mark == nullptr) {
      ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(context_, Took(cudaEventCreate(&mark))));
    }
    const absl::Status recorded =
        ZS_CUDA_STATUS(context_, Took(cudaEventRecord(mark, Native(stream))));
    if (recorded.ok()) return reinterpret_cast<NcclMark*>(mark);
    FreeMark(reinterpret_cast<NcclMark*>(mark));
    return recorded;
  }
  absl::StatusOr<bool> Reached(NcclMark* mark) override {
    context_->Enter().IgnoreError();
    const cudaError_t state = cudaEventQuery(Native(mark));
    if (state == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    ZS_RETURN_IF_ERROR(ZS_CUDA_STATUS(context_, Took(state)));
    return true;
  }
  double Seconds(NcclMark* from, NcclMark* to) override {
    float milliseconds = 0;
    context_->Enter().IgnoreError();
    if (cudaEventElapsedTime(&milliseconds, Native(from), Native(to)) != cudaSuccess) {
      cudaGetLastError();
      return 0;
    }
    return 1e-3 * milliseconds;
  }
  void FreeMark(NcclMark* mark) override {
    std::lock_guard lock(mutex_);
    marks_.push_back(Native(mark));
  }
  Event EventOf(std::shared_ptr<NcclOperation> operation) override {
    return Event(std::make_shared<OperationEvent>(std::move(operation)));
  }

 private:
  const NcclLibrary& nccl_;
  cuda::CudaDevice* const device_;
  const std::shared_ptr<cuda::Context> context_;
  std::mutex mutex_;
  std::vector<std::pair<cudaStream_t, std::unique_ptr<cuda::CudaStream>>> streams_;
  std::vector<cudaEvent_t> marks_;  // free ones: making one is a call of the driver
};

}  // namespace

absl::StatusOr<std::shared_ptr<NcclApi>> MakeCudaNcclApi(cuda::CudaDevice* device) {
  ZS_ASSIGN_OR_RETURN(const NcclLibrary* const nccl, LoadNccl());
  return std::make_shared<CudaNcclApi>(*nccl, device);
}

}  // namespace zeroshard
