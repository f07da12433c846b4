#include "common/text/documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Texts(absl::string_view bytes, TextFormat format) {
  std::vector<std::string> texts;
  const absl::Status status = ForEachDocument("file", bytes, format, [&](Document&& document) {
    texts.push_back(document.prompt.empty() ? document.text
                                            : document.prompt + "|" + document.text);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return texts;
}

std::string ErrorOf(absl::string_view bytes) {
  const absl::Status status = ForEachDocument("some.jsonl", bytes, TextFormat::kJsonLines,
                                              [](Document&&) { return absl::OkStatus(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bytes;
  return std::string(status.message());
}

TEST(DocumentsTest, ATextKeepsItsBytesButForTheByteOrderMark) {
  const std::string text("\r\nline \x92\r\n\0x\n no newline at the end", 37);
  EXPECT_THAT(Texts("\xEF\xBB\xBF" + text, TextFormat::kText), ElementsAre(text));
  EXPECT_THAT(Texts(text, TextFormat::kText), ElementsAre(text));
  EXPECT_THAT(Texts("\xEF\xBB\xBF\xEF\xBB\xBF", TextFormat::kText), ElementsAre("\xEF\xBB\xBF"));
  EXPECT_THAT(Texts("\xEF\xBB", TextFormat::kText), ElementsAre("\xEF\xBB"));
}

TEST(DocumentsTest, EveryJsonLineIsADocument) {
  EXPECT_THAT(Texts("\xEF\xBB\xBF{\"text\": \"a\\nb\", \"source\": 3}\r\n\n  \t\r\n"
                    "{\"prompt\": \"q\", \"completion\": \"\\u00e9\\u0000\\ud83d\\ude42\"}",
                    TextFormat::kJsonLines),
              ElementsAre("a\nb", std::string("q|\xC3\xA9\0\xF0\x9F\x99\x82", 9)));
  EXPECT_THAT(Texts("", TextFormat::kJsonLines), ElementsAre());
  EXPECT_THAT(Texts("{\"text\":\"\"}\n", TextFormat::kJsonLines), ElementsAre(""));
}

TEST(DocumentsTest, WhatIsWrongWithALineIsSaidWithItsNumber) {
  const std::pair<const char*, const char*> cases[] = {
      {"{\"text\": \"a\"}\n\n{\"text\": \"b\"", "some.jsonl:3: no JSON"},
      {"{\"text\": \"a\"} {\"text\": \"b\"}", "some.jsonl:1: no JSON"},
      {"\n[1]", "some.jsonl:2: no JSON object but array"},
      {"{\"txt\": \"a\"}", "some.jsonl:1: has neither text nor prompt"},
      {"{\"text\": 5}", "some.jsonl:1: the field text is no text but number"},
      {"{\"text\": null}", "some.jsonl:1: the field text is no text but null"},
      {"{\"prompt\": \"a\"}", "some.jsonl:1: has a prompt but no completion"},
      {"{\"completion\": \"a\"}", "some.jsonl:1: has a completion but no prompt"},
      {"{\"text\": \"a\", \"prompt\": \"b\"}", "some.jsonl:1: has both"},
      {"{\"prompt\": [], \"completion\": \"b\"}", "some.jsonl:1: the field prompt is no text"},
      {"{\"text\": \"\x92\"}", "some.jsonl:1: no JSON"},
      {"{\"text\": \"\\ud800\"}", "some.jsonl:1: no JSON"},
      {"{\"text\": \"a\", \"text\": \"b\"}", "some.jsonl:1: the key \"text\" is there twice"},
  };
  for (const auto& [bytes, message] : cases) {
    EXPECT_THAT(ErrorOf(bytes), AllOf(HasSubstr(message), HasSubstr("a line holds a document")));
  }
}

TEST(DocumentsTest, ALineThatIsNestedTooDeepIsRefused) {
  const std::string deep = std::string(1'000'000, '[') + std::string(1'000'000, ']');
  for (const std::string& line : {deep, "{\"text\": \"a\", \"meta\": " + deep + "}"}) {
    EXPECT_THAT(ErrorOf("{\"text\": \"a\"}\n" + line),
                HasSubstr("some.jsonl:2: it is nested deeper than 64"));
  }
}

TEST(DocumentsTest, ALineThatIsTooLongIsRefusedBeforeItIsParsed) {
  const std::string line((64 << 20) + 1, ' ');
  EXPECT_THAT(ErrorOf("{\"text\": \"a\"}\n" + line), HasSubstr("some.jsonl:2: has 67108865 bytes"));
}

TEST(DocumentsTest, LinesAreCountedFromTheFirstOfAPart) {
  std::vector<int64_t> lines;
  ASSERT_TRUE(
      ForEachJsonLine("f", "{\"text\":\"a\"}\n\n{\"text\":\"b\"}\n", 41, [&](Document&& document) {
        lines.push_back(document.line);
        return absl::OkStatus();
      }).ok());
  EXPECT_THAT(lines, ElementsAre(41, 43));
}

TEST(DocumentsTest, AnErrorOfTheReceiverEndsIt) {
  int seen = 0;
  const absl::Status status = ForEachDocument("f", "{\"text\":\"a\"}\n{\"text\":\"b\"}\n",
                                              TextFormat::kJsonLines, [&](Document&&) {
                                                ++seen;
                                                return absl::CancelledError("enough");
                                              });
  EXPECT_EQ(status, absl::CancelledError("enough"));
  EXPECT_EQ(seen, 1);
}

TEST(DocumentsTest, TheNameSaysTheFormatUnlessTheUserDoes) {
  EXPECT_EQ(TextFormatOf("a.jsonl", "auto").value(), TextFormat::kJsonLines);
  EXPECT_EQ(TextFormatOf("a.NDJSON", "").value(), TextFormat::kJsonLines);
  EXPECT_EQ(TextFormatOf("a.json", "auto").value(), TextFormat::kText);
  EXPECT_EQ(TextFormatOf("jsonl", "").value(), TextFormat::kText);
  EXPECT_EQ(TextFormatOf("a.jsonl", "text").value(), TextFormat::kText);
  EXPECT_EQ(TextFormatOf("a.txt", "jsonl").value(), TextFormat::kJsonLines);
  EXPECT_EQ(TextFormatOf("a.txt", "csv").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace zeroshard
