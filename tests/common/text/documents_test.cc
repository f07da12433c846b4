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
  constexpr char kText[] = "\r\nline \x92\r\n\0x\n no newline at the end";
  const std::string text(kText, sizeof(kText) - 1);
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
  const auto format = [](const std::string& path, const char* format) {
    return TextFormatOf(path, format, "a text");
  };
  EXPECT_EQ(format("a.jsonl", "auto").value(), TextFormat::kJsonLines);
  EXPECT_EQ(format("a.NDJSON", "").value(), TextFormat::kJsonLines);
  EXPECT_EQ(format("a.json", "auto").value(), TextFormat::kText);
  EXPECT_EQ(format("jsonl", "").value(), TextFormat::kText);
  EXPECT_EQ(format("a.jsonl", "text").value(), TextFormat::kText);
  EXPECT_EQ(format("a.txt", "jsonl").value(), TextFormat::kJsonLines);
  EXPECT_EQ(format("a.txt", "csv").status().code(), absl::StatusCode::kInvalidArgument);
}

// Unless the format is said, whichever it is.
void ExpectRefused(const std::string& start, const char* why) {
  for (const char* format : {"", "auto"}) {
    const absl::Status status = TextFormatOf("some.json", format, start).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << start.substr(0, 80);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("some.json"), HasSubstr(why), HasSubstr("data.format")));
  }
  EXPECT_EQ(TextFormatOf("some.json", "text", start).value(), TextFormat::kText);
  EXPECT_EQ(TextFormatOf("some.json", "jsonl", start).value(), TextFormat::kJsonLines);
  EXPECT_EQ(TextFormatOf("some.jsonl", "", start).value(), TextFormat::kJsonLines);
}

TEST(DocumentsTest, JsonLinesByAnotherNameAreNotTakenForText) {
  const std::string large(100'000, 'x');  // goes on beyond what is looked at
  for (const std::string& start :
       {std::string("{\"text\": \"a\"}\n{\"text\": \"b\"}\n"), std::string("{\"text\":\"a\"}"),
        std::string("\xEF\xBB\xBF\r\n  \n {\"id\": {\"n\": [1]}, \"text\": \"a\"}\r\nrest"),
        std::string("{\"completion\": \"b\", \"prompt\": \"a\"}\nno JSON"),
        "{\"source\": \"s\", \"text\": \"" + large + "\"}\n"}) {
    ExpectRefused(start, "first line");
  }
  for (const std::string& text :
       {std::string("{\n\"text\": \"a\"\n}\n"), std::string("[{\"text\": \"a\"}]"),
        std::string("{\"texts\": 1, \"a\": {\"text\": 2}}\n"), std::string("{\"text\": broken}\n"),
        std::string("\"text\"\n{\"text\": \"a\"}\n"), std::string("text {\"text\": 1}"),
        std::string("\n \n"), std::string(), "{\"texts\": \"" + large + "\"}\n",
        std::string(200'000, '['), std::string(1000, '[') + "\n"}) {
    EXPECT_EQ(TextFormatOf("some.json", "auto", text).value(), TextFormat::kText)
        << text.substr(0, 80);
  }
}

TEST(DocumentsTest, BinaryFilesAreNotTakenForText) {
  // llm.c's headers: the magic as a little-endian number of 32 bits.
  for (const uint32_t magic : {20240520u, 20240801u}) {
    std::string header;
    for (int shift = 0; shift < 32; shift += 8) header.push_back(static_cast<char>(magic >> shift));
    ExpectRefused(header + "any tokens", "llm.c");
  }
  ExpectRefused(std::string("MMIDIDX\0\0\1", 10), "Megatron");
  ExpectRefused("\x1F\x8B\x08\x08 text.jsonl", "gzip");
  ExpectRefused("PK\x03\x04 text.txt", "zip");
  // 16-bit characters, and ids of four bytes.
  std::string wide, ids;
  for (const char c : std::string("a text of more than a few characters, as Windows wrote it")) {
    wide.append({c, '\0'});
    ids.append({c, c, '\0', '\0'});
  }
  ExpectRefused(wide, "NUL");
  ExpectRefused(ids, "NUL");
}

TEST(DocumentsTest, TextsMayHoldSomeNuls) {
  std::string tenth;
  for (int i = 0; i < 10'000; ++i) tenth += i % 10 == 0 ? '\0' : 'x';
  for (const std::string& text :
       {std::string("a\0b", 3), std::string(32, '\0'), tenth,
        std::string(70'000, 'x') + std::string(70'000, '\0')}) {  // behind what is looked at
    EXPECT_EQ(TextFormatOf("a.txt", "auto", text).value(), TextFormat::kText);
  }
}

}  // namespace
}  // namespace zeroshard
