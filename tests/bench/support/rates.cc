#include "tests/bench/support/rates.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace zeroshard::bench {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string Rates::Text() const { return Format("%7.0f MB/s (%.0f to %.0f)", 1e6); }

std::string Rates::TextInGigabytes() const { return Format("%6.2f GB/s (%.2f to %.2f)", 1e9); }

std::string Rates::Format(const char* format, double unit) const {
  const auto [least, most] = std::minmax_element(rates_.begin(), rates_.end());
  char text[100];
  std::snprintf(text, sizeof(text), format, Median() / unit, *least / unit, *most / unit);
  return text;
}

}  // namespace zeroshard::bench
