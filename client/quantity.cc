#include "client/quantity.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace zeroshard {
namespace {

constexpr double kMost = 9e18;

absl::Status Refused(absl::string_view text, absl::string_view wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("seen \"", absl::CHexEscape(text.substr(0, 40)), "\", wanted ", wanted));
}

// The number in front, and what follows it in lower case. False: there is none, or it is negative.
bool Split(absl::string_view text, double* number, std::string* unit) {
  text = absl::StripAsciiWhitespace(text);
  size_t end = 0;
  while (end < text.size()) {
    const char c = text[end];
    const bool exponent = (c == 'e' || c == 'E') && end + 1 < text.size() &&
                          (absl::ascii_isdigit(text[end + 1]) ||
                           ((text[end + 1] == '+' || text[end + 1] == '-') &&
                            end + 2 < text.size() && absl::ascii_isdigit(text[end + 2])));
    if (exponent) {
      end += 2;
    } else if (absl::ascii_isdigit(c) || c == '.') {
      ++end;
    } else {
      break;
    }
  }
  if (end == 0 || !absl::SimpleAtod(text.substr(0, end), number)) return false;
  *unit = absl::AsciiStrToLower(absl::StripAsciiWhitespace(text.substr(end)));
  return std::isfinite(*number);
}

// 10^3, 10^6, ... for k, m, g, t, p; with an i 2^10, 2^20, ...; 1 for none.
double TakePrefix(absl::string_view* unit) {
  if (unit->empty()) return 1;
  const size_t at = absl::string_view("kmgtp").find(unit->front());
  if (at == absl::string_view::npos) return 1;
  unit->remove_prefix(1);
  const double base = absl::ConsumePrefix(unit, "i") ? 1024 : 1000;
  return std::pow(base, static_cast<double>(at + 1));
}

}  // namespace

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  constexpr char kWanted[] = "a size such as 80GB, 80GiB or 1.5TB";
  double number = 0;
  std::string unit;
  if (!Split(text, &number, &unit)) return Refused(text, kWanted);
  absl::string_view rest = unit;
  const double factor = TakePrefix(&rest);
  if (rest == "bit") return Refused(text, absl::StrCat(kWanted, ", in bytes, not bits"));
  if ((rest != "" && rest != "b") || number * factor > kMost) return Refused(text, kWanted);
  return static_cast<uint64_t>(std::llround(number * factor));
}

absl::StatusOr<double> ParseSpeed(absl::string_view text) {
  constexpr char kWanted[] = "a speed such as 400Gbit or 50GB, for a second";
  double number = 0;
  std::string unit;
  if (!Split(text, &number, &unit)) return Refused(text, kWanted);
  absl::string_view rest = unit;
  const double factor = TakePrefix(&rest);
  absl::ConsumeSuffix(&rest, "/s");
  double bytes = number * factor;
  if (rest == "bit" || rest == "bps") {
    bytes /= 8;
  } else if (rest != "b") {
    return Refused(text, kWanted);
  } else if (!absl::StrContains(text, 'B')) {  // eight times as fast as whoever means bits thinks
    return Refused(text, absl::StrCat(kWanted, "; a small b may be bits or bytes"));
  }
  if (bytes > kMost) return Refused(text, kWanted);
  return bytes;
}

absl::StatusOr<double> ParseCount(absl::string_view text) {
  constexpr char kWanted[] = "a count such as 124M, 7.5B or 2T";
  double number = 0;
  std::string unit;
  if (!Split(text, &number, &unit)) return Refused(text, kWanted);
  for (const auto& [name, factor] : {std::pair<const char*, double>{"", 1},
                                     {"k", 1e3},
                                     {"m", 1e6},
                                     {"b", 1e9},
                                     {"g", 1e9},
                                     {"t", 1e12},
                                     {"p", 1e15}}) {
    if (unit == name && number * factor <= kMost) return number * factor;
  }
  return Refused(text, kWanted);
}

}  // namespace zeroshard
