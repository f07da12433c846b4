// Which known names a misspelt one may have meant. Pure; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace zeroshard {

// The insertions, deletions and replacements of single characters that turn `a` into `b`
// (Levenshtein 1966). Time |a| x |b|.
size_t EditDistance(absl::string_view a, absl::string_view b);

// At most `count` of `names`, the nearest first; of equally near ones, those that come first.
std::vector<std::string> NearestNames(absl::string_view seen, const std::vector<std::string>& names,
                                      size_t count);

}  // namespace zeroshard
