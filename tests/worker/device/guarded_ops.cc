#include "tests/worker/device/guarded_ops.h"

#include <utility>
#include <vector>

namespace zeroshard {

GuardedOps::~GuardedOps() {
  // Not a Record: the stream's error is for whoever asks for it.
  device_->compute()->Enqueue([] { return absl::OkStatus(); }).Wait().IgnoreError();
}

void GuardedOps::Run(std::function<absl::Status()> work) {
  device_->compute()->Enqueue(std::move(work));
}

MatmulArgs GuardedOps::View(MatmulArgs args) const {
  args.a = View(args.a);
  args.b = View(args.b);
  args.c = View(args.c);
  args.bias = View(args.bias);
  return args;
}

AttentionArgs GuardedOps::View(AttentionArgs args) const {
  args.q = View(args.q);
  args.k = View(args.k);
  args.v = View(args.v);
  args.document_start = View(args.document_start);
  return args;
}

CachedAttentionArgs GuardedOps::View(CachedAttentionArgs args) const {
  args.q = View(args.q);
  args.k = View(args.k);
  args.v = View(args.v);
  return args;
}

RowSums GuardedOps::View(RowSums sums) const {
  sums.slots = View(sums.slots);
  sums.touched = View(sums.touched);
  sums.count = View(sums.count);
  sums.sums = View(sums.sums);
  return sums;
}

absl::Status GuardedOps::Matmul(const MatmulArgs& args) {
  Run([=, this, args = View(args)] { return cpu_->Matmul(args); });
  return absl::OkStatus();
}

void GuardedOps::ColumnSum(const void* x, int64_t rows, int64_t cols, DType dtype, void* out,
                           DType out_type) {
  Run([=, this, x = View(x), out = View(out)] {
    cpu_->ColumnSum(x, rows, cols, dtype, out, out_type);
    return absl::OkStatus();
  });
}

void GuardedOps::LayerNormForward(const void* x, const void* weight, const void* bias, int64_t rows,
                                  int64_t cols, float eps, DType dtype, void* y, float* mean,
                                  float* rstd) {
  Run([=, this, x = View(x), weight = View(weight), bias = View(bias), y = View(y),
       mean = View(mean), rstd = View(rstd)] {
    cpu_->LayerNormForward(x, weight, bias, rows, cols, eps, dtype, y, mean, rstd);
    return absl::OkStatus();
  });
}

void GuardedOps::LayerNormBackward(const void* dy, const void* x, const void* weight,
                                   const float* mean, const float* rstd, int64_t rows, int64_t cols,
                                   DType dtype, bool accumulate_dx, void* dx, void* d_weight,
                                   void* d_bias) {
  Run([=, this, dy = View(dy), x = View(x), weight = View(weight), mean = View(mean),
       rstd = View(rstd), dx = View(dx), d_weight = View(d_weight), d_bias = View(d_bias)] {
    cpu_->LayerNormBackward(dy, x, weight, mean, rstd, rows, cols, dtype, accumulate_dx, dx,
                            d_weight, d_bias);
    return absl::OkStatus();
  });
}

void GuardedOps::RmsNormForward(const void* x, const void* weight, int64_t rows, int64_t cols,
                                float eps, DType dtype, void* y, float* rstd) {
  Run([=, this, x = View(x), weight = View(weight), y = View(y), rstd = View(rstd)] {
    cpu_->RmsNormForward(x, weight, rows, cols, eps, dtype, y, rstd);
    return absl::OkStatus();
  });
}

void GuardedOps::RmsNormBackward(const void* dy, const void* x, const void* weight,
                                 const float* rstd, int64_t rows, int64_t cols, DType dtype,
                                 bool accumulate_dx, void* dx, void* d_weight) {
  Run([=, this, dy = View(dy), x = View(x), weight = View(weight), rstd = View(rstd), dx = View(dx),
       d_weight = View(d_weight)] {
    cpu_->RmsNormBackward(dy, x, weight, rstd, rows, cols, dtype, accumulate_dx, dx, d_weight);
    return absl::OkStatus();
  });
}

void GuardedOps::GeluForward(const void* x, int64_t n, DType dtype, void* y) {
  Run([=, this, x = View(x), y = View(y)] {
    cpu_->GeluForward(x, n, dtype, y);
    return absl::OkStatus();
  });
}

void GuardedOps::GeluBackward(const void* dy, const void* x, int64_t n, DType dtype, void* dx) {
  Run([=, this, dy = View(dy), x = View(x), dx = View(dx)] {
    cpu_->GeluBackward(dy, x, n, dtype, dx);
    return absl::OkStatus();
  });
}

void GuardedOps::SwiGluForward(const void* gate, const void* up, int64_t n, DType dtype, void* y) {
  Run([=, this, gate = View(gate), up = View(up), y = View(y)] {
    cpu_->SwiGluForward(gate, up, n, dtype, y);
    return absl::OkStatus();
  });
}

void GuardedOps::SwiGluBackward(const void* dy, const void* gate, const void* up, int64_t n,
                                DType dtype, void* d_gate, void* d_up) {
  Run([=, this, dy = View(dy), gate = View(gate), up = View(up), d_gate = View(d_gate),
       d_up = View(d_up)] {
    cpu_->SwiGluBackward(dy, gate, up, n, dtype, d_gate, d_up);
    return absl::OkStatus();
  });
}

void GuardedOps::Rope(void* x, int64_t ld, int64_t batch, int64_t seq, int64_t heads,
                      int64_t head_dim, const float* frequencies, int64_t first_position,
                      bool inverse, DType dtype) {
  Run([=, this, x = View(x), angles = std::vector<float>(frequencies, frequencies + head_dim / 2)] {
    cpu_->Rope(x, ld, batch, seq, heads, head_dim, angles.data(), first_position, inverse, dtype);
    return absl::OkStatus();
  });
}

void GuardedOps::Dropout(const DropoutArgs& args, const void* x, int64_t batch, int64_t per_sample,
                         DType dtype, void* y) {
  Run([=, this, x = View(x), y = View(y)] {
    cpu_->Dropout(args, x, batch, per_sample, dtype, y);
    return absl::OkStatus();
  });
}

absl::Status GuardedOps::AttentionForward(const AttentionArgs& args, void* out, float* lse) {
  Run([=, this, args = View(args), out = View(out), lse = View(lse)] {
    return cpu_->AttentionForward(args, out, lse);
  });
  return absl::OkStatus();
}

absl::Status GuardedOps::AttentionBackward(const AttentionArgs& args, const void* out,
                                           const void* d_out, const float* lse, void* d_q,
                                           void* d_k, void* d_v) {
  Run([=, this, args = View(args), out = View(out), d_out = View(d_out), lse = View(lse),
       d_q = View(d_q), d_k = View(d_k),
       d_v = View(d_v)] { return cpu_->AttentionBackward(args, out, d_out, lse, d_q, d_k, d_v); });
  return absl::OkStatus();
}

absl::Status GuardedOps::CachedAttention(const CachedAttentionArgs& args, void* out) {
  Run([=, this, args = View(args), out = View(out)] { return cpu_->CachedAttention(args, out); });
  return absl::OkStatus();
}

void GuardedOps::Copy(void* to, const void* from, size_t bytes) {
  Run([=, this, to = View(to), from = View(from)] {
    cpu_->Copy(to, from, bytes);
    return absl::OkStatus();
  });
}

void GuardedOps::Zero(void* to, size_t bytes) {
  Run([=, this, to = View(to)] {
    cpu_->Zero(to, bytes);
    return absl::OkStatus();
  });
}

void GuardedOps::CopyRows(void* to, int64_t to_stride, const void* from, int64_t from_stride,
                          int64_t rows, int64_t bytes) {
  Run([=, this, to = View(to), from = View(from)] {
    cpu_->CopyRows(to, to_stride, from, from_stride, rows, bytes);
    return absl::OkStatus();
  });
}

void GuardedOps::Add(const void* a, const void* b, int64_t n, DType dtype, void* y) {
  Run([=, this, a = View(a), b = View(b), y = View(y)] {
    cpu_->Add(a, b, n, dtype, y);
    return absl::OkStatus();
  });
}

void GuardedOps::EmbeddingForward(const int32_t* tokens, const void* tok, const void* pos,
                                  int64_t batch, int64_t seq, int64_t cols, DType dtype, void* y) {
  Run([=, this, tokens = View(tokens), tok = View(tok), pos = View(pos), y = View(y)] {
    cpu_->EmbeddingForward(tokens, tok, pos, batch, seq, cols, dtype, y);
    return absl::OkStatus();
  });
}

void GuardedOps::EmbeddingBackwardRows(const void* dy, const int32_t* tokens, int64_t batch,
                                       int64_t seq, int64_t cols, DType dtype, int32_t* ids,
                                       void* rows) {
  Run([=, this, dy = View(dy), tokens = View(tokens), ids = View(ids), rows = View(rows)] {
    cpu_->EmbeddingBackwardRows(dy, tokens, batch, seq, cols, dtype, ids, rows);
    return absl::OkStatus();
  });
}

void GuardedOps::PositionBackward(const void* dy, int64_t batch, int64_t seq, int64_t cols,
                                  DType dtype, void* d_pos) {
  Run([=, this, dy = View(dy), d_pos = View(d_pos)] {
    cpu_->PositionBackward(dy, batch, seq, cols, dtype, d_pos);
    return absl::OkStatus();
  });
}

void GuardedOps::CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v,
                                     DType dtype, float gradient_scale, float* losses) {
  Run([=, this, logits = View(logits), targets = View(targets), losses = View(losses)] {
    cpu_->CrossEntropyColumns(logits, targets, rows, v, dtype, gradient_scale, losses);
    return absl::OkStatus();
  });
}

absl::Status GuardedOps::LocalIds(const int32_t* ids, int64_t n, int64_t begin, int64_t end,
                                  int32_t* local) {
  Run([=, this, ids = View(ids), local = View(local)] {
    return cpu_->LocalIds(ids, n, begin, end, local);
  });
  return absl::OkStatus();
}

absl::Status GuardedOps::LookupRows(const int32_t* local, const void* table, int64_t n,
                                    int64_t cols, DType dtype, void* y) {
  Run([=, this, local = View(local), table = View(table), y = View(y)] {
    return cpu_->LookupRows(local, table, n, cols, dtype, y);
  });
  return absl::OkStatus();
}

absl::Status GuardedOps::SoftmaxPart(const void* logits, const int32_t* local_targets, int64_t rows,
                                     int64_t v, DType dtype, float* part) {
  Run([=, this, logits = View(logits), local_targets = View(local_targets), part = View(part)] {
    return cpu_->SoftmaxPart(logits, local_targets, rows, v, dtype, part);
  });
  return absl::OkStatus();
}

absl::Status GuardedOps::CrossEntropyOfParts(const float* parts, int ranks, void* logits,
                                             const int32_t* targets, const int32_t* local_targets,
                                             int64_t rows, int64_t v, DType dtype,
                                             float gradient_scale, float* losses) {
  Run([=, this, parts = View(parts), logits = View(logits), targets = View(targets),
       local_targets = View(local_targets), losses = View(losses)] {
    return cpu_->CrossEntropyOfParts(parts, ranks, logits, targets, local_targets, rows, v, dtype,
                                     gradient_scale, losses);
  });
  return absl::OkStatus();
}

void GuardedOps::Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type) {
  Run([=, this, in = View(in), out = View(out)] {
    cpu_->Convert(in, in_type, n, out, out_type);
    return absl::OkStatus();
  });
}

void GuardedOps::AccumulateF32(const void* x, DType dtype, int64_t n, bool accumulate, float* acc) {
  Run([=, this, x = View(x), acc = View(acc)] {
    cpu_->AccumulateF32(x, dtype, n, accumulate, acc);
    return absl::OkStatus();
  });
}

void GuardedOps::AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type,
                       float* master, float* exp_avg, float* exp_avg_sq, void* param,
                       DType param_type) {
  Run([=, this, grad = View(grad), master = View(master), exp_avg = View(exp_avg),
       exp_avg_sq = View(exp_avg_sq), param = View(param)] {
    cpu_->AdamW(args, n, grad, grad_type, master, exp_avg, exp_avg_sq, param, param_type);
    return absl::OkStatus();
  });
}

void GuardedOps::AddLosses(const float* losses, const int32_t* targets, int64_t rows, double* sum) {
  Run([=, this, losses = View(losses), targets = View(targets), sum = View(sum)] {
    cpu_->AddLosses(losses, targets, rows, sum);
    return absl::OkStatus();
  });
}

void GuardedOps::RoundInPlace(float* x, int64_t n, DType wire) {
  Run([=, this, x = View(x)] {
    cpu_->RoundInPlace(x, n, wire);
    return absl::OkStatus();
  });
}

void GuardedOps::AddRounded(const void* sum, DType sum_type, int64_t n, DType wire, void* gradient,
                            DType gradient_type) {
  Run([=, this, sum = View(sum), gradient = View(gradient)] {
    cpu_->AddRounded(sum, sum_type, n, wire, gradient, gradient_type);
    return absl::OkStatus();
  });
}

void GuardedOps::ScatterRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols,
                             DType dtype, void* table) {
  Run([=, this, ids = View(ids), rows = View(rows), table = View(table)] {
    cpu_->ScatterRows(ids, rows, n, cols, dtype, table);
    return absl::OkStatus();
  });
}

void GuardedOps::AccumulateRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols,
                                DType dtype, float* table) {
  Run([=, this, ids = View(ids), rows = View(rows), table = View(table)] {
    cpu_->AccumulateRows(ids, rows, n, cols, dtype, table);
    return absl::OkStatus();
  });
}

void GuardedOps::FoldRows(const RowSums& sums, const int32_t* ids, const void* rows, int64_t n,
                          DType dtype) {
  Run([=, this, sums = View(sums), ids = View(ids), rows = View(rows)] {
    cpu_->FoldRows(sums, ids, rows, n, dtype);
    return absl::OkStatus();
  });
}

void GuardedOps::JoinRows(const RowSums& sums, DType wire, void* gradient, DType gradient_type) {
  Run([=, this, sums = View(sums), gradient = View(gradient)] {
    cpu_->JoinRows(sums, wire, gradient, gradient_type);
    return absl::OkStatus();
  });
}

void GuardedOps::ClearRows(const RowSums& sums) {
  Run([=, this, sums = View(sums)] {
    cpu_->ClearRows(sums);
    return absl::OkStatus();
  });
}

void GuardedOps::AddSquares(const void* x, int64_t n, DType dtype, NormAccumulator* acc) {
  Run([=, this, x = View(x), acc = View(acc)] {
    cpu_->AddSquares(x, n, dtype, acc);
    return absl::OkStatus();
  });
}

}  // namespace zeroshard
