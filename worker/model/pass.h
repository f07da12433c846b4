// One call of a unit: its parameters, the memory for its gradients and its activations by name.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/plan/activation_table.h"
#include "common/plan/model_table.h"
#include "worker/model/tensor_part.h"
#include "worker/model/unit.h"
#include "worker/ops/ops.h"

namespace zeroshard {

// `pointer` moved by `elements` of `dtype`.
inline void* Advance(void* pointer, int64_t elements, DType dtype) {
  return static_cast<char*>(pointer) + elements * static_cast<int64_t>(SizeOf(dtype));
}
inline const void* Advance(const void* pointer, int64_t elements, DType dtype) {
  return static_cast<const char*>(pointer) + elements * static_cast<int64_t>(SizeOf(dtype));
}

// A unit's activation tables for the sizes and type last asked for. Not thread-safe.
class ActivationCache {
 public:
  ActivationCache(const ModelConfig& config, UnitKind kind, bool checkpointing)
      : config_(config), kind_(kind), checkpointing_(checkpointing) {}
  // Valid until the next call.
  const ActivationTable& Get(int64_t micro_batch, DType dtype);
  // Of inference (MakeDecodeTable). Valid until its next call.
  const ActivationTable& GetDecode(int64_t rows, DType dtype);

 private:
  struct Kept {
    int64_t size = -1;
    DType dtype = DType::kF32;
    ActivationTable table;
  };
  ModelConfig config_;
  UnitKind kind_;
  bool checkpointing_;
  Kept training_, decode_;
};

// The places of a unit where elements are dropped in training.
enum class DropoutPlace : uint8_t {
  kEmbedding,
  kAttentionWeights,
  kAttentionOutput,
  kMlpOutput,
};
// DropoutArgs::site: four a unit. Part of what a run's numbers depend on: never renumbered.
constexpr uint32_t DropoutSite(int64_t unit_index, DropoutPlace place) {
  return static_cast<uint32_t>(unit_index) * 4 + static_cast<uint32_t>(place);
}

// All pointers are borrowed for the call.
struct Pass {
  const UnitContext& ctx;
  const ActivationTable& activations;
  int64_t batch = 0;               // sequences
  int64_t sequence = 0;            // tokens of each: T; in inference as many as are new
  int64_t rows = 0;                // tokens: batch x sequence
  int64_t own_rows = 0;            // those of the residual stream and of norms here (StreamRows)
  int64_t first_row = 0;           // which of the rows is the first of them
  const void* params = nullptr;    // the unit's flat vector
  void* gradients = nullptr;       // likewise, in backward
  const MicroBatch* mb = nullptr;  // in training
  const KvCache* cache = nullptr;  // in inference, by blocks
  int64_t past = 0;                // position of the first row in its sequence
  TensorGroup* group = nullptr;    // of a tensor rank; null: the model is whole
  CollectiveInfo info = {};        // of its collectives

  Ops& ops() const { return *ctx.ops; }
  DType dtype() const { return ctx.dtype; }
  const void* Parameter(const ParameterInfo& p) const {
    return Advance(params, p.offset, ctx.dtype);
  }
  void* Gradient(const ParameterInfo& p) const { return Advance(gradients, p.offset, ctx.dtype); }

  // Sets the sizes. SetRows: every row is here. DivideRows: as the configuration has it.
  void SetRows(int64_t sequences, int64_t tokens);
  void DivideRows(const ModelConfig& config);
  // Whether other ranks have rows of the residual stream that this one has not.
  bool divided() const { return own_rows != rows; }
  // Of x [rows, cols] the own rows.
  void* Own(void* x, int64_t cols) const { return Advance(x, first_row * cols, dtype()); }
  // Calls body(position of the first in its sequence, own row, number) for the own rows of each
  // sequence that has some, in order.
  template <typename Body>
  void ForEachSequence(const Body& body) const {
    for (int64_t row = 0; row < own_rows;) {
      const int64_t position = (first_row + row) % sequence;
      const int64_t count = std::min(sequence - position, own_rows - row);
      body(position, row, count);
      row += count;
    }
  }

  // The mask of `site` for this micro-batch; rate 0 where none is to be applied.
  DropoutArgs Dropout(float rate, uint32_t site) const;
  // Applies `mask`, which is of all rows, to own rows x [own_rows, cols]; y may be x.
  void DropRows(const DropoutArgs& mask, const void* x, int64_t cols, void* y) const;

  // An entry of the unit's activation table, kept or scratch; it must exist.
  void* At(absl::string_view name) const;
  float* Float(absl::string_view name) const { return static_cast<float*>(At(name)); }

  // c[m,n] = op(a)[m,k] * op(b)[k,n], all in the compute type.
  absl::Status Product(const void* a, bool transpose_a, const void* b, bool transpose_b, void* c,
                       int64_t m, int64_t n, int64_t k, const void* bias = nullptr,
                       bool accumulate = false) const;
  // The same product a[m,k] * b[n,k]^T as the gradient by GELU's output, made that by its input x.
  absl::Status ProductGeluBackward(const void* a, const void* b, const void* x, void* c, int64_t m,
                                   int64_t n, int64_t k) const;
  // The gradient of the matrix `p` [m,n] = a[rows,m]^T * b[rows,n]. Nothing where `p` is frozen.
  absl::Status MatrixGradient(const ParameterInfo& p, const void* a, const void* b, int64_t m,
                              int64_t n) const;
  // The gradient of the bias `p` [n]: the column sums of d [rows, n].
  void BiasGradient(const ParameterInfo& p, const void* d) const;

  // What ends the run of split products: the own rows of a[rows, k] * b[k, n] (+ bias) in out
  // [own_rows, n], of which a tensor rank has some of k. Its product is rounded to the compute
  // type; the ranks' are added in fp32 in rank order and rounded once more. The first rank's has
  // the bias, so that the sum has it once. Where rows are divided the product is made in
  // "norm.out".
  absl::Status RowSplitProduct(const void* a, const void* b, void* out, int64_t n, int64_t k,
                               const void* bias) const;

  // With a group, in the compute type; beside what is computed until Wait.
  // x [rows, cols] becomes its sum over the tensor ranks, where rows are divided the own ones do.
  Event BeginSum(void* x, int64_t cols) const;
  // The same in out [own_rows, cols]; out is x where every row is here, else apart from it. Waits.
  absl::Status Sum(void* x, int64_t cols, void* out) const;
  // x [rows, cols], of which each rank has its own rows, becomes whole.
  Event BeginGather(void* x, int64_t cols) const;
  // An empty event is done.
  absl::Status Wait(const Event& event) const;

 private:
  MatmulArgs Args(const void* a, bool transpose_a, const void* b, bool transpose_b, void* c,
                  int64_t m, int64_t n, int64_t k) const;
};

}  // namespace zeroshard
