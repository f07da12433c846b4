#include "worker/generate/text_stream.h"

#include <gmock/gmock.h>

#include "tests/worker/generate/tiny_model.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;

constexpr char kReplacement[] = "\xEF\xBF\xBD";

// What each byte of `text` lets out, and at last what Finish does.
std::vector<std::string> Pieces(const std::string& text) {
  const ByteTokens tokenizer;
  TextStream stream(&tokenizer);
  std::vector<std::string> pieces;
  for (const char c : text) pieces.push_back(*stream.Add(static_cast<uint8_t>(c)));
  pieces.push_back(stream.Finish());
  return pieces;
}

TEST(TextStreamTest, ACharacterComesWithItsLastByte) {
  EXPECT_THAT(Pieces("a\xC3\xA9z"), ElementsAre("a", "", "\xC3\xA9", "z", ""));
  EXPECT_THAT(Pieces("\xE2\x82\xAC"), ElementsAre("", "", "\xE2\x82\xAC", ""));
  EXPECT_THAT(Pieces("\xF0\x9F\x98\x80!"), ElementsAre("", "", "", "\xF0\x9F\x98\x80", "!", ""));
}

TEST(TextStreamTest, WhatIsCutOffAtTheEndIsReplaced) {
  EXPECT_THAT(Pieces("a\xF0\x9F\x98"), ElementsAre("a", "", "", "", kReplacement));
}

TEST(TextStreamTest, BytesThatBeginNothingAreReplacedAtOnce) {
  EXPECT_THAT(Pieces("\xFF"), ElementsAre(kReplacement, ""));
  EXPECT_THAT(Pieces("\xA9"), ElementsAre(kReplacement, ""));
  // A lead byte whose character is broken off by another character.
  EXPECT_THAT(Pieces("\xE2\x82g"), ElementsAre("", "", std::string(kReplacement) + "g", ""));
  EXPECT_THAT(Pieces("\xC3\xC3\xA9"), ElementsAre("", kReplacement, "\xC3\xA9", ""));
  // A surrogate's second byte cannot follow ED.
  EXPECT_THAT(Pieces("\xED\xA0"), ElementsAre("", std::string(kReplacement) + kReplacement, ""));
}

TEST(TextStreamTest, TokensWithoutTextAreNothing) {
  const ByteTokens tokenizer;
  TextStream stream(&tokenizer);
  EXPECT_EQ(*stream.Add(0xC3), "");
  EXPECT_EQ(*stream.Add(256), "");   // special
  EXPECT_EQ(*stream.Add(5000), "");  // beyond the tokenizer: padding of the vocabulary
  EXPECT_EQ(*stream.Add(0xA9), "\xC3\xA9");
}

}  // namespace
}  // namespace zeroshard
