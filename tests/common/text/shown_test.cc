// What others wrote, as it is shown.
#include "common/text/shown.h"

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

TEST(Shown, TextOfAnyScriptStaysAsItIs) {
  for (const char* text :
       {"", "rank 1 on host-b: killed by signal 9", R"(C:\temp\new "x" 'y')",
        "h\xc3\xa9llo \xe6\x97\xa5\xe6\x9c\xac \xd9\x85\xd8\xb1",
        "\xf0\x9f\x91\xa9\xe2\x80\x8d\xf0\x9f\x91\xa7", "\xc2\xa0|\xe2\x80\xaf"}) {
    EXPECT_EQ(Shown(text), text);
  }
}

TEST(Shown, ControlCharactersAreEscaped) {
  EXPECT_EQ(Shown("a\033[2Jb"), "a\\x1b[2Jb");
  EXPECT_EQ(Shown("\033]0;title\a"), "\\x1b]0;title\\x07");
  EXPECT_EQ(Shown("a\nb\tc\rd\b\x7f"), "a\\nb\\tc\\rd\\x08\\x7f");
  EXPECT_EQ(Shown(absl::string_view("\0\x1f", 2)), "\\x00\\x1f");
}

// U+009B begins what ESC [ begins, in one character.
TEST(Shown, C1ControlsAreEscaped) {
  EXPECT_EQ(Shown("\xc2\x9b"
                  "31m"),
            "\\u009b31m");
  EXPECT_EQ(Shown("\xc2\x80\xc2\x9f"), "\\u0080\\u009f");
}

TEST(Shown, WhatTurnsOrBreaksLinesIsEscaped) {
  EXPECT_EQ(Shown("\xe2\x80\xae gnp.exe"), "\\u202e gnp.exe");
  EXPECT_EQ(Shown("\xe2\x80\x8e\xe2\x80\x8f\xe2\x80\xaa\xe2\x81\xa6\xe2\x81\xa9\xd8\x9c"),
            "\\u200e\\u200f\\u202a\\u2066\\u2069\\u061c");
  EXPECT_EQ(Shown("\xe2\x80\xa8\xe2\x80\xa9"), "\\u2028\\u2029");
}

TEST(Shown, BytesThatAreNoUtf8AreEscaped) {
  EXPECT_EQ(Shown("a\xff\xfe z"), "a\\xff\\xfe z");
  EXPECT_EQ(Shown("\x9b"
                  "31m"),
            "\\x9b31m");                                         // alone
  EXPECT_EQ(Shown("\xc0\x9b"), "\\xc0\\x9b");                    // overlong
  EXPECT_EQ(Shown("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(Shown("x\xe6\x97"), "x\\xe6\\x97");                  // its end is missing
  EXPECT_EQ(Shown("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // past U+10FFFF
}

TEST(Shown, NewlinesAndTabsMayStay) {
  EXPECT_EQ(Shown("a\n\tb\r\n\033", kMostReason, Layout::kKept), "a\n\tb\\r\n\\x1b");
}

TEST(Shown, WhatIsLongerIsCutBetweenCharactersAndSaysSo) {
  EXPECT_EQ(Shown("12345", 5), "12345");
  EXPECT_EQ(Shown("123456", 5), "12...");
  EXPECT_EQ(Shown("\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e", 9),
            "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e");
  EXPECT_EQ(Shown("\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e", 8), "\xe6\x97\xa5...");
  EXPECT_EQ(Shown("a\033\033", 8), "a\\x1b...");  // not the half of an escape
  EXPECT_EQ(Shown("\033", 3), "...");
  const std::string text = "a\033\xe6\x97\xa5\xe2\x80\xae\xff\nz";
  const std::string whole = Shown(text, 1000);
  for (size_t most = 3; most < whole.size(); ++most) {
    const std::string cut = Shown(text, most);
    EXPECT_LE(cut.size(), most);
    ASSERT_TRUE(absl::EndsWith(cut, "..."));
    EXPECT_TRUE(absl::StartsWith(whole, cut.substr(0, cut.size() - 3))) << cut;
    // The longest piece is an escape of six.
    EXPECT_GT(cut.size() + 6, most);
  }
  EXPECT_EQ(Shown(text, whole.size()), whole);
}

TEST(Shown, ALongTextTakesNoLongerThanItsBytes) {
  const std::string bad(4 << 20, '\xff');
  EXPECT_EQ(Shown(bad, 5 * bad.size()).size(), 4 * bad.size());
  EXPECT_EQ(Shown(bad, 100).size(), 99u);
}

}  // namespace
}  // namespace zeroshard
