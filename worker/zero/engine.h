// The ZeRO engine of one rank: holds the model's state as the policy says and drives it through
// four hooks around each unit's forward and backward. Gather, release, prefetch and reduce live
// behind the hooks and nowhere else.
//
// Every rank of the job makes the same calls in the same order, also a rank without a micro-batch
// in a ragged last round (it computes on any data; nobody uses what it writes). Not thread-safe.
// Errors are the collectives' (worker/comm/communicator.h) and the stores' (state_store.h) unless
// said otherwise; after one the engine is of no further use.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"
#include "common/parameter_source.h"
#include "common/plan/tensor_slices.h"
#include "common/plan/zero_policy.h"
#include "worker/comm/communicator.h"
#include "worker/comm/waiting.h"
#include "worker/device/device.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"
#include "worker/zero/gather.h"
#include "worker/zero/push.h"
#include "worker/zero/reduce.h"
#include "worker/zero/squares.h"
#include "worker/zero/state_store.h"
#include "worker/zero/tied_table.h"
#include "worker/zero/token_rows.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {

struct UnitParameters {
  const void* own = nullptr;      // the unit's flat vector, compute type
  const void* lm_head = nullptr;  // head only: [V, C]
};

// A part of a rank's shard of a unit: what it writes into a checkpoint, of each kind of state there
// is. Of a whole unit the shard, at multiples of 64; of a slice each run of the shard that the rank
// is home of (common/plan/tensor_slices.h), within one tensor and without padding.
struct OwnedRange {
  int unit = 0;
  int64_t begin = 0, end = 0;  // elements of the flat vector
  int64_t flat = 0;            // where `begin` is in the full unit's flat vector
  bool ends = false;           // SliceRun::ends
  bool trained = true;         // there are moments
  bool keeps_master = true;    // fp32 values are kept; else they are made from 16-bit ones
  int64_t size() const { return end - begin; }
};

// What a rank of a mesh has beside its data line, whose ranks share the engine's state.
struct EngineLinks {
  Communicator* job = nullptr;        // of all ranks: digests are of the whole model
  Communicator* pipeline = nullptr;   // this rank's line
  int tied_peer = -1;                 // in that line, who has the token table too; -1: nobody
  const TensorRank* slice = nullptr;  // which part of each parameter the model's are; null: whole
};

class ZeroEngine {
 public:
  // The pointers outlive the engine. RESOURCE_EXHAUSTED names the bytes. Parameters come from
  // `weights`, or where that is null fresh from `seed`; moments are zero. `stop` may be null; once
  // true, filling ends with CANCELLED. An offloaded job has a `store` (others null) and stage 1, 2
  // or 3; parameters are then pulled from it, together with the other ranks, whatever `weights` is:
  // the store's errors and the collectives'. To destroy the engine while something is on its way,
  // abort store and communicator first; it waits for them.
  // Of a tensor rank `model` is links->slice->model, `comm` its data line, and `weights`, which
  // must be given, a SlicedSource. FinishGradients then counts what the rank is home of.
  static absl::StatusOr<std::unique_ptr<ZeroEngine>> Create(
      const ModelTable* model, const ZeroPolicy* policy, uint64_t seed, Device* device, Ops* ops,
      Communicator* comm, const std::atomic<bool>* stop = nullptr,
      const ParameterSource* weights = nullptr, StateStore* store = nullptr,
      const EngineLinks* links = nullptr);
  ~ZeroEngine();

  // exp_avg or exp_avg_sq of what is trainable; before the first step. Of a tensor rank `source` is
  // a SlicedSource too. The source's errors, or CANCELLED.
  absl::Status LoadMoments(StateKind kind, const ParameterSource& source,
                           const std::atomic<bool>* stop = nullptr);

  void BeginStep(uint64_t step);
  // Where the policy's uses span the step, before each forward and backward: of which micro-batch.
  void BeginRound(int64_t round);
  // A micro-batch of which only the loss is wanted: BeforeForward and AfterForward of every unit in
  // order, the head's included. Between steps. Where `uses` is not null, as many micro-batches as
  // these are of, in their order (EvaluationUses); they outlive it.
  void BeginEvaluation(uint64_t step, const std::vector<UnitUse>* uses = nullptr);

  // Parameters are valid, for what is computed, until the matching After. In training the head's
  // backward follows its forward under one gather: BeforeForward(head), then AfterBackward(head).
  absl::StatusOr<UnitParameters> BeforeForward(int unit);
  absl::Status AfterForward(int unit);
  absl::StatusOr<UnitParameters> BeforeBackward(int unit);
  absl::Status AfterBackward(int unit);

  GradientSink* Sink(int unit) { return reducer_->Sink(unit); }
  // Where the head's matrix goes: its unit, and the matrix's offset there.
  int HeadMatrixUnit() const { return head_matrix_unit_; }
  int64_t HeadMatrixOffset() const { return head_matrix_offset_; }
  // The embedding's rows, before AfterBackward(0).
  TokenRows* rows() { return rows_.get(); }

  // After the last round: every sum is on its owner, rounded to the wire type. The sum of squares
  // of this rank's shard; `first_nonfinite` names the first unit whose part of it is not finite.
  // Offload: the sums have left for the stores as they became final, and all are acknowledged.
  absl::StatusOr<NormAccumulator> FinishGradients(std::string* first_nonfinite);
  // AdamW on this rank's state (weight decay on the tensors of the decay group only), then the new
  // parameters to everyone who keeps them whole.
  absl::Status Update(const AdamWArgs& args);
  // In its place in an offloaded job: what this rank keeps is pulled as it is after the step, once
  // the stores have that, and everything is used at this version from here on.
  absl::Status PullUpdated();
  // Waits for what either of them sent on its way; also the device's error.
  absl::Status Drain();

  // Of the fp32 master weights (or frozen parameters), all ranks together: independent of world
  // size, stage, pipeline and slices. Counted as traffic of the step phase. Empty in an offloaded
  // job: the stores have the weights.
  absl::StatusOr<std::string> WeightsDigest();
  // Of all the state that was loaded, by StateKind, all ranks together: as the checkpoint's
  // manifest has them. Frozen 16-bit parameters count as they were before they were rounded.
  absl::StatusOr<std::array<std::string, kStateKinds>> LoadedDigests();

  // EngineLinks::slice.
  const TensorRank* slice() const { return slice_; }
  // What this rank writes into checkpoints, between steps. Nothing in an offloaded job.
  std::vector<OwnedRange> OwnedRanges() const;
  // The fp32 values of one kind of an owned range, or of a part of it, into host memory. A moment
  // exists only where the range is trained. Another thread may call it until the next Update: it
  // only copies memory, on a stream of its own. The device's error.
  absl::Status CopyState(StateKind kind, int unit, int64_t begin, int64_t end, float* out) const;

  // Replaces the values of one tensor, all of it, of which each rank keeps what it holds. Before
  // the first step. NOT_FOUND names the nearest tensors, INVALID_ARGUMENT the sizes;
  // FAILED_PRECONDITION in an offloaded job.
  absl::Status SetTensor(const std::string& name, absl::Span<const float> values);
  // The fp32 values of one tensor, of a slice those of its rows with padding, on every rank of the
  // data line (of an offloaded job: its parameters, which are rounded to the compute type).
  // NOT_FOUND names the nearest tensors.
  absl::StatusOr<std::vector<float>> GatherTensor(const std::string& name);

  // Told of every wait from now on; null: nobody.
  void SetWaitObserver(WaitObserver* observer);

 private:
  ZeroEngine(const ZeroPolicy* policy, Device* device, Ops* ops, Communicator* comm,
             StateStore* store, const EngineLinks* links);
  absl::Status LocateHead(const ModelTable& model);
  // What takes part in collectives from the beginning to the end: whole parameters and gradients.
  absl::Status RegisterBuffers();
  // This rank's part of a digest.
  absl::StatusOr<PartedDigest> OwnDigest(StateKind kind, bool as_filled) const;
  // One for each of `own`, which is by kind.
  absl::StatusOr<std::vector<WeightDigest>> CombineDigests(const std::vector<PartedDigest>& own);
  // Adds the blocks that are torn between ranks.
  absl::Status AddTornBlocks(const std::vector<PartedDigest>& own,
                             std::vector<WeightDigest>* total);
  void BeginUses(const std::vector<UnitUse>* uses);
  // Takes the next use of the schedule; INTERNAL if it is another unit's.
  absl::StatusOr<const void*> NextUse(int unit, bool backward);
  void EndUses();
  absl::Status GatherShardedGradients();
  absl::Status GatherThroughWire(UnitState* unit);
  // This rank's sums to their place in the unit's `whole` gradient of the wire type.
  void OwnSumsTo(const UnitState& unit, void* whole);
  void UpdateUnit(UnitState* unit, const AdamWArgs& args);
  absl::Status PushEmbedding();
  struct Located {
    UnitState* unit;
    const ParameterInfo* info;
  };
  absl::StatusOr<Located> Locate(const std::string& name);
  // Squares of every trained unit's gradient, those that are kept added last, on their way to host
  // memory, with the error of what was computed before.
  Event ReadSquares();
  // The fp32 values of this rank's shard, into host memory.
  absl::Status OwnValues(const UnitState& unit, float* out);
  // Those of `n` parameters of `type` in device memory, once `after` is done.
  absl::Status ReadParameters(const void* from, DType type, int64_t n, const Event& after,
                              float* out) const;

  const ZeroPolicy& policy_;
  Device* const device_;
  Stream* const compute_;
  const std::unique_ptr<Stream> state_reads_;  // CopyState's
  Ops* ops_;
  Communicator* comm_;
  StateStore* store_;
  Communicator* const all_;  // the job's
  const TensorRank* const slice_;
  std::vector<UnitState> units_;
  std::vector<Registration> registered_;    // of their memory
  std::unique_ptr<GradientPusher> pusher_;  // with a store
  std::unique_ptr<GradientReducer> reducer_;
  std::unique_ptr<ParameterGather> gather_;
  std::unique_ptr<TokenRows> rows_;  // where the embedding is
  std::unique_ptr<TiedTable> tied_table_;
  int head_matrix_unit_ = 0;
  int64_t head_matrix_offset_ = 0;
  uint64_t step_ = 0;
  int64_t round_ = 0;
  const std::vector<UnitUse>* uses_ = nullptr;  // of the micro-batch
  size_t next_use_ = 0;
  std::vector<int> open_uses_;  // of the current unit
  WaitObserver* waits_ = nullptr;
  std::unique_ptr<GradientSquares> squares_;
  Event updated_;  // the state is that of the last Update
};

}  // namespace zeroshard
