#include "common/tokenizer/byte_tokenizer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace zeroshard {

void ByteTokenizer::Encode(absl::string_view text, std::vector<int32_t>* ids) const {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  ids->insert(ids->end(), bytes, bytes + text.size());
}

absl::StatusOr<std::string> ByteTokenizer::Decode(absl::Span<const int32_t> ids,
                                                  bool skip_special) const {
  std::string text;
  text.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] > 255) {
      return absl::OutOfRangeError(absl::StrCat("token ", i, " is ", ids[i],
                                                ", which is no byte (0 to 255); was the text made "
                                                "with another tokenizer?"));
    }
    text.push_back(static_cast<char>(ids[i]));
  }
  return text;
}

std::optional<int32_t> ByteTokenizer::Find(absl::string_view token) const {
  if (token.size() != 1) return std::nullopt;
  return static_cast<uint8_t>(token[0]);
}

size_t ByteTokenizer::SafeCut(absl::string_view text, size_t from, size_t limit) const {
  return std::min(from, text.size());
}

}  // namespace zeroshard
