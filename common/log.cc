#include "common/log.h"

#include <unistd.h>

#include <memory>
#include <mutex>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace zeroshard {
namespace {

struct Logger {
  std::mutex mutex;
  std::string component = "zeroshard";
  LogLevel least = LogLevel::kInfo;
  std::shared_ptr<const LogSink> sink;
};

Logger& TheLogger() {
  static Logger* logger = new Logger;  // outlives every thread that may log
  return *logger;
}

const char* NameOf(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "DEBUG";
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      return "ERROR";
  }
  return "?";
}

}  // namespace

void SetLogComponent(absl::string_view component) {
  Logger& logger = TheLogger();
  std::lock_guard<std::mutex> lock(logger.mutex);
  logger.component = std::string(component);
}

void SetLogLevel(LogLevel least) {
  Logger& logger = TheLogger();
  std::lock_guard<std::mutex> lock(logger.mutex);
  logger.least = least;
}

void SetLogSink(LogSink sink) {
  auto shared = sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr;
  Logger& logger = TheLogger();
  std::lock_guard<std::mutex> lock(logger.mutex);
  logger.sink = std::move(shared);
}

std::string FormatLogLine(absl::Time when, LogLevel level, absl::string_view component,
                          absl::string_view text) {
  std::string line =
      absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", when, absl::UTCTimeZone()), " ",
                   NameOf(level), " ", component, ": ");
  for (const char c : text) {
    if (c == '\n') {
      line += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 && c != '\t') {
      absl::StrAppendFormat(&line, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      line += c;
    }
  }
  return line;
}

void Log(LogLevel level, absl::string_view text) {
  Logger& logger = TheLogger();
  std::string component;
  std::shared_ptr<const LogSink> sink;
  {
    std::lock_guard<std::mutex> lock(logger.mutex);
    if (level < logger.least) return;
    component = logger.component;
    sink = logger.sink;
  }
  std::string line = FormatLogLine(absl::Now(), level, component, text);
  if (sink) (*sink)(level, line);
  line += '\n';
  // One write a line: lines of several threads or processes on one file never interleave.
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t wrote = write(STDERR_FILENO, line.data() + done, line.size() - done);
    if (wrote <= 0) return;
    done += static_cast<size_t>(wrote);
  }
}

}  // namespace zeroshard
