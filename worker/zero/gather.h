// Stage 3's parameters: gathers a unit just before it is used, prefetches the next ones, releases
// it straight after (ZeroPolicy::uses). Other stages and resident units pass straight through.
//
// In an offloaded job each rank pulls its part of what the others then gather from it: after every
// update where it keeps that part, else (offload_param) before each gather, straight into the
// buffer. Nobody waits for a pull but the gather behind it, and at last whoever uses the unit.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/zero_policy.h"
#include "worker/comm/communicator.h"
#include "worker/comm/waiting.h"
#include "worker/ops/ops.h"
#include "worker/zero/buffer_pool.h"
#include "worker/zero/state_store.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {

class ParameterGather {
 public:
  // All outlive this; `store` is null without offload. Every rank makes the same calls in the same
  // order.
  ParameterGather(const ZeroPolicy* policy, std::vector<UnitState>* units, Communicator* comm,
                  Device* device, Ops* ops, StateStore* store);
  // Waits: what is on its way writes to the units and to buffers owned here.
  ~ParameterGather();

  void SetWaitObserver(WaitObserver* observer) { waits_ = observer; }

  // Offload, before anything else: all that this rank keeps, frozen units too, of the version that
  // the job starts from.
  absl::Status PullAll();

  // Before each micro-batch: the uses it will have, ZeroPolicy::uses or eval_uses.
  void BeginPass(const std::vector<UnitUse>* uses);
  // `use` indexes the pass's uses, in order within a micro-batch. The unit's whole flat vector,
  // valid for the compute stream's work until AfterUse. Errors are the collective's.
  absl::StatusOr<const void*> BeforeUse(int use, uint64_t step);
  void AfterUse(int use);

  // After the update: units that are whole get everyone's new shards. The next BeforeUse waits.
  absl::Status GatherUpdated(uint64_t step);
  // The same in an offloaded job, where the stores update: what this rank keeps is pulled as it is
  // after `step`. From here on that is the version that is used.
  absl::Status PullUpdated(uint64_t step);
  // The version in use.
  uint64_t version() const { return version_; }
  // Waits for all of it, on the host.
  absl::Status Drain();

 private:
  struct Gathered {
    Buffer buffer;
    Event own;    // this rank's part is there
    Event ready;  // all is
    bool issued = false;
  };
  // A resident unit between an update and its next use.
  struct Renewal {
    Event pulled;  // also of a shard that is kept
    Event whole;
    bool due = false;  // to be gathered
  };
  absl::Status Issue(int use, uint64_t step);
  absl::Status Prefetch(int use, uint64_t step);
  void PullKept(bool frozen);
  absl::Status GatherWhole(size_t unit);
  // Several whose shards are there, as one operation.
  absl::Status GatherTogether(const std::vector<size_t>& units);
  // What is computed from here on waits for the pull and for the rest.
  absl::Status Wait(const Event& pulled, const Event& rest);
  absl::Status WaitFor(const Event& event, WaitKind kind);
  bool Pulls(const UnitState& unit) const { return store_ != nullptr && !unit.keeps_parameters; }

  const ZeroPolicy& policy_;
  std::vector<UnitState>& units_;
  Communicator* comm_;
  Ops* ops_;
  Stream* const compute_;
  StateStore* const store_;
  WaitObserver* waits_ = nullptr;
  BufferPool pool_;
  const std::vector<UnitUse>* uses_;
  std::vector<Gathered> gathered_;  // by use
  std::vector<Renewal> renewals_;   // by unit
  uint64_t version_ = 0;            // after this step
  int64_t live_ = 0;                // elements gathered or on their way
  // Copies shards that are still being pulled into the buffers they are gathered in.
  std::unique_ptr<Stream> copies_;  // last: it uses all of the above
};

}  // namespace zeroshard
