// The byte-level BPE of a tokenizer.json.
#pragma once

#include <memory>
#include <mutex>

#include "common/tokenizer/tokenizer.h"
#include "common/tokenizer/tokenizer_json.h"

namespace zeroshard {

class BpeTokenizer : public Tokenizer {
 public:
  BpeTokenizer(TokenizerParts parts, std::optional<int32_t> end_of_text);
  ~BpeTokenizer() override;

  void Encode(absl::string_view text, std::vector<int32_t>* ids) const override;
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t> ids,
                                     bool skip_special) const override;
  int64_t vocab_size() const override { return table_.size(); }
  std::optional<int32_t> end_of_text() const override { return end_of_text_; }
  std::optional<int32_t> Find(absl::string_view token) const override { return table_.Find(token); }
  // Between a letter that normalization leaves alone and a space, a line's end or a comma or full
  // stop of CJK: no word of the patterns goes on there, and none looks back.
  size_t SafeCut(absl::string_view text, size_t from, size_t limit) const override;

 private:
  // What one call of Encode needs. They are kept, with the words they have seen, for later calls:
  // there are as many as calls that ever ran at once.
  struct Workspace;
  class Lease;

  const bool nfc_;
  const PreTokenizer pre_tokenizer_;
  const BytePairs pairs_;
  const TokenTable table_;
  const std::optional<int32_t> end_of_text_;
  AddedTokenMatcher before_;  // normalization
  AddedTokenMatcher after_;
  bool may_cut_ = true;

  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Workspace>> idle_;
};

}  // namespace zeroshard
