#include "common/text/shown.h"

#include <cstdint>
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

}  // namespace zeroshard
