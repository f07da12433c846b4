#include "common/spec/nearest_key.h"

#include <algorithm>

#include "common/plan/nearest.h"

namespace zeroshard {

std::string NearestKey(absl::string_view word, const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 128;
  if (word.size() > kLongest) return "";
  size_t best = std::max<size_t>(2, word.size() / 3) + 1;
  std::string nearest;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(word, candidate);
    // A word replaced letter by letter resembles nothing.
    if (distance < best && distance < std::max(word.size(), candidate.size())) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace zeroshard
