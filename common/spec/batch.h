// The three batch sizes: which follow from which.
#pragma once

#include "absl/status/status.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Fills in train_batch_size (G), train_micro_batch_size_per_gpu (m) and gradient_accumulation_steps
// (A) for W = the data-parallel ranks, which follow from resources.workers and parallel.*, both
// set, as DeepSpeed does: two give the third by G = m * A * W, G alone means A = 1 and m = G / W, m
// alone means A = 1 and G = m * W. Unlike there, W need not divide G / m: then the last round is
// ragged and A = ceil(G / (m W)). INVALID_ARGUMENT gives the numbers; m is at most 65,536 and m *
// sequence_length and G below 2^31.
absl::Status NormaliseBatch(v1::JobSpec* spec);

}  // namespace zeroshard
