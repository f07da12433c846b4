#include "worker/model/head.h"

#include <algorithm>
#include <string>
#include <vector>

#include "worker/model/norm.h"
#include "worker/model/pass.h"

namespace zeroshard {
namespace {

constexpr int64_t kBlockElements = int64_t{1} << 22;
constexpr int64_t kAlign = 64;

// Logits are kept as [V, T], one sequence at a time. With the vocabulary outermost every run of
// vocabulary rows is a dense operand, of the logits' product as of the gradient's, and an odd V
// never is a leading dimension.
class Head : public HeadUnit {
 public:
  Head(const ModelConfig& config, const UnitTable& unit, bool matrix_trainable,
       const TensorPart& part)
      : config_(config),
        part_(part),
        name_(unit.name),
        matrix_trainable_(matrix_trainable),
        block_rows_(HeadBlockRows(config)),
        norm_(config, unit, config.architecture == Architecture::kGpt2 ? "ln_f" : "norm_f", "norm"),
        activations_(config, UnitKind::kHead, /*checkpointing=*/false) {}

  absl::Status Loss(const UnitContext& ctx, const void* params, const void* lm_head,
                    const MicroBatch& mb, const void* x, double* loss) override {
    const Pass pass = MakePass(ctx, params, mb);
    const absl::Status normalised = Normalise(pass, x);
    if (!normalised.ok()) return normalised;
    for (int64_t b = 0; b < mb.batch; ++b) {
      const absl::Status status = SequenceLoss(pass, lm_head, mb, b, /*gradient_scale=*/0, loss);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status LossAndBackward(const UnitContext& ctx, const void* params, const void* lm_head,
                               const MicroBatch& mb, const void* x, void* dx, GradientSink* sink,
                               GradientSink* head_sink, int64_t head_offset,
                               double* loss) override {
    Pass pass = MakePass(ctx, params, mb);
    void* norm_out = pass.At("norm.out");
    absl::Status status = Normalise(pass, x);
    if (!status.ok()) return status;
    void* d_norm_out = NormGradient(pass, dx);
    std::vector<Event> sums;
    for (int64_t b = 0; b < mb.batch; ++b) {
      status = SequenceLoss(pass, lm_head, mb, b, mb.gradient_scale, loss);
      if (!status.ok()) return status;
      if (pass.group != nullptr) {
        status = InputGradient(pass, lm_head, Sequence(pass, d_norm_out, b));
        if (!status.ok()) return status;
        BeginSum(pass, d_norm_out, b, &sums);
      }
      void* sequence = Sequence(pass, norm_out, b);
      status = mb.batch == 1 ? HandOutGradient(pass, sequence, head_sink, head_offset)
                             : AccumulateGradient(pass, sequence, /*first=*/b == 0);
      if (status.ok() && pass.group == nullptr) status = InputGradient(pass, lm_head, sequence);
      if (!status.ok()) return status;
    }
    if (mb.batch > 1) {
      status = HandOutAccumulated(pass, head_sink, head_offset);
      if (!status.ok()) return status;
    }
    for (const Event& sum : sums) {
      status = pass.Wait(sum);
      if (!status.ok()) return status;
    }
    absl::StatusOr<void*> gradients = sink->Acquire(0, norm_.end());
    if (!gradients.ok()) return gradients.status();
    pass.gradients = *gradients;
    norm_.Backward(pass, pass.Own(d_norm_out, config_.hidden), x, /*accumulate=*/false, dx);
    status = pass.Wait(norm_.BeginSum(pass));
    return status.ok() ? sink->Done(0, norm_.end()) : status;
  }

  absl::Status Logits(const UnitContext& ctx, const void* params, const void* lm_head, int64_t rows,
                      const void* x, float* logits) override {
    Pass pass{ctx, activations_.GetDecode(rows, ctx.dtype)};
    pass.SetRows(1, rows);
    pass.params = params;
    void* norm_out = pass.At("norm.out");
    norm_.Forward(pass, x, norm_out);
    auto* const parts = part_.group == nullptr ? nullptr : pass.Float("logits");
    MatmulArgs args;
    args.a = norm_out;
    args.b = lm_head;
    args.c = parts == nullptr ? logits : parts + part_.group->rank() * rows * config_.vocab;
    args.m = rows;
    args.n = config_.vocab;
    args.k = config_.hidden;
    args.transpose_b = true;
    args.ab_type = ctx.dtype;
    args.c_type = DType::kF32;
    const absl::Status status = pass.ops().Matmul(args);
    return status.ok() && parts != nullptr ? JoinLogits(pass, parts, logits) : status;
  }

 private:
  // Of a whole vocabulary, from what each rank has of it: inference wants few rows.
  absl::Status JoinLogits(const Pass& pass, float* parts, float* logits) const {
    const int64_t local = config_.vocab, whole = part_.full_vocab;
    const absl::Status status =
        part_.group->Gather(parts, pass.rows * local, DType::kF32, {Phase::kForward, name_, 0});
    if (!status.ok()) return status;
    constexpr int64_t kBytes = sizeof(float);
    for (int64_t begin = 0; begin < whole; begin += local, parts += pass.rows * local) {
      pass.ops().CopyRows(logits + begin, whole * kBytes, parts, local * kBytes, pass.rows,
                          std::min(local, whole - begin) * kBytes);
    }
    return absl::OkStatus();
  }

  Pass MakePass(const UnitContext& ctx, const void* params, const MicroBatch& mb) {
    Pass pass{ctx, activations_.Get(mb.batch, ctx.dtype)};
    pass.SetRows(mb.batch, config_.sequence);
    pass.params = params;
    pass.group = part_.group;
    if (pass.group != nullptr)
      pass.info = {.phase = Phase::kBackward, .unit = name_, .step = mb.step};
    pass.DivideRows(config_);
    return pass;
  }

  // "norm.out" [rows, C] of x [own_rows, C].
  absl::Status Normalise(const Pass& pass, const void* x) const {
    void* out = pass.At("norm.out");
    norm_.Forward(pass, x, pass.Own(out, config_.hidden));
    if (!pass.divided()) return absl::OkStatus();
    Pass forward = pass;
    forward.info.phase = Phase::kForward;
    return pass.Wait(forward.BeginGather(out, config_.hidden));
  }

  // Where the gradient of "norm.out" goes. That has served where its gradient takes its place.
  // Split, the gradient is on its way between ranks while the matrix's is still made from the
  // output; where rows are divided dx has no room for it.
  void* NormGradient(const Pass& pass, void* dx) const {
    if (pass.group == nullptr) return pass.At("norm.out");
    return pass.divided() ? pass.At("d_in") : dx;
  }

  // Of sequence b of d [rows, C], or behind the last one of all where rows are divided: ranks' rows
  // are not of each sequence.
  void BeginSum(const Pass& pass, void* d, int64_t b, std::vector<Event>* sums) const {
    if (!pass.divided()) {
      const int64_t n = config_.sequence * config_.hidden;
      sums->push_back(pass.group->BeginSum(Sequence(pass, d, b), n, pass.dtype(), pass.info));
    } else if (b + 1 == pass.batch) {
      sums->push_back(pass.BeginSum(d, config_.hidden));
    }
  }

  // Sequence b of a [mb*T, C] buffer.
  void* Sequence(const Pass& pass, void* rows, int64_t b) const {
    return Advance(rows, b * config_.sequence * config_.hidden, pass.dtype());
  }

  // Calls body(first row, number of rows) for each block of vocabulary rows.
  template <typename Body>
  absl::Status ForEachBlock(const Body& body) const {
    for (int64_t row = 0; row < config_.vocab; row += block_rows_) {
      const absl::Status status = body(row, std::min(block_rows_, config_.vocab - row));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // The loss of sequence b; the logits become the gradient of gradient_scale times it (0: stay).
  absl::Status SequenceLoss(const Pass& pass, const void* lm_head, const MicroBatch& mb, int64_t b,
                            float gradient_scale, double* loss) const {
    const int64_t T = config_.sequence;
    const void* sequence = Sequence(pass, pass.At("norm.out"), b);
    void* logits = pass.At("logits");
    const absl::Status status = ForEachBlock([&](int64_t row, int64_t count) {
      return pass.Product(Advance(lm_head, row * config_.hidden, pass.dtype()), false, sequence,
                          true, Advance(logits, row * T, pass.dtype()), count, T, config_.hidden);
    });
    if (!status.ok()) return status;
    float* losses = pass.Float("losses");
    const int32_t* targets = mb.targets + b * T;
    if (pass.group != nullptr) {
      const absl::Status split = SplitCrossEntropy(pass, targets, gradient_scale, losses);
      if (!split.ok()) return split;
    } else {
      pass.ops().CrossEntropyColumns(logits, targets, T, config_.vocab, pass.dtype(),
                                     gradient_scale, losses);
    }
    pass.ops().AddLosses(losses, targets, T, loss);
    return absl::OkStatus();
  }

  // The cross-entropy of "logits" over all ranks' rows of the vocabulary. Padding is in no sum and
  // has no gradient.
  absl::Status SplitCrossEntropy(const Pass& pass, const int32_t* targets, float gradient_scale,
                                 float* losses) const {
    const int64_t T = config_.sequence, rows = part_.vocab_end - part_.vocab_begin;
    void* logits = pass.At("logits");
    auto* local = static_cast<int32_t*>(pass.At("ids"));
    float* parts = pass.Float("softmax");
    Ops& ops = pass.ops();
    absl::Status status = ops.LocalIds(targets, T, part_.vocab_begin, part_.vocab_end, local);
    if (!status.ok()) return status;
    status =
        ops.SoftmaxPart(logits, local, T, rows, pass.dtype(), parts + pass.group->rank() * 3 * T);
    if (!status.ok()) return status;
    CollectiveInfo info = pass.info;
    info.phase = Phase::kForward;
    status = pass.group->Gather(parts, 3 * T, DType::kF32, info);
    if (!status.ok()) return status;
    status = ops.CrossEntropyOfParts(parts, pass.group->size(), logits, targets, local, T, rows,
                                     pass.dtype(), gradient_scale, losses);
    if (!status.ok() || gradient_scale == 0) return status;
    ops.Zero(Advance(logits, rows * T, pass.dtype()),
             static_cast<size_t>((config_.vocab - rows) * T) * SizeOf(pass.dtype()));
    return absl::OkStatus();
  }

  // d [T, C], from one sequence's gradient in "logits" and the rows of the matrix that are here.
  absl::Status InputGradient(const Pass& pass, const void* lm_head, void* d) const {
    return pass.Product(pass.At("logits"), true, lm_head, false, d, config_.sequence,
                        config_.hidden, config_.vocab);
  }

  // Rows [row, row + count) of the head matrix's gradient from one sequence [T, C].
  absl::Status GradientBlock(const Pass& pass, const void* sequence, int64_t row, int64_t count,
                             void* out, DType out_type, bool accumulate) const {
    MatmulArgs args;
    args.a = Advance(pass.At("logits"), row * config_.sequence, pass.dtype());
    args.b = sequence;
    args.c = out;
    args.m = count;
    args.n = config_.hidden;
    args.k = config_.sequence;
    args.ab_type = pass.dtype();
    args.c_type = out_type;
    args.accumulate = accumulate;
    return pass.ops().Matmul(args);
  }

  // Acquires each block of rows, has `fill(row, count, memory)` write it, and hands it out.
  template <typename Fill>
  absl::Status HandOut(GradientSink* sink, int64_t offset, const Fill& fill) const {
    return ForEachBlock([&](int64_t row, int64_t count) -> absl::Status {
      const int64_t begin = offset + row * config_.hidden;
      const int64_t end = RoundUp(begin + count * config_.hidden, kAlign);
      absl::StatusOr<void*> memory = sink->Acquire(begin, end);
      if (!memory.ok()) return memory.status();
      if (matrix_trainable_) {
        const absl::Status status = fill(row, count, *memory);
        if (!status.ok()) return status;
      }
      return sink->Done(begin, end);
    });
  }

  absl::Status HandOutGradient(const Pass& pass, const void* sequence, GradientSink* sink,
                               int64_t offset) const {
    return HandOut(sink, offset, [&](int64_t row, int64_t count, void* memory) {
      return GradientBlock(pass, sequence, row, count, memory, pass.dtype(), false);
    });
  }

  absl::Status AccumulateGradient(const Pass& pass, const void* sequence, bool first) const {
    if (!matrix_trainable_) return absl::OkStatus();
    float* sum = pass.Float("lm_head.gradient");
    return ForEachBlock([&](int64_t row, int64_t count) {
      return GradientBlock(pass, sequence, row, count, sum + row * config_.hidden, DType::kF32,
                           !first);
    });
  }

  absl::Status HandOutAccumulated(const Pass& pass, GradientSink* sink, int64_t offset) const {
    const float* sum = pass.Float("lm_head.gradient");
    return HandOut(sink, offset, [&](int64_t row, int64_t count, void* memory) {
      const float* from = sum + row * config_.hidden;
      const int64_t n = count * config_.hidden;
      if (pass.dtype() == DType::kF32) {
        pass.ops().Copy(memory, from, static_cast<size_t>(n) * sizeof(float));
      } else {
        pass.ops().Convert(from, DType::kF32, n, memory, pass.dtype());
      }
      return absl::OkStatus();
    });
  }

  const ModelConfig config_;
  const TensorPart part_;
  const std::string name_;
  const bool matrix_trainable_;
  const int64_t block_rows_;
  const Norm norm_;
  ActivationCache activations_;
};

}  // namespace

int64_t HeadBlockRows(const ModelConfig& config) {
  const int64_t rows = std::max(kAlign, kBlockElements / config.hidden / kAlign * kAlign);
  return std::min(rows, config.vocab);
}

std::unique_ptr<HeadUnit> MakeHead(const ModelConfig& config, const UnitTable& unit,
                                   bool matrix_trainable, const TensorPart& part) {
  return std::make_unique<Head>(config, unit, matrix_trainable, part);
}

}  // namespace zeroshard
