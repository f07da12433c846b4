#include "common/spec/scalar.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"

namespace zeroshard {
namespace {

bool AllDigits(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
}

size_t SkipDigits(absl::string_view text, size_t at) {
  while (at < text.size() && absl::ascii_isdigit(text[at])) ++at;
  return at;
}

}  // namespace

bool IsNumberText(absl::string_view text) {
  size_t at = !text.empty() && (text[0] == '+' || text[0] == '-') ? 1 : 0;
  const size_t whole = SkipDigits(text, at);
  size_t digits = whole - at;
  at = whole;
  if (at < text.size() && text[at] == '.') {
    const size_t fraction = SkipDigits(text, at + 1);
    digits += fraction - at - 1;
    at = fraction;
  }
  if (digits == 0) return false;
  if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
    ++at;
    if (at < text.size() && (text[at] == '+' || text[at] == '-')) ++at;
    const size_t exponent = SkipDigits(text, at);
    if (exponent == at) return false;
    at = exponent;
  }
  return at == text.size();
}

bool IsNullText(absl::string_view text) {
  return text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL";
}

std::optional<bool> BoolFromText(absl::string_view text) {
  if (text == "true" || text == "True" || text == "TRUE") return true;
  if (text == "false" || text == "False" || text == "FALSE") return false;
  return std::nullopt;
}

std::optional<double> DoubleFromText(absl::string_view text) {
  double value = 0;
  if (!IsNumberText(text) || !absl::SimpleAtod(text, &value) || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

std::optional<uint64_t> UnsignedFromText(absl::string_view text, uint64_t limit) {
  if (AllDigits(text)) {
    uint64_t value = 0;
    if (!absl::SimpleAtoi(text, &value) || value > limit) return std::nullopt;
    return value;
  }
  const std::optional<double> real = DoubleFromText(text);
  // Above 2^53 a double no longer names one whole number.
  constexpr double kExact = 9007199254740992.0;
  if (!real || *real < 0 || *real > kExact || std::floor(*real) != *real) return std::nullopt;
  const uint64_t value = static_cast<uint64_t>(*real);
  if (value > limit) return std::nullopt;
  return value;
}

std::string DoubleToText(double value) {
  char buffer[40];
  const std::to_chars_result end = std::to_chars(buffer, buffer + sizeof(buffer), value);
  std::string text(buffer, end.ptr);
  if (AllDigits(text) || (text[0] == '-' && AllDigits(absl::string_view(text).substr(1)))) {
    text += ".0";
  }
  return text;
}

}  // namespace zeroshard
