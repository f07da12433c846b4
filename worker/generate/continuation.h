// A prompt continued token by token.
#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/generate/generator.h"
#include "worker/generate/parameter_lender.h"
#include "worker/generate/sampler.h"

namespace zeroshard {

enum class StopReason : uint8_t { kEndOfText, kMaxTokens, kPositions };
const char* NameOf(StopReason reason);  // "end_of_text", "max_tokens", "positions"

struct ContinuationOptions {
  std::vector<int32_t> prompt = {};  // at least one token
  int64_t max_tokens = 128;
  SamplingOptions sampling = {};
  std::set<int32_t> end_of_text = {};  // any of these ends it, and is not part of it
  // Goes on to max_tokens (or the last position) even behind the end, so that how often the model
  // runs does not depend on its answers: for ranks that run it together. The answer is the same.
  bool run_to_length = false;
};

struct Continuation {
  std::vector<int32_t> tokens;  // without the prompt
  StopReason reason = StopReason::kMaxTokens;
};

// How many positions the options need at most: the capacity of a generator that never stops for
// want of them, where the model has as many.
int64_t PositionsWanted(const ContinuationOptions& options);

// Resets the generator and continues the prompt; `on_token`, where there is one, is called with
// each token of the answer. The last token is not run through the model, so an answer may reach one
// past the capacity. Generator::Step's errors, SampleToken's, and on_token's, which ends it.
absl::StatusOr<Continuation> Continue(
    const ContinuationOptions& options, Generator* generator, ParameterLender* lender,
    const std::function<absl::Status(int32_t token)>& on_token = nullptr);

}  // namespace zeroshard
