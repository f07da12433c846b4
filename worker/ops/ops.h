// The kernels, behind one interface a backend implements. All matrices are row-major and dense
// unless a leading dimension is named. Pointers are device memory. Unless said otherwise T-typed
// tensors are of the job's compute type (`dtype`: fp32, bf16 or fp16), statistics and losses are
// fp32, and sums are accumulated in fp32. Every result is the same for any thread count. One
// instance serves one thread at a time (it owns that rank's scratch memory); instances are
// independent.
//
// Calls are work of the device's compute stream, in order: on a device that is not the host they
// return before it is done, and an error of the device itself is that stream's (Stream::Record). A
// host reads a result through Stream::Copy and its event.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/kernels/adamw.h"
#include "common/types.h"
#include "worker/device/device.h"
#include "worker/ops/norm_accumulator.h"

namespace zeroshard {

// C[m,n] = op(A)[m,k] * op(B)[k,n] (+ bias[n]) (+ C where accumulate).
struct MatmulArgs {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  const void* bias = nullptr;  // [n] of type ab_type, or null
  int64_t m = 0, n = 0, k = 0;
  bool transpose_a = false;  // A is stored [k,m]
  bool transpose_b = false;  // B is stored [n,k]
  DType ab_type = DType::kF32;
  DType c_type = DType::kF32;  // fp32, or ab_type
  bool accumulate = false;
};

// A mask that any rank can draw for any part of a tensor: element e of sample s is dropped where
// the counter-based generator (common/kernels/philox.h), keyed by seed and (step, s, site, e), says
// so; what is kept is scaled by 1 / (1 - rate). The same in forward and backward.
struct DropoutArgs {
  float rate = 0;  // 0: none
  uint64_t seed = 0;
  uint64_t step = 0;
  uint32_t site = 0;         // which dropout of the model
  int64_t first_sample = 0;  // of the first sequence
  // The call's element e of a sample is the mask's element first_element + e: a part of a tensor
  // has the mask that the whole one has there.
  int64_t first_element = 0;
};

struct AttentionArgs {
  // Sequence b, position t, head h starts at q + ((b*T + t)*ld_q + h*D); likewise k and v, over KV
  // heads (query head h reads key head h / (H/KV)); so a packed [B*T, (H+2*KV)*D] buffer serves.
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t ld_q = 0, ld_k = 0, ld_v = 0;  // elements
  int64_t batch = 0, seq = 0, heads = 0, kv_heads = 0, head_dim = 0;
  DType dtype = DType::kF32;
  // [batch, T]: a query attends to keys from its document's start on (in [0, t], never falling
  // within a sequence). Null: from 0.
  const int32_t* document_start = nullptr;
  // Of the attention weights: element (h*T + t)*T + key of a sample.
  DropoutArgs dropout;
};

// Queries [rows, H*D] at positions [past, past + rows) of one sequence, over the keys and values
// [past + rows, KV*D] of all positions up to each query's own. Dense.
struct CachedAttentionArgs {
  const void* q = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t past = 0, rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  DType dtype = DType::kF32;
};

// What a micro-batch comes to, in device memory until the host reads it.
struct MicroBatchSums {
  double loss = 0;         // of its tokens, in order of position
  NormAccumulator inputs;  // of its gradient by the embedding's output
};

// The sums of a table's rows on a rank that owns elements [begin, end) of the table [_, cols]: fp32
// accumulators for the rows that were touched, in device memory. All zero bytes but slots (all -1)
// is a sum of nothing.
struct RowSums {
  int64_t begin = 0, end = 0, cols = 0;
  int64_t capacity = 0;        // rows that `sums` has room for
  int32_t* slots = nullptr;    // [rows that [begin, end) touches]: where a row is in sums; -1
  int32_t* touched = nullptr;  // [capacity]: the row of each slot that is in use
  int32_t* count = nullptr;    // [1]: slots in use
  float* sums = nullptr;       // [capacity, cols]
  int64_t first_row() const { return cols > 0 ? begin / cols : 0; }
};

class Ops {
 public:
  virtual ~Ops() = default;

  virtual absl::Status Matmul(const MatmulArgs& args) = 0;
  // The gradient by GELU's input x [m, n], of c_type, where the product is that by its output: as
  // Matmul, then GeluBackward in place. A backend may do both at once and round the product once
  // less. No bias, no accumulation.
  virtual absl::Status MatmulGeluBackward(const MatmulArgs& args, const void* x) {
    absl::Status status = Matmul(args);
    if (status.ok()) GeluBackward(args.c, x, args.m * args.n, args.c_type, args.c);
    return status;
  }

  // out[c] (+)= sum over rows of x[rows, cols], added from row 0 on in a fixed order; out is
  // out_type.
  virtual void ColumnSum(const void* x, int64_t rows, int64_t cols, DType dtype, void* out,
                         DType out_type) = 0;

  // y = (x - mean) * rstd * weight + bias over the last dimension; mean and rstd [rows] are kept.
  virtual void LayerNormForward(const void* x, const void* weight, const void* bias, int64_t rows,
                                int64_t cols, float eps, DType dtype, void* y, float* mean,
                                float* rstd) = 0;
  // dx (+)= ...; d_weight and d_bias are overwritten, of type dtype (rounded once from fp32 sums).
  virtual void LayerNormBackward(const void* dy, const void* x, const void* weight,
                                 const float* mean, const float* rstd, int64_t rows, int64_t cols,
                                 DType dtype, bool accumulate_dx, void* dx, void* d_weight,
                                 void* d_bias) = 0;
  virtual void RmsNormForward(const void* x, const void* weight, int64_t rows, int64_t cols,
                              float eps, DType dtype, void* y, float* rstd) = 0;
  virtual void RmsNormBackward(const void* dy, const void* x, const void* weight, const float* rstd,
                               int64_t rows, int64_t cols, DType dtype, bool accumulate_dx,
                               void* dx, void* d_weight) = 0;

  // GELU with the tanh approximation ("gelu_new" in GPT-2).
  virtual void GeluForward(const void* x, int64_t n, DType dtype, void* y) = 0;
  virtual void GeluBackward(const void* dy, const void* x, int64_t n, DType dtype, void* dx) = 0;
  // y = silu(gate) * up. Backward may write d_gate over gate and d_up over up.
  virtual void SwiGluForward(const void* gate, const void* up, int64_t n, DType dtype, void* y) = 0;
  virtual void SwiGluBackward(const void* dy, const void* gate, const void* up, int64_t n,
                              DType dtype, void* d_gate, void* d_up) = 0;

  // Rotates pairs (i, i + D/2) of each head in place by position * frequencies[i] (Hugging Face's
  // half-split convention, and like it the angle is rounded to fp32); inverse: the backward
  // rotation. x starts at the first head; each sequence's rows are at positions first_position on.
  // frequencies [D/2]: radians per position (common/plan/rope.h), in host memory.
  virtual void Rope(void* x, int64_t ld, int64_t batch, int64_t seq, int64_t heads,
                    int64_t head_dim, const float* frequencies, int64_t first_position,
                    bool inverse, DType dtype) = 0;

  // y = x with the mask of args applied: x, y [batch, per_sample], element e of sample
  // args.first_sample + b is element e of row b. y may be x. The gradient is the same call on dy.
  virtual void Dropout(const DropoutArgs& args, const void* x, int64_t batch, int64_t per_sample,
                       DType dtype, void* y) = 0;

  // Causal attention with scale 1/sqrt(D): out [B*T, H*D], lse [B, H, T] (log-sum-exp per row).
  virtual absl::Status AttentionForward(const AttentionArgs& args, void* out, float* lse) = 0;
  // d_q, d_k, d_v have the leading dimensions of q, k, v and are overwritten.
  virtual absl::Status AttentionBackward(const AttentionArgs& args, const void* out,
                                         const void* d_out, const float* lse, void* d_q, void* d_k,
                                         void* d_v) = 0;
  // Inference: out [rows, H*D] of type args.dtype; scores, softmax and sums are fp32.
  virtual absl::Status CachedAttention(const CachedAttentionArgs& args, void* out) = 0;

  // Within the device's memory.
  virtual void Copy(void* to, const void* from, size_t bytes) = 0;
  virtual void Zero(void* to, size_t bytes) = 0;
  // `rows` rows of `bytes` each, whose starts lie to_stride and from_stride bytes apart.
  virtual void CopyRows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                        int64_t rows, int64_t bytes) = 0;

  // y = a + b (y may be a or b).
  virtual void Add(const void* a, const void* b, int64_t n, DType dtype, void* y) = 0;

  // y[i] = tok[tokens[i]] (+ pos[i % seq] where pos is not null); tokens [batch*seq].
  virtual void EmbeddingForward(const int32_t* tokens, const void* tok, const void* pos,
                                int64_t batch, int64_t seq, int64_t cols, DType dtype, void* y) = 0;
  // The token table's gradient as rows: ids[] receives the distinct tokens in rising order,
  // followed by -1 up to batch*seq; rows [batch*seq, cols] their fp32 sums (in order of position)
  // rounded once to dtype, zeros after the last. Where LocalIds works a token may be -1: it has no
  // row.
  virtual void EmbeddingBackwardRows(const void* dy, const int32_t* tokens, int64_t batch,
                                     int64_t seq, int64_t cols, DType dtype, int32_t* ids,
                                     void* rows) = 0;
  // d_pos [seq, cols] = sum over the batch of dy.
  virtual void PositionBackward(const void* dy, int64_t batch, int64_t seq, int64_t cols,
                                DType dtype, void* d_pos) = 0;

  // losses[i] = -log softmax(column i of logits)[targets[i]] (0 and a zero gradient where the
  // target is -1). Unless gradient_scale is 0, logits become (softmax - onehot) * gradient_scale,
  // the gradient of that many times the summed loss, rounded once. logits [v, rows]: with the
  // vocabulary outermost each run of vocabulary rows is a dense operand of the head matrix's
  // gradient, and an odd vocabulary size never is a leading dimension.
  virtual void CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v,
                                   DType dtype, float gradient_scale, float* losses) = 0;

  // For a vocabulary that is split over tensor ranks, of which this one has rows [begin, end).
  // UNIMPLEMENTED from a backend without kernels for it.
  // local[i] = ids[i] - begin where ids[i] is one of them, else -1.
  virtual absl::Status LocalIds(const int32_t* ids, int64_t n, int64_t begin, int64_t end,
                                int32_t* local) {
    return NoTensorRanks();
  }
  // y[i] = table[local[i]], zeros where that is -1; y [n, cols].
  virtual absl::Status LookupRows(const int32_t* local, const void* table, int64_t n, int64_t cols,
                                  DType dtype, void* y) {
    return NoTensorRanks();
  }
  // What the columns of logits [v, rows] add to a softmax over all ranks' logits, part [3, rows]:
  // the largest logit (minus infinity where v is 0), the sum of exp(logit - largest) (NaN where a
  // logit is not finite), and the target's logit, 0 where the local target is -1.
  virtual absl::Status SoftmaxPart(const void* logits, const int32_t* local_targets, int64_t rows,
                                   int64_t v, DType dtype, float* part) {
    return NoTensorRanks();
  }
  // CrossEntropyColumns of logits that are spread over `ranks`: parts [ranks, 3, rows] are theirs,
  // targets those of the whole vocabulary. Every rank gets the same losses, and the gradient of its
  // own logits.
  virtual absl::Status CrossEntropyOfParts(const float* parts, int ranks, void* logits,
                                           const int32_t* targets, const int32_t* local_targets,
                                           int64_t rows, int64_t v, DType dtype,
                                           float gradient_scale, float* losses) {
    return NoTensorRanks();
  }

  // out[i] = to(in[i]) (round to nearest even), for pairs of fp32, bf16 and fp16.
  virtual void Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type) = 0;
  // acc[i] (+)= x[i] in fp32; x of dtype.
  virtual void AccumulateF32(const void* x, DType dtype, int64_t n, bool accumulate,
                             float* acc) = 0;

  // Decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), in the order of operations of
  // common/kernels/adamw.h. Updates master, exp_avg, exp_avg_sq in place and writes the parameters
  // (param may be master itself for fp32 jobs). grad of grad_type, param of param_type.
  virtual void AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type,
                     float* master, float* exp_avg, float* exp_avg_sq, void* param,
                     DType param_type) = 0;

  // sum += the losses [rows] of the rows whose target is not -1, in order, in fp64.
  virtual void AddLosses(const float* losses, const int32_t* targets, int64_t rows,
                         double* sum) = 0;

  // x[i] = fp32(wire(x[i])), in place.
  virtual void RoundInPlace(float* x, int64_t n, DType wire) = 0;
  // gradient[i] = wire(gradient[i] + wire(sum[i])), which is kept as gradient_type.
  virtual void AddRounded(const void* sum, DType sum_type, int64_t n, DType wire, void* gradient,
                          DType gradient_type) = 0;

  // Rows of a table [_, cols], by distinct ids in rising order that -1 ends before n.
  // table[ids[i]] = rows[i], both of dtype.
  virtual void ScatterRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols,
                           DType dtype, void* table) = 0;
  // table[ids[i]] += rows[i], in fp32.
  virtual void AccumulateRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols,
                              DType dtype, float* table) = 0;
  // The same into sums.sums, as far as this rank owns it; a row that is touched for the first time
  // gets a slot. There must be room.
  virtual void FoldRows(const RowSums& sums, const int32_t* ids, const void* rows, int64_t n,
                        DType dtype) = 0;
  // AddRounded of every touched row's sum to `gradient`, which starts at element sums.begin.
  virtual void JoinRows(const RowSums& sums, DType wire, void* gradient, DType gradient_type) = 0;
  // A sum of nothing again.
  virtual void ClearRows(const RowSums& sums) = 0;

  // Adds the squares of x to `acc` (worker/ops/norm_accumulator.h), in device memory: x starts at a
  // multiple of 64 elements of its unit's flat vector. A non-finite element sets acc->nonfinite.
  virtual void AddSquares(const void* x, int64_t n, DType dtype, NormAccumulator* acc) = 0;

  // Instruction set, product library and version: jobs that must be bit-identical compare it.
  virtual std::string Fingerprint() const = 0;
  // Seconds this instance spent in matrix products; 0 where the device does not tell.
  virtual double MatmulSeconds() const = 0;

 private:
  absl::Status NoTensorRanks() const {
    return absl::UnimplementedError(
        "this backend has no kernels for a vocabulary that is split over tensor ranks; wanted "
        "parallel.tensor: 1, or workers on CPUs");
  }
};

// `threads`: OpenMP threads of one call. For memory of the host.
std::unique_ptr<Ops> MakeCpuOps(int threads);

}  // namespace zeroshard
