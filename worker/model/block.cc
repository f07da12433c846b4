#include "worker/model/block.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "worker/model/attention.h"
#include "worker/model/mlp.h"
#include "worker/model/norm.h"
#include "worker/model/pass.h"

namespace zeroshard {
namespace {

class Block : public BlockUnit {
 public:
  Block(const ModelConfig& config, const UnitTable& unit, int64_t unit_index, bool checkpointing,
        const TensorPart& part)
      : config_(config),
        name_(unit.name),
        group_(part.group),
        checkpointing_(checkpointing),
        length_(unit.length),
        attention_site_(DropoutSite(unit_index, DropoutPlace::kAttentionOutput)),
        mlp_site_(DropoutSite(unit_index, DropoutPlace::kMlpOutput)),
        norm_1_(config, unit, NormName(config, "1"), "norm_1"),
        norm_2_(config, unit, NormName(config, "2"), "norm_2"),
        attention_(config, unit, unit_index, part.first_head),
        mlp_(MakeMlp(config, unit)),
        activations_(config, UnitKind::kBlock, checkpointing) {}

  absl::Status Forward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                       const void* x, void* y) override {
    const Pass pass = MakePass(ctx, params, mb, Phase::kForward);
    void* input = pass.At("input");
    if (checkpointing_ && x != input) {
      pass.ops().Copy(input, x, Boundary(pass));
      x = input;
    }
    const absl::Status status = ForwardToMlp(pass, x);
    return status.ok() ? FinishForward(pass, y) : status;
  }

  absl::Status Decode(const UnitContext& ctx, const void* params, int64_t past, int64_t rows,
                      const KvCache& cache, const void* x, void* y) override {
    if (past < 0 || rows < 1 || past > cache.capacity - rows) {
      return absl::InvalidArgumentError(absl::StrCat(rows, " positions from ", past,
                                                     " on do not fit a key/value cache of ",
                                                     cache.capacity, " positions"));
    }
    Pass pass{ctx, activations_.GetDecode(rows, ctx.dtype)};
    pass.SetRows(1, rows);
    pass.params = params;
    pass.cache = &cache;
    pass.past = past;
    Join(&pass, Phase::kForward, /*step=*/0);
    const absl::Status status = ForwardToMlp(pass, x);
    return status.ok() ? FinishForward(pass, y) : status;
  }

  absl::Status Backward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                        const void* x, const void* dy, void* dx, GradientSink* sink) override {
    Pass pass = MakePass(ctx, params, mb, Phase::kBackward);
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
  static std::string NormName(const ModelConfig& config, const char* which) {
    return absl::StrCat(config.architecture == Architecture::kGpt2 ? "ln_" : "norm_", which);
  }

  Pass MakePass(const UnitContext& ctx, const void* params, const MicroBatch& mb, Phase phase) {
    Pass pass{ctx, activations_.Get(mb.batch, ctx.dtype)};
    pass.SetRows(mb.batch, config_.sequence);
    pass.params = params;
    pass.mb = &mb;
    Join(&pass, phase, mb.step);
    pass.DivideRows(config_);
    return pass;
  }

  void Join(Pass* pass, Phase phase, uint64_t step) const {
    if (group_ == nullptr) return;
    pass->group = group_;
    pass->info = {.phase = phase, .unit = name_, .step = step};
  }

  int64_t Elements(const Pass& pass) const { return pass.own_rows * config_.hidden; }
  size_t Boundary(const Pass& pass) const {
    return static_cast<size_t>(Elements(pass)) * SizeOf(pass.dtype());
  }

  // Drops elements of x [own_rows, C] in place; they are not yet part of the residual stream.
  void Drop(const Pass& pass, uint32_t site, void* x) const {
    const DropoutArgs args = pass.Dropout(config_.resid_pdrop, site);
    if (args.rate > 0) pass.DropRows(args, x, config_.hidden, x);
  }

  // The gradient [rows, C] of a half's output, from that of the residual stream, d [own_rows, C]:
  // `d` itself, or in scratch what the mask leaves of it. Where rows are divided it is whole once
  // `gathered` is done.
  const void* OutputGradient(const Pass& pass, uint32_t site, const void* d,
                             Event* gathered) const {
    const DropoutArgs args = pass.Dropout(config_.resid_pdrop, site);
    if (args.rate <= 0 && !pass.divided()) return d;
    void* out = pass.At(pass.divided() ? "d_in" : "norm.out");
    void* own = pass.Own(out, config_.hidden);
    if (args.rate > 0) {
      pass.DropRows(args, d, config_.hidden, own);
    } else {
      pass.ops().Copy(own, d, Boundary(pass));
    }
    if (pass.divided()) *gathered = pass.BeginGather(out, config_.hidden);
    return out;
  }

  // x [own_rows, C] normalised in "norm.out" [rows, C]; all of it once the event is done.
  Event BeginNorm(const Pass& pass, const Norm& norm, const void* x) const {
    void* out = pass.At("norm.out");
    norm.Forward(pass, x, pass.Own(out, config_.hidden));
    return pass.divided() ? pass.BeginGather(out, config_.hidden) : Event();
  }

  // Everything that backward needs, from x [own_rows, C] on; all but the MLP's last product.
  absl::Status ForwardToMlp(const Pass& pass, const void* x) {
    void* norm_out = pass.At("norm.out");
    void* residual = pass.At("residual");
    absl::Status status = pass.Wait(BeginNorm(pass, norm_1_, x));
    if (status.ok()) status = attention_.Forward(pass, norm_out, residual);
    if (!status.ok()) return status;
    Drop(pass, attention_site_, residual);
    pass.ops().Add(x, residual, Elements(pass), pass.dtype(), residual);
    status = pass.Wait(BeginNorm(pass, norm_2_, residual));
    return status.ok() ? mlp_->Expand(pass, norm_out) : status;
  }

  absl::Status FinishForward(const Pass& pass, void* y) {
    const absl::Status status = mlp_->Contract(pass, y);
    if (!status.ok()) return status;
    Drop(pass, mlp_site_, y);
    pass.ops().Add(pass.At("residual"), y, Elements(pass), pass.dtype(), y);
    return absl::OkStatus();
  }

  absl::Status BackwardMlp(const Pass& pass, void* dx, GradientSink* sink) {
    void* norm_out = pass.At("norm.out");
    const void* residual = pass.At("residual");
    Event d_out_whole, in_whole;
    const void* d_out = OutputGradient(pass, mlp_site_, dx, &d_out_whole);
    // On its way beside the first products. Checkpointing's forward has just left it there.
    if (pass.divided() && !checkpointing_) in_whole = BeginNorm(pass, norm_2_, residual);
    absl::Status status = pass.Wait(d_out_whole);
    if (status.ok()) status = mlp_->BackwardContract(pass, d_out);
    if (status.ok()) status = sink->Done(mlp_->contract_offset(), length_);
    if (!status.ok()) return status;
    void* d_in = norm_out;
    Event sum;
    if (pass.group != nullptr) {
      // On its way between ranks while the matrices' gradients are computed.
      d_in = pass.At("d_in");
      status = mlp_->BackwardInput(pass, d_in);
      if (!status.ok()) return status;
      sum = pass.BeginSum(d_in, config_.hidden);
    }
    if (!pass.divided()) norm_2_.Forward(pass, residual, norm_out);
    status = pass.Wait(in_whole);
    if (status.ok()) status = mlp_->BackwardExpand(pass, norm_out);
    if (status.ok()) status = sink->Done(mlp_->expand_offset(), mlp_->contract_offset());
    if (status.ok())
      status = pass.group != nullptr ? pass.group->Wait(sum) : mlp_->BackwardInput(pass, d_in);
    if (!status.ok()) return status;
    norm_2_.Backward(pass, pass.Own(d_in, config_.hidden), residual, /*accumulate=*/true, dx);
    return absl::OkStatus();
  }

  absl::Status BackwardAttention(const Pass& pass, const void* x, void* dx, GradientSink* sink) {
    const int64_t projection = attention_.projection_offset();
    Event d_out_whole, in_whole;
    const void* d_out = OutputGradient(pass, attention_site_, dx, &d_out_whole);
    const Event norm_2_sum = norm_2_.BeginSum(pass);
    if (pass.divided()) in_whole = BeginNorm(pass, norm_1_, x);
    absl::Status status = pass.Wait(d_out_whole);
    if (status.ok()) status = attention_.BackwardProjection(pass, d_out);
    if (status.ok()) status = pass.Wait(norm_2_sum);
    if (status.ok()) status = sink->Done(projection, mlp_->expand_offset());
    if (status.ok()) status = attention_.BackwardScores(pass);
    if (!status.ok()) return status;
    void* norm_out = pass.At("norm.out");
    if (!pass.divided()) norm_1_.Forward(pass, x, norm_out);
    status = pass.Wait(in_whole);
    void* d_in = pass.group != nullptr ? pass.At("d_in") : norm_out;
    if (status.ok()) status = attention_.BackwardInput(pass, norm_out, d_in);
    if (!status.ok()) return status;
    norm_1_.Backward(pass, pass.Own(d_in, config_.hidden), x, /*accumulate=*/true, dx);
    status = pass.Wait(norm_1_.BeginSum(pass));
    return status.ok() ? sink->Done(0, projection) : status;
  }

  const ModelConfig config_;
  const std::string name_;
  TensorGroup* const group_;
  const bool checkpointing_;
  const int64_t length_;
  const uint32_t attention_site_;
  const uint32_t mlp_site_;
  const Norm norm_1_;
  const Norm norm_2_;
  const SelfAttention attention_;
  const std::unique_ptr<Mlp> mlp_;
  ActivationCache activations_;
};

}  // namespace

std::unique_ptr<BlockUnit> MakeBlock(const ModelConfig& config, const UnitTable& unit,
                                     int64_t unit_index, bool checkpointing,
                                     const TensorPart& part) {
  return std::make_unique<Block>(config, unit, unit_index, checkpointing, part);
}

}  // namespace zeroshard
