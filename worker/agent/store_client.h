// The offload path of a rank over gRPC: StateStore on the shard stores that hold a job's chunks.
//
// Gradients go to every replica of their chunk, parameters come from one. Each store has a stream
// for pushes and one for pulls, on connections of their own; frames to different stores travel side
// by side. Nothing is copied on its way out; what comes in is copied once, from where gRPC received
// it. Not more than the bounded number of elements is on its way in each direction; what is above
// it waits without a thread, in the order of the calls.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/member/cancellation.h"
#include "common/member/cluster_client.h"
#include "common/plan/chunk_table.h"
#include "common/presence.h"
#include "common/types.h"
#include "worker/zero/state_store.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

struct StoreClientOptions {
  v1::Fence fence;
  v1::StoreMap map;
  v1::StateVersion base;
  ChunkTable chunks;
  DType dtype = DType::kF32;  // in which gradients and parameters travel
  // Elements that may be on their way; a single piece of a chunk always may.
  int64_t most_pushed = 0, most_pulled = 0;
  absl::Duration open_timeout = absl::Seconds(120);
  // Null: all time counts towards the timeouts, else what this counts.
  std::shared_ptr<const Presence> presence;
  // Without anything moving between this rank and a store that it waits for.
  absl::Duration stall_timeout = absl::Seconds(300);
  // The same while the stores may still be loading: pulls of the base version.
  absl::Duration load_timeout = absl::Seconds(300);
  bool shared_memory = true;             // with stores of this host
  ClusterClient* client = nullptr;       // outlives the object
  Cancellation* cancellation = nullptr;  // ends Open; may be null

  // Of an assignment of an offloaded job, whose specification is normalised. INVALID_ARGUMENT: the
  // model, or a map that does not fit it.
  static absl::StatusOr<StoreClientOptions> Of(const v1::Assign& assign, const v1::Fence& fence);
};

// Thread-safe. The events given as `after` must end, with whatever status, before the destructor
// can.
class StoreClient : public StateStore {
 public:
  // Connects to every store of the map. A store that answers UNAVAILABLE, or is not there yet, is
  // tried again until open_timeout: DEADLINE_EXCEEDED then, with its last word. Others: as the
  // store gave them, or the cancellation's.
  static absl::StatusOr<std::unique_ptr<StoreClient>> Open(StoreClientOptions options);
  // Ends what is on its way, as Abort does.
  ~StoreClient() override;

  v1::StateVersion base() const override;
  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after = {}) override;
  Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
             const Event& after = {}) override;
  // Waits for as long as the coordinator does, which names the stores it waits for, and while the
  // coordinator is away.
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next_sample,
                                          uint64_t samples) override;
  void Abort(const std::string& reason) override;
  const OffloadCounters& counters() const override;

 private:
  struct Core;
  explicit StoreClient(std::shared_ptr<Core> core);

  const std::shared_ptr<Core> core_;
};

}  // namespace zeroshard
