#include "client/console.h"

#include <cmath>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/tokenizer/utf8.h"

namespace zeroshard {
namespace {

bool TurnsOrBreaksLines(uint32_t c) {
  return c == 0x061C || c == 0x200E || c == 0x200F || (c >= 0x2028 && c <= 0x202E) ||
         (c >= 0x2066 && c <= 0x2069);
}

// Empty where the character may be written as it is.
std::string EscapeOf(uint32_t c, Layout layout) {
  if ((c == '\n' || c == '\t') && layout == Layout::kKept) return "";
  if (c == '\n') return "\\n";
  if (c == '\t') return "\\t";
  if (c == '\r') return "\\r";
  if (c < 0x20 || c == 0x7F) return absl::StrFormat("\\x%02x", c);
  if ((c >= 0x80 && c < 0xA0) || TurnsOrBreaksLines(c)) return absl::StrFormat("\\u%04x", c);
  return "";
}

// A text of at most so many bytes that says when there was more.
class Cut {
 public:
  explicit Cut(size_t most) : most_(most) {}

  // False: full.
  bool Add(absl::string_view piece) {
    if (text_.size() + piece.size() > most_) {
      text_.resize(room_for_dots_);
      text_ += "...";
      return false;
    }
    absl::StrAppend(&text_, piece);
    if (text_.size() + 3 <= most_) room_for_dots_ = text_.size();
    return true;
  }
  std::string Take() { return std::move(text_); }

 private:
  const size_t most_;
  size_t room_for_dots_ = 0;
  std::string text_;
};

}  // namespace

std::string Shown(absl::string_view text, size_t most, Layout layout) {
  Cut shown(most);
  while (!text.empty()) {
    const size_t valid = ValidUtf8Prefix(text);
    for (size_t at = 0; at < valid;) {
      const CodePoint c = CodePointAt(text, at);
      const std::string escape = EscapeOf(c.value, layout);
      if (!shown.Add(escape.empty() ? text.substr(at, c.bytes) : escape)) return shown.Take();
      at += c.bytes;
    }
    text.remove_prefix(valid);
    if (text.empty()) break;
    const uint8_t byte = text.front();
    if (!shown.Add(absl::StrFormat("\\x%02x", byte))) return shown.Take();
    text.remove_prefix(1);
  }
  return shown.Take();
}

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
