// A model from nothing but how large it is. Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

struct ShapeOptions {
  int64_t sequence = 1024;
  int64_t vocab = 50257;
};

// A GPT-2 (tied embeddings, 4 C wide MLP) of about `parameters`: heads of 128; hidden a multiple of
// 128, from 4096 on of 1024; for each hidden the number of layers that comes nearest, from 32 on a
// multiple of 4. Of these the one whose hidden is nearest to 128 x layers by ratio, which is how
// published models of 7 B to 175 B look (GPT-3 175B: 12288 and 96). From a hidden of 4096 on the
// count is off by 1.5 % at most, below that by half a block.
// INVALID_ARGUMENT: from 10 million to 20 trillion parameters are wanted.
absl::StatusOr<v1::ModelSpec> ShapeOf(double parameters, const ShapeOptions& options);

}  // namespace zeroshard
