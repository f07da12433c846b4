// Which known key a misspelt one was probably meant to be.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace zeroshard {

// The first of the nearest candidates by edit distance; empty when none is near (further than a
// third of the word, two at least). Thread-safe.
std::string NearestKey(absl::string_view word, const std::vector<std::string>& candidates);

}  // namespace zeroshard
