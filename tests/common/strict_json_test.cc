#include "common/strict_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeroshard {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using testing::AllOf;
using testing::HasSubstr;

std::string Refusal(absl::string_view text) {
  const auto parsed = ParseStrictJson<json>(text);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 100);
  EXPECT_EQ(ParseStrictJson<ordered_json>(text).status(), parsed.status());
  return std::string(parsed.status().message());
}

std::string Nested(int depth, char open, char close) {
  std::string text(static_cast<size_t>(depth), open);
  if (open == '{') {
    text.clear();
    for (int i = 0; i < depth; ++i) text += i + 1 < depth ? "{\"a\":" : "{";
  }
  return text + std::string(static_cast<size_t>(depth), close);
}

TEST(StrictJsonTest, ReadsWhatTheLibraryReads) {
  for (const char* text :
       {R"({"b": [1, -2, 1.5e300, true, false, null, "x\u00e9\ud83d\ude42\n", {}, []], "a":)"
        R"( {"z": 18446744073709551615, "y": -9223372036854775808, "": [[{"c": 1}], {"c": 2}]}})",
        " [ ] ", "\"text\"", "0", "null", "\t{\"a\":{},\"b\":{\"a\":1}}\n"}) {
    const auto plain = ParseStrictJson<json>(text);
    ASSERT_TRUE(plain.ok()) << plain.status();
    EXPECT_EQ(*plain, json::parse(text));
    const auto ordered = ParseStrictJson<ordered_json>(text);
    ASSERT_TRUE(ordered.ok()) << ordered.status();
    EXPECT_EQ(ordered->dump(), ordered_json::parse(text).dump());
  }
}

TEST(StrictJsonTest, NestingHasALimit) {
  for (const auto& [open, close] : {std::pair('[', ']'), std::pair('{', '}')}) {
    EXPECT_TRUE(ParseStrictJson<json>(Nested(kMaxJsonDepth, open, close)).ok());
    EXPECT_THAT(Refusal(Nested(kMaxJsonDepth + 1, open, close)), HasSubstr("deeper than 64"));
  }
  EXPECT_THAT(Refusal(std::string(3'000'000, '[')), HasSubstr("deeper than 64"));
  // Brackets in texts are none.
  EXPECT_TRUE(ParseStrictJson<json>('"' + std::string(1000, '[') + '"').ok());
}

TEST(StrictJsonTest, AKeyIsInAnObjectOnce) {
  EXPECT_THAT(Refusal(R"({"a": {"b": 1, "c": 2, "b": 1}})"), HasSubstr("\"b\" is there twice"));
  EXPECT_THAT(Refusal(R"({"\n": 1, "\u000a": 1})"), HasSubstr("\"?\" is there twice"));
}

TEST(StrictJsonTest, WhatIsNoJsonIsSaidWithItsPlace) {
  EXPECT_THAT(Refusal("{\n\"a\": 1,\n oops}"), AllOf(HasSubstr("no JSON"), HasSubstr("line 3")));
  for (const absl::string_view text :
       {"", " ", "{", "[1", "{} {}", "{\"a\"}", "[1,]", "nul", "1e999", "\"\x92\"", "\"\\ud800\"",
        "NaN", "'a'", "// a\n1"}) {
    EXPECT_THAT(Refusal(text), HasSubstr("no JSON"));
  }
}

}  // namespace
}  // namespace zeroshard
