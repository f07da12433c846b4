#include "worker/generate/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/kernels/philox.h"

namespace zeroshard {
namespace {

// Keeps these draws apart from the others that a seed keys.
constexpr uint32_t kDomain = 0x53414D50;

// In [0, 1).
double Uniform(uint64_t seed, int64_t position) {
  const auto at = static_cast<uint64_t>(position);
  const cpu::PhiloxCounter words =
      cpu::Philox4x32({static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32), kDomain, 0},
                      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = uint64_t{words[1]} << 32 | words[0];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// The ids of the k likeliest, in rising order.
std::vector<int32_t> Likeliest(absl::Span<const float> logits, int64_t k) {
  std::vector<int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  if (k == 0 || k >= static_cast<int64_t>(ids.size())) return ids;
  const auto likelier = [&](int32_t a, int32_t b) {
    const float x = logits[static_cast<size_t>(a)], y = logits[static_cast<size_t>(b)];
    return x != y ? x > y : a < b;
  };
  std::nth_element(ids.begin(), ids.begin() + k, ids.end(), likelier);
  ids.resize(static_cast<size_t>(k));
  std::sort(ids.begin(), ids.end());
  return ids;
}

}  // namespace

absl::Status CheckSampling(const SamplingOptions& options) {
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    return absl::InvalidArgumentError(absl::StrCat("the temperature is ", options.temperature,
                                                   "; wanted 0 (the likeliest token) or more"));
  }
  if (options.top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k is ", options.top_k, "; wanted 0 (all tokens) or more"));
  }
  return absl::OkStatus();
}

absl::StatusOr<int32_t> SampleToken(absl::Span<const float> logits, const SamplingOptions& options,
                                    int64_t position) {
  const auto nan = std::find_if(logits.begin(), logits.end(), [](float x) { return x != x; });
  const auto most = std::max_element(logits.begin(), logits.end());
  if (nan != logits.end() || most == logits.end() || !std::isfinite(*most)) {
    return absl::InternalError(
        absl::StrCat("the logits at position ", position, " are not finite (",
                     nan != logits.end() ? absl::StrCat("NaN for token ", nan - logits.begin())
                                         : "no finite largest value",
                     "): the model's weights are broken, or their type is too narrow"));
  }
  if (options.temperature == 0) return static_cast<int32_t>(most - logits.begin());
  const std::vector<int32_t> ids = Likeliest(logits, options.top_k);
  std::vector<double> weights;
  weights.reserve(ids.size());
  double sum = 0;
  for (const int32_t id : ids) {
    const double below = static_cast<double>(logits[static_cast<size_t>(id)]) - *most;
    weights.push_back(std::exp(below / options.temperature));
    sum += weights.back();
  }
  double left = Uniform(options.seed, position) * sum;
  for (size_t i = 0; i < ids.size(); ++i) {
    left -= weights[i];
    if (left < 0) return ids[i];
  }
  // Rounding left a rest: the last token that can be drawn at all.
  for (size_t i = ids.size(); i-- > 0;) {
    if (weights[i] > 0) return ids[i];
  }
  return static_cast<int32_t>(most - logits.begin());
}

}  // namespace zeroshard
