// The gradient of the embedding's token table. A micro-batch touches few rows, so it exists as
// rows; they travel as rows or densely (ZeroPolicy::sparse_rows), are added up in fp32 in the order
// of the micro-batches apart from the head's gradient, and join it once at the end of the step:
//   gradient = wire(wire(head's sum) + wire(rows' sum))
// where wire() rounds to the wire type. The same bits for any world size. With kFullAccumulate a
// rank's rows are simply added to its own sum. Same calls in the same order on every rank; not
// thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "common/plan/planner.h"
#include "worker/comm/waiting.h"
#include "worker/zero/reduce.h"

namespace zeroshard {

class TokenRows {
 public:
  static absl::StatusOr<std::unique_ptr<TokenRows>> Create(
      const ModelTable* model, const ZeroPolicy* policy, UnitState* embedding,
      GradientReducer* reducer, Communicator* comm, Device* device, Ops* ops);
  ~TokenRows();

  // Where Ops::EmbeddingBackwardRows writes: ids [mb*T], rows [mb*T, C] in the wire type.
  int32_t* ids() const { return ids_.as<int32_t>(); }
  void* rows() const { return rows_.data(); }

  void BeginStep();
  // After the embedding's backward of a round (GradientReducer::BeginRound was called for it).
  absl::Status Reduce(uint64_t step, int64_t round, int contributors);
  // Told of waits in Reduce; null: nobody.
  void SetWaitObserver(WaitObserver* observer) { waits_ = observer; }
  // After GradientReducer::FinishRounds: adds the rows' sum to the owner's gradient.
  absl::Status Join();

 private:
  TokenRows(const ModelTable* model, const ZeroPolicy* policy, UnitState* embedding,
            GradientReducer* reducer, Communicator* comm, Device* device, Ops* ops);
  absl::Status Allocate(Device* device);
  absl::Status ReduceDense(int64_t round);
  absl::Status GatherRows(uint64_t step, int contributors);
  absl::Status FoldGathered();
  absl::Status AllocateSums(int64_t capacity, Device* device);

  const ModelConfig& config_;
  const ZeroPolicy& policy_;
  UnitState& unit_;
  GradientReducer* reducer_;
  Communicator* comm_;
  Ops* ops_;
  Stream* const compute_;
  WaitObserver* waits_ = nullptr;
  const ElementRange table_;   // of the unit's flat vector
  const ElementRange blocks_;  // the same in whole blocks
  const ElementRange owned_;   // this rank's part of it
  const DType wire_;

  Buffer ids_, rows_;
  Buffer all_ids_, all_rows_;  // of every rank, as gathered
  Event gathered_ids_, gathered_rows_;
  int gathered_contributors_ = 0;  // 0: nothing gathered that is not folded
  Buffer sums_;      // fp32 accumulators [capacity, C], or the dense sum of a tied table
  Buffer slots_;     // what touched rows are looked up in
  RowSums touched_;  // over the two, where rows travel as rows
};

}  // namespace zeroshard
