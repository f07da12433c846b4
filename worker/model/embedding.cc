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
    const Pass pass = MakePass(ctx, params, mb, Phase::kForward);
    const absl::Status status = LookUp(pass, mb.tokens, y);
    if (!status.ok()) return status;
    const DropoutArgs dropout = pass.Dropout(config_.embd_pdrop, kDropoutSite);
    if (dropout.rate > 0) pass.DropRows(dropout, y, config_.hidden, y);
    return absl::OkStatus();
  }

  absl::Status Decode(const UnitContext& ctx, const void* params, int64_t past, int64_t rows,
                      const int32_t* tokens, void* y) override {
    if (past < 0 || rows < 1 || (has_positions_ && past > config_.positions - rows)) {
      return absl::InvalidArgumentError(absl::StrCat(rows, " positions from ", past,
                                                     " on; wanted some of the model's ",
                                                     config_.positions, " positions"));
    }
    Pass pass{ctx, activations_.GetDecode(rows, ctx.dtype)};
    pass.SetRows(1, rows);
    pass.params = params;
    pass.past = past;
    Join(&pass, Phase::kForward, /*step=*/0);
    return LookUp(pass, tokens, y);
  }

  absl::Status Backward(const UnitContext& ctx, const MicroBatch& mb, const void* dy, int32_t* ids,
                        void* rows, GradientSink* sink) override {
    const Pass pass = MakePass(ctx, /*params=*/nullptr, mb, Phase::kBackward);
    absl::Status status = WholeGradient(pass, &dy);
    if (status.ok() && has_positions_) status = PositionGradient(pass, dy, sink);
    if (!status.ok()) return status;
    const int32_t* tokens = mb.tokens;
    if (pass.group != nullptr) {
      const absl::StatusOr<int32_t*> local = LocalIds(pass, mb.tokens);
      if (!local.ok()) return local.status();
      tokens = *local;
    }
    ctx.ops->EmbeddingBackwardRows(dy, tokens, mb.batch, config_.sequence, config_.hidden,
                                   ctx.dtype, ids, rows);
    return absl::OkStatus();
  }

 private:
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
    if (part_.group == nullptr) return;
    pass->group = part_.group;
    pass->info = {.phase = phase, .unit = name_, .step = step};
  }

  // y [own_rows, C] of the tokens [rows].
  absl::Status LookUp(const Pass& pass, const int32_t* tokens, void* y) const {
    const void* table = pass.Parameter(tokens_);
    const void* positions = Positions(pass);
    if (pass.group == nullptr) {
      pass.ops().EmbeddingForward(tokens, table, positions, pass.batch, pass.sequence,
                                  config_.hidden, pass.dtype(), y);
      return absl::OkStatus();
    }
    const absl::StatusOr<int32_t*> local = LocalIds(pass, tokens);
    if (!local.ok()) return local.status();
    void* rows = pass.divided() ? pass.At("rows") : y;
    absl::Status status =
        pass.ops().LookupRows(*local, table, pass.rows, config_.hidden, pass.dtype(), rows);
    // One rank has a token's row, the others zeros: the sum is the row.
    if (status.ok()) status = pass.Sum(rows, config_.hidden, y);
    if (!status.ok() || positions == nullptr) return status;
    pass.ForEachSequence([&](int64_t position, int64_t row, int64_t count) {
      void* at = Advance(y, row * config_.hidden, pass.dtype());
      pass.ops().Add(at, Advance(positions, position * config_.hidden, pass.dtype()),
                     count * config_.hidden, pass.dtype(), at);
    });
    return absl::OkStatus();
  }

  // Of a tensor rank: where in its table the rows of the tokens [pass.rows] are.
  absl::StatusOr<int32_t*> LocalIds(const Pass& pass, const int32_t* tokens) const {
    auto* local = static_cast<int32_t*>(pass.At("ids"));
    const absl::Status status =
        pass.ops().LocalIds(tokens, pass.rows, part_.vocab_begin, part_.vocab_end, local);
    if (!status.ok()) return status;
    return local;
  }

  // Rows of the position table from the pass' first one on; null without one.
  const void* Positions(const Pass& pass) const {
    if (!has_positions_) return nullptr;
    return Advance(pass.params, positions_.offset + pass.past * config_.hidden, pass.dtype());
  }

  // From dy [own_rows, C] the gradient [rows, C] of what was looked up: dy itself or in "rows".
  absl::Status WholeGradient(const Pass& pass, const void** dy) const {
    const DropoutArgs dropout = pass.Dropout(config_.embd_pdrop, kDropoutSite);
    if (dropout.rate <= 0 && !pass.divided()) return absl::OkStatus();
    void* rows = pass.At("rows");
    void* own = pass.Own(rows, config_.hidden);
    if (dropout.rate > 0) {
      pass.DropRows(dropout, *dy, config_.hidden, own);
    } else {
      pass.ops().Copy(own, *dy,
                      static_cast<size_t>(pass.own_rows * config_.hidden) * SizeOf(pass.dtype()));
    }
    *dy = rows;
    return pass.divided() ? pass.Wait(pass.BeginGather(rows, config_.hidden)) : absl::OkStatus();
  }

  // Positions that no sequence reaches have a gradient of zero.
  absl::Status PositionGradient(const Pass& pass, const void* dy, GradientSink* sink) const {
    absl::StatusOr<void*> gradient = sink->Acquire(positions_.offset, length_);
    if (!gradient.ok()) return gradient.status();
    pass.ops().PositionBackward(dy, pass.batch, config_.sequence, config_.hidden, pass.dtype(),
                                *gradient);
    const int64_t reached = config_.sequence * config_.hidden;
    pass.ops().Zero(Advance(*gradient, reached, pass.dtype()),
                    static_cast<size_t>(positions_.size - reached) * SizeOf(pass.dtype()));
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
