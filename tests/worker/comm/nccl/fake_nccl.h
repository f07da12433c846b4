// NCCL without GPUs: ranks are threads of the test, device memory is host memory, a stream is a
// thread. It moves data only as NCCL would (when all ranks have come to an operation, in the order
// of their streams), never ends an operation by itself, and takes note of calls that NCCL forbids.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "worker/comm/nccl/nccl_api.h"
#include "worker/comm/nccl/nccl_operation.h"
#include "worker/device/host_event.h"

namespace zeroshard {

// An event that the test finishes and that a fake stream can wait for by itself.
class FakeGpuEvent : public HostEvent {};

struct FakeCall {
  enum Kind { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kSend, kReceive } kind;
  const void* send = nullptr;
  void* receive = nullptr;
  int64_t count = 0;
  DType type = DType::kU8;
  int peer = 0;
};

// Thread-safe. Outlives what was made with its api.
class FakeNccl {
 public:
  static constexpr int kOwnGpu = -1;  // of each communicator

  FakeNccl();
  ~FakeNccl();

  // The interface as one rank sees it. Communicators with one `gpu` share it.
  std::shared_ptr<NcclApi> Api(int gpu = kOwnGpu);

  // From now on the communicators of `rank` have this asynchronous error.
  void SetError(int rank, NcclResult error);
  // Aborting hangs, and stops nothing, until Release. The first call is waited for with
  // AwaitHungAbort.
  void HangAborts();
  void RefuseRegistrations();
  void AwaitHungAbort();
  void Release();
  // Aborting returns, but the GPU goes on with what it does until Release.
  void KeepKernels();

  // Each GPU that communicators share has room for one kernel alone, and takes them in the order in
  // which they were launched.
  void NoRoomForTwoKernels();

  // Groups stay in progress for ever, as where a peer does not answer while NCCL connects to it.
  void StallGroups();
  void AwaitAborts(int count);
  // Until so many groups have come to run on a GPU.
  void AwaitKernels(int count);

  // What was called that must not be.
  std::vector<std::string> violations();
  int aborted();
  int destroyed();
  int live_marks() { return live_marks_; }
  std::vector<FakeCall::Kind> calls(int rank);  // of collectives and sends, as they were put
  int groups(int rank);                         // that these were put in
  // What is registered with the communicators of `rank`.
  std::map<void*, size_t> registered(int rank);

  std::atomic<int> version{22809};
  std::atomic<bool> refuse_init{false};  // as where two ranks share a GPU

 private:
  friend class FakeNcclApi;
  friend struct NcclComm;

  // One collective that ranks come to.
  struct Meeting {
    std::map<int, FakeCall> calls;
    bool done = false;
  };
  struct Message {
    FakeCall call;
    bool done = false;
  };
  struct Clique {
    int size = 0;
    std::set<int> joined, finalized;
    std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
    std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> sends, receives;
  };

  void Violation(const std::string& what);
  void RunKernel(NcclComm* comm, const std::vector<FakeCall>& calls, uint64_t launch);
  void Execute(const Clique& clique, Meeting& meeting);
  void Match(Clique& clique, std::pair<int, int> way);
  bool Stopped(const NcclComm& comm) const;

  std::mutex mutex_;
  std::condition_variable changed_;
  int ids_ = 0;
  std::map<std::string, Clique> cliques_;
  std::vector<std::shared_ptr<NcclApi>> apis_;  // a hung call may come back late
  std::vector<std::unique_ptr<NcclComm>> comms_;
  std::vector<std::string> violations_;
  std::map<int, NcclResult> errors_;
  std::map<int, std::vector<FakeCall::Kind>> calls_;
  std::map<int, int> groups_;
  bool hang_aborts_ = false, refuses_registrations_ = false, keep_kernels_ = false,
       stall_groups_ = false, no_room_for_two_ = false;
  uint64_t launches_ = 0;
  std::map<int, std::deque<uint64_t>> on_gpu_;  // launched and not done, of those that share it
  int kernels_ = 0, hung_ = 0, aborted_ = 0, destroyed_ = 0;
  std::atomic<int> live_marks_{0};
};

}  // namespace zeroshard
