// Every byte is a token.
#pragma once

#include "common/tokenizer/tokenizer.h"

namespace zeroshard {

class ByteTokenizer : public Tokenizer {
 public:
  void Encode(absl::string_view text, std::vector<int32_t>* ids) const override;
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                     bool skip_special) const override;
  int64_t vocab_size() const override { return 256; }
  std::optional<int32_t> end_of_text() const override { return std::nullopt; }
  std::optional<int32_t> Find(absl::string_view token) const override;
  size_t SafeCut(absl::string_view text, size_t from, size_t limit) const override;
};

}  // namespace zeroshard
