// A unit of the model: parameters in one flat vector, Forward and Backward written by hand over
// Ops. Units hold no parameters and no gradients: the ZeRO engine lends them (worker/zero). Not
// thread-safe; one instance a rank.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "common/plan/activation_table.h"
#include "common/plan/model_table.h"
#include "common/plan/tensor_slices.h"
#include "worker/comm/tensor_group.h"
#include "worker/ops/ops.h"

namespace zeroshard {

// Where a unit's gradients go. The unit asks for room for a range of its flat vector, writes the
// gradient of MicroBatch::gradient_scale times the summed loss over the micro-batch there (wire
// type = compute dtype, rounded once), and says when a range is done; from then on it must not
// touch it.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  // Room for elements [begin, end) (multiples of 64), contiguous; contents undefined. At most two
  // ranges not yet Done at a time; may wait for an earlier range to leave.
  virtual absl::StatusOr<void*> Acquire(int64_t begin, int64_t end) = 0;
  // [begin, end) is final. Must be a part of an acquired range; parts may come in any order, and
  // together must cover it (padding included; the sink zeroes padding and frozen tensors itself).
  virtual absl::Status Done(int64_t begin, int64_t end) = 0;
};

// Arrays in device memory.
struct MicroBatch {
  int64_t batch = 0;                 // sequences
  const int32_t* tokens = nullptr;   // [batch, T]
  const int32_t* targets = nullptr;  // [batch, T]; -1: no loss
  // [batch, T]: where in its sequence a token's document starts; attention does not look behind it.
  // Null: each sequence is one document.
  const int32_t* document_start = nullptr;
  // What dropout masks are keyed by (architecture, section 5b): the sequence b of the micro-batch
  // is sample first_sample + b of the run's order.
  uint64_t seed = 0;
  uint64_t step = 0;
  int64_t first_sample = 0;
  bool dropout = false;  // false: the rates of the specification are not applied (evaluation)
  // Gradients are of the summed loss times this; not 0. 1 but for fp16 (common/spec/loss_scale.h).
  float gradient_scale = 1;
};

// Everything a call needs besides parameters.
struct UnitContext {
  Ops* ops = nullptr;
  DType dtype = DType::kF32;
  void* kept = nullptr;     // this unit's block of ActivationTable::kept_bytes
  void* scratch = nullptr;  // shared block of at least ActivationTable::scratch_bytes
};

// Keys and values of the positions so far of one sequence, of one block: [capacity, KV*D] each, in
// the context's type. Borrowed.
struct KvCache {
  void* keys = nullptr;
  void* values = nullptr;
  int64_t capacity = 0;
};

// Scratch for Decode and Logits of `rows` positions: bytes of UnitContext::scratch.
int64_t DecodeScratchBytes(const ModelConfig& config, int64_t rows, DType dtype);

class BlockUnit {
 public:
  virtual ~BlockUnit() = default;
  // x, y [StreamRows, C] (activation_table.h), as dy and dx; params: the unit's flat vector in
  // ctx.dtype. `x` stays valid and unchanged until Backward (the unit may keep the pointer) unless
  // checkpointing, where Forward copies it to `kept`.
  virtual absl::Status Forward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                               const void* x, void* y) = 0;
  // dy -> dx, which may be the same buffer. With checkpointing it first repeats the forward.
  virtual absl::Status Backward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                                const void* x, const void* dy, void* dx, GradientSink* sink) = 0;
  // Inference: positions [past, past + rows) of one sequence, x and y [rows, C], one attending to
  // all before it. Adds their keys and values to `cache`; ctx.kept is not used. With past = 0 the
  // numbers are Forward's. INVALID_ARGUMENT where the cache is too short.
  virtual absl::Status Decode(const UnitContext& ctx, const void* params, int64_t past,
                              int64_t rows, const KvCache& cache, const void* x, void* y) = 0;
};

class EmbeddingUnit {
 public:
  virtual ~EmbeddingUnit() = default;
  // y [StreamRows, C].
  virtual absl::Status Forward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                               void* y) = 0;
  // `dy` [StreamRows, C] is not changed. The token table's gradient as rows
  // (Ops::EmbeddingBackwardRows): ids [mb*T], rows [mb*T, C] in ctx.dtype; the position table's
  // (gpt2) through the sink. Needs no parameters.
  virtual absl::Status Backward(const UnitContext& ctx, const MicroBatch& mb, const void* dy,
                                int32_t* ids, void* rows, GradientSink* sink) = 0;
  // Inference: y [rows, C] of the tokens (device memory, all in the vocabulary) at positions [past,
  // past + rows). INVALID_ARGUMENT for a position beyond gpt2's table.
  virtual absl::Status Decode(const UnitContext& ctx, const void* params, int64_t past,
                              int64_t rows, const int32_t* tokens, void* y) = 0;
};

class HeadUnit {
 public:
  virtual ~HeadUnit() = default;
  // Loss only, added to *loss (device memory): of the tokens that count, in fp64, in order of
  // position. x [StreamRows, C]; `lm_head`: [V, C], the tied embedding table or this unit's own
  // lm_head.weight.
  virtual absl::Status Loss(const UnitContext& ctx, const void* params, const void* lm_head,
                            const MicroBatch& mb, const void* x, double* loss) = 0;
  // Loss, and the gradient of gradient_scale times the summed loss: dx [StreamRows, C] (not x), the
  // norm's gradients through `sink`, the head matrix's through `head_sink` in row blocks whose
  // element range in that unit's flat vector starts at head_offset (the same sink and unit when
  // untied).
  virtual absl::Status LossAndBackward(const UnitContext& ctx, const void* params,
                                       const void* lm_head, const MicroBatch& mb, const void* x,
                                       void* dx, GradientSink* sink, GradientSink* head_sink,
                                       int64_t head_offset, double* loss) = 0;
  // Inference: the fp32 logits [rows, V] of x [rows, C].
  virtual absl::Status Logits(const UnitContext& ctx, const void* params, const void* lm_head,
                              int64_t rows, const void* x, float* logits) = 0;
};

struct Model {
  ModelTable table;
  std::unique_ptr<EmbeddingUnit> embedding;
  std::vector<std::unique_ptr<BlockUnit>> blocks;
  std::unique_ptr<HeadUnit> head;
};

Model MakeModel(ModelTable table, bool checkpointing);

// The units of one tensor rank, over the slice's table: the tensors that units are given and write
// gradients of are slice.model's. `group` (of slice.tensor ranks, this one slice.rank; with copies
// where slice.slices has any of attn.k.weight) outlives the model; null only where slice.tensor is
// 1. Every rank of it makes the same calls with the same micro-batches. Then
//   activations between units, losses and inference's logits are those of the whole model, the same
//     bits on every rank; with sequence_parallel in the table's configuration a rank has its rows
//     of the activations alone, and of a forward each row has the bits that it has without;
//   the gradient of what several ranks hold is that of the whole model, the same bits on each;
//   EmbeddingUnit::Backward's ids are rows of this rank's table, of tokens that it has.
// UNIMPLEMENTED from units over Ops without kernels for it.
Model MakeModel(const TensorRank& slice, bool checkpointing, TensorGroup* group);

}  // namespace zeroshard
