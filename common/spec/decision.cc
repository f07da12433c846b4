#include "common/spec/decision.h"

#include <algorithm>
#include <cmath>

#include "common/plan/zero_policy.h"
#include "common/spec/loss_scale.h"
#include "common/spec/schedule.h"

namespace zeroshard {

double ClipFactor(double grad_norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (grad_norm + 1e-6)) : 1.0;
}

v1::StepDecision MakeDecision(const v1::JobSpec& spec, uint64_t step, double grad_norm,
                              uint64_t tokens, const v1::LossScale& loss_scale, bool overflow) {
  v1::StepDecision decision;
  decision.set_step(step);
  decision.set_skip(tokens == 0 || overflow);
  decision.set_learning_rate(static_cast<float>(LearningRate(spec, step)));
  decision.set_adam_step(step - loss_scale.skipped_steps());
  if (!decision.skip()) {
    const double scale = GradientScale(spec, loss_scale);
    decision.set_multiplier(static_cast<float>(ClipFactor(grad_norm, spec.gradient_clipping()) /
                                               (scale * static_cast<double>(tokens))));
  }
  if (UsesLossScale(spec)) {
    // A step that says nothing says nothing of the scale either.
    *decision.mutable_loss_scale() =
        tokens == 0 && !overflow ? loss_scale : NextLossScale(spec, loss_scale, overflow);
  }
  return decision;
}

bool IsCommittable(const v1::JobSpec& spec, const v1::StepRecord& record) {
  if (!std::isfinite(record.learning_rate()) || !std::isfinite(record.seconds())) return false;
  if (record.skipped() && UsesLossScale(spec)) return true;
  return std::isfinite(record.loss()) && std::isfinite(record.grad_norm());
}

AdamWArgs MakeAdamWArgs(const v1::JobSpec& spec, const v1::StepDecision& decision) {
  const v1::OptimizerParams& params = spec.optimizer().params();
  AdamWArgs args;
  args.learning_rate = decision.learning_rate();
  if (params.betas_size() == 2) {
    args.beta1 = static_cast<float>(params.betas(0));
    args.beta2 = static_cast<float>(params.betas(1));
  }
  args.eps = static_cast<float>(params.eps());
  args.weight_decay = static_cast<float>(params.weight_decay());
  args.grad_scale = decision.multiplier();
  args.t = static_cast<int64_t>(decision.adam_step());
  args.rounding = MakeRounding(spec);
  return args;
}

SgdArgs MakeSgdArgs(const v1::JobSpec& spec, const v1::StepDecision& decision) {
  const v1::OptimizerParams& params = spec.optimizer().params();
  SgdArgs args;
  args.learning_rate = decision.learning_rate();
  args.momentum = static_cast<float>(params.momentum());
  args.weight_decay = static_cast<float>(params.weight_decay());
  args.grad_scale = decision.multiplier();
  args.rounding = MakeRounding(spec);
  return args;
}

}  // namespace zeroshard
