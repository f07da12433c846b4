// Sizes, speeds and counts as people write them. Pure; thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

// All three: a number that is not negative and its unit, in any case, with or without a space
// between. INVALID_ARGUMENT names what was seen and what is wanted.

// Bytes: "80GB" (10^9), "80GiB" (2^30), "512", "1.5 TB". Units B, k, M, G, T, P with or without B.
absl::StatusOr<uint64_t> ParseBytes(absl::string_view text);

// Bytes a second: "400Gbit", "400 Gbit/s", "400Gbps" (an eighth of the bits), "50GB", "50 GB/s".
absl::StatusOr<double> ParseSpeed(absl::string_view text);

// A count: "7.5B" (10^9), "124M", "2T", "350k", "1e9". For operations a second "989T", "1P".
absl::StatusOr<double> ParseCount(absl::string_view text);

}  // namespace zeroshard
