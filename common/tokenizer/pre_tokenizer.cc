#include "common/tokenizer/pre_tokenizer.h"

#include <utf8proc.h>

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/tokenizer/utf8.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace zeroshard {
namespace {

// White_Space of Unicode, which is what \s means elsewhere; PCRE2's holds U+180E too.
constexpr absl::string_view kWhiteSpace =
    R"(\t-\r\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

// The pattern with \s and \S spelled out.
std::string ForPcre2(absl::string_view pattern) {
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (c == '\\') {
      const char escaped = pattern[++i];
      if (escaped == 's') {
        absl::StrAppend(&out, in_class ? "" : "[", kWhiteSpace, in_class ? "" : "]");
      } else if (escaped == 'S') {
        absl::StrAppend(&out, "[^", kWhiteSpace, "]");
      } else {
        out.append({c, escaped});
      }
      continue;
    }
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out.push_back(c);
  }
  return out;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const WordPattern>> WordPattern::Make(absl::string_view pattern) {
  if (pattern != kGpt2 && pattern != kLlama3 && pattern != kQwen2) {
    return absl::InvalidArgumentError(
        absl::StrCat("the regular expression ", pattern, " is not supported; those of GPT-2 (",
                     kGpt2, "), Llama 3 (", kLlama3, ") and Qwen2 (", kQwen2, ") are"));
  }
  const std::string translated = ForPcre2(pattern);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(
      reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
      PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, &error, &offset, nullptr);
  if (code == nullptr) {
    return absl::InternalError(absl::StrCat("PCRE2 refuses the regular expression ", translated,
                                            " at ", offset, " with error ", error));
  }
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);  // where it cannot, matching is only slower
  return std::shared_ptr<const WordPattern>(new WordPattern(code));
}

WordPattern::~WordPattern() { pcre2_code_free(code_); }

WordPattern::Matcher::Matcher()
    : data_(pcre2_match_data_create(1, nullptr)), context_(pcre2_match_context_create(nullptr)) {
  // The patterns take linear time; a limit would only be met by a long run of white space.
  pcre2_set_match_limit(context_, std::numeric_limits<uint32_t>::max());
}

WordPattern::Matcher::~Matcher() {
  pcre2_match_context_free(context_);
  pcre2_match_data_free(data_);
}

size_t WordPattern::WordEnd(absl::string_view text, size_t at, Matcher* matcher) const {
  const int matched = pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at,
                                  PCRE2_NO_UTF_CHECK, matcher->data_, matcher->context_);
  const size_t end = matched < 0 ? 0 : pcre2_get_ovector_pointer(matcher->data_)[1];
  // The patterns match everywhere; without memory for that, a character stands alone.
  return end > at ? end : at + CodePointAt(text, at).bytes;
}

bool IsNumeric(uint32_t code_point) {
  if (code_point < 0x80) return code_point >= '0' && code_point <= '9';
  const utf8proc_category_t category = utf8proc_category(static_cast<int32_t>(code_point));
  return category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
         category == UTF8PROC_CATEGORY_NO;
}

bool PreTokenizer::adds_space() const {
  for (const Step& step : steps_) {
    if (step.kind == Step::Kind::kSpace) return true;
  }
  return false;
}

void PreTokenizer::ForEachWord(absl::string_view text, Scratch* scratch,
                               absl::FunctionRef<void(absl::string_view)> word) const {
  Run(0, text, scratch, word);
}

void PreTokenizer::Run(size_t step, absl::string_view text, Scratch* scratch,
                       absl::FunctionRef<void(absl::string_view)> word) const {
  if (text.empty()) return;
  if (step == steps_.size()) {
    word(text);
    return;
  }
  switch (steps_[step].kind) {
    case Step::Kind::kPattern: {
      const WordPattern& pattern = *steps_[step].pattern;
      const bool last = step + 1 == steps_.size();
      for (size_t at = 0; at < text.size();) {
        const size_t end = pattern.WordEnd(text, at, &scratch->matcher);
        if (last) {
          word(text.substr(at, end - at));
        } else {
          Run(step + 1, text.substr(at, end - at), scratch, word);
        }
        at = end;
      }
      return;
    }
    case Step::Kind::kDigits:
    case Step::Kind::kContiguousDigits: {
      const bool alone = steps_[step].kind == Step::Kind::kDigits;
      size_t begin = 0;
      bool in_number = false;
      for (size_t at = 0; at < text.size();) {
        const CodePoint point = CodePointAt(text, at);
        const bool numeric = IsNumeric(point.value);
        if (numeric != in_number || (numeric && alone)) {
          Run(step + 1, text.substr(begin, at - begin), scratch, word);
          begin = at;
          in_number = numeric;
        }
        at += point.bytes;
      }
      Run(step + 1, text.substr(begin), scratch, word);
      return;
    }
    case Step::Kind::kSpace: {
      if (text[0] == ' ') {
        Run(step + 1, text, scratch, word);
        return;
      }
      scratch->spaced.assign(1, ' ');
      scratch->spaced.append(text.data(), text.size());
      Run(step + 1, scratch->spaced, scratch, word);
      return;
    }
  }
}

}  // namespace zeroshard
