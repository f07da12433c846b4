// The next token from the model's logits. A pure function: what is drawn at a position depends on
// (logits, seed, position) alone.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace zeroshard {

struct SamplingOptions {
  double temperature = 0;  // 0: always the likeliest token
  int64_t top_k = 0;       // only the k likeliest take part; 0: all
  uint64_t seed = 0;
};

// INVALID_ARGUMENT: a temperature that is negative or not finite, a negative top_k.
absl::Status CheckSampling(const SamplingOptions& options);

// Of equal logits the lowest id is the likelier. Probabilities are softmax(logits / temperature)
// over those that take part, in fp64; the uniform deviate of a position is 53 bits of the Philox
// block (counter: position and a constant, key: seed). INTERNAL where a logit is NaN or none is
// finite: the model's weights or activations are broken.
absl::StatusOr<int32_t> SampleToken(absl::Span<const float> logits, const SamplingOptions& options,
                                    int64_t position);

}  // namespace zeroshard
