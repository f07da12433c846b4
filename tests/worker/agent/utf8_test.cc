#include "worker/agent/utf8.h"

#include <gtest/gtest.h>

namespace zeroshard {
namespace {

constexpr char kBad[] = "\xef\xbf\xbd";

TEST(ValidUtf8, KeepsWhatIsValid) {
  const std::string text =
      "a\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf";
  EXPECT_EQ(ValidUtf8(text, 100), text);
  EXPECT_EQ(ValidUtf8(absl::string_view("a\0b", 3), 100), std::string("a\0b", 3));
}

// RFC 3629, sections 3 and 4: what must not appear.
TEST(ValidUtf8, ReplacesEveryByteThatBelongsToNoCharacter) {
  const std::string bad = kBad;
  EXPECT_EQ(ValidUtf8("\x80", 100), bad);                      // a continuation alone
  EXPECT_EQ(ValidUtf8("\xc0\xaf", 100), bad + bad);            // overlong
  EXPECT_EQ(ValidUtf8("\xe0\x9f\xbf", 100), bad + bad + bad);  // overlong
  EXPECT_EQ(ValidUtf8("\xf0\x8f\xbf\xbf", 100), bad + bad + bad + bad);
  EXPECT_EQ(ValidUtf8("\xed\xa0\x80", 100), bad + bad + bad);            // a surrogate
  EXPECT_EQ(ValidUtf8("\xf4\x90\x80\x80", 100), bad + bad + bad + bad);  // beyond U+10FFFF
  EXPECT_EQ(ValidUtf8("\xff"
                      "a",
                      100),
            bad + "a");
  EXPECT_EQ(ValidUtf8("\xe4\xbd", 100), bad + bad);  // cut off
  EXPECT_EQ(ValidUtf8("\xe4\xbd"
                      "a",
                      100),
            bad + bad + "a");
}

TEST(ValidUtf8, CutsBetweenCharacters) {
  EXPECT_EQ(ValidUtf8("ab\xc3\xa9"
                      "c",
                      3),
            "ab");
  EXPECT_EQ(ValidUtf8("ab\xc3\xa9"
                      "c",
                      4),
            "ab\xc3\xa9");
  EXPECT_EQ(ValidUtf8("\xff\xff", 5), kBad);
}

}  // namespace
}  // namespace zeroshard
