// Loss scaling of fp16 jobs (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2),
// with the keys and the rule of DeepSpeed's fp16 section. Gradients are computed times a scale, so
// that they stay above fp16's smallest numbers; a step with one that is not finite (an overflow) is
// skipped, and the scale falls. After so many good steps it grows again. Dynamic scales are powers
// of two times min_loss_scale or 2^initial_scale_power; a fixed one is any positive number.
//
// Pure functions of a normalised specification and a v1::LossScale, which is part of the state of a
// run: every process that computes the next one gets the same. Thread-safe.
#pragma once

#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard {

inline bool UsesLossScale(const v1::JobSpec& spec) { return spec.fp16().enabled(); }

// Of a run's first step. Of a job in another type: the default message, also below.
v1::LossScale InitialLossScale(const v1::JobSpec& spec);
// Of a run that goes on from `saved`; where that is none (scale 0: the run before was not in fp16,
// or of a version that knew none) InitialLossScale. What the specification has changed since
// counts.
v1::LossScale ContinuedLossScale(const v1::JobSpec& spec, const v1::LossScale& saved);

// Of the step after one that was computed with `now`: where it overflowed, and where it did not.
// * Overflow: one less of the hysteresis; where it is used up, half the scale, at least
//   min_loss_scale. The hysteresis stays used up.
// * loss_scale_window good steps in a row: twice the scale (at most 2^126), all of the hysteresis
//   again. With consecutive_hysteresis every good step gives that back.
v1::LossScale NextLossScale(const v1::JobSpec& spec, const v1::LossScale& now, bool overflow);

// Whether an overflow with `now` ends the job: the scale is fixed, or would have to fall below
// min_loss_scale. True of a job in another type, where nothing may be non-finite.
bool OverflowFails(const v1::JobSpec& spec, const v1::LossScale& now);

// What the gradient of a micro-batch's summed loss is multiplied by: scale / 2^k, where 2^k is the
// largest power of two that is at most a micro-batch's tokens: sums would leave fp16's range sooner
// than the means that the scale is meant for. 1 of a job in another type.
float GradientScale(const v1::JobSpec& spec, const v1::LossScale& now);

}  // namespace zeroshard
