// Stage 3's parameters: gathers a unit just before it is used, prefetches the next ones, releases
// it straight after (ZeroPolicy::uses). Other stages and resident units pass straight through.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/zero_policy.h"
#include "worker/comm/communicator.h"
#include "worker/zero/buffer_pool.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {

class ParameterGather {
 public:
  // All outlive this. Every rank makes the same calls in the same order.
  ParameterGather(const ZeroPolicy* policy, std::vector<UnitState>* units, Communicator* comm,
                  Device* device, Ops* ops);
  // In-flight gathers write to buffers owned here.
  ~ParameterGather();

  // Before each micro-batch: the uses it will have, ZeroPolicy::uses or eval_uses.
  void BeginPass(const std::vector<UnitUse>* uses);
  // `use` indexes the pass's uses, in order within a micro-batch. The unit's whole flat vector,
  // valid until AfterUse. Errors are the collective's.
  absl::StatusOr<const void*> BeforeUse(int use, uint64_t step);
  void AfterUse(int use);

  // After the update: units that are whole get everyone's new shards. The next BeforeUse waits.
  absl::Status GatherUpdated(uint64_t step);
  absl::Status Drain();

 private:
  struct Gathered {
    Buffer buffer;
    Event ready;
    bool issued = false;
  };
  absl::Status Issue(int use, uint64_t step);
  absl::Status Prefetch(int use, uint64_t step);

  const ZeroPolicy& policy_;
  std::vector<UnitState>& units_;
  Communicator* comm_;
  Ops* ops_;
  BufferPool pool_;
  const std::vector<UnitUse>* uses_;
  std::vector<Gathered> gathered_;  // by use
  std::vector<Event> updated_;      // by unit
  int64_t live_ = 0;                // elements gathered or on their way
};

}  // namespace zeroshard
