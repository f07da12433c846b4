#include "worker/agent/utf8.h"

namespace zeroshard {
namespace {

constexpr char kReplacement[] = "\xef\xbf\xbd";

// The length of the character at the start of `text`; 0 when there is none.
size_t CharacterAt(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xc2 && first <= 0xdf   ? 2
                        : first >= 0xe0 && first <= 0xef ? 3
                        : first >= 0xf0 && first <= 0xf4 ? 4
                                                         : 0;
  if (length == 0 || length > text.size()) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool surrogate = first == 0xed && byte(1) >= 0xa0;
  const bool beyond = first == 0xf4 && byte(1) >= 0x90;
  return overlong || surrogate || beyond ? 0 : length;
}

}  // namespace

std::string ValidUtf8(absl::string_view text, size_t most) {
  std::string valid;
  while (!text.empty()) {
    const size_t length = CharacterAt(text);
    const absl::string_view next = length == 0 ? kReplacement : text.substr(0, length);
    if (valid.size() + next.size() > most) break;
    valid.append(next.data(), next.size());
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return valid;
}

}  // namespace zeroshard
