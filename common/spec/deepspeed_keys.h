// DeepSpeed's configuration keys that ZeroShard does not have: refused by name, never ignored.
#pragma once

#include "absl/strings/string_view.h"

namespace zeroshard {

// What to do about the DeepSpeed key `path` ("zero_optimization.contiguous_gradients", list indexes
// left out), or empty when it is no key of DeepSpeed's. The text continues the sentence "is a
// DeepSpeed key that ZeroShard does not support: ". Thread-safe.
absl::string_view DeepSpeedKeyAdvice(absl::string_view path);

// Likewise for a value of optimizer.type or scheduler.type that DeepSpeed knows, in any case.
absl::string_view DeepSpeedOptimizerAdvice(absl::string_view type);
absl::string_view DeepSpeedSchedulerAdvice(absl::string_view type);

}  // namespace zeroshard
