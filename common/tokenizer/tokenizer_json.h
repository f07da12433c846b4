// Reads a Hugging Face tokenizer.json; what it may hold is listed in README.md.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/tokenizer/added_tokens.h"
#include "common/tokenizer/bpe.h"
#include "common/tokenizer/pre_tokenizer.h"
#include "common/tokenizer/token_table.h"

namespace zeroshard {

struct TokenizerParts {
  bool nfc = false;
  std::vector<PreTokenizer::Step> steps;
  std::vector<AddedToken> added_tokens;
  TokenTable table;
  BytePairs pairs;
};

// `json` is the content of the file at `path`. INVALID_ARGUMENT names the file, the field, what it
// holds and what is supported.
absl::StatusOr<TokenizerParts> ParseTokenizerJson(const std::string& path, absl::string_view json);

}  // namespace zeroshard
