#include "common/spec/checks.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "common/spec/nearest_key.h"
#include "common/spec/scalar.h"

namespace zeroshard {

std::string Shown(const std::string& text) {
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, 80)), "\"");
}

absl::Status CheckChoice(absl::string_view path, const std::string& seen,
                         const std::vector<std::string>& wanted) {
  if (std::find(wanted.begin(), wanted.end(), seen) != wanted.end()) return absl::OkStatus();
  const std::string nearest = seen.empty() ? "" : NearestKey(seen, wanted);
  return Bad(path, ": seen ", Shown(seen), ", wanted ", absl::StrJoin(wanted, ", "),
             nearest.empty() ? "" : absl::StrCat("; did you mean ", nearest, "?"));
}

absl::Status CheckPath(absl::string_view path, const std::string& seen) {
  constexpr size_t kLongest = 4095;
  const bool good = !seen.empty() && seen.size() <= kLongest &&
                    std::none_of(seen.begin(), seen.end(),
                                 [](unsigned char c) { return absl::ascii_iscntrl(c); });
  if (good) return absl::OkStatus();
  return Bad(path, ": seen ", Shown(seen), " (", seen.size(), " bytes), wanted a path of 1 to ",
             kLongest, " bytes without control characters");
}

absl::Status CheckCount(absl::string_view path, uint64_t seen, uint64_t low, uint64_t high) {
  if (seen >= low && seen <= high) return absl::OkStatus();
  return Bad(path, ": seen ", seen, ", wanted a whole number from ", low, " to ", high);
}

absl::Status CheckReal(absl::string_view path, double seen, bool good, absl::string_view wanted) {
  if (std::isfinite(seen) && good) return absl::OkStatus();
  return Bad(path, ": seen ", DoubleToText(seen), ", wanted ", wanted);
}

}  // namespace zeroshard
