// Ids, against those of Hugging Face's tokenizers (reference/make_reference.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "common/tokenizer/tokenizer.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

using Ids = std::vector<int32_t>;

const std::string& ReferenceFolder() {
  static const std::string& folder = *new std::string(ZEROSHARD_TOKENIZER_REFERENCE);
  return folder;
}

struct Reference {
  std::vector<std::string> texts;
  std::map<std::string, std::vector<Ids>> ids;  // by tokenizer
};

const Reference& Encodings() {
  static const Reference& reference = *[] {
    const auto json = nlohmann::json::parse(Contents(ReferenceFolder() + "/encodings.json"));
    return new Reference{json["texts"], json["ids"]};
  }();
  return reference;
}

class EncodingsTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const auto loaded = Tokenizer::Load(ReferenceFolder() + "/" + GetParam() + ".json");
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    tokenizer_ = *loaded;
  }
  Ids Encode(absl::string_view text) const {
    Ids ids;
    tokenizer_->Encode(text, &ids);
    return ids;
  }
  std::shared_ptr<const Tokenizer> tokenizer_;
};

TEST_P(EncodingsTest, IdsAreThoseOfHuggingFace) {
  const std::vector<Ids>& wanted = Encodings().ids.at(GetParam());
  ASSERT_EQ(wanted.size(), Encodings().texts.size());
  for (int pass = 0; pass < 2; ++pass) {  // the second finds words that were seen
    for (size_t i = 0; i < wanted.size(); ++i) {
      EXPECT_EQ(Encode(Encodings().texts[i]), wanted[i])
          << "text " << i << ": " << nlohmann::json(Encodings().texts[i]).dump(-1, ' ', true);
    }
  }
}

TEST_P(EncodingsTest, EncodingAppends) {
  Ids ids = {7};
  tokenizer_->Encode("harbour", &ids);
  ASSERT_GT(ids.size(), 1u);
  EXPECT_EQ(ids[0], 7);
}

TEST_P(EncodingsTest, DecodedIdsAreTheTextInItsNormalForm) {
  const std::string name = GetParam();
  for (size_t i = 0; i < Encodings().texts.size(); ++i) {
    const absl::StatusOr<std::string> text =
        tokenizer_->Decode(Encodings().ids.at(name)[i], /*skip_special=*/false);
    ASSERT_TRUE(text.ok()) << text.status();
    if (name != "qwen2") {  // no NFC, nothing stripped
      EXPECT_EQ(*text, Encodings().texts[i]) << i;
    }
    EXPECT_EQ(Encode(*text).size(), Encodings().ids.at(name)[i].size()) << i;
  }
}

TEST_P(EncodingsTest, PartsBetweenSafeCutsGiveTheIdsOfTheWhole) {
  std::string text;
  for (int i = 0; i < 8; ++i) {
    for (const std::string& part : Encodings().texts) text += part;
  }
  const Ids whole = Encode(text);
  std::mt19937 random(5);
  for (size_t most : {40, 1000}) {
    Ids parts;
    int cuts = 0;
    for (size_t at = 0; at < text.size(); ++cuts) {
      const size_t from = at + 1 + random() % most;
      const size_t cut = tokenizer_->SafeCut(text, from, text.size());
      ASSERT_GT(cut, at);
      ASSERT_LE(cut, text.size());
      tokenizer_->Encode(absl::string_view(text).substr(at, cut - at), &parts);
      at = cut;
    }
    EXPECT_EQ(parts, whole);
    if (std::string(GetParam()) != "qwen2") {  // one of whose added tokens holds a space
      EXPECT_GT(cuts, 50);
    }
  }
}

TEST_P(EncodingsTest, ManyThreadsEncodeAtOnce) {
  const std::vector<Ids>& wanted = Encodings().ids.at(GetParam());
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < wanted.size(); ++i) {
        const size_t text = (i * 7 + t * 31) % wanted.size();
        if (Encode(Encodings().texts[text]) != wanted[text]) ++wrong[t];
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, ::testing::Each(0));
}

TEST_P(EncodingsTest, BytesThatAreNoUtf8BecomeReplacementCharacters) {
  const std::string r = "\xEF\xBF\xBD";
  // Python 3: bytes.decode(errors="replace").
  const std::pair<std::string, std::string> cases[] = {
      {"a\x92z", "a" + r + "z"},
      {"\xC0\x80", r + r},
      {"\xED\xA0\x80x", r + r + r + "x"},
      {"\xF0\x9F\x99", r},
      {"\xF0\x9F\x99\xF0\x9F\x99\x82", r + "\xF0\x9F\x99\x82"},
      {"\xE2\x82y", r + "y"},
      {"\xF4\x90\x80\x80", r + r + r + r},
      {"\xFF\xFE", r + r},
      {"ok \xE2\x82\xAC \xE2", "ok \xE2\x82\xAC " + r},
  };
  for (const auto& [bytes, text] : cases) {
    EXPECT_EQ(Encode(bytes), Encode(text)) << nlohmann::json(text).dump();
  }
}

TEST_P(EncodingsTest, VocabularyEndsWithTheLargestIdAndTheTokensAreFound) {
  const auto json = nlohmann::json::parse(Contents(ReferenceFolder() + "/" + GetParam() + ".json"));
  std::map<int32_t, std::string> tokens;
  for (const auto& [token, id] : json["model"]["vocab"].items()) tokens[id] = token;
  for (const auto& token : json["added_tokens"]) tokens[token["id"]] = token["content"];
  EXPECT_EQ(tokenizer_->vocab_size(), tokens.rbegin()->first + 1);
  for (const auto& token : json["added_tokens"]) {
    EXPECT_EQ(tokenizer_->Find(token["content"].get<std::string>()), token["id"].get<int32_t>());
  }
  EXPECT_EQ(tokenizer_->Find("<|no such token|>"), std::nullopt);
  EXPECT_EQ(tokenizer_->end_of_text(), tokenizer_->Find("<|endoftext|>"));
  const int32_t end = *tokenizer_->end_of_text();
  const auto hidden = tokenizer_->Decode({end}, /*skip_special=*/true);
  ASSERT_TRUE(hidden.ok());
  EXPECT_EQ(*hidden, "");
  for (int32_t id : {-1, static_cast<int32_t>(tokenizer_->vocab_size())}) {
    const auto none = tokenizer_->Decode({end, id}, /*skip_special=*/false);
    EXPECT_EQ(none.status().code(), absl::StatusCode::kOutOfRange);
    EXPECT_THAT(std::string(none.status().message()), ::testing::HasSubstr(std::to_string(id)));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, EncodingsTest,
                         ::testing::Values("gpt2", "llama3", "smollm2", "qwen2"),
                         [](const auto& test) { return std::string(test.param); });

TEST(ByteTokenizerTest, EveryByteIsAToken) {
  const auto tokenizer = Tokenizer::Load("bytes");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  std::string text;
  for (int byte = 0; byte < 256; ++byte) text.push_back(static_cast<char>(byte));
  Ids ids;
  (*tokenizer)->Encode(text, &ids);
  ASSERT_EQ(ids.size(), 256u);
  for (int32_t byte = 0; byte < 256; ++byte) EXPECT_EQ(ids[static_cast<size_t>(byte)], byte);
  EXPECT_EQ((*tokenizer)->Decode(ids, false).value(), text);
  EXPECT_EQ((*tokenizer)->Decode({256}, false).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*tokenizer)->Decode({-1}, false).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*tokenizer)->vocab_size(), 256);
  EXPECT_EQ((*tokenizer)->end_of_text(), std::nullopt);
  EXPECT_EQ((*tokenizer)->Find("\xFF"), 255);
  EXPECT_EQ((*tokenizer)->Find("ab"), std::nullopt);
  EXPECT_EQ((*tokenizer)->SafeCut(text, 100, 200), 100u);
}

}  // namespace
}  // namespace zeroshard
