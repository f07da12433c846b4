#include "common/spec/schedule.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace zeroshard {
namespace {

constexpr double kPi = 3.14159265358979323846;

double WithWarmup(const v1::JobSpec& spec, uint64_t step) {
  const v1::SchedulerParams& params = spec.scheduler().params();
  const double lr = spec.optimizer().params().lr();
  const uint64_t warmup = params.warmup_steps();
  if (step <= warmup) return lr * static_cast<double>(step) / static_cast<double>(warmup);
  if (spec.scheduler().type() == "constant") return lr;
  const uint64_t total = params.total_steps();
  const double min_lr = params.min_lr();
  if (step >= total) return min_lr;
  const double progress = static_cast<double>(step - warmup) / static_cast<double>(total - warmup);
  if (spec.scheduler().type() == "linear") return min_lr + (lr - min_lr) * (1.0 - progress);
  return min_lr + 0.5 * (lr - min_lr) * (1.0 + std::cos(kPi * progress));
}

// How far the warm-up of DeepSpeed's schedulers is at `iteration` in [0, steps).
double DeepSpeedWarmup(const v1::SchedulerParams& params, double iteration, double steps) {
  if (params.warmup_type() == "linear") return iteration / steps;
  return std::log(iteration + 1.0) / std::log(steps);
}

double DeepSpeedRate(const v1::JobSpec& spec, uint64_t step) {
  const v1::SchedulerParams& params = spec.scheduler().params();
  const std::string& type = spec.scheduler().type();
  const bool cosine = type == "WarmupCosineLR";
  const double lr = spec.optimizer().params().lr();
  if (step < 2) return cosine ? 0.0 : params.warmup_min_lr();

  const double iteration = static_cast<double>(step - 2);
  const double warmup = static_cast<double>(std::max<uint64_t>(2, params.warmup_num_steps()));
  const double total = static_cast<double>(params.total_num_steps());
  const double decay_steps = std::max(1.0, total - warmup);
  if (cosine) {
    if (iteration < warmup) {
      const double start = params.warmup_min_ratio();
      return lr * (start + (1.0 - start) * DeepSpeedWarmup(params, iteration, warmup));
    }
    const double progress = std::min(1.0, (iteration - warmup + 1.0) / decay_steps);
    const double end = params.cos_min_ratio();
    return lr * std::max(0.0, end + (1.0 - end) * (1.0 + std::cos(kPi * progress)) / 2.0);
  }
  double gamma = 1.0;
  if (iteration < warmup) {
    gamma = DeepSpeedWarmup(params, iteration, warmup);
  } else if (type == "WarmupDecayLR") {
    gamma = std::max(0.0, (total - iteration) / decay_steps);
  }
  return params.warmup_min_lr() + (params.warmup_max_lr() - params.warmup_min_lr()) * gamma;
}

}  // namespace

double LearningRate(const v1::JobSpec& spec, uint64_t step) {
  const std::string& type = spec.scheduler().type();
  return type.rfind("Warmup", 0) == 0 ? DeepSpeedRate(spec, step) : WithWarmup(spec, step);
}

}  // namespace zeroshard
