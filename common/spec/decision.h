// From what the ranks found in a step to how the state changes: one place for workers that update
// their own state and for the coordinator, which decides for the shard stores. Pure functions of a
// normalised specification; thread-safe.
#pragma once

#include <cstdint>

#include "common/kernels/adamw.h"
#include "common/kernels/sgd.h"
#include "common/plan/offload.h"
#include "zeroshard/v1/job.pb.h"
#include "zeroshard/v1/store.pb.h"

namespace zeroshard {

// The clip factor of global-norm clipping (Pascanu et al. 2013, with PyTorch's 1e-6): 1 without.
double ClipFactor(double grad_norm, double max_norm);

// Of step `step`, whose gradients are summed over `tokens` tokens and have the norm `grad_norm` (of
// the mean). A step without a token that carries a loss is a skip: nothing was said of how to
// change the weights, so they do not decay either. Sets step, skip, multiplier, learning_rate and
// adam_step, which counts such steps too. Of an fp16 job `loss_scale` is what the step was computed
// with, and what comes after it is set; with `overflow` the step is a skip that Adam's t does not
// count, as in DeepSpeed.
v1::StepDecision MakeDecision(const v1::JobSpec& spec, uint64_t step, double grad_norm,
                              uint64_t tokens, const v1::LossScale& loss_scale = {},
                              bool overflow = false);

// Whether what a step came to may be committed: all is finite, but for the loss and the norm of a
// step that an fp16 job skips.
bool IsCommittable(const v1::JobSpec& spec, const v1::StepRecord& record);

// What the optimizer computes with, for a decision that is no skip: AdamW, or SGD where
// UsesSgd(spec) says so. Their weight_decay is that of the decay group; the caller takes 0 for
// other tensors.
AdamWArgs MakeAdamWArgs(const v1::JobSpec& spec, const v1::StepDecision& decision);
SgdArgs MakeSgdArgs(const v1::JobSpec& spec, const v1::StepDecision& decision);

}  // namespace zeroshard
