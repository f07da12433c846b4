// Collectives over a mesh (see communicator.h for the contract). Not for use outside this folder,
// its tests and its benchmark: MakeGlooCommunicator is the way in.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "worker/comm/communicator.h"
#include "worker/comm/mesh.h"
#include "worker/device/host_stream.h"

namespace zeroshard {

// Must be the same on all ranks.
struct GlooTuning {
  int64_t piece_elements = 512 * 1024;
  int pieces_in_flight = 3;                    // from each peer
  int64_t scratch_elements = 24 * 512 * 1024;  // of all peers; pieces get smaller beyond
};

absl::StatusOr<std::unique_ptr<Communicator>> MakeGlooCommunicator(
    const CommunicatorOptions& options, const GlooTuning& tuning, Rendezvous* rendezvous,
    Device* device);

class Messages;

class GlooCommunicator : public Communicator {
 public:
  // `mesh` is null where size is 1.
  GlooCommunicator(const CommunicatorOptions& options, const GlooTuning& tuning,
                   std::unique_ptr<Mesh> mesh, Device* device);
  // Pending operations end with ABORTED. Waits for events that they were told to start after.
  ~GlooCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Event AllGather(void* buffer, int64_t count, DType type, const CollectiveInfo& info,
                  const Event& after) override;
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
  Event Exchange(std::vector<Message> messages, const CollectiveInfo& info,
                 const Event& after) override;
  Event Barrier(const CollectiveInfo& info) override;
  absl::Status AllGatherHost(void* buffer, int64_t bytes, const CollectiveInfo& info) override;
  void Abort(const std::string& reason) override;
  const TrafficCounters& traffic() const override { return traffic_; }
  double BusySeconds() const override { return 1e-9 * static_cast<double>(busy_nanos_.load()); }

 private:
  // A direct exchange in which each owner folds the contributions to its part.
  struct FoldExchange {
    const char* input = nullptr;
    DType type = DType::kF32;
    std::vector<int64_t> starts;  // of each owner's part in every contributor's input, in elements
    std::vector<int64_t> counts;
    int contributors = 0;
    char* output = nullptr;
    DType output_type = DType::kF32;
    bool accumulate = false;
  };
  Event Enqueue(const char* name, const CollectiveInfo& info, const Event& after,
                std::function<absl::Status()> body);
  absl::Status Run(const std::string& what, const Event& after,
                   const std::function<absl::Status()>& body);
  absl::Status Refusal(const std::string& what) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Fail(const std::string& what, const absl::Status& status);
  void TearDown();

  absl::Status RunAllGather(void* buffer, int64_t count, DType type, Phase phase);
  absl::Status RunReduceScatter(const ReduceScatterArgs& args, Phase phase);
  absl::Status RunAllReduce(void* buffer, int64_t count, DType type, Phase phase);
  absl::Status RunBroadcast(void* buffer, int64_t bytes, int root, Phase phase);
  absl::Status RunSend(const void* buffer, int64_t bytes, int peer, Phase phase);
  absl::Status RunRecv(void* buffer, int64_t bytes, int peer);
  absl::Status RunExchange(const std::vector<Message>& exchange);
  absl::Status RunBarrier();

  absl::Status Fold(const FoldExchange& exchange);
  absl::Status SendContributions(const FoldExchange& exchange, uint64_t slot, Messages& messages);
  // Every rank's part of `buffer`, given in bytes, reaches all ranks.
  absl::Status GatherParts(char* buffer, const std::vector<int64_t>& starts,
                           const std::vector<int64_t>& bytes);
  // `lanes` buffers of at least `bytes`, kept from call to call.
  absl::Status PrepareLanes(size_t lanes, int64_t bytes);
  int64_t PieceElements() const;
  void Count(CollectiveOp op, Phase phase, int64_t bytes);

  // Slots carry the number of the operation and a digest of its arguments, so that ranks that
  // disagree about an operation wait for each other in vain instead of mixing up data.
  uint64_t CollectiveSlot(absl::Span<const int64_t> arguments);

  const int rank_;
  const int size_;
  const std::string line_;            // CommunicatorOptions::line
  const std::vector<int> job_ranks_;  // CommunicatorOptions::job_ranks
  const absl::Duration operation_timeout_;
  const GlooTuning tuning_;
  Device* const device_;

  std::unique_ptr<Mesh> mesh_;
  TrafficCounters traffic_;
  std::atomic<int64_t> busy_nanos_{0};

  // Used by the communication stream alone.
  uint64_t operations_ = 0;
  std::vector<uint64_t> sent_to_, received_from_;
  Buffer input_copy_;  // of a sum that peers read while it is written
  Buffer lane_memory_;
  int64_t lane_bytes_ = 0;
  std::vector<std::unique_ptr<MessageBuffer>> lanes_;

  absl::Mutex mutex_;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);

  absl::Mutex enqueue_mutex_;  // keeps the order of concurrent callers one order
  std::unique_ptr<HostStream> stream_;
};

}  // namespace zeroshard
