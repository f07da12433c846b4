#include "worker/model/pass.h"

namespace zeroshard {

const ActivationTable& ActivationCache::Get(int64_t micro_batch, DType dtype) {
  if (micro_batch != training_.size || dtype != training_.dtype) {
    training_ = {micro_batch, dtype,
                 MakeActivationTable(config_, kind_, micro_batch, dtype, checkpointing_)};
  }
  return training_.table;
}

const ActivationTable& ActivationCache::GetDecode(int64_t rows, DType dtype) {
  if (rows != decode_.size || dtype != decode_.dtype) {
    decode_ = {rows, dtype, MakeDecodeTable(config_, kind_, rows, dtype)};
  }
  return decode_.table;
}

void Pass::SetRows(int64_t sequences, int64_t tokens) {
  batch = sequences;
  sequence = tokens;
  rows = own_rows = sequences * tokens;
}

void Pass::DivideRows(const ModelConfig& config) {
  if (group == nullptr || !config.DividesRows()) return;
  own_rows = StreamRows(config, batch);
  first_row = group->rank() * own_rows;
}

void Pass::DropRows(const DropoutArgs& mask, const void* x, int64_t cols, void* y) const {
  if (!divided()) {
    ops().Dropout(mask, x, batch, sequence * cols, dtype(), y);
    return;
  }
  ForEachSequence([&](int64_t position, int64_t row, int64_t count) {
    DropoutArgs part = mask;
    part.first_sample += (first_row + row) / sequence;
    part.first_element += position * cols;
    ops().Dropout(part, Advance(x, row * cols, dtype()), 1, count * cols, dtype(),
                  Advance(y, row * cols, dtype()));
  });
}

DropoutArgs Pass::Dropout(float rate, uint32_t site) const {
  DropoutArgs args;
  if (mb == nullptr || !mb->dropout || rate <= 0) return args;
  args.rate = rate;
  args.seed = mb->seed;
  args.step = mb->step;
  args.site = site;
  args.first_sample = mb->first_sample;
  return args;
}

void* Pass::At(absl::string_view name) const {
  if (const ActivationInfo* entry = activations.FindKept(name)) {
    return static_cast<char*>(ctx.kept) + entry->offset;
  }
  const ActivationInfo* entry = activations.FindScratch(name);
  assert(entry != nullptr);
  return static_cast<char*>(ctx.scratch) + entry->offset;
}

MatmulArgs Pass::Args(const void* a, bool transpose_a, const void* b, bool transpose_b, void* c,
                      int64_t m, int64_t n, int64_t k) const {
  MatmulArgs args;
  args.a = a;
  args.b = b;
  args.c = c;
  args.m = m;
  args.n = n;
  args.k = k;
  args.transpose_a = transpose_a;
  args.transpose_b = transpose_b;
  args.ab_type = dtype();
  args.c_type = dtype();
  return args;
}

absl::Status Pass::Product(const void* a, bool transpose_a, const void* b, bool transpose_b,
                           void* c, int64_t m, int64_t n, int64_t k, const void* bias,
                           bool accumulate) const {
  MatmulArgs args = Args(a, transpose_a, b, transpose_b, c, m, n, k);
  args.bias = bias;
  args.accumulate = accumulate;
  return ops().Matmul(args);
}

absl::Status Pass::ProductGeluBackward(const void* a, const void* b, const void* x, void* c,
                                       int64_t m, int64_t n, int64_t k) const {
  return ops().MatmulGeluBackward(Args(a, false, b, true, c, m, n, k), x);
}

absl::Status Pass::MatrixGradient(const ParameterInfo& p, const void* a, const void* b, int64_t m,
                                  int64_t n) const {
  if (!p.trainable) return absl::OkStatus();
  return Product(a, true, b, false, Gradient(p), m, n, rows);
}

void Pass::BiasGradient(const ParameterInfo& p, const void* d) const {
  if (p.trainable) ops().ColumnSum(d, rows, p.size, dtype(), Gradient(p), dtype());
}

absl::Status Pass::RowSplitProduct(const void* a, const void* b, void* out, int64_t n, int64_t k,
                                   const void* bias) const {
  if (group != nullptr && group->rank() != 0) bias = nullptr;
  void* product = divided() ? At("norm.out") : out;
  const absl::Status status = Product(a, false, b, false, product, rows, n, k, bias);
  return status.ok() && group != nullptr ? Sum(product, n, out) : status;
}

Event Pass::BeginSum(void* x, int64_t cols) const {
  if (!divided()) return group->BeginSum(x, rows * cols, dtype(), info);
  return group->BeginSumOfParts(x, own_rows * cols, Own(x, cols), dtype(), info);
}

absl::Status Pass::Sum(void* x, int64_t cols, void* out) const {
  if (!divided()) return group->Sum(x, rows * cols, dtype(), info);
  return group->Wait(group->BeginSumOfParts(x, own_rows * cols, out, dtype(), info));
}

Event Pass::BeginGather(void* x, int64_t cols) const {
  return group->BeginGather(x, own_rows * cols, dtype(), info);
}

absl::Status Pass::Wait(const Event& event) const {
  return event.state() == nullptr ? absl::OkStatus() : group->Wait(event);
}

}  // namespace zeroshard
