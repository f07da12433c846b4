// How what others wrote is shown on a terminal.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

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

}  // namespace zeroshard
