#include "common/plan/nearest.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace zeroshard {

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replace = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replace, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

std::vector<std::string> NearestNames(absl::string_view seen, const std::vector<std::string>& names,
                                      size_t count) {
  std::vector<std::pair<size_t, size_t>> ranked;  // distance, position
  for (size_t i = 0; i < names.size(); ++i) ranked.emplace_back(EditDistance(seen, names[i]), i);
  std::sort(ranked.begin(), ranked.end());
  std::vector<std::string> nearest;
  for (size_t i = 0; i < ranked.size() && i < count; ++i) {
    nearest.push_back(names[ranked[i].second]);
  }
  return nearest;
}

}  // namespace zeroshard
