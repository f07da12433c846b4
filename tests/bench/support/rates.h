// What benchmarks measure and print: medians of rounds that take turns.
#pragma once

#include <string>
#include <vector>

namespace zeroshard::bench {

// Seconds, of a clock that never goes back.
double Now();

// The upper one of the two in the middle; 0 of nothing.
double Median(std::vector<double> values);

// Rates of all rounds, in bytes a second.
class Rates {
 public:
  void Add(double bytes_a_second) { rates_.push_back(bytes_a_second); }
  bool empty() const { return rates_.empty(); }
  double Median() const { return bench::Median(rates_); }
  // "   1234 MB/s (1200 to 1260)": median, least and most; not of nothing.
  std::string Text() const;
  std::string TextInGigabytes() const;  // "  1.23 GB/s (1.20 to 1.26)"

 private:
  std::string Format(const char* format, double unit) const;

  std::vector<double> rates_;
};

}  // namespace zeroshard::bench
