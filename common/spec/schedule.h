// The learning rate as a function of the step: no state, so that a resumed job needs none.
#pragma once

#include <cstdint>

#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// The learning rate of optimizer step `step` (the first is 1) of a normalised specification.
// Thread-safe.
//
// constant, linear, cosine: lr * step / warmup_steps up to warmup_steps, then lr; or to min_lr at
// total_steps along a line or half a cosine (Loshchilov and Hutter 2017, equation 5, without
// restarts), and min_lr from there on.
//
// WarmupLR, WarmupDecayLR, WarmupCosineLR: the values DeepSpeed's schedulers give
// (deepspeed/runtime/lr_schedules.py). DeepSpeed steps the scheduler after the optimizer, and the
// scheduler counts from -1, so optimizer step s is computed with its last_batch_iteration = s - 2;
// at -1 WarmupLR and WarmupDecayLR give warmup_min_lr and WarmupCosineLR gives 0.
double LearningRate(const v1::JobSpec& spec, uint64_t step);

}  // namespace zeroshard
