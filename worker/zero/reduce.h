// Gradients on their way from a unit's backward to their owner: sinks that units write to, buckets,
// reduce-scatters, and the sums between micro-batches (architecture, section 5b).
// Every rank makes the same calls in the same order; not thread-safe.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/zero_policy.h"
#include "worker/comm/communicator.h"
#include "worker/comm/waiting.h"
#include "worker/model/unit.h"
#include "worker/zero/buffer_pool.h"
#include "worker/zero/push.h"
#include "worker/zero/squares.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {

class GradientReducer {
 public:
  // With a `pusher` what is final goes to it at once; of the embedding only where rows are added
  // before (kFullAccumulate), else it is final after TokenRows::Join. What the policy does not keep
  // is added to `squares` meanwhile, which may be null without a pusher.
  GradientReducer(const ZeroPolicy* policy, std::vector<UnitState>* units, Communicator* comm,
                  Device* device, Ops* ops, GradientPusher* pusher = nullptr,
                  GradientSquares* squares = nullptr);
  ~GradientReducer();

  // Before each micro-batch: `round` of the step, in which ranks below `contributors` have one. A
  // rank without one runs the same calls (on any data): what it writes is not sent.
  void BeginRound(uint64_t step, int64_t round, int contributors);

  // The token table's sum is one end's alone until another rank's has joined it
  // (worker/zero/tied_table.h): whoever joins the two pushes the embedding.
  void LeaveEmbedding() { leaves_embedding_ = true; }

  GradientSink* Sink(int unit);
  // A sink whose ranges are added up apart, in `output` (accumulate_type, this rank's part of
  // `range`): the embedding's rows of a tied table, where they travel densely.
  absl::Status ReduceApart(int unit, Buffer contribution, ElementRange range, void* output);

  // After the last round, for every unit in order: the sum is on its owner, rounded once to the
  // wire type. Waits for reductions, not for the stores; the squares of what is not kept have been
  // asked for.
  absl::Status FinishRounds();
  // Waits for what is on its way; the first error.
  absl::Status Drain();

  // Told of waits for room, which the stores have to make where there are any, else the ranks;
  // null: nobody.
  void SetWaitObserver(WaitObserver* observer) { waits_ = observer; }

  // Transient memory, from the buffers that gradients leave in: once an earlier one has left. Tells
  // the observer itself, so not within a wait.
  absl::StatusOr<Buffer> TakeTransient(size_t bytes);
  void GiveTransient(Buffer buffer) { in_flight_.GiveAfter(std::move(buffer), {}); }

 private:
  class UnitSink;
  friend class UnitSink;

  // Reduces [begin, end) of a unit; `input` is this rank's contribution to it.
  Event Reduce(int unit, const void* input, ElementRange range, void* output, DType output_type,
               bool accumulate, Phase phase, int contributors);
  // The owned part of a range is the step's sum once `reduced` is done, if this is the last round.
  absl::Status PushFinal(int unit, ElementRange owned, const Event& reduced);
  // Until all that is kept is reduced; the first error.
  absl::Status WaitForKept();
  absl::Status ReduceAccumulated(int unit);
  void RoundToWire(UnitState* unit);

  const ZeroPolicy& policy_;
  std::vector<UnitState>& units_;
  Communicator* comm_;
  Ops* ops_;
  Stream* const compute_;
  GradientPusher* pusher_;
  GradientSquares* squares_;
  const bool leaves_at_once_;  // all gradients but the embedding's
  bool leaves_embedding_ = false;
  WaitObserver* waits_ = nullptr;
  InFlightPool in_flight_;
  std::vector<Event> events_;  // of reductions that read or write the units' own buffers
  std::vector<std::unique_ptr<UnitSink>> sinks_;
  uint64_t step_ = 0;
  int64_t round_ = 0;
  int contributors_ = 1;
};

}  // namespace zeroshard
