// What one of t tensor-parallel ranks holds of a model (architecture, section 12; Shoeybi et al.
// 2019, section 3). Pure arithmetic; thread-safe.
//
// Rows are those of a tensor's outermost dimension. Of t ranks, rank i holds
//   attn.q (and bias), attn.proj.weight: the rows of heads [i H/t, (i+1) H/t); t divides H.
//   attn.k, attn.v (and bias): the rows of its key and value heads: KV/t of them where t divides
//     KV; where KV divides t one head, number i / (t/KV), which t/KV ranks side by side hold alike.
//   mlp.*: rows [i I/t, (i+1) I/t); t divides I.
//   the token table and an untied lm_head: rows [i R, min((i+1) R, V)) with R = ceil(V / t). Every
//     rank has the shape [R, C]; rows behind the vocabulary's end are padding, on the last ranks:
//     zeros, masked in the softmax, never trained, saved or counted. Some ranks may have none but
//     such.
//   everything else (norms, biases of row-split products, gpt2's positions): whole.
// Rows that several ranks hold have one home, the lowest of these ranks: there they are saved, and
// counted in norms. So the homes' rows are each tensor's, each once.
//
// All ranks of a tensor group have one layout: the same shapes and offsets, by the rules of
// model_table.h applied to the local shapes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/plan/model_table.h"
#include "common/plan/zero_policy.h"

namespace zeroshard {

// Which rows of a tensor a rank holds. Local row r is row `begin` + r of the full tensor; local
// rows from end - begin on are padding.
struct TensorSlice {
  int64_t begin = 0, end = 0;
  int copies = 1;  // tensor ranks that hold these rows: [home, home + copies)
  int home = 0;
  // Of the full tensor: its rows, and where it begins in its unit's flat vector.
  int64_t rows = 0, offset = 0;
};

struct TensorRank {
  // Local shapes, offsets and lengths; of the configuration heads, kv_heads, intermediate and vocab
  // are those of this rank (vocab with padding), tensor is their number, the rest the model's. With
  // it activation tables, policies and plans are made as for a model of its own.
  ModelTable model;
  std::vector<std::vector<TensorSlice>> slices;  // by unit and parameter, as in model.units
  int tensor = 1, rank = 0;
  int64_t full_vocab = 0;  // V: without padding
  bool IsHome(size_t unit, size_t parameter) const { return slices[unit][parameter].home == rank; }
};

// How many tensor ranks side by side hold the same key and value heads of the whole model.
int KeyValueCopies(const ModelConfig& model, int tensor);

// Why the model cannot be split so, with the keys, the numbers and what to do; empty: it can.
// `tensor` below 1; heads or MLP columns that it does not divide, with sequence_parallel also
// tokens of a sequence; key and value heads that neither divide it nor are divided by it; slices of
// q, k or v that are no multiple of 64 elements, which would tear the three apart.
std::string TensorProblem(const ModelTable& model, int tensor);

// TensorProblem must be empty. With tensor = 1 the model itself.
TensorRank MakeTensorRank(const ModelTable& model, int tensor, int rank);

// A tensor as the full model has it: its shape, size and offset.
ParameterInfo FullParameter(const TensorRank& rank, size_t unit, size_t parameter);

// Consecutive elements of one tensor, in the rank's unit and in the full tensor.
struct SliceRun {
  int parameter = 0;    // in the unit's table
  int64_t local = 0;    // from the start of the local unit's flat vector
  int64_t element = 0;  // from the start of the full tensor
  int64_t size = 0;
  bool home = true;  // this rank saves and counts it
  int64_t flat = 0;  // from the start of the full unit's flat vector
  bool ends = true;  // with the full tensor: zeros follow `flat` + size up to a multiple of 64
};

// What a range of a local unit's flat vector is of the full tensors: at most one run a tensor, in
// ascending order. Paddings, between tensors and of rows, are in none. Initial values, checkpoints
// and the stores' chunks address full tensors by it. `local` must lie within the unit.
std::vector<SliceRun> FullRuns(const TensorRank& rank, size_t unit, ElementRange local);

// The shard stores' chunks are of whole units (chunk_table.h), so that none moves where a mesh
// changes; they commit a step when each element of a chunk was pushed exactly once. The homes of a
// tensor group push their runs, whatever pieces their units are cut into, and whoever is home of a
// tensor's end zeros for the padding behind it. So each element of a unit is pushed once.
int64_t PaddingBehind(const SliceRun& run);
// Elements that the stores get from the rank, and give it, for these runs.
int64_t PushedElements(const std::vector<SliceRun>& runs);
int64_t PulledElements(const std::vector<SliceRun>& runs);

}  // namespace zeroshard
