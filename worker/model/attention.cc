#include "worker/model/attention.h"

#include "common/plan/rope.h"

namespace zeroshard {
namespace {

constexpr std::array<const char*, 3> kBiases = {"attn.q.bias", "attn.k.bias", "attn.v.bias"};

size_t Bytes(int64_t elements, DType dtype) {
  return static_cast<size_t>(elements) * SizeOf(dtype);
}

}  // namespace

SelfAttention::SelfAttention(const ModelConfig& config, const UnitTable& unit, int64_t unit_index,
                             int64_t first_head)
    : config_(config),
      width_(config.heads * config.head_dim),
      kv_width_(config.kv_heads * config.head_dim),
      qkv_width_(width_ + 2 * kv_width_),
      first_head_(first_head),
      dropout_site_(DropoutSite(unit_index, DropoutPlace::kAttentionWeights)),
      rotary_(config.architecture == Architecture::kLlama),
      frequencies_(rotary_ ? RopeFrequencies(config) : std::vector<float>()),
      q_(*unit.Find("attn.q.weight")),
      k_(*unit.Find("attn.k.weight")),
      v_(*unit.Find("attn.v.weight")),
      qkv_trainable_(q_.trainable || k_.trainable || v_.trainable),
      proj_(*unit.Find("attn.proj.weight")) {
  if (config.qkv_bias) {
    for (size_t i = 0; i < kBiases.size(); ++i) qkv_biases_[i] = *unit.Find(kBiases[i]);
  }
  if (config.proj_bias) proj_bias_ = *unit.Find("attn.proj.bias");
}

AttentionArgs SelfAttention::Arguments(const Pass& pass) const {
  AttentionArgs args;
  const void* qkv = pass.At("attn.qkv");
  args.q = qkv;
  args.k = Part(qkv, 1, pass.dtype());
  args.v = Part(qkv, 2, pass.dtype());
  args.ld_q = args.ld_k = args.ld_v = qkv_width_;
  args.batch = pass.batch;
  args.seq = pass.sequence;
  args.heads = config_.heads;
  args.kv_heads = config_.kv_heads;
  args.head_dim = config_.head_dim;
  args.dtype = pass.dtype();
  if (pass.mb != nullptr) args.document_start = pass.mb->document_start;
  args.dropout = pass.Dropout(config_.attn_pdrop, dropout_site_);
  args.dropout.first_element = first_head_ * pass.sequence * pass.sequence;
  return args;
}

// Queries and keys lie side by side, so one call turns the heads of both.
void SelfAttention::Rotate(const Pass& pass, void* qkv, bool inverse) const {
  if (!rotary_) return;
  pass.ops().Rope(qkv, qkv_width_, pass.batch, pass.sequence, config_.heads + config_.kv_heads,
                  config_.head_dim, frequencies_.data(), pass.past, inverse, pass.dtype());
}

// q, k and v's biases as one: padding may lie between them in the flat vector.
const void* SelfAttention::PackedBias(const Pass& pass) const {
  if (!config_.qkv_bias) return nullptr;
  void* packed = pass.At("attn.qkv.bias");
  for (size_t i = 0; i < qkv_biases_.size(); ++i) {
    pass.ops().Copy(Part(packed, i, pass.dtype()), pass.Parameter(qkv_biases_[i]),
                    Bytes(PartWidth(i), pass.dtype()));
  }
  return packed;
}

absl::Status SelfAttention::Forward(const Pass& pass, const void* in, void* out) const {
  void* qkv = pass.At("attn.qkv");
  absl::Status status = pass.Product(in, false, pass.Parameter(q_), true, qkv, pass.rows,
                                     qkv_width_, config_.hidden, PackedBias(pass));
  if (!status.ok()) return status;
  Rotate(pass, qkv, /*inverse=*/false);
  void* attention = pass.At("attn.out");
  status = pass.cache == nullptr ? Attend(pass, attention) : AttendCached(pass, attention);
  if (!status.ok()) return status;
  return pass.RowSplitProduct(attention, pass.Parameter(proj_), out, config_.hidden, width_,
                              config_.proj_bias ? pass.Parameter(proj_bias_) : nullptr);
}

absl::Status SelfAttention::Attend(const Pass& pass, void* out) const {
  return pass.ops().AttentionForward(Arguments(pass), out, pass.Float("attn.lse"));
}

absl::Status SelfAttention::AttendCached(const Pass& pass, void* out) const {
  const DType dtype = pass.dtype();
  const void* qkv = pass.At("attn.qkv");
  void* queries = pass.At("attn.d_out");  // dense; inference has no use for the gradient
  void* const keys = Advance(pass.cache->keys, pass.past * kv_width_, dtype);
  void* const values = Advance(pass.cache->values, pass.past * kv_width_, dtype);
  const auto stride = static_cast<int64_t>(Bytes(qkv_width_, dtype));
  const std::array<void*, 3> to = {queries, keys, values};
  for (size_t part = 0; part < to.size(); ++part) {
    const auto width = static_cast<int64_t>(Bytes(PartWidth(part), dtype));
    pass.ops().CopyRows(to[part], width, Part(qkv, part, dtype), stride, pass.rows, width);
  }
  if (pass.past == 0) return Attend(pass, out);
  CachedAttentionArgs args;
  args.q = queries;
  args.k = pass.cache->keys;
  args.v = pass.cache->values;
  args.past = pass.past;
  args.rows = pass.rows;
  args.heads = config_.heads;
  args.kv_heads = config_.kv_heads;
  args.head_dim = config_.head_dim;
  args.dtype = dtype;
  return pass.ops().CachedAttention(args, out);
}

absl::Status SelfAttention::BackwardProjection(const Pass& pass, const void* d_out) const {
  if (config_.proj_bias) pass.BiasGradient(proj_bias_, d_out);
  const absl::Status status =
      pass.MatrixGradient(proj_, pass.At("attn.out"), d_out, width_, config_.hidden);
  if (!status.ok()) return status;
  return pass.Product(d_out, false, pass.Parameter(proj_), true, pass.At("attn.d_out"), pass.rows,
                      width_, config_.hidden);
}

absl::Status SelfAttention::BackwardScores(const Pass& pass) const {
  void* d_qkv = pass.At("wide");
  const absl::Status status = pass.ops().AttentionBackward(
      Arguments(pass), pass.At("attn.out"), pass.At("attn.d_out"), pass.Float("attn.lse"), d_qkv,
      Part(d_qkv, 1, pass.dtype()), Part(d_qkv, 2, pass.dtype()));
  if (!status.ok()) return status;
  Rotate(pass, d_qkv, /*inverse=*/true);
  if (config_.qkv_bias) BiasGradients(pass, d_qkv);
  return absl::OkStatus();
}

absl::Status SelfAttention::BackwardInput(const Pass& pass, const void* in, void* d_in) const {
  if (pass.group == nullptr) {
    const absl::Status status = MatrixGradients(pass, in);
    return status.ok() ? InputGradient(pass, d_in) : status;
  }
  absl::Status status = InputGradient(pass, d_in);
  if (!status.ok()) return status;
  // Its sum is on its way while the matrices' gradients are computed.
  const Event sum = pass.BeginSum(d_in, config_.hidden);
  status = MatrixGradients(pass, in);
  if (status.ok() && pass.group->has_copies()) status = SumCopies(pass);
  if (status.ok()) status = pass.group->Wait(sum);
  return status;
}

absl::Status SelfAttention::MatrixGradients(const Pass& pass, const void* in) const {
  if (!qkv_trainable_) return absl::OkStatus();
  return pass.Product(pass.At("wide"), true, in, false, pass.Gradient(q_), qkv_width_,
                      config_.hidden, pass.rows);
}

absl::Status SelfAttention::InputGradient(const Pass& pass, void* d_in) const {
  return pass.Product(pass.At("wide"), false, pass.Parameter(q_), false, d_in, pass.rows,
                      config_.hidden, qkv_width_);
}

// Key and value heads that several ranks hold serve other queries on each: what they lack of their
// gradient is on the others.
absl::Status SelfAttention::SumCopies(const Pass& pass) const {
  const auto sum = [&](const ParameterInfo& k, const ParameterInfo& v) {
    if (!k.trainable && !v.trainable) return absl::OkStatus();
    const int64_t n = v.offset + v.size - k.offset;
    return pass.group->Wait(
        pass.group->BeginSumOfCopies(pass.Gradient(k), n, pass.dtype(), pass.info));
  };
  const absl::Status status = sum(k_, v_);
  if (!status.ok() || !config_.qkv_bias) return status;
  return sum(qkv_biases_[1], qkv_biases_[2]);
}

void SelfAttention::BiasGradients(const Pass& pass, const void* d_qkv) const {
  void* packed = pass.At("attn.qkv.bias");
  pass.ops().ColumnSum(d_qkv, pass.rows, qkv_width_, pass.dtype(), packed, pass.dtype());
  for (size_t i = 0; i < qkv_biases_.size(); ++i) {
    pass.ops().Copy(pass.Gradient(qkv_biases_[i]), Part(packed, i, pass.dtype()),
                    Bytes(PartWidth(i), pass.dtype()));
  }
}

}  // namespace zeroshard
