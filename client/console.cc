#include "client/console.h"

#include <cmath>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace zeroshard {
void PrintError(std::ostream* err, absl::string_view message) {
  *err << "zeroshard: " << Shown(message, kMostMessage, Layout::kKept) << std::endl;
}

Console::~Console() { EndLive(); }

void Console::EndLive() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (live_) *env_.out << std::endl;
  live_ = false;
}

void Console::EraseLive() {
  if (live_) *env_.out << "\r\033[K";
  live_ = false;
}

void Console::Print(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  EraseLive();
  *env_.out << line << std::endl;
}

void Console::Live(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!env_.terminal) return;
  EraseLive();
  // The last column stays free: some terminals wrap as soon as it is written.
  *env_.out << line.substr(0, env_.width > 1 ? env_.width - 1 : 0) << std::flush;
  live_ = true;
}

std::string FormatDuration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "?";
  const int64_t whole = static_cast<int64_t>(std::ceil(seconds));
  if (whole < 60) return absl::StrCat(whole, " s");
  if (whole < 3600) return absl::StrFormat("%dm %02ds", whole / 60, whole % 60);
  return absl::StrFormat("%dh %02dm", whole / 3600, whole % 3600 / 60);
}

std::string FormatCount(double count) {
  if (!(std::fabs(count) < 1e15)) return "?";
  const std::string digits = absl::StrCat(static_cast<int64_t>(std::llround(std::fabs(count))));
  std::string text = count < 0 ? "-" : "";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

}  // namespace zeroshard
