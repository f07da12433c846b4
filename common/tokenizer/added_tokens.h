// Tokens that are found in the text before it is cut into words ("added_tokens").
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"

namespace zeroshard {

struct AddedToken {
  std::string content;  // not empty
  int32_t id = 0;
  bool special = false;
  bool single_word = false;  // only where no word character is beside it
  bool lstrip = false;       // takes the white space on its left with it
  bool rstrip = false;       // and on its right
  bool normalized = false;   // is looked for after normalization, in its own normal form
};

// Finds the leftmost token, of those that start there the longest, and goes on behind it, as
// Hugging Face's tokenizers do. One with lstrip that lies in the white space which the token before
// took with it is none. Immutable once filled; thread-safe.
class AddedTokenMatcher {
 public:
  AddedTokenMatcher() { root_.fill(kNone); }

  // `token.content` as it is looked for. Of two that are alike the first counts.
  void Add(AddedToken token);
  bool empty() const { return tokens_.empty(); }

  // Calls, in order, `text` for what is between the tokens, never empty, and `token` for their ids.
  void ForEach(absl::string_view text, absl::FunctionRef<void(absl::string_view)> between,
               absl::FunctionRef<void(int32_t)> token) const;

 private:
  static constexpr int32_t kNone = -1;

  // The longest token that starts at `at`; null without one.
  const AddedToken* LongestAt(absl::string_view text, size_t at) const;

  std::vector<AddedToken> tokens_;
  // A trie: nodes by number, their children by (node << 8 | byte), the tokens that end there.
  std::array<int32_t, 256> root_;
  absl::flat_hash_map<uint64_t, int32_t> children_;
  std::vector<int32_t> ends_;
};

// Letters, marks, decimal and letter numbers, connecting punctuation and joiners: \w of Unicode
// Technical Standard 18, annex C.
bool IsWordCharacter(uint32_t code_point);
// The property White_Space of Unicode.
bool IsWhiteSpace(uint32_t code_point);

}  // namespace zeroshard
