// One line on stderr for each thing worth knowing:
//   2026-01-02T03:04:05.678Z INFO coordinator: job a is RUNNING: 2 ranks started
#pragma once

#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace zeroshard {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Receives every line that is written, without its newline. Called outside the logger's lock, from
// the thread that logs; must not log itself and must not block.
using LogSink = std::function<void(LogLevel level, const std::string& line)>;

// The component is the program's or member's name ("coordinator", "worker-0"). All of these are
// thread-safe.
void SetLogComponent(absl::string_view component);
void SetLogLevel(LogLevel least);
// Replaces the sink; nullptr takes it away. A call already under way may still reach the old one.
void SetLogSink(LogSink sink);

// The text of a line. Newlines and other control characters in `text` are escaped: what a peer
// sends cannot forge a line.
std::string FormatLogLine(absl::Time when, LogLevel level, absl::string_view component,
                          absl::string_view text);

void Log(LogLevel level, absl::string_view text);

template <typename... Parts>
void LogDebug(const Parts&... parts) {
  Log(LogLevel::kDebug, absl::StrCat(parts...));
}
template <typename... Parts>
void LogInfo(const Parts&... parts) {
  Log(LogLevel::kInfo, absl::StrCat(parts...));
}
template <typename... Parts>
void LogWarning(const Parts&... parts) {
  Log(LogLevel::kWarning, absl::StrCat(parts...));
}
template <typename... Parts>
void LogError(const Parts&... parts) {
  Log(LogLevel::kError, absl::StrCat(parts...));
}

}  // namespace zeroshard
