// Lines on standard output, of which the last may be a live one that is redrawn in place.
#pragma once

#include <mutex>
#include <ostream>
#include <string>

#include "absl/strings/string_view.h"
#include "client/environment.h"
#include "common/text/shown.h"

namespace zeroshard {

// "zeroshard: MESSAGE" and a newline, the message Shown with its lines as they are.
void PrintError(std::ostream* err, absl::string_view message);

// Thread-safe.
class Console {
 public:
  explicit Console(const Environment& env) : env_(env) {}
  ~Console();

  // A line that stays; what others wrote in it is Shown already.
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
