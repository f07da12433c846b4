#include "worker/model/embedding.h"

#include "absl/strings/str_cat.h"
#include "worker/model/pass.h"

namespace zeroshard {
namespace {

constexpr uint32_t kDropoutSite = DropoutSite(0, DropoutPlace::kEmbedding);

class Embedding : public EmbeddingUnit {
 public:
  Embedding(const ModelConfig& config, const UnitTable& unit)
      : config_(config),
        has_positions_(config.architecture == Architecture::kGpt2),
        length_(unit.length),
        tokens_(*unit.Find(has_positions_ ? "wte.weight" : "embed.weight")),
        activations_(config, UnitKind::kEmbedding, /*checkpointing=*/false) {
    if (has_positions_) positions_ = *unit.Find("wpe.weight");
  }

  absl::Status Forward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                       void* y) override {
    ctx.ops->EmbeddingForward(mb.tokens, Advance(params, tokens_.offset, ctx.dtype),
                              Positions(ctx, params, 0), mb.batch, config_.sequence, config_.hidden,
                              ctx.dtype, y);
    const DropoutArgs dropout = Dropout(ctx, mb);
    if (dropout.rate > 0) ctx.ops->Dropout(dropout, y, mb.batch, PerSample(), ctx.dtype, y);
    return absl::OkStatus();
  }

  absl::Status Decode(const UnitContext& ctx, const void* params, int64_t past, int64_t rows,
                      const int32_t* tokens, void* y) override {
    if (past < 0 || rows < 1 || (has_positions_ && past > config_.positions - rows)) {
      return absl::InvalidArgumentError(absl::StrCat(rows, " positions from ", past,
                                                     " on; wanted some of the model's ",
                                                     config_.positions, " positions"));
    }
    ctx.ops->EmbeddingForward(tokens, Advance(params, tokens_.offset, ctx.dtype),
                              Positions(ctx, params, past), 1, rows, config_.hidden, ctx.dtype, y);
    return absl::OkStatus();
  }

  absl::Status Backward(const UnitContext& ctx, const MicroBatch& mb, const void* dy, int32_t* ids,
                        void* rows, GradientSink* sink) override {
    const DropoutArgs dropout = Dropout(ctx, mb);
    if (dropout.rate > 0) {
      void* masked = Pass{ctx, activations_.Get(mb.batch, ctx.dtype)}.At("gradient");
      ctx.ops->Dropout(dropout, dy, mb.batch, PerSample(), ctx.dtype, masked);
      dy = masked;
    }
    if (has_positions_) {
      const absl::Status status = PositionGradient(ctx, mb, dy, sink);
      if (!status.ok()) return status;
    }
    ctx.ops->EmbeddingBackwardRows(dy, mb.tokens, mb.batch, config_.sequence, config_.hidden,
                                   ctx.dtype, ids, rows);
    return absl::OkStatus();
  }

 private:
  int64_t PerSample() const { return config_.sequence * config_.hidden; }

  // Rows of the position table from `first` on; null without one.
  const void* Positions(const UnitContext& ctx, const void* params, int64_t first) const {
    if (!has_positions_) return nullptr;
    return Advance(params, positions_.offset + first * config_.hidden, ctx.dtype);
  }

  DropoutArgs Dropout(const UnitContext& ctx, const MicroBatch& mb) {
    Pass pass{ctx, activations_.Get(mb.batch, ctx.dtype)};
    pass.mb = &mb;
    return pass.Dropout(config_.embd_pdrop, kDropoutSite);
  }

  // Positions that no sequence reaches have a gradient of zero.
  absl::Status PositionGradient(const UnitContext& ctx, const MicroBatch& mb, const void* dy,
                                GradientSink* sink) {
    absl::StatusOr<void*> gradient = sink->Acquire(positions_.offset, length_);
    if (!gradient.ok()) return gradient.status();
    ctx.ops->PositionBackward(dy, mb.batch, config_.sequence, config_.hidden, ctx.dtype, *gradient);
    const int64_t reached = config_.sequence * config_.hidden;
    ctx.ops->Zero(Advance(*gradient, reached, ctx.dtype),
                  static_cast<size_t>(positions_.size - reached) * SizeOf(ctx.dtype));
    return sink->Done(positions_.offset, length_);
  }

  const ModelConfig config_;
  const bool has_positions_;
  const int64_t length_;
  const ParameterInfo tokens_;
  ParameterInfo positions_;
  ActivationCache activations_;
};

}  // namespace

std::unique_ptr<EmbeddingUnit> MakeEmbedding(const ModelConfig& config, const UnitTable& unit) {
  return std::make_unique<Embedding>(config, unit);
}

}  // namespace zeroshard
