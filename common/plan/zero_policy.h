// What the ZeRO engine will do, decided before it does it: which units stay gathered, when each is
// gathered and released, how gradients are kept and folded, how the embedding's rows travel. The
// engine follows it and the planner counts it, so that prediction and run cannot disagree. Pure
// arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/model_table.h"
#include "common/rounding.h"
#include "common/types.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// The settings that the schedule depends on, with defaults filled in. Sizes in elements.
struct ZeroOptions {
  int stage = 0;
  int world = 1;              // N, data-parallel ranks
  int64_t micro_batch = 1;    // sequences
  int64_t micro_batches = 1;  // G, of a step over all ranks
  DType dtype = DType::kF32;  // compute and wire type
  Rounding rounding = {};     // of master weights into parameters
  bool deterministic = false;
  bool checkpointing = false;
  bool overlap = true;
  int64_t reduce_bucket = 500000000;
  int64_t prefetch_bucket = 50000000;
  int64_t persistence_threshold = 100000;
  int64_t max_live = 1000000000;
  int64_t max_reuse_distance = 1000000000;
  bool offload_optimizer = false;  // the optimizer state is in the shard stores
  bool offload_param = false;      // and the parameters too, but for those of resident units
  int replicas = 1;                // stores that each gradient goes to
  // What gradients leave in where they are rounded on their way to the stores.
  int64_t push_buffers = 4, push_buffer_size = 100000000;
  // Stages 2 and 3 with several rounds: a rank's micro-batches are added in full and reduced once,
  // with the bits and the memory of stages 0 and 1, instead of each into its shard. Not heard where
  // `deterministic` wants the order of the micro-batches.
  bool full_gradients = false;
};

// How a job's master weights become parameters; with the unit and element where a run begins,
// by Rounding::At. What is not trained is rounded to nearest instead.
Rounding MakeRounding(const v1::JobSpec& spec);

// The type that a job computes in, and in which gradients and parameters travel.
DType ComputeType(const v1::JobSpec& spec);

// From a normalised specification (common/spec).
ZeroOptions MakeZeroOptions(const v1::JobSpec& spec, int world);

enum class GradientMode : uint8_t {
  // Each micro-batch is reduced into the owner's shard (stages 2 and 3; deterministic with several
  // rounds).
  kShard,
  // One round: the whole unit's gradient in the wire type, reduced in place (stages 0 and 1).
  kFullWire,
  // Several rounds: micro-batches are added in fp32 on the rank and reduced once (stages 0 and 1).
  kFullAccumulate,
};

// One use of a unit's parameters within a micro-batch, in execution order.
struct UnitUse {
  int unit = 0;
  bool backward = false;  // the phase the traffic is counted under
  bool gather = false;    // stage 3: an all-gather (offload_param: of what was pulled) precedes it
  bool release = false;   // stage 3: the gathered parameters are given back after it
};

struct ZeroPolicy {
  ZeroOptions options;
  int64_t rounds = 1;  // R = ceil(G / N)
  GradientMode gradient_mode = GradientMode::kFullWire;
  DType accumulate_type = DType::kF32;  // of gradients between rounds: the wire type where R = 1
  std::vector<ShardLayout> layouts;     // by unit
  std::vector<bool> resident;           // by unit: parameters are whole all the time
  std::vector<bool> trained;            // by unit: any tensor is trainable
  bool table_trained = true;            // the token table is
  std::vector<UnitUse> uses;            // of one micro-batch
  std::vector<UnitUse> eval_uses;       // of one micro-batch that only measures its loss
  // The token table's gradient travels as `row_slots` rows a rank and micro-batch, all-gathered
  // (true), or as a dense contribution that is reduced like any other (false). The same bits either
  // way: a fold starts at +0, so adding zeros changes nothing.
  bool sparse_rows = false;
  int64_t row_slots = 0;        // min(micro_batch * T, V)
  bool tied = false;            // the head, which is here, uses the token table
  bool has_rows = true;         // the embedding is here, and with it the rows of its gradient
  bool copies_table = false;    // unit 0 is a copy of the token table, which counts elsewhere
  bool uses_span_step = false;  // `uses` are of a whole step (common/plan/stage_model.h)

  // Ranks that have a micro-batch in this round: the first ones.
  int Contributors(int64_t round) const;
  // Whether a rank keeps parameters of the unit between its uses: whole, or its shard.
  bool KeepsParameters(int unit) const;
  // Whether a rank keeps its part of the unit's gradient until the step's end. With offload and one
  // round of kShard it is final once it is reduced: it leaves from the transient memory that it was
  // reduced in. But for the embedding's, which rows and a tied head are yet to join.
  bool KeepsGradient(int unit) const;
  // The elements of a unit whose update a rank answers for: all at stage 0, else its shard.
  int64_t StateBegin(int unit, int rank) const;
  int64_t StateEnd(int unit, int rank) const;
};

// Units may be empty where other ranks of a pipeline have them.
ZeroPolicy MakeZeroPolicy(const ModelTable& model, const ZeroOptions& options);
// Fills gather and release of `uses`, which are all at once: a unit is kept from one use to the
// next where what is used in between is at most max_reuse_distance and all that is kept at once at
// most max_live.
void PlanGathers(const ZeroPolicy& policy, std::vector<UnitUse>* uses);

// The most elements that are gathered for one forward or backward. Where parameters are offloaded,
// stage3_max_live_parameters below it cannot be held.
int64_t WidestUse(const ZeroPolicy& policy);

// Element ranges of a unit's flat vector that hold its token table (unit 0's first tensor).
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
ElementRange TokenTable(const ModelTable& model);  // empty: it is not here
// The same rounded up to whole 64-element blocks: what is reduced where it travels densely.
ElementRange TokenTableBlocks(const ModelTable& model);
// The part of `range` that `rank` owns (empty: begin == end).
ElementRange Owned(const ShardLayout& layout, int rank, ElementRange range);

}  // namespace zeroshard
