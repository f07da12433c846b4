#include "worker/generate/text_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/string_view.h"
#include "common/status_macros.h"
#include "common/tokenizer/utf8.h"

namespace zeroshard {
namespace {

// How many bytes a character that begins with `lead` has; 0: none does.
size_t LengthOf(char lead) {
  const auto byte = static_cast<uint8_t>(lead);
  if (byte < 0x80) return 1;
  if (byte < 0xC2 || byte > 0xF4) return 0;
  return byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// Bytes at the end of `text` that begin a character whose rest is still to come.
size_t Unfinished(absl::string_view text) {
  for (size_t size = std::min<size_t>(3, text.size()); size > 0; --size) {
    const absl::string_view tail = text.substr(text.size() - size);
    if (LengthOf(tail[0]) <= size) continue;
    std::string storage;
    if (AsUtf8(tail, &storage) == "\xEF\xBF\xBD") return size;  // one part of one character
  }
  return 0;
}

}  // namespace

absl::StatusOr<std::string> TextStream::Add(int32_t token) {
  if (token >= tokenizer_->vocab_size()) return std::string();
  ZS_ASSIGN_OR_RETURN(const std::string bytes,
                      tokenizer_->Decode({&token, 1}, /*skip_special=*/true));
  const std::string text = std::exchange(pending_, "") + bytes;
  const size_t whole = text.size() - Unfinished(text);
  pending_ = text.substr(whole);
  std::string storage;
  return std::string(AsUtf8(absl::string_view(text).substr(0, whole), &storage));
}

std::string TextStream::Finish() {
  std::string storage;
  return std::string(AsUtf8(std::exchange(pending_, ""), &storage));
}

}  // namespace zeroshard
