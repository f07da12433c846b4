// UTF-8 as bytes and code points.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace zeroshard {

struct CodePoint {
  uint32_t value = 0;
  uint32_t bytes = 0;
};

// The code point at `at` of text that is known to be UTF-8; `at` is where one starts.
inline CodePoint CodePointAt(absl::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint32_t>(static_cast<uint8_t>(text[i])); };
  const uint32_t lead = byte(at);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | (byte(at + 1) & 0x3F), 2};
  if (lead < 0xF0) {
    return {(lead & 0x0F) << 12 | (byte(at + 1) & 0x3F) << 6 | (byte(at + 2) & 0x3F), 3};
  }
  return {(lead & 0x07) << 18 | (byte(at + 1) & 0x3F) << 12 | (byte(at + 2) & 0x3F) << 6 |
              (byte(at + 3) & 0x3F),
          4};
}

// Where the code point that ends at `end` (> 0) of such text starts.
inline size_t CodePointBefore(absl::string_view text, size_t end) {
  --end;
  while (end > 0 && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) --end;
  return end;
}

// Appends the UTF-8 of a code point, at most 0x10FFFF.
void AppendCodePoint(uint32_t code_point, std::string* text);

// How many of the first bytes of `text` are UTF-8 (no overlong forms, no surrogates).
size_t ValidUtf8Prefix(absl::string_view text);

// `text` if it is UTF-8; else a copy in `*storage` in which each longest part that could have begun
// a character, or else a single byte, is U+FFFD (Unicode 15, section 3.9, "substitution of maximal
// subparts"; what Python's errors="replace" does). The answer lives as long as the two.
absl::string_view AsUtf8(absl::string_view text, std::string* storage);

}  // namespace zeroshard
