#include "worker/model/embedding.h"

#include "worker/model/pass.h"

namespace zeroshard {
namespace {

class Embedding : public EmbeddingUnit {
 public:
  Embedding(const ModelConfig& config, const UnitTable& unit)
      : config_(config),
        has_positions_(config.architecture == Architecture::kGpt2),
        length_(unit.length),
        tokens_(*unit.Find(has_positions_ ? "wte.weight" : "embed.weight")) {
    if (has_positions_) positions_ = *unit.Find("wpe.weight");
  }

  absl::Status Forward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                       void* y) override {
    ctx.ops->EmbeddingForward(
        mb.tokens, Advance(params, tokens_.offset, ctx.dtype),
        has_positions_ ? Advance(params, positions_.offset, ctx.dtype) : nullptr, mb.batch,
        config_.sequence, config_.hidden, ctx.dtype, y);
    return absl::OkStatus();
  }

  absl::Status Backward(const UnitContext& ctx, const MicroBatch& mb, const void* dy, int32_t* ids,
                        void* rows, GradientSink* sink) override {
    if (has_positions_) {
      absl::StatusOr<void*> gradient = sink->Acquire(positions_.offset, length_);
      if (!gradient.ok()) return gradient.status();
      ctx.ops->PositionBackward(dy, mb.batch, config_.sequence, config_.hidden, ctx.dtype,
                                *gradient);
      const absl::Status status = sink->Done(positions_.offset, length_);
      if (!status.ok()) return status;
    }
    ctx.ops->EmbeddingBackwardRows(dy, mb.tokens, mb.batch, config_.sequence, config_.hidden,
                                   ctx.dtype, ids, rows);
    return absl::OkStatus();
  }

 private:
  const ModelConfig config_;
  const bool has_positions_;
  const int64_t length_;
  const ParameterInfo tokens_;
  ParameterInfo positions_;
};

}  // namespace

std::unique_ptr<EmbeddingUnit> MakeEmbedding(const ModelConfig& config, const UnitTable& unit) {
  return std::make_unique<Embedding>(config, unit);
}

}  // namespace zeroshard
