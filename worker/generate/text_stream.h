// Tokens to text as they come. A character is handed out when all its bytes are there, never half
// of it; bytes that cannot become one are U+FFFD. One thread at a time.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "common/tokenizer/tokenizer.h"

namespace zeroshard {

class TextStream {
 public:
  // Borrows the tokenizer.
  explicit TextStream(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  // What is new. Special tokens have no text, nor have ids that only pad the model's vocabulary.
  absl::StatusOr<std::string> Add(int32_t token);
  // The rest: U+FFFD for a character that was not finished.
  std::string Finish();

 private:
  const Tokenizer* tokenizer_;
  std::string pending_;  // the first bytes of a character, at most 3
};

}  // namespace zeroshard
