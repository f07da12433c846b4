#include "common/tokenizer/byte_level.h"

#include <array>

#include "common/tokenizer/utf8.h"

namespace zeroshard {
namespace {

constexpr uint32_t kOthers = 0x100;  // the first letter of a byte that is not printable
constexpr size_t kOtherCount = 68;
constexpr int16_t kNoByte = -1;

std::array<int16_t, kOthers + kOtherCount> MakeBytes() {
  std::array<int16_t, kOthers + kOtherCount> bytes;
  bytes.fill(kNoByte);
  size_t others = 0;
  for (int16_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    bytes[printable ? static_cast<size_t>(byte) : kOthers + others++] = byte;
  }
  return bytes;
}

}  // namespace

bool BytesOfLetters(absl::string_view token, std::string* bytes) {
  static const auto& kBytes = *new std::array(MakeBytes());
  bytes->clear();
  for (size_t at = 0; at < token.size();) {
    const CodePoint letter = CodePointAt(token, at);
    if (letter.value >= kBytes.size() || kBytes[letter.value] == kNoByte) return false;
    bytes->push_back(static_cast<char>(kBytes[letter.value]));
    at += letter.bytes;
  }
  return true;
}

}  // namespace zeroshard
