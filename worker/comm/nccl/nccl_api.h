// What the communicator asks of NCCL and of the GPU's streams: the one place where another
// implementation (tests) can take NCCL's. Handles are opaque, so that no header of CUDA is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/types.h"
#include "worker/comm/nccl/fold.h"
#include "worker/device/device.h"

namespace zeroshard {

class NcclOperation;

struct NcclComm;    // an ncclComm_t
struct NcclStream;  // a cudaStream_t
struct NcclMark;    // a cudaEvent_t that takes the time

// Values as in nccl.h.
enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

constexpr size_t kNcclIdBytes = 128;

// One GPU. Calls on one communicator come from one thread at a time and, but for AsyncError,
// Finalize, Destroy and Abort, in groups; Abort may come while another call has not returned. The
// methods below "streams" are thread-safe.
class NcclApi {
 public:
  virtual ~NcclApi() = default;

  // Called first on every thread that the communicator starts.
  virtual void EnterThread() = 0;

  virtual NcclResult Version(int* version) = 0;  // 22809 is 2.28.9
  virtual NcclResult MakeUniqueId(std::string* id) = 0;
  // Does not block: kInProgress, and AsyncError tells when the ranks have met. *comm may be set
  // though the call failed.
  virtual NcclResult InitRank(int size, const std::string& id, int rank, NcclComm** comm) = 0;
  // The state of `comm`: kInProgress until the call before has done its work on the host.
  virtual NcclResult AsyncError(NcclComm* comm, NcclResult* state) = 0;
  virtual NcclResult Finalize(NcclComm* comm) = 0;
  virtual NcclResult Destroy(NcclComm* comm) = 0;
  virtual NcclResult Abort(NcclComm* comm) = 0;
  // What a result means, with the library's last message (`comm` may be null).
  virtual std::string Describe(NcclResult result, NcclComm* comm) = 0;

  // Memory that collectives use again: the handle that Deregister takes.
  virtual NcclResult Register(NcclComm* comm, void* data, size_t bytes, void** handle) = 0;
  virtual NcclResult Deregister(NcclComm* comm, void* handle) = 0;

  virtual NcclResult GroupStart() = 0;
  virtual NcclResult GroupEnd() = 0;
  // Counts are elements of `type`, that of one rank's part for AllGather and ReduceScatter.
  virtual NcclResult AllGather(const void* send, void* receive, int64_t count, DType type,
                               NcclComm* comm, NcclStream* stream) = 0;
  virtual NcclResult ReduceScatter(const void* send, void* receive, int64_t count, DType type,
                                   NcclComm* comm, NcclStream* stream) = 0;
  virtual NcclResult AllReduce(const void* send, void* receive, int64_t count, DType type,
                               NcclComm* comm, NcclStream* stream) = 0;
  virtual NcclResult Broadcast(void* buffer, int64_t count, DType type, int root, NcclComm* comm,
                               NcclStream* stream) = 0;
  virtual NcclResult Send(const void* buffer, int64_t count, DType type, int peer, NcclComm* comm,
                          NcclStream* stream) = 0;
  virtual NcclResult Receive(void* buffer, int64_t count, DType type, int peer, NcclComm* comm,
                             NcclStream* stream) = 0;

  // Streams. Errors are the device's: it is unusable after one.
  virtual absl::StatusOr<NcclStream*> NewStream() = 0;
  virtual void DeleteStream(NcclStream* stream) = 0;
  // Makes the stream wait for `event` and returns true. False where it cannot, at least not yet: an
  // event of the host, or one whose work is itself still held back there.
  virtual absl::StatusOr<bool> WaitFor(NcclStream* stream, const Event& event) = 0;
  // Either side may be host memory.
  virtual absl::Status Copy(void* to, const void* from, size_t bytes, NcclStream* stream) = 0;
  virtual absl::Status Fold(const FoldArgs& args, NcclStream* stream) = 0;
  virtual absl::StatusOr<NcclMark*> Mark(NcclStream* stream) = 0;
  virtual absl::StatusOr<bool> Reached(NcclMark* mark) = 0;
  // Between two marks that have been reached.
  virtual double Seconds(NcclMark* from, NcclMark* to) = 0;
  virtual void FreeMark(NcclMark* mark) = 0;

  // The event that callers get: one that the device's streams can wait for without the host.
  virtual Event EventOf(std::shared_ptr<NcclOperation> operation) = 0;
};

}  // namespace zeroshard
