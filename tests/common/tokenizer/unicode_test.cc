// Every code point, against what Hugging Face's tokenizers take it for.
#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "common/tokenizer/added_tokens.h"
#include "common/tokenizer/normalizer.h"
#include "common/tokenizer/pre_tokenizer.h"
#include "common/tokenizer/utf8.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

constexpr uint32_t kEnd = 0x110000;

bool IsSurrogate(uint32_t point) { return point >= 0xD800 && point < 0xE000; }

const nlohmann::json& Reference() {
  static const nlohmann::json& json = *new nlohmann::json(nlohmann::json::parse(
      Contents(std::string(ZEROSHARD_TOKENIZER_REFERENCE) + "/unicode.json")));
  return json;
}

std::string Utf8(uint32_t point) {
  std::string text;
  AppendCodePoint(point, &text);
  return text;
}

// `holds` must be true of the code points in the reference's ranges, and of no other.
void ExpectClass(const char* name, const std::function<bool(uint32_t)>& holds) {
  std::vector<bool> wanted(kEnd, false);
  for (const auto& range : Reference()[name]) {
    for (uint32_t point = range[0]; point <= range[1]; ++point) wanted[point] = true;
  }
  int wrong = 0;
  for (uint32_t point = 0; point < kEnd && wrong < 20; ++point) {
    if (IsSurrogate(point) || holds(point) == wanted[point]) continue;
    ++wrong;
    ADD_FAILURE() << name << absl::StrFormat(": U+%04X should be ", point)
                  << (wanted[point] ? "in" : "out");
  }
}

// Whether the pattern takes `front` and the code point for one word.
std::function<bool(uint32_t)> JoinedTo(absl::string_view front, absl::string_view pattern) {
  const auto made = WordPattern::Make(pattern).value();
  const auto matcher = std::make_shared<WordPattern::Matcher>();
  return [front = std::string(front), made, matcher](uint32_t point) {
    const std::string text = front + Utf8(point);
    return made->WordEnd(text, 0, matcher.get()) == text.size();
  };
}

TEST(UnicodeTest, LettersAreThoseOfThePatterns) {
  for (absl::string_view pattern : {WordPattern::kGpt2, WordPattern::kLlama3}) {
    ExpectClass("letter", JoinedTo("x", pattern));
  }
}

TEST(UnicodeTest, NumbersAreThoseOfThePatterns) {
  for (absl::string_view pattern : {WordPattern::kGpt2, WordPattern::kLlama3}) {
    ExpectClass("number", JoinedTo("1", pattern));
  }
}

TEST(UnicodeTest, WhiteSpaceIsThatOfThePatterns) {
  ExpectClass("space", JoinedTo("\n", WordPattern::kGpt2));
}

TEST(UnicodeTest, DigitsAreThoseThatStandAlone) { ExpectClass("numeric", IsNumeric); }

TEST(UnicodeTest, WordCharactersAreThoseThatASingleWordMayNotTouch) {
  ExpectClass("word", IsWordCharacter);
}

TEST(UnicodeTest, WhiteSpaceIsThatWhichTokensStrip) { ExpectClass("stripped", IsWhiteSpace); }

TEST(UnicodeTest, NormalFormsAreThoseOfHuggingFace) {
  constexpr uint32_t kBlock = 0x1000;
  const auto& hashes = Reference()["nfc_hashes"];
  size_t block = 0;
  for (uint32_t begin = 0; begin < kEnd; begin += kBlock) {
    std::string text;
    for (const auto& context : Reference()["nfc_contexts"]) {
      for (uint32_t point = begin; point < begin + kBlock; ++point) {
        if (IsSurrogate(point)) continue;
        text += context[0].get_ref<const std::string&>();
        AppendCodePoint(point, &text);
        text += context[1].get_ref<const std::string&>();
      }
    }
    uint64_t hash = 0xCBF29CE484222325;
    std::string storage;
    for (const char byte : NormalizeNfc(text, &storage)) {
      hash = (hash ^ static_cast<uint8_t>(byte)) * 0x100000001B3;
    }
    ASSERT_LT(block, hashes.size());
    EXPECT_EQ(absl::StrFormat("%016x", hash), hashes[block++].get<std::string>())
        << absl::StrFormat("code points from U+%04X on", begin);
  }
  EXPECT_EQ(block, hashes.size());
}

TEST(UnicodeTest, TextInNormalFormIsNotCopied) {
  std::string storage;
  const std::string text = "h\xC3\xA9llo \xE8\x88\xB9 \xF0\x9F\x99\x82";
  EXPECT_EQ(NormalizeNfc(text, &storage).data(), text.data());
  EXPECT_EQ(NormalizeNfc("", &storage), "");
}

TEST(UnicodeTest, LongRunsOfMarksAndOfSpacesTakeLinearTime) {
  std::string marks = "x";
  for (int i = 0; i < 300000; ++i) marks += "\xCC\x81\xCC\x96";  // above, below
  std::string storage;
  EXPECT_EQ(NormalizeNfc(marks, &storage).size(), marks.size());
  const std::string spaces(12000000, ' ');  // more steps than PCRE2's default limit
  WordPattern::Matcher matcher;
  EXPECT_EQ(WordPattern::Make(WordPattern::kLlama3).value()->WordEnd(spaces, 0, &matcher),
            spaces.size());
}

}  // namespace
}  // namespace zeroshard
