// What a tokenizer.json may hold, and what is refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "common/tokenizer/tokenizer.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

using Json = nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using Ids = std::vector<int32_t>;

Json Reference(const std::string& name) {
  return Json::parse(Contents(std::string(ZEROSHARD_TOKENIZER_REFERENCE) + "/" + name + ".json"));
}

class LoadTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  absl::StatusOr<std::shared_ptr<const Tokenizer>> Load(const Json& json) {
    Write("tokenizer.json", json.dump());
    return Tokenizer::Load(folder_ / "tokenizer.json");
  }
  // Of a tokenizer that must load.
  Ids Encode(const Json& json, const std::string& text) {
    const auto tokenizer = Load(json);
    Ids ids;
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    if (tokenizer.ok()) (*tokenizer)->Encode(text, &ids);
    return ids;
  }
  void ExpectRefused(const Json& json, const std::vector<std::string>& says) {
    const auto tokenizer = Load(json);
    ASSERT_EQ(tokenizer.status().code(), absl::StatusCode::kInvalidArgument) << json.dump(1);
    EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(folder_ / "tokenizer.json"));
    for (const std::string& part : says) {
      EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(part));
    }
  }
  TempFolder folder_;
};

// Bytes a to d, and merges of them: ab, abc and cd, in this order.
Json Small() {
  return Json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
    "post_processor": null, "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE",
              "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "abc": 5, "cd": 6, "bcd": 7,
                        "\u0120": 8, "\u0120a": 9},
              "merges": ["a b", "ab c", "c d", ["\u0120", "a"]]}})");
}

TEST_F(LoadTest, TheLowestMergeGoesFirst) {
  EXPECT_EQ(Encode(Small(), "abcd"), (Ids{5, 3}));  // ab, then abc, not cd
  EXPECT_EQ(Encode(Small(), "bcd"), (Ids{1, 6}));
  EXPECT_EQ(Encode(Small(), "abab a"), (Ids{4, 4, 9}));
  Json last_counts = Small();
  last_counts["model"]["merges"].push_back("a b");  // now later than the others
  EXPECT_EQ(Encode(last_counts, "abcd"), (Ids{4, 6}));
}

TEST_F(LoadTest, LongWordsAreMergedLikeShortOnes) {
  // "abcd" 250 times: every one on its own, whatever the length.
  std::string word;
  Ids wanted;
  for (int i = 0; i < 250; ++i) {
    word += "abcd";
    wanted.insert(wanted.end(), {5, 3});
  }
  EXPECT_EQ(Encode(Small(), word), wanted);
}

TEST_F(LoadTest, BytesThatTheVocabularyLacksAreLeftOutAsInHuggingFace) {
  EXPECT_EQ(Encode(Small(), "axb"), (Ids{4}));
}

TEST_F(LoadTest, WholeWordsComeFirstWhereMergesAreIgnored) {
  Json json = Small();
  EXPECT_EQ(Encode(json, "bcd"), (Ids{1, 6}));
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(Encode(json, "bcd"), (Ids{7}));
  EXPECT_EQ(Encode(json, "bcdc"), (Ids{1, 6, 2}));
}

TEST_F(LoadTest, PiecesGetASpaceInFrontWhereTheFileSaysSo) {
  Json json = Small();
  json["pre_tokenizer"]["add_prefix_space"] = true;
  json["added_tokens"] = Json::parse(R"([{"id": 10, "content": "<x>", "special": true}])");
  EXPECT_EQ(Encode(json, "ac"), (Ids{9, 2}));
  EXPECT_EQ(Encode(json, " ac<x>ac"), (Ids{9, 2, 10, 9, 2}));
}

TEST_F(LoadTest, TokensInWhiteSpaceThatTheOneBeforeTookAreAsInHuggingFace) {
  // Ids by tokenizers 0.20.3, of these texts with each pair of flags.
  const std::string texts[] = {"a\n\n\n\nb", "a\n\n\n\n\nb", "\n\n \n\n", "a\n\n <y>b",
                               "a\n\n  \n\nb\n\n"};
  const Ids repeated[] = {
      {0, 10, 10, 1}, {0, 10, 10, 1}, {10, 10}, {0, 10, 11, 1}, {0, 10, 10, 1, 10}};
  const Ids swallowed[] = {{0, 10, 1}, {0, 10, 1}, {10}, {0, 10, 11, 1}, {0, 10, 1, 10}};
  for (const auto& [lstrip, rstrip] : {std::pair(true, true), {false, true}, {true, false}}) {
    Json json = Small();
    json["added_tokens"] = {
        {{"id", 10}, {"content", "\n\n"}, {"lstrip", lstrip}, {"rstrip", rstrip}},
        {{"id", 11}, {"content", " <y>"}, {"lstrip", true}}};
    for (size_t i = 0; i < std::size(texts); ++i) {
      EXPECT_EQ(Encode(json, texts[i]), (lstrip && rstrip ? swallowed : repeated)[i])
          << i << " " << lstrip << rstrip;
    }
  }
}

TEST_F(LoadTest, FilesWithoutTypeOrWithEmptyAffixesAreThoseOfOldVersions) {
  Json json = Small();
  json["model"].erase("type");
  json["model"]["unk_token"] = "";
  json["model"]["continuing_subword_prefix"] = "";
  json["model"]["end_of_word_suffix"] = "";
  json["model"]["dropout"] = nullptr;
  json["model"]["fuse_unk"] = false;
  EXPECT_EQ(Encode(json, "abcd"), (Ids{5, 3}));
}

TEST_F(LoadTest, EverythingThatWouldChangeAnIdIsRefusedByName) {
  struct Case {
    const char* at;
    Json value;
    std::vector<std::string> says;
  };
  const Json metaspace = {{"type", "Metaspace"}, {"replacement", "_"}};
  const Case cases[] = {
      {"/truncation", {{"max_length", 5}}, {"truncation", "max_length", "null"}},
      {"/padding", {{"strategy", "BatchLongest"}}, {"padding"}},
      {"/normalizer", {{"type", "Lowercase"}}, {"normalizer", "Lowercase", "NFC"}},
      {"/normalizer",
       {{"type", "Sequence"}, {"normalizers", {{{"type", "NFKC"}}}}},
       {"normalizer", "NFKC"}},
      {"/pre_tokenizer", nullptr, {"pre_tokenizer", "ByteLevel"}},
      {"/pre_tokenizer", metaspace, {"pre_tokenizer.type", "Metaspace"}},
      {"/pre_tokenizer", {{"type", "Digits"}, {"individual_digits", true}}, {"ByteLevel"}},
      {"/pre_tokenizer/use_regex", "yes", {"use_regex", "yes"}},
      {"/pre_tokenizer/new_field", 1, {"pre_tokenizer.new_field", "not known"}},
      {"/pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"},
           {"pattern", {{"Regex", "\\w+"}}},
           {"behavior", "Isolated"},
           {"invert", false}}}}},
       {"pre_tokenizer.pretokenizers[0].pattern", "\\w+", "GPT-2", "Llama 3", "Qwen2"}},
      {"/pre_tokenizer",
       {{"type", "Split"},
        {"pattern", {{"String", " "}}},
        {"behavior", "Isolated"},
        {"invert", false}},
       {"pattern", "String", "Regex"}},
      {"/pre_tokenizer",
       {{"type", "Split"},
        {"pattern", {{"Regex", " "}}},
        {"behavior", "Removed"},
        {"invert", true}},
       {"Removed", "Isolated"}},
      {"/post_processor", {{"type", "BertProcessing"}}, {"post_processor", "BertProcessing"}},
      {"/decoder", nullptr, {"decoder"}},
      {"/decoder", {{"type", "WordPiece"}}, {"decoder", "WordPiece"}},
      {"/model/type", "Unigram", {"model.type", "Unigram", "BPE"}},
      {"/model/dropout", 0.1, {"model.dropout", "0.1"}},
      {"/model/continuing_subword_prefix", "##", {"continuing_subword_prefix", "##"}},
      {"/model/end_of_word_suffix", "</w>", {"end_of_word_suffix", "</w>"}},
      {"/model/byte_fallback", true, {"byte_fallback"}},
      {"/model/unk_token", "a", {"unk_token", "256"}},
      {"/model/more", 1, {"model.more"}},
      {"/model/vocab", Json::array(), {"model.vocab"}},
      {"/model/vocab/a", -1, {"model.vocab", "\"a\"", "-1"}},
      {"/model/vocab/a", 4194304, {"model.vocab", "4194304"}},
      {"/model/vocab/a", 1, {"model.vocab", "the id 1"}},
      {"/model/vocab/a", "0", {"model.vocab"}},
      {"/model/merges", nullptr, {"model.merges"}},
      {"/model/merges/0", "a b c", {"model.merges[0]", "a b c"}},
      {"/model/merges/1", {"a"}, {"model.merges[1]"}},
      {"/model/merges/1", "a d", {"model.merges[1]", "a d", "vocabulary"}},
      {"/added_tokens", {{{"id", 11}, {"content", "<x>"}}}, {"added_tokens[0].id", "11", "10"}},
      {"/added_tokens", {{{"id", 3}, {"content", "a"}}}, {"added_tokens[0].id", "3", "0"}},
      {"/added_tokens", {{{"content", "<x>"}}}, {"added_tokens[0]"}},
      {"/added_tokens", {{{"id", 10}, {"content", "<x>"}, {"odd", 1}}}, {"added_tokens[0].odd"}},
      {"/more", 1, {"more", "not known"}},
  };
  for (const Case& c : cases) {
    Json json = Small();
    json[Json::json_pointer(c.at)] = c.value;
    SCOPED_TRACE(c.at);
    ExpectRefused(json, c.says);
  }
}

TEST_F(LoadTest, WhatIsNoJsonIsRefused) {
  for (const char* text : {"", "[]", "{\"model\":", "nonsense", "{}", "{\"version\": \"1.0\"}"}) {
    Write("tokenizer.json", text);
    EXPECT_EQ(Tokenizer::Load(folder_.path()).status().code(), absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST_F(LoadTest, NestingThatNoTokenizerHasIsRefused) {
  const std::string deep = std::string(3'000'000, '[') + std::string(3'000'000, ']');
  for (const std::string& text :
       {deep, "{\"truncation\": " + deep + "}", "{\"model\": {\"merges\": [" + deep + "]}}"}) {
    Write("tokenizer.json", text);
    const absl::Status status = Tokenizer::Load(folder_.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("tokenizer.json"), HasSubstr("nested deeper than 64")));
  }
  Write("tokenizer.json", Reference("qwen2").dump());
  Write("tokenizer_config.json", "{\"eos_token\": " + deep + "}");
  EXPECT_THAT(std::string(Tokenizer::Load(folder_.path()).status().message()),
              AllOf(HasSubstr("tokenizer_config.json"), HasSubstr("nested deeper than 64")));
}

TEST_F(LoadTest, AFileThatIsNotThereIsNamed) {
  for (const std::string& name : {folder_ / "none.json", folder_.path()}) {
    const absl::Status status = Tokenizer::Load(name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    EXPECT_THAT(std::string(status.message()), HasSubstr("bytes"));
  }
}

TEST_F(LoadTest, TheFolderSaysWhichTokenEndsAText) {
  Json json = Reference("qwen2");
  Write("tokenizer.json", json.dump());
  const auto end = [&]() -> std::string {
    const auto tokenizer = Tokenizer::Load(folder_.path());
    if (!tokenizer.ok()) return std::string(tokenizer.status().message());
    if (!(*tokenizer)->end_of_text().has_value()) return "none";
    return (*tokenizer)->Decode({*(*tokenizer)->end_of_text()}, false).value();
  };
  EXPECT_EQ(end(), "<|endoftext|>");
  Write("config.json", R"({"eos_token_id": [751, 752]})");
  EXPECT_EQ(end(), (*Tokenizer::Load(folder_.path()))->Decode({751}, false).value());
  Write("config.json", R"({"eos_token_id": 100000})");
  EXPECT_THAT(end(), HasSubstr("config.json: eos_token_id is 100000"));
  Write("tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  EXPECT_EQ(end(), "<|im_end|>");
  Write("tokenizer_config.json", R"({"eos_token": {"content": "<|im_start|>"}})");
  EXPECT_EQ(end(), "<|im_start|>");
  Write("tokenizer_config.json", R"({"eos_token": "<eos>"})");
  EXPECT_THAT(end(), HasSubstr("tokenizer_config.json: eos_token is \"<eos>\""));
  Write("tokenizer_config.json", "{");
  EXPECT_THAT(end(), HasSubstr("tokenizer_config.json: no JSON"));
  std::filesystem::remove(folder_ / "tokenizer_config.json");
  std::filesystem::remove(folder_ / "config.json");
  Write("tokenizer.json", Small().dump());
  EXPECT_EQ(end(), "none");
}

}  // namespace
}  // namespace zeroshard
