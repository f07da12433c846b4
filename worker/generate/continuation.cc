#include "worker/generate/continuation.h"

#include "common/status_macros.h"

namespace zeroshard {

const char* NameOf(StopReason reason) {
  switch (reason) {
    case StopReason::kEndOfText:
      return "end_of_text";
    case StopReason::kMaxTokens:
      return "max_tokens";
    case StopReason::kPositions:
      return "positions";
  }
  return "?";
}

int64_t PositionsWanted(const ContinuationOptions& options) {
  return static_cast<int64_t>(options.prompt.size()) + options.max_tokens - 1;
}

absl::StatusOr<Continuation> Continue(const ContinuationOptions& options, Generator* generator,
                                      ParameterLender* lender,
                                      const std::function<absl::Status(int32_t token)>& on_token) {
  ZS_RETURN_IF_ERROR(CheckSampling(options.sampling));
  Continuation answer;
  if (options.max_tokens <= 0) return answer;
  generator->Reset();
  bool ended = false;
  absl::Span<const int32_t> next = options.prompt;
  int32_t token = 0;
  for (int64_t count = 1;; ++count) {
    ZS_ASSIGN_OR_RETURN(const absl::Span<const float> logits, generator->Step(next, lender));
    ZS_ASSIGN_OR_RETURN(token, SampleToken(logits, options.sampling, generator->length()));
    if (options.end_of_text.contains(token) && !ended) {
      ended = true;
      answer.reason = StopReason::kEndOfText;
    }
    if (!ended) {
      answer.tokens.push_back(token);
      if (on_token) ZS_RETURN_IF_ERROR(on_token(token));
    }
    if (ended && !options.run_to_length) return answer;
    if (count == options.max_tokens) return answer;
    if (generator->length() == generator->capacity()) {
      if (!ended) answer.reason = StopReason::kPositions;
      return answer;
    }
    next = {&token, 1};
  }
}

}  // namespace zeroshard
