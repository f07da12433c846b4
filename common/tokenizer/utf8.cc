#include "common/tokenizer/utf8.h"

#include <cstring>

namespace zeroshard {
namespace {

// The length of the character at the front; 0 and the length of its maximal subpart otherwise.
size_t CharacterAt(const uint8_t* text, size_t size, size_t* subpart) {
  const uint8_t lead = text[0];
  *subpart = 1;
  if (lead < 0x80) return 1;
  size_t bytes;
  uint8_t low = 0x80;
  uint8_t high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    bytes = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    bytes = 3;
    if (lead == 0xE0) low = 0xA0;   // shorter forms
    if (lead == 0xED) high = 0x9F;  // surrogates
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    bytes = 4;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;  // past U+10FFFF
  } else {
    return 0;
  }
  for (size_t i = 1; i < bytes; ++i) {
    if (i >= size || text[i] < low || text[i] > high) {
      *subpart = i;
      return 0;
    }
    low = 0x80;
    high = 0xBF;
  }
  return bytes;
}

}  // namespace

void AppendCodePoint(uint32_t code_point, std::string* text) {
  const auto append = [text](uint32_t byte) { text->push_back(static_cast<char>(byte)); };
  const auto trail = [&](int shift) { append(0x80 | ((code_point >> shift) & 0x3F)); };
  if (code_point < 0x80) {
    append(code_point);
  } else if (code_point < 0x800) {
    append(0xC0 | code_point >> 6);
    trail(0);
  } else if (code_point < 0x10000) {
    append(0xE0 | code_point >> 12);
    trail(6);
    trail(0);
  } else {
    append(0xF0 | code_point >> 18);
    trail(12);
    trail(6);
    trail(0);
  }
}

size_t ValidUtf8Prefix(absl::string_view text) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  size_t at = 0;
  size_t subpart;
  while (at < text.size()) {
    uint64_t eight;
    if (text.size() - at >= sizeof(eight)) {
      std::memcpy(&eight, bytes + at, sizeof(eight));
      if ((eight & 0x8080808080808080) == 0) {
        at += sizeof(eight);
        continue;
      }
    }
    const size_t length = CharacterAt(bytes + at, text.size() - at, &subpart);
    if (length == 0) return at;
    at += length;
  }
  return at;
}

absl::string_view AsUtf8(absl::string_view text, std::string* storage) {
  size_t valid = ValidUtf8Prefix(text);
  if (valid == text.size()) return text;
  storage->clear();
  storage->reserve(text.size() + 16);
  while (true) {
    storage->append(text.data(), valid);
    text.remove_prefix(valid);
    if (text.empty()) return *storage;
    size_t subpart;
    CharacterAt(reinterpret_cast<const uint8_t*>(text.data()), text.size(), &subpart);
    storage->append("\xEF\xBF\xBD");
    text.remove_prefix(subpart);
    valid = ValidUtf8Prefix(text);
  }
}

}  // namespace zeroshard
