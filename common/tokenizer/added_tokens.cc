#include "common/tokenizer/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "common/tokenizer/utf8.h"

namespace zeroshard {
namespace {

struct Range {
  uint32_t first;
  uint32_t last;
};

// Word characters that are younger than utf8proc's Unicode 15: Hugging Face's tokenizers know those
// of Unicode 16.
constexpr Range kYoungWord[] = {
    {0x897, 0x897},     {0x1C89, 0x1C8A},   {0xA7CB, 0xA7CD},   {0xA7DA, 0xA7DC},
    {0x105C0, 0x105F3}, {0x10D40, 0x10D65}, {0x10D69, 0x10D6D}, {0x10D6F, 0x10D85},
    {0x10EC2, 0x10EC4}, {0x10EFC, 0x10EFC}, {0x11380, 0x11389}, {0x1138B, 0x1138B},
    {0x1138E, 0x1138E}, {0x11390, 0x113B5}, {0x113B7, 0x113C0}, {0x113C2, 0x113C2},
    {0x113C5, 0x113C5}, {0x113C7, 0x113CA}, {0x113CC, 0x113D3}, {0x113E1, 0x113E2},
    {0x116D0, 0x116E3}, {0x11BC0, 0x11BE0}, {0x11BF0, 0x11BF9}, {0x11F5A, 0x11F5A},
    {0x13460, 0x143FA}, {0x16100, 0x16139}, {0x16D40, 0x16D6C}, {0x16D70, 0x16D79},
    {0x18CFF, 0x18CFF}, {0x1CCF0, 0x1CCF9}, {0x1E5D0, 0x1E5FA}, {0x2EBF0, 0x2EE5D},
};

bool IsYoungWord(uint32_t code_point) {
  return std::any_of(std::begin(kYoungWord), std::end(kYoungWord), [=](const Range& range) {
    return range.first <= code_point && code_point <= range.last;
  });
}

}  // namespace

bool IsWordCharacter(uint32_t code_point) {
  switch (utf8proc_category(static_cast<int32_t>(code_point))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    case UTF8PROC_CATEGORY_SO:  // letters in circles and squares are alphabetic
      return (code_point >= 0x24B6 && code_point <= 0x24E9) ||
             (code_point >= 0x1F130 && code_point <= 0x1F149) ||
             (code_point >= 0x1F150 && code_point <= 0x1F169) ||
             (code_point >= 0x1F170 && code_point <= 0x1F189);
    default:
      return code_point == 0x200C || code_point == 0x200D || IsYoungWord(code_point);
  }
}

bool IsWhiteSpace(uint32_t code_point) {
  if (code_point < 0x80) return code_point == ' ' || (code_point >= '\t' && code_point <= '\r');
  return code_point == 0x85 || code_point == 0xA0 || code_point == 0x1680 ||
         (code_point >= 0x2000 && code_point <= 0x200A) || code_point == 0x2028 ||
         code_point == 0x2029 || code_point == 0x202F || code_point == 0x205F ||
         code_point == 0x3000;
}

void AddedTokenMatcher::Add(AddedToken token) {
  int32_t node = kNone;
  for (size_t i = 0; i < token.content.size(); ++i) {
    const auto byte = static_cast<uint8_t>(token.content[i]);
    int32_t* child =
        i == 0
            ? &root_[byte]
            : &children_.try_emplace(static_cast<uint64_t>(node) << 8 | byte, kNone).first->second;
    if (*child == kNone) {
      *child = static_cast<int32_t>(ends_.size());
      ends_.push_back(kNone);
    }
    node = *child;
  }
  if (node == kNone || ends_[static_cast<size_t>(node)] != kNone) return;
  ends_[static_cast<size_t>(node)] = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(std::move(token));
}

const AddedToken* AddedTokenMatcher::LongestAt(absl::string_view text, size_t at) const {
  int32_t node = root_[static_cast<uint8_t>(text[at])];
  int32_t longest = kNone;
  while (node != kNone) {
    if (ends_[static_cast<size_t>(node)] != kNone) longest = ends_[static_cast<size_t>(node)];
    if (++at == text.size()) break;
    const auto child =
        children_.find(static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(text[at]));
    node = child == children_.end() ? kNone : child->second;
  }
  return longest == kNone ? nullptr : &tokens_[static_cast<size_t>(longest)];
}

void AddedTokenMatcher::ForEach(absl::string_view text,
                                absl::FunctionRef<void(absl::string_view)> between,
                                absl::FunctionRef<void(int32_t)> token) const {
  size_t given = 0;  // text before has been handed out
  const auto hand_out = [&](size_t end) {
    if (given < end) between(text.substr(given, end - given));
  };
  for (size_t at = 0; at < text.size();) {
    if (root_[static_cast<uint8_t>(text[at])] == kNone) {
      ++at;
      continue;
    }
    const AddedToken* found = LongestAt(text, at);
    if (found == nullptr) {
      ++at;
      continue;
    }
    size_t begin = at;
    size_t end = at + found->content.size();
    at = end;
    if (found->single_word) {
      const bool begins =
          begin == 0 || !IsWordCharacter(CodePointAt(text, CodePointBefore(text, begin)).value);
      const bool ends = end == text.size() || !IsWordCharacter(CodePointAt(text, end).value);
      if (!begins || !ends) continue;
    }
    if (found->lstrip) {
      begin = std::max(begin, given);
      while (begin > given) {
        const size_t before = CodePointBefore(text, begin);
        if (!IsWhiteSpace(CodePointAt(text, before).value)) break;
        begin = before;
      }
    }
    if (found->rstrip) {
      while (end < text.size()) {
        const CodePoint next = CodePointAt(text, end);
        if (!IsWhiteSpace(next.value)) break;
        end += next.bytes;
      }
    }
    if (begin >= end) continue;  // the token before took all of it
    hand_out(begin);
    token(found->id);
    given = end;
  }
  hand_out(text.size());
}

}  // namespace zeroshard
