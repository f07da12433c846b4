#include "worker/model/block.h"

#include <array>
#include <vector>

#include "common/plan/rope.h"
#include "worker/model/mlp.h"
#include "worker/model/norm.h"
#include "worker/model/pass.h"

namespace zeroshard {
namespace {

constexpr std::array<const char*, 3> kBiases = {"attn.q.bias", "attn.k.bias", "attn.v.bias"};

class Block : public BlockUnit {
 public:
  Block(const ModelConfig& config, const UnitTable& unit, bool checkpointing)
      : config_(config),
        gpt2_(config.architecture == Architecture::kGpt2),
        checkpointing_(checkpointing),
        length_(unit.length),
        width_(config.heads * config.head_dim),
        qkv_width_((config.heads + 2 * config.kv_heads) * config.head_dim),
        norm_1_(config, unit, gpt2_ ? "ln_1" : "norm_1", "norm_1"),
        norm_2_(config, unit, gpt2_ ? "ln_2" : "norm_2", "norm_2"),
        q_(*unit.Find("attn.q.weight")),
        qkv_trainable_(q_.trainable || unit.Find("attn.k.weight")->trainable ||
                       unit.Find("attn.v.weight")->trainable),
        proj_(*unit.Find("attn.proj.weight")),
        mlp_(MakeMlp(config, unit)),
        activations_(config, UnitKind::kBlock, checkpointing),
        rope_frequencies_(RopeFrequencies(config)) {
    if (!gpt2_) return;
    for (size_t i = 0; i < kBiases.size(); ++i) qkv_biases_[i] = *unit.Find(kBiases[i]);
    proj_bias_ = *unit.Find("attn.proj.bias");
  }

  absl::Status Forward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                       const void* x, void* y) override {
    const Pass pass = MakePass(ctx, params, mb);
    void* input = pass.At("input");
    if (checkpointing_ && x != input) {
      pass.ops().Copy(input, x, Boundary(pass));
      x = input;
    }
    absl::Status status = ForwardToMlp(pass, x);
    if (status.ok()) status = mlp_->Contract(pass, y);
    if (!status.ok()) return status;
    pass.ops().Add(pass.At("residual"), y, pass.rows * config_.hidden, pass.dtype(), y);
    return absl::OkStatus();
  }

  absl::Status Backward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                        const void* x, const void* dy, void* dx, GradientSink* sink) override {
    Pass pass = MakePass(ctx, params, mb);
    if (checkpointing_) {
      x = pass.At("input");
      const absl::Status status = ForwardToMlp(pass, x);
      if (!status.ok()) return status;
    }
    absl::StatusOr<void*> gradients = sink->Acquire(0, length_);
    if (!gradients.ok()) return gradients.status();
    pass.gradients = *gradients;
    // From here on dx is the gradient of the residual stream, to which each half adds its own.
    if (dx != dy) pass.ops().Copy(dx, dy, Boundary(pass));
    const absl::Status status = BackwardMlp(pass, dx, sink);
    if (!status.ok()) return status;
    return BackwardAttention(pass, x, dx, sink);
  }

 private:
  Pass MakePass(const UnitContext& ctx, const void* params, const MicroBatch& mb) {
    Pass pass{ctx, activations_.Get(mb.batch, ctx.dtype)};
    pass.batch = mb.batch;
    pass.rows = mb.batch * config_.sequence;
    pass.params = params;
    return pass;
  }

  size_t Boundary(const Pass& pass) const {
    return static_cast<size_t>(pass.rows * config_.hidden) * SizeOf(pass.dtype());
  }

  AttentionArgs Attention(const Pass& pass) const {
    AttentionArgs args;
    args.q = pass.At("attn.qkv");
    args.k = Advance(args.q, width_, pass.dtype());
    args.v = Advance(args.k, config_.kv_heads * config_.head_dim, pass.dtype());
    args.ld_q = args.ld_k = args.ld_v = qkv_width_;
    args.batch = pass.batch;
    args.seq = config_.sequence;
    args.heads = config_.heads;
    args.kv_heads = config_.kv_heads;
    args.head_dim = config_.head_dim;
    args.dtype = pass.dtype();
    return args;
  }

  // Queries and keys lie side by side, so one call turns the heads of both.
  void Rotate(const Pass& pass, void* qkv, bool inverse) const {
    pass.ops().Rope(qkv, qkv_width_, pass.batch, config_.sequence, config_.heads + config_.kv_heads,
                    config_.head_dim, rope_frequencies_.data(), /*first_position=*/0, inverse,
                    pass.dtype());
  }

  // q, k and v's biases as one: padding may lie between them in the flat vector.
  const void* PackedBias(const Pass& pass) const {
    if (!gpt2_) return nullptr;
    void* packed = pass.At("attn.qkv.bias");
    for (size_t i = 0; i < qkv_biases_.size(); ++i) {
      pass.ops().Copy(Advance(packed, static_cast<int64_t>(i) * width_, pass.dtype()),
                      pass.Parameter(qkv_biases_[i]),
                      static_cast<size_t>(width_) * SizeOf(pass.dtype()));
    }
    return packed;
  }

  // Everything that backward needs, from x [rows, C] on; all but the MLP's last product.
  absl::Status ForwardToMlp(const Pass& pass, const void* x) {
    void* norm_out = pass.At("norm.out");
    void* qkv = pass.At("attn.qkv");
    norm_1_.Forward(pass, x, norm_out);
    absl::Status status = pass.Product(norm_out, false, pass.Parameter(q_), true, qkv, pass.rows,
                                       qkv_width_, config_.hidden, PackedBias(pass));
    if (!status.ok()) return status;
    if (!gpt2_) Rotate(pass, qkv, /*inverse=*/false);
    void* attention = pass.At("attn.out");
    status = pass.ops().AttentionForward(Attention(pass), attention, pass.Float("attn.lse"));
    if (!status.ok()) return status;
    void* residual = pass.At("residual");
    status = pass.Product(attention, false, pass.Parameter(proj_), false, residual, pass.rows,
                          config_.hidden, width_, gpt2_ ? pass.Parameter(proj_bias_) : nullptr);
    if (!status.ok()) return status;
    pass.ops().Add(x, residual, pass.rows * config_.hidden, pass.dtype(), residual);
    norm_2_.Forward(pass, residual, norm_out);
    return mlp_->Expand(pass, norm_out);
  }

  absl::Status BackwardMlp(const Pass& pass, void* dx, GradientSink* sink) {
    void* norm_out = pass.At("norm.out");
    const void* residual = pass.At("residual");
    absl::Status status = mlp_->BackwardContract(pass, dx);
    if (status.ok()) status = sink->Done(mlp_->contract_offset(), length_);
    if (!status.ok()) return status;
    norm_2_.Forward(pass, residual, norm_out);
    status = mlp_->BackwardExpand(pass, norm_out);
    if (status.ok()) status = sink->Done(mlp_->expand_offset(), mlp_->contract_offset());
    if (status.ok()) status = mlp_->BackwardInput(pass, norm_out);
    if (!status.ok()) return status;
    norm_2_.Backward(pass, norm_out, residual, /*accumulate=*/true, dx);
    return absl::OkStatus();
  }

  absl::Status BackwardAttention(const Pass& pass, const void* x, void* dx, GradientSink* sink) {
    const void* attention = pass.At("attn.out");
    if (gpt2_) pass.BiasGradient(proj_bias_, dx);
    absl::Status status = pass.MatrixGradient(proj_, attention, dx, width_, config_.hidden);
    if (status.ok()) status = sink->Done(proj_.offset, mlp_->expand_offset());
    if (!status.ok()) return status;
    void* d_attention = pass.At("attn.d_out");
    status = pass.Product(dx, false, pass.Parameter(proj_), true, d_attention, pass.rows, width_,
                          config_.hidden);
    if (!status.ok()) return status;

    void* d_q = pass.At("wide");
    void* d_k = Advance(d_q, width_, pass.dtype());
    void* d_v = Advance(d_k, config_.kv_heads * config_.head_dim, pass.dtype());
    status = pass.ops().AttentionBackward(Attention(pass), attention, d_attention,
                                          pass.Float("attn.lse"), d_q, d_k, d_v);
    if (!status.ok()) return status;
    if (gpt2_) {
      BiasGradients(pass, d_q);
    } else {
      Rotate(pass, d_q, /*inverse=*/true);
    }
    void* norm_out = pass.At("norm.out");
    norm_1_.Forward(pass, x, norm_out);
    if (qkv_trainable_) {
      status = pass.Product(d_q, true, norm_out, false, pass.Gradient(q_), qkv_width_,
                            config_.hidden, pass.rows);
      if (!status.ok()) return status;
    }
    status = pass.Product(d_q, false, pass.Parameter(q_), false, norm_out, pass.rows,
                          config_.hidden, qkv_width_);
    if (!status.ok()) return status;
    norm_1_.Backward(pass, norm_out, x, /*accumulate=*/true, dx);
    return sink->Done(0, proj_.offset);
  }

  void BiasGradients(const Pass& pass, const void* d_qkv) const {
    void* packed = pass.At("attn.qkv.bias");
    pass.ops().ColumnSum(d_qkv, pass.rows, qkv_width_, pass.dtype(), packed, pass.dtype());
    for (size_t i = 0; i < qkv_biases_.size(); ++i) {
      pass.ops().Copy(pass.Gradient(qkv_biases_[i]),
                      Advance(packed, static_cast<int64_t>(i) * width_, pass.dtype()),
                      static_cast<size_t>(width_) * SizeOf(pass.dtype()));
    }
  }

  const ModelConfig config_;
  const bool gpt2_;  // biases, and learned instead of rotary positions
  const bool checkpointing_;
  const int64_t length_;
  const int64_t width_;      // of all heads: H x D
  const int64_t qkv_width_;  // (H + 2 KV) x D
  const Norm norm_1_;
  const Norm norm_2_;
  const ParameterInfo q_;  // k and v follow without a gap
  const bool qkv_trainable_;
  const ParameterInfo proj_;
  std::array<ParameterInfo, 3> qkv_biases_;  // gpt2
  ParameterInfo proj_bias_;                  // gpt2
  const std::unique_ptr<Mlp> mlp_;
  ActivationCache activations_;
  const std::vector<float> rope_frequencies_;
};

}  // namespace

std::unique_ptr<BlockUnit> MakeBlock(const ModelConfig& config, const UnitTable& unit,
                                     bool checkpointing) {
  return std::make_unique<Block>(config, unit, checkpointing);
}

}  // namespace zeroshard
