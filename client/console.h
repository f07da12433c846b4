// Lines on standard output, of which the last may be a live one that is redrawn in place, and how
// what others wrote is shown.
#pragma once

#include <mutex>
#include <ostream>
#include <string>

#include "absl/strings/string_view.h"
#include "client/environment.h"

namespace zeroshard {

// Most bytes that are shown of what others wrote.
inline constexpr size_t kMostCell = 256;           // a name, a host, a column of a table
inline constexpr size_t kMostReason = 4096;        // a reason, an event, a path
inline constexpr size_t kMostMessage = 16 << 10;   // an error, a sample
inline constexpr size_t kMostLogLine = 256 << 10;  // what a rank logged

// Newlines and tabs of a text that is shown: "\\n" and "\\t", or as they are.
enum class Layout { kEscaped, kKept };

// A text of others for a terminal, which it cannot command: control characters (C0, DEL and C1) and
// those that turn or break lines (Unicode's bidirectional controls, line and paragraph separator)
// as "\\r", "\\x1b", "\\u202e", bytes that are no UTF-8 as "\\xff". A backslash stays one: this is
// to be read, not to be read back. What is longer than `most` (at least 3) bytes when shown is cut
// between two characters and ends with "...".
std::string Shown(absl::string_view text, size_t most = kMostReason,
                  Layout layout = Layout::kEscaped);

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
