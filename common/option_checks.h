// Checks of numbers on a command line, for CLI::Option::check: the problem, or nothing.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {

// Decimal digits without leading zeros, which CLI11 would read as octal.
inline std::string WholeNumberProblem(const std::string& text, uint64_t most) {
  uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, value);
  const bool whole = parsed.ec == std::errc() && parsed.ptr == end;
  if (whole && value <= most && (text.size() == 1 || text[0] != '0')) return "";
  return absl::StrCat("seen ", text, ", wanted a whole number from 0 to ", most);
}

// A variable that is not set becomes an empty value.
inline std::string EmptyProblem(const std::string& text, const std::string& wanted) {
  if (!text.empty()) return "";
  return absl::StrCat("seen an empty value, wanted ", wanted,
                      "; leave the option out for its default");
}

inline std::string NotNegativeProblem(const std::string& text) {
  double value = 0;
  if (absl::SimpleAtod(text, &value) && value >= 0 && std::isfinite(value)) return "";
  return absl::StrCat("seen ", text, ", wanted a finite number, 0 or more");
}

}  // namespace zeroshard
