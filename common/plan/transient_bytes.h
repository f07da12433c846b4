// What a rank's `buffers` take beside what it holds for good (zeroshard_worker_memory_bytes). Pure
// arithmetic; thread-safe.
#pragma once

#include "common/plan/model_table.h"
#include "common/plan/zero_policy.h"

namespace zeroshard {

// Of the first rank of a data line, but for a few numbers a token, unit and micro-batch: parameters
// as the schedule gathers, prefetches and keeps them, gradients on their way, both through pools
// that keep what is given back (worker/zero/buffer_pool.h); the token table's gradient as rows; of
// a tied table whose ends are apart, what they exchange. As much as is ever allocated: exact where
// gradients do not leave for the stores before the step ends, else an upper bound.
uint64_t TransientBytes(const ModelTable& model, const ZeroPolicy& policy);

}  // namespace zeroshard
