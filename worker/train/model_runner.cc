#include "worker/train/model_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/plan/activation_table.h"
#include "common/status_macros.h"

namespace zeroshard {
ModelRunner::ModelRunner(const Model* model, const ZeroPolicy* policy, ZeroEngine* engine,
                         Device* device, Ops* ops)
    : model_(*model),
      policy_(*policy),
      engine_(*engine),
      device_(device),
      ops_(ops),
      slots_(std::max(policy->rounds, kLeastSums)) {}

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(const Model* model,
                                                                 const ZeroPolicy* policy,
                                                                 ZeroEngine* engine, Device* device,
                                                                 Ops* ops) {
  std::unique_ptr<ModelRunner> runner(new ModelRunner(model, policy, engine, device, ops));
  const ModelConfig& config = model->table.config;
  const ZeroOptions& o = policy->options;
  const int64_t bytes = ActivationBytes(config, o.micro_batch, o.dtype, o.checkpointing);
  ZS_ASSIGN_OR_RETURN(runner->memory_,
                      device->Allocate(static_cast<size_t>(bytes), MemoryKind::kActivations));
  runner->head_ = static_cast<int>(model->table.units.size()) - 1;
  char* at = runner->memory_.as<char>();
  int64_t scratch = 0;
  for (const UnitTable& unit : model->table.units) {
    const ActivationTable table =
        MakeActivationTable(config, unit.kind, o.micro_batch, o.dtype, o.checkpointing);
    runner->kept_.push_back(at);
    at += table.kept_bytes;
    scratch = std::max(scratch, table.scratch_bytes);
  }
  const int64_t boundary = RoundUp(
      o.micro_batch * config.sequence * config.hidden * static_cast<int64_t>(SizeOf(o.dtype)), 64);
  runner->scratch_ = at;
  runner->gradient_ = at + scratch;
  runner->next_gradient_ = runner->gradient_ + boundary;
  if (runner->next_gradient_ + boundary != runner->memory_.as<char>() + bytes) {
    return absl::InternalError(
        absl::StrFormat("the activation plan of %d bytes does not match its tables", bytes));
  }
  const size_t sums = static_cast<size_t>(runner->slots_) * sizeof(MicroBatchSums);
  ZS_ASSIGN_OR_RETURN(runner->sums_, device->Allocate(sums, MemoryKind::kBuffers));
  ZS_ASSIGN_OR_RETURN(runner->read_sums_, device->AllocateHost(sums));
  return runner;
}

UnitContext ModelRunner::Context(int unit) const {
  UnitContext context;
  context.ops = ops_;
  context.dtype = policy_.options.dtype;
  context.kept = kept_[static_cast<size_t>(unit)];
  context.scratch = scratch_;
  return context;
}

absl::Status ModelRunner::Forward(const MicroBatch& mb, const Progress& progress) {
  for (int u = 0; u < head_; ++u) {
    progress(StepPhase::kForward, UnitName(u));
    ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, engine_.BeforeForward(u));
    if (u == 0) {
      ZS_RETURN_IF_ERROR(model_.embedding->Forward(Context(u), parameters.own, mb, Input(1)));
    } else {
      ZS_RETURN_IF_ERROR(model_.blocks[static_cast<size_t>(u - 1)]->Forward(
          Context(u), parameters.own, mb, Input(u), Input(u + 1)));
    }
    ZS_RETURN_IF_ERROR(engine_.AfterForward(u));
  }
  return absl::OkStatus();
}

absl::Status ModelRunner::Head(const MicroBatch& mb, double* loss, const Progress& progress) {
  progress(StepPhase::kBackward, UnitName(head_));
  ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, engine_.BeforeForward(head_));
  ZS_RETURN_IF_ERROR(model_.head->LossAndBackward(
      Context(head_), parameters.own, parameters.lm_head, mb, Input(head_), gradient_,
      engine_.Sink(head_), engine_.Sink(engine_.HeadMatrixUnit()), engine_.HeadMatrixOffset(),
      loss));
  return engine_.AfterBackward(head_);
}

absl::Status ModelRunner::Backward(const MicroBatch& mb, const Progress& progress) {
  for (int u = head_ - 1; u > 0; --u) {
    progress(StepPhase::kBackward, UnitName(u));
    ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, engine_.BeforeBackward(u));
    ZS_RETURN_IF_ERROR(model_.blocks[static_cast<size_t>(u - 1)]->Backward(
        Context(u), parameters.own, mb, Input(u), gradient_, next_gradient_, engine_.Sink(u)));
    ZS_RETURN_IF_ERROR(engine_.AfterBackward(u));
    std::swap(gradient_, next_gradient_);
  }
  progress(StepPhase::kBackward, UnitName(0));
  ZS_RETURN_IF_ERROR(model_.embedding->Backward(Context(0), mb, gradient_, engine_.rows()->ids(),
                                                engine_.rows()->rows(), engine_.Sink(0)));
  return engine_.AfterBackward(0);
}

MicroBatchSums* ModelRunner::ClearSums(int64_t slot) {
  MicroBatchSums* sums = sums_.as<MicroBatchSums>() + slot;
  ops_->Zero(sums, sizeof(*sums));
  return sums;
}

absl::Status ModelRunner::Loss(const MicroBatch& mb, int64_t slot, const Progress& progress) {
  MicroBatchSums* sums = ClearSums(slot);
  ZS_RETURN_IF_ERROR(Forward(mb, progress));
  progress(StepPhase::kForward, UnitName(head_));
  ZS_ASSIGN_OR_RETURN(const UnitParameters parameters, engine_.BeforeForward(head_));
  ZS_RETURN_IF_ERROR(model_.head->Loss(Context(head_), parameters.own, parameters.lm_head, mb,
                                       Input(head_), &sums->loss));
  return engine_.AfterForward(head_);
}

absl::StatusOr<absl::Span<const MicroBatchSums>> ModelRunner::Losses(
    uint64_t step, int64_t n, const Load& load, const Progress& progress,
    const std::atomic<bool>& stop) {
  for (int64_t i = 0; i < n; ++i) {
    if (stop) return absl::CancelledError("stopped");
    progress(StepPhase::kData, "evaluation");
    engine_.BeginEvaluation(step);
    ZS_ASSIGN_OR_RETURN(const MicroBatch mb, load(i));
    ZS_RETURN_IF_ERROR(Loss(mb, i, progress));
  }
  return Sums(n);
}

absl::Status ModelRunner::ForwardBackward(const MicroBatch& mb, int64_t slot,
                                          const Progress& progress) {
  MicroBatchSums* sums = ClearSums(slot);
  ZS_RETURN_IF_ERROR(Forward(mb, progress));
  ZS_RETURN_IF_ERROR(Head(mb, &sums->loss, progress));
  ZS_RETURN_IF_ERROR(Backward(mb, progress));
  const ModelConfig& config = model_.table.config;
  ops_->AddSquares(gradient_, mb.batch * config.sequence * config.hidden, policy_.options.dtype,
                   &sums->inputs);
  return absl::OkStatus();
}

absl::StatusOr<absl::Span<const MicroBatchSums>> ModelRunner::Sums(int64_t n) {
  ZS_RETURN_IF_ERROR(CopyAndWait(device_, read_sums_.data(), sums_.data(),
                                 static_cast<size_t>(n) * sizeof(MicroBatchSums)));
  ZS_RETURN_IF_ERROR(device_->compute()->Record().Wait());  // of the kernels that made them
  return absl::MakeConstSpan(read_sums_.as<MicroBatchSums>(), static_cast<size_t>(n));
}

}  // namespace zeroshard
