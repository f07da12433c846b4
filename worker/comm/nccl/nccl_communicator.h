// Collectives over NCCL (see communicator.h for the contract). Knows CUDA only through NcclApi;
// MakeNcclCommunicator of cuda/make_nccl_communicator.h is the way in.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/exit_process.h"
#include "worker/comm/communicator.h"
#include "worker/comm/nccl/launch_order.h"
#include "worker/comm/nccl/nccl_api.h"
#include "worker/comm/nccl/nccl_queue.h"
#include "worker/device/device.h"

namespace zeroshard {

// The sizes must be the same on all ranks.
struct NcclTuning {
  int64_t staging_bytes = int64_t{64} << 20;   // for contributions of others; exchanges in pieces
  int64_t scratch_bytes = int64_t{256} << 20;  // for a sum of NCCL's that is then converted
  int64_t host_bytes = int64_t{4} << 20;       // pinned memory of AllGatherHost, for all ranks
  NcclEnding ending = {.exit_process = ExitProcess};
  // Of all communicators of this GPU; null where there is but this one.
  std::shared_ptr<LaunchOrder> order = nullptr;
};

// Connects before it returns; errors as of ConnectNccl and of the device. `device` outlives the
// communicator; `api` is kept by it and by its events. A single rank connects to nobody.
absl::StatusOr<std::unique_ptr<Communicator>> MakeNcclCommunicator(
    const CommunicatorOptions& options, const NcclTuning& tuning, std::shared_ptr<NcclApi> api,
    Rendezvous* rendezvous, Device* device);

class NcclCommunicator : public Communicator {
 public:
  // Owns `comm` (null where size is 1) and `stream`.
  NcclCommunicator(const CommunicatorOptions& options, const NcclTuning& tuning,
                   std::shared_ptr<NcclApi> api, NcclComm* comm, NcclStream* stream,
                   Device* device);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Event AllGather(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                  const Event& after) override;
  // One group of NCCL's.
  std::vector<Event> AllGatherTogether(const std::vector<GatherPart>& parts, DType type,
                                       const CollectiveInfo& info, const Event& after) override;
  Event ReduceScatter(ReduceScatterArgs args, const CollectiveInfo& info,
                      const Event& after) override;
  Event AllReduce(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                  const Event& after) override;
  Event Broadcast(void* buffer, int64_t bytes, int root, const CollectiveInfo& info,
                  const Event& after) override;
  Event Send(const void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override;
  Event Recv(void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override;
  // One group of NCCL's.
  Event Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                 const Event& after) override;
  Event Barrier(const CollectiveInfo& info) override;
  absl::Status AllGatherHost(void* buffer, int64_t bytes, const CollectiveInfo& info) override;
  absl::StatusOr<Registration> Register(void* data, size_t bytes) override;
  void Abort(const std::string& reason) override;
  const TrafficCounters& traffic() const override { return traffic_; }
  double BusySeconds() const override { return queue_->BusySeconds(); }

 private:
  // An exchange in which each owner folds the contributions to its part, in rank order.
  struct FoldExchange {
    const char* input = nullptr;
    DType type = DType::kF32;
    std::vector<int64_t> starts;  // of each owner's part in the input, in elements
    std::vector<int64_t> counts;
    int contributors = 0;
    char* output = nullptr;
    DType output_type = DType::kF32;
    bool accumulate = false;
  };

  Event Enqueue(const char* name, const CollectiveInfo& info, const Event& after,
                std::function<absl::Status()> body, std::function<void()> succeeded);
  std::function<void()> Count(CollectiveOp op, Phase phase, int64_t bytes);

  // Bodies: they run on the launching thread, and put an operation on the stream.
  absl::Status PutAllGather(void* buffer, int64_t count, DType type);
  absl::Status PutAllGathers(const std::vector<GatherPart>& parts, DType type);
  absl::Status PutReduceScatter(const ReduceScatterArgs& args);
  absl::Status PutAllReduce(void* buffer, int64_t count, DType type);
  absl::Status PutBroadcast(void* buffer, int64_t bytes, int root);
  absl::Status PutSend(const void* buffer, int64_t bytes, int peer);
  absl::Status PutRecv(void* buffer, int64_t bytes, int peer);
  absl::Status PutExchange(const std::vector<Message>& messages);
  absl::Status PutBarrier();
  absl::Status PutHostGather(int64_t bytes);

  absl::Status PutFold(const FoldExchange& exchange);
  absl::Status PutPiece(const FoldExchange& exchange, int64_t start, int64_t piece);
  // Sums of up to kDirectAllReduce elements: everyone gathers all and folds them.
  absl::Status PutSmallSum(void* buffer, int64_t count, DType type);
  // NCCL's own reduce-scatter, in whatever order it adds.
  absl::Status PutNcclReduceScatter(const ReduceScatterArgs& args);
  // Every rank's part of `buffer` reaches all ranks; the parts may differ in size.
  absl::Status PutGatherParts(char* buffer, const FoldExchange& parts);
  // Device memory for an operation that is about to be put on the stream. Waits for the stream
  // where it has to grow.
  absl::StatusOr<char*> Staging(int64_t bytes);

  const int rank_;
  const int size_;
  const bool deterministic_;
  const std::string line_;  // CommunicatorOptions::line
  const NcclTuning tuning_;
  const std::shared_ptr<NcclApi> api_;
  Device* const device_;
  TrafficCounters traffic_;

  Buffer staging_;          // the launching thread's; one operation after the other uses it
  absl::Mutex host_mutex_;  // one AllGatherHost at a time
  Buffer host_;             // pinned; behind host_mutex_, then with the operation until that ended

  std::unique_ptr<NcclQueue> queue_;  // last: its threads use all of the above
};

}  // namespace zeroshard
