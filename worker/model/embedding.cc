#include "worker/model/embedding.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "worker/model/pass.h"

namespace zeroshard {
namespace {

constexpr uint32_t kDropoutSite = DropoutSite(0, DropoutPlace::kEmbedding);

class Embedding : public EmbeddingUnit {
 public:
  Embedding(const ModelConfig& config, const UnitTable& unit, const TensorPart& part)
      : config_(config),
        part_(part),
        name_(unit.name),
        has_positions_(config.architecture == Architecture::kGpt2),
        length_(unit.length),
        tokens_(*unit.Find(has_positions_ ? "wte.weight" : "embed.weight")),
        activations_(config, UnitKind::kEmbedding, /*checkpointing=*/false) {
    if (has_positions_) positions_ = *unit.Find("wpe.weight");
  }

  absl::Status Forward(const UnitContext& ctx, const void* params, const MicroBatch& mb,
                       void* y) override {
    const absl::Status status =
        LookUp(ctx, activations_.Get(mb.batch, ctx.dtype), params, mb.tokens, mb.batch,
               config_.sequence, /*first=*/0, mb.step, y);
    if (!status.ok()) return status;
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
    return LookUp(ctx, activations_.GetDecode(rows, ctx.dtype), params, tokens, /*batch=*/1, rows,
                  past, /*step=*/0, y);
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
    const int32_t* tokens = mb.tokens;
    if (part_.group != nullptr) {
      const Pass pass{ctx, activations_.Get(mb.batch, ctx.dtype)};
      const absl::StatusOr<int32_t*> local = LocalIds(pass, mb.tokens, mb.batch * config_.sequence);
      if (!local.ok()) return local.status();
      tokens = *local;
    }
    ctx.ops->EmbeddingBackwardRows(dy, tokens, mb.batch, config_.sequence, config_.hidden,
                                   ctx.dtype, ids, rows);
    return absl::OkStatus();
  }

 private:
  // y [batch * rows, C] of the tokens at positions [first, first + rows) of each sequence.
  absl::Status LookUp(const UnitContext& ctx, const ActivationTable& activations,
                      const void* params, const int32_t* tokens, int64_t batch, int64_t rows,
                      int64_t first, uint64_t step, void* y) const {
    const void* table = Advance(params, tokens_.offset, ctx.dtype);
    const void* positions = Positions(ctx, params, first);
    if (part_.group == nullptr) {
      ctx.ops->EmbeddingForward(tokens, table, positions, batch, rows, config_.hidden, ctx.dtype,
                                y);
      return absl::OkStatus();
    }
    const int64_t count = batch * rows;
    const absl::StatusOr<int32_t*> local = LocalIds(Pass{ctx, activations}, tokens, count);
    if (!local.ok()) return local.status();
    absl::Status status = ctx.ops->LookupRows(*local, table, count, config_.hidden, ctx.dtype, y);
    if (!status.ok()) return status;
    // One rank has a token's row, the others zeros: the sum is the row.
    status = part_.group->Sum(y, count * config_.hidden, ctx.dtype,
                              {.phase = Phase::kForward, .unit = name_, .step = step});
    if (!status.ok() || positions == nullptr) return status;
    const int64_t each = rows * config_.hidden;
    for (int64_t b = 0; b < batch; ++b) {
      void* sequence = Advance(y, b * each, ctx.dtype);
      ctx.ops->Add(sequence, positions, each, ctx.dtype, sequence);
    }
    return absl::OkStatus();
  }

  // Of a tensor rank: where in its table the tokens' rows are.
  absl::StatusOr<int32_t*> LocalIds(const Pass& pass, const int32_t* tokens, int64_t count) const {
    auto* local = static_cast<int32_t*>(pass.At("ids"));
    const absl::Status status =
        pass.ops().LocalIds(tokens, count, part_.vocab_begin, part_.vocab_end, local);
    if (!status.ok()) return status;
    return local;
  }

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
  const TensorPart part_;
  const std::string name_;
  const bool has_positions_;
  const int64_t length_;
  const ParameterInfo tokens_;
  ParameterInfo positions_;
  ActivationCache activations_;
};

}  // namespace

std::unique_ptr<EmbeddingUnit> MakeEmbedding(const ModelConfig& config, const UnitTable& unit,
                                             const TensorPart& part) {
  return std::make_unique<Embedding>(config, unit, part);
}

}  // namespace zeroshard
