// The gradients of an offloaded job on their way from their owner to the shard stores. What is
// final leaves while backward goes on: straight from the unit's gradient where that is in the wire
// type, else rounded once (architecture, section 5b), in place and into buffers of a pool that
// ZeroOptions::push_buffers bounds. Used by the rank's training thread; not thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/zero_policy.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"
#include "worker/zero/buffer_pool.h"
#include "worker/zero/state_store.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {

class GradientPusher {
 public:
  // All outlive this.
  GradientPusher(const ZeroPolicy* policy, std::vector<UnitState>* units, StateStore* store,
                 Device* device, Ops* ops);
  // Waits until nothing reads the gradients any more; whoever ends a step early aborts the store
  // first.
  ~GradientPusher();

  // Everything of the step before is acknowledged.
  void BeginStep(uint64_t step) { step_ = step; }

  // A part of this rank's shard of a trained unit: its gradient is the step's sum once `after` is
  // done, and nobody writes there until Drain.
  void Push(int unit, ElementRange range, const Event& after);
  // The same where `data` has the sum, in the wire type; it stays as it is until the event is done.
  Event PushFrom(int unit, ElementRange range, const void* data, const Event& after);

  // Rounds what is ready to be, as far as there are buffers. Waits for nothing.
  absl::Status Advance();
  // Everything pushed so far is rounded in its place, and on its way.
  absl::Status FinishRounding();
  // Every store has acknowledged everything; the first error.
  absl::Status Drain();

 private:
  struct Unrounded {
    int unit = 0;
    ElementRange range;
    Event after;
  };
  absl::Status RoundFirst(bool wait);

  const ZeroPolicy& policy_;
  std::vector<UnitState>& units_;
  StateStore* const store_;
  Ops* const ops_;
  Stream* const compute_;
  const int64_t piece_;  // elements of a buffer
  InFlightPool pool_;
  std::deque<Unrounded> unrounded_;
  std::vector<Event> pushed_;  // that read memory which is not the pool's
  uint64_t step_ = 0;
};

}  // namespace zeroshard
