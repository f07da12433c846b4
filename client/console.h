// Lines on standard output, of which the last may be a live one that is redrawn in place.
#pragma once

#include <mutex>
#include <string>

#include "client/environment.h"

namespace zeroshard {

// Thread-safe.
class Console {
 public:
  explicit Console(const Environment& env) : env_(env) {}
  ~Console();

  // A line that stays.
  void Print(const std::string& line);
  // On a terminal: replaces the live line, cut to its width. Elsewhere nothing.
  void Live(const std::string& line);
  // Lets the live line stay as it is.
  void EndLive();

  bool terminal() const { return env_.terminal; }

 private:
  void EraseLive();

  const Environment& env_;
  std::mutex mutex_;
  bool live_ = false;
};

// "1h 02m", "3m 07s", "12 s": a duration for people, rounded up to a second.
std::string FormatDuration(double seconds);

// "41,234": a count for people.
std::string FormatCount(double count);

}  // namespace zeroshard
