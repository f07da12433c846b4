#include "client/tokenize_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

struct TokenFile {
  std::vector<int32_t> header;
  std::vector<int64_t> ids;
};

class TokenizeFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    tokenizer_ = Tokenizer::Load("bytes").value();
    options_.output = folder_ / "out.bin";
    options_.threads = 3;
    options_.piece_bytes = 16;
  }
  std::string Write(const std::string& name, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  absl::StatusOr<TokenizeProgress> Run(std::vector<std::string> inputs) {
    options_.inputs = std::move(inputs);
    return TokenizeFiles(*tokenizer_, options_, [](const TokenizeProgress&) {});
  }
  TokenFile Read() const {
    const std::string bytes = Contents(options_.output);
    TokenFile file;
    file.header.resize(256);
    EXPECT_GE(bytes.size(), 1024u);
    std::memcpy(file.header.data(), bytes.data(), 1024);
    const size_t width = file.header[0] == 20240801 ? 4 : 2;
    for (size_t at = 1024; at + width <= bytes.size(); at += width) {
      uint32_t id = 0;
      std::memcpy(&id, bytes.data() + at, width);
      file.ids.push_back(id);
    }
    EXPECT_EQ(bytes.size(), 1024 + width * file.ids.size());
    return file;
  }
  // Nothing may be left of what was not finished.
  void ExpectNothingWritten() const {
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      EXPECT_THAT(entry.path().filename().string(), ::testing::Not(HasSubstr("out.bin")));
    }
  }
  static std::vector<int64_t> Bytes(const std::string& text) {
    std::vector<int64_t> ids;
    for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
    return ids;
  }

  TempFolder folder_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  TokenizeOptions options_;
};

TEST_F(TokenizeFilesTest, DocumentsFollowEachOtherInTheOrderOfPathsWithTheSeparatorAfterEach) {
  Write("in/b.txt", "\xEF\xBB\xBFsecond\r\n");
  Write("in/a/z.jsonl", "{\"text\":\"first\"}\n\n{\"text\":\"\"}\n{\"text\":\"and a half\"}");
  Write("in/.hidden", "no");
  Write("in/empty.txt", "");
  const std::string named = Write("named", "third, which is longer than a piece");
  options_.separator = 0;
  const auto result = Run({folder_ / "in", named});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->documents, 4);
  const TokenFile file = Read();
  const std::string wanted("first\0and a half\0second\r\n\0third, which is longer than a piece\0",
                           62);
  EXPECT_THAT(file.ids, ElementsAreArray(Bytes(wanted)));
  EXPECT_EQ(result->tokens, 62);
  EXPECT_THAT(std::vector<int32_t>(file.header.begin(), file.header.begin() + 4),
              ElementsAre(20240520, 1, 62, 0));
}

TEST_F(TokenizeFilesTest, PiecesAndThreadsChangeNothing) {
  tokenizer_ = Tokenizer::Load(ZEROSHARD_TOKENIZER_REFERENCE "/llama3.json").value();
  const std::string text = Contents(ZEROSHARD_TOKENIZER_REFERENCE "/training.txt") + "\x92\xE8\x88";
  const nlohmann::json reference =
      nlohmann::json::parse(Contents(ZEROSHARD_TOKENIZER_REFERENCE "/encodings.json"));
  std::vector<int32_t> whole;
  tokenizer_->Encode(text, &whole);
  const std::string path = Write("text", text);
  for (size_t piece : {1, 2, 3, 7, 64, 100000}) {
    for (int threads : {1, 4}) {
      options_.piece_bytes = piece;
      options_.threads = threads;
      ASSERT_TRUE(Run({path}).ok());
      EXPECT_THAT(Read().ids, ElementsAreArray(whole)) << piece << " " << threads;
    }
  }
  // The same text as lines of JSON, of which each is a document.
  std::string lines;
  for (int i = 0; i < 20; ++i)
    lines += nlohmann::json{{"text", reference["texts"][1]}}.dump() + "\n";
  ASSERT_TRUE(Run({Write("lines.jsonl", lines)}).ok());
  std::vector<int64_t> wanted;
  for (int i = 0; i < 20; ++i) {
    for (const int64_t id : reference["ids"]["llama3"][1]) wanted.push_back(id);
  }
  EXPECT_THAT(Read().ids, ElementsAreArray(wanted));
}

TEST_F(TokenizeFilesTest, WhatLooksLikeNoTextIsRefusedUntilTheFormatSaysSo) {
  const std::string lines = "{\"text\": \"first\"}\n{\"text\": \"second\"}\n";
  const std::string path = Write("lines.json", lines);
  const absl::Status refused = Run({path}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), AllOf(HasSubstr(path), HasSubstr("--format")));
  ExpectNothingWritten();
  options_.format = "jsonl";
  ASSERT_TRUE(Run({path}).ok());
  EXPECT_THAT(Read().ids, ElementsAreArray(Bytes("firstsecond")));
  options_.format = "text";
  ASSERT_TRUE(Run({path}).ok());
  EXPECT_THAT(Read().ids, ElementsAreArray(Bytes(lines)));
  // Its own output is no text.
  options_.format = "auto";
  std::filesystem::rename(options_.output, folder_ / "tokens");
  EXPECT_THAT(std::string(Run({folder_ / "tokens"}).status().message()), HasSubstr("llm.c"));
}

TEST_F(TokenizeFilesTest, AVocabularyThatNeedsThemGetsFourBytes) {
  nlohmann::json json = nlohmann::json::parse(Contents(ZEROSHARD_TOKENIZER_REFERENCE "/gpt2.json"));
  json["model"]["vocab"]["\xC4\xA0zzz"] = 65536;  // the first id that two bytes do not hold
  json["model"]["ignore_merges"] = true;
  json["added_tokens"] = nlohmann::json::array();
  tokenizer_ = Tokenizer::Load(Write("tokenizer.json", json.dump())).value();
  options_.separator = 7;
  const auto result = Run({Write("text", " zzz")});
  ASSERT_TRUE(result.ok()) << result.status();
  const TokenFile file = Read();
  EXPECT_THAT(std::vector<int32_t>(file.header.begin(), file.header.begin() + 3),
              ElementsAre(20240801, 7, 2));
  EXPECT_THAT(file.ids, ElementsAre(65536, 7));
}

TEST_F(TokenizeFilesTest, WhatCannotBeIsRefusedAndLeavesNoFile) {
  const std::string text = Write("text", "some text");
  const std::string prompts =
      Write("prompts.jsonl", "{\"text\":\"a\"}\n{\"prompt\":\"p\",\"completion\":\"c\"}\n");
  const std::string broken =
      Write("broken.jsonl", "{\"text\":\"a\"}\n{\"text\":\"b\"}\n{\"txt\":1}\n");
  std::filesystem::create_directory(folder_ / "nothing");
  struct Case {
    std::vector<std::string> inputs;
    absl::StatusCode code;
    std::vector<std::string> says;
  };
  const Case cases[] = {
      {{text, prompts}, absl::StatusCode::kInvalidArgument, {prompts + ":2", "data.train"}},
      {{broken}, absl::StatusCode::kInvalidArgument, {broken + ":3", "text"}},
      {{folder_ / "none"}, absl::StatusCode::kNotFound, {folder_ / "none"}},
      {{folder_ / "nothing"}, absl::StatusCode::kInvalidArgument, {folder_ / "nothing"}},
      {{Write("empty", "")}, absl::StatusCode::kInvalidArgument, {"no text"}},
  };
  for (const Case& c : cases) {
    const absl::Status status = Run(c.inputs).status();
    EXPECT_EQ(status.code(), c.code) << status;
    for (const std::string& part : c.says) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
    ExpectNothingWritten();
  }
  options_.most_tokens = 8;
  EXPECT_EQ(Run({text}).status().code(), absl::StatusCode::kOutOfRange);
  options_.most_tokens = 9;
  ExpectNothingWritten();
  EXPECT_TRUE(Run({text}).ok());
  options_.separator = 256;
  EXPECT_THAT(std::string(Run({text}).status().message()),
              AllOf(HasSubstr("256"), HasSubstr("255")));
  options_.separator.reset();
  options_.output = text;
  EXPECT_THAT(std::string(Run({text}).status().message()), HasSubstr("another -o"));
  EXPECT_EQ(Contents(text), "some text");
}

TEST_F(TokenizeFilesTest, AnOldFileStaysWhenANewOneCannotBeMade) {
  const std::string text = Write("text", "old");
  ASSERT_TRUE(Run({text}).ok());
  EXPECT_FALSE(Run({text, folder_ / "none"}).ok());
  EXPECT_THAT(Read().ids, ElementsAreArray(Bytes("old")));
}

TEST_F(TokenizeFilesTest, OnlyAFileIsReplaced) {
  namespace fs = std::filesystem;
  const std::string text = Write("text", "some text");
  const std::string pipe = folder_ / "pipe", link = folder_ / "link", loose = folder_ / "loose";
  const std::string target = Write("target", "mine");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  fs::create_symlink(target, link);
  fs::create_symlink(folder_ / "nowhere", loose);
  fs::create_directory(folder_ / "sub");
  const std::pair<std::string, std::string> cases[] = {
      {pipe, "pipe"}, {link, target}, {loose, folder_ / "nowhere"}, {folder_ / "sub", "folder"}};
  for (const auto& [output, says] : cases) {
    options_.output = output;
    // Refused before the texts are looked for.
    const absl::Status status = Run({folder_ / "none"}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(output + ","), HasSubstr(says)));
    EXPECT_FALSE(Run({text}).ok());
  }
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(fs::read_symlink(link), target);
  EXPECT_EQ(Contents(target), "mine");
  EXPECT_FALSE(fs::exists(folder_ / "nowhere"));
}

}  // namespace
}  // namespace zeroshard
