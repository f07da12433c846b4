#include "common/spec/loss_scale.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace zeroshard {
namespace {

constexpr double kMostScale = 0x1p126;  // stays a float

bool IsFixed(const v1::JobSpec& spec) { return spec.fp16().loss_scale() != 0; }

}  // namespace

v1::LossScale InitialLossScale(const v1::JobSpec& spec) {
  v1::LossScale scale;
  if (!UsesLossScale(spec)) return scale;
  const v1::Fp16Spec& fp16 = spec.fp16();
  scale.set_scale(IsFixed(spec) ? fp16.loss_scale()
                                : static_cast<double>(uint64_t{1} << fp16.initial_scale_power()));
  scale.set_hysteresis(fp16.hysteresis());
  return scale;
}

v1::LossScale ContinuedLossScale(const v1::JobSpec& spec, const v1::LossScale& saved) {
  v1::LossScale scale = InitialLossScale(spec);
  if (!UsesLossScale(spec) || saved.scale() == 0) return scale;
  scale.set_skipped_steps(saved.skipped_steps());
  if (IsFixed(spec)) return scale;
  scale.set_scale(std::max(saved.scale(), spec.fp16().min_loss_scale()));
  scale.set_good_steps(saved.good_steps());
  scale.set_hysteresis(std::clamp<uint32_t>(saved.hysteresis(), 1, spec.fp16().hysteresis()));
  return scale;
}

v1::LossScale NextLossScale(const v1::JobSpec& spec, const v1::LossScale& now, bool overflow) {
  v1::LossScale next = now;
  if (!UsesLossScale(spec)) return next;
  const v1::Fp16Spec& fp16 = spec.fp16();
  if (overflow) {
    next.set_skipped_steps(now.skipped_steps() + 1);
    next.set_good_steps(0);
    if (IsFixed(spec)) return next;
    if (now.hysteresis() > 1) {
      next.set_hysteresis(now.hysteresis() - 1);
    } else {
      next.set_scale(std::max(now.scale() / 2, fp16.min_loss_scale()));
    }
    return next;
  }
  if (IsFixed(spec)) return next;
  if (fp16.consecutive_hysteresis()) next.set_hysteresis(fp16.hysteresis());
  next.set_good_steps(now.good_steps() + 1);
  if (next.good_steps() < fp16.loss_scale_window()) return next;
  next.set_good_steps(0);
  next.set_hysteresis(fp16.hysteresis());
  next.set_scale(std::min(now.scale() * 2, kMostScale));
  return next;
}

bool OverflowFails(const v1::JobSpec& spec, const v1::LossScale& now) {
  if (!UsesLossScale(spec) || IsFixed(spec)) return true;
  return now.hysteresis() <= 1 && now.scale() <= spec.fp16().min_loss_scale();
}

float GradientScale(const v1::JobSpec& spec, const v1::LossScale& now) {
  if (!UsesLossScale(spec)) return 1;
  const uint64_t tokens = spec.train_micro_batch_size_per_gpu() * spec.model().sequence_length();
  return static_cast<float>(now.scale() / static_cast<double>(std::bit_floor(tokens)));
}

}  // namespace zeroshard
