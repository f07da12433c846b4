// Documents: what separates them, what is masked between them, and prompts without loss.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "absl/strings/str_cat.h"
#include "tests/worker/data/data_folder.h"
#include "worker/data/dataset.h"
#include "worker/data/text_tokens.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// One token a byte, but "ab" is one: where a text is cut matters.
class PairTokenizer : public Tokenizer {
 public:
  static constexpr int32_t kPair = 256, kEnd = 257;

  void Encode(absl::string_view text, std::vector<int32_t>* ids) const override {
    for (size_t i = 0; i < text.size(); ++i) {
      if (text.substr(i, 2) == "ab") {
        ids->push_back(kPair);
        ++i;
      } else {
        ids->push_back(static_cast<uint8_t>(text[i]));
      }
    }
  }
  absl::StatusOr<std::string> Decode(absl::Span<const int32_t>, bool) const override {
    return absl::UnimplementedError("not needed");
  }
  int64_t vocab_size() const override { return kEnd + 1; }
  std::optional<int32_t> end_of_text() const override { return kEnd; }
  std::optional<int32_t> Find(absl::string_view) const override { return std::nullopt; }
  size_t SafeCut(absl::string_view text, size_t from, size_t limit) const override {
    for (size_t at = from; at < limit; ++at) {
      if (text[at - 1] != 'a' || text[at] != 'b') return at;
    }
    return text.size();
  }
};

v1::DataSpec Spec(const std::vector<std::string>& paths, const std::string& tokenizer) {
  v1::DataSpec spec;
  for (const std::string& path : paths) spec.add_train(path);
  spec.set_tokenizer(tokenizer);
  return spec;
}

DatasetOptions Pairs(int threads = 1) {
  DatasetOptions options;
  options.threads = threads;
  options.tokenizer = std::make_shared<PairTokenizer>();
  return options;
}

std::vector<int32_t> RunOf(const v1::DataSpec& spec, const DatasetOptions& options) {
  const auto data = TokenDataset::Open(spec, 1, 300, options);
  EXPECT_TRUE(data.ok()) << data.status();
  return data.ok() ? RunOf(**data) : std::vector<int32_t>();
}

std::string ErrorOf(const v1::DataSpec& spec, const DatasetOptions& options = {}) {
  const auto data = TokenDataset::Open(spec, 1, 300, options);
  EXPECT_FALSE(data.ok());
  return std::string(data.status().message());
}

// A token of a document, as a dataset should treat it.
struct Expected {
  int32_t token;
  bool first = false;   // of its document
  bool silent = false;  // part of a prompt
};

// Reads every sample and compares it with the rules, from the whole list of tokens.
void ExpectMaskedSamples(const TokenDataset& data, int64_t sequence,
                         const std::vector<Expected>& run) {
  ASSERT_TRUE(data.masks_documents());
  ASSERT_EQ(data.token_count(), static_cast<int64_t>(run.size()));
  std::vector<int32_t> tokens(sequence), targets(sequence), starts(sequence);
  for (int64_t sample = 0; sample < data.sample_count(); ++sample) {
    SCOPED_TRACE(absl::StrCat("sample ", sample));
    data.Sample(sample, absl::MakeSpan(tokens), absl::MakeSpan(targets));
    data.DocumentStarts(sample, absl::MakeSpan(starts));
    int32_t start = 0;
    for (int64_t t = 0; t < sequence; ++t) {
      const Expected& here = run[sample * sequence + t];
      const Expected& next = run[sample * sequence + t + 1];
      if (here.first) start = static_cast<int32_t>(t);
      EXPECT_EQ(tokens[t], here.token) << t;
      EXPECT_EQ(starts[t], start) << t;
      EXPECT_EQ(targets[t], next.first || next.silent ? -1 : next.token) << t;
    }
  }
  EXPECT_TRUE(data.status().ok()) << data.status();
}

// Documents of 1, 2, 3, ... tokens, `total` of them together, whose last is `separator`.
std::vector<Expected> GrowingDocuments(int total, int32_t separator) {
  std::vector<Expected> run;
  for (int length = 1; static_cast<int>(run.size()) < total; ++length) {
    for (int i = 0; i < length; ++i) {
      run.push_back({i + 1 == length ? separator : 10 + i, i == 0, false});
    }
  }
  return run;
}

std::vector<uint16_t> TokensOf(const std::vector<Expected>& run) {
  std::vector<uint16_t> ids;
  for (const Expected& token : run) ids.push_back(static_cast<uint16_t>(token.token));
  return ids;
}

TEST(DocumentsTest, EachFileEndsWithTheEndOfTextToken) {
  DataFolder folder;
  const std::string a = folder.Write("a.txt", "\xEF\xBB\xBFxaby"), b = folder.Write("b.txt", "z");
  EXPECT_THAT(RunOf(Spec({a, b}, "./pairs"), Pairs()), ElementsAre('x', 256, 'y', 257, 'z', 257));
}

TEST(DocumentsTest, TheSeparatorOfTheSpecIsUsedInItsPlace) {
  DataFolder folder;
  v1::DataSpec spec = Spec({folder.Write("a.txt", "x"), folder.Write("b.txt", "y")}, "./pairs");
  spec.mutable_packing()->set_separator(280);
  EXPECT_THAT(RunOf(spec, Pairs()), ElementsAre('x', 280, 'y', 280));
  spec.mutable_packing()->set_separator(300);
  EXPECT_THAT(ErrorOf(spec, Pairs()), AllOf(HasSubstr("300"), HasSubstr("separator")));
}

TEST(DocumentsTest, BytesHaveASeparatorOnlyWhereTheSpecNamesOne) {
  DataFolder folder;
  v1::DataSpec spec = Spec({folder.Write("a.txt", "x"), folder.Write("b.txt", "y")}, "bytes");
  EXPECT_THAT(RunOf(spec, {}), ElementsAre('x', 'y'));
  spec.mutable_packing()->set_separator(256);
  EXPECT_THAT(RunOf(spec, {}), ElementsAre('x', 256, 'y', 256));
}

TEST(DocumentsTest, AByteTokenizerReadsTheTextOfJsonLines) {
  DataFolder folder;
  const std::string lines = folder.Write(
      "a.jsonl", "{\"text\": \"x\\n\"}\n\n{\"id\": 3, \"text\": \"\\u00e9\"}\n{\"text\": \"\"}\n");
  EXPECT_THAT(RunOf(Spec({lines}, "bytes"), {}), ElementsAre('x', '\n', 0xC3, 0xA9));
  const std::string between = folder.Write("b.txt", "{}");
  EXPECT_THAT(RunOf(Spec({lines, between, lines}, "bytes"), {}).size(), 4u + 2);
  v1::DataSpec text = Spec({lines}, "bytes");
  text.set_format("text");
  EXPECT_THAT(RunOf(text, {}).size(), Contents(lines).size());
}

TEST(DocumentsTest, TheTokensDoNotDependOnTheNumberOfThreads) {
  DataFolder folder;
  std::string text;  // one long document, whose pairs lie at every place of a cut
  for (int i = 0; text.size() < (700 << 10); ++i)
    text.append(i % 3, 'c').append("abab").append("a");
  std::string lines;
  for (int i = 0; i < 3000; ++i) absl::StrAppend(&lines, "{\"text\": \"ab", i, "aab\"}\n");
  const std::string a = folder.Write("a.txt", text), b = folder.Write("b.jsonl", lines);

  std::vector<int32_t> expected;
  const PairTokenizer tokenizer;
  tokenizer.Encode(text, &expected);
  expected.push_back(PairTokenizer::kEnd);
  for (int i = 0; i < 3000; ++i) {
    tokenizer.Encode(absl::StrCat("ab", i, "aab"), &expected);
    expected.push_back(PairTokenizer::kEnd);
  }
  for (const int threads : {1, 2, 5}) {
    EXPECT_TRUE(RunOf(Spec({a, b}, "./pairs"), Pairs(threads)) == expected) << threads;
  }
}

TEST(DocumentsTest, ATokenizerThatIsTooLargeForTheModelIsRefusedWithBothNumbers) {
  DataFolder folder;
  const v1::DataSpec spec = Spec({folder.Write("a.txt", "xyz")}, "./pairs");
  const auto data = TokenDataset::Open(spec, 1, 257, Pairs());
  EXPECT_EQ(data.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(data.status().message(),
              AllOf(HasSubstr("./pairs has 258 tokens"), HasSubstr("model.vocab_size is 257")));
  EXPECT_TRUE(TokenDataset::Open(spec, 1, 258, Pairs()).ok());
}

TEST(DocumentsTest, MoreTextThanTheLimitIsRefusedWithWhatToRun) {
  const PairTokenizer tokenizer;
  TokenRun run(300);
  TextTokens::Options options;
  options.tokenizer = &tokenizer;
  options.limit = 10;
  TextTokens text(options, &run);
  EXPECT_TRUE(text.Add({.prompt = "12345", .text = "12345"}).ok());
  const absl::Status status = text.Add({.prompt = "", .text = "x"});
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("10 bytes"), HasSubstr("zeroshard tokenize")));
}

TEST(DocumentsTest, ATokenizersFileIsReadFromItsFolder) {
  DataFolder folder;
  folder.Write("model/tokenizer.json", R"({"version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 3, "content": "<|endoftext|>", "single_word": false, "lstrip": false,
                      "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                      "use_regex": true},
    "post_processor": null, "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
              "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})");
  folder.Write("model/tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
  const v1::DataSpec spec = Spec({folder.Write("a.txt", "abba")}, folder.At("model"));
  EXPECT_THAT(RunOf(spec, {}), ElementsAre(2, 1, 0, 3));
}

TEST(DocumentsTest, WhatLooksLikeNoTextIsRefusedUntilTheFormatSaysSo) {
  DataFolder folder;
  v1::DataSpec spec = Spec({folder.Write("lines.json", "{\"text\": \"ab\"}\n")}, "bytes");
  const auto data = TokenDataset::Open(spec, 1, 300);
  EXPECT_EQ(data.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(data.status().message(), HasSubstr("data.format"));
  spec.set_format("jsonl");
  EXPECT_TRUE(TokenDataset::Open(spec, 1, 300).ok());
}

TEST(DocumentsTest, ATextBeyondTheLimitIsRefusedBeforeItIsRead) {
  DataFolder folder;
  const std::string path = folder.Write("a.txt", "x");
  std::filesystem::resize_file(path, (int64_t{2} << 30) + 1);  // takes no room on the disk
  v1::DataSpec spec = Spec({path}, "./pairs");
  spec.set_format("text");  // all those NULs
  const auto data = TokenDataset::Open(spec, 1, 300, Pairs());
  EXPECT_EQ(data.status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(data.status().message(), HasSubstr("2147483648 bytes"));
}

// Masks between documents.
TEST(DocumentsTest, FilesAndLinesThatAreReadHereAreMaskedFromEachOther) {
  DataFolder folder;
  const std::string a = folder.Write("a.txt", "abcd"), b = folder.Write("b.txt", "e");
  const std::string c =
      folder.Write("c.jsonl", "{\"text\": \"fg\"}\n{\"text\": \"\"}\n{\"text\": \"h\"}\n");
  std::vector<Expected> run = {{256, true}, {'c'}, {'d'}, {257},       {'e', true}, {257},
                               {'f', true}, {'g'}, {257}, {'h', true}, {257}};
  v1::DataSpec spec = Spec({a, b, c}, "./pairs");
  spec.mutable_packing()->set_mask_documents(true);
  for (const int64_t sequence : {1, 2, 3, 5, 10}) {
    const auto data = TokenDataset::Open(spec, sequence, 300, Pairs());
    ASSERT_TRUE(data.ok()) << data.status();
    ExpectMaskedSamples(**data, sequence, run);
  }
  // With bytes and no separator the same boundaries.
  run = {{'a', true}, {'b'}, {'c'}, {'d'}, {'e', true}, {'f', true}, {'g'}, {'h', true}};
  spec.set_tokenizer("bytes");
  for (const int64_t sequence : {1, 3, 7}) {
    const auto data = TokenDataset::Open(spec, sequence, 256);
    ASSERT_TRUE(data.ok()) << data.status();
    ExpectMaskedSamples(**data, sequence, run);
  }
}

TEST(DocumentsTest, WithoutMasksEverySampleIsOneDocumentAndFirstTokensCarryLoss) {
  DataFolder folder;
  const v1::DataSpec spec =
      Spec({folder.Write("a.txt", "xy"), folder.Write("b.txt", "z")}, "./pairs");
  const auto data = TokenDataset::Open(spec, 4, 300, Pairs());
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_FALSE((*data)->masks_documents());
  std::vector<int32_t> tokens(4), targets(4), starts(4, 9);
  (*data)->Sample(0, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  (*data)->DocumentStarts(0, absl::MakeSpan(starts));
  EXPECT_THAT(targets, ElementsAre('y', 257, 'z', 257));
  EXPECT_THAT(starts, Each(0));
}

TEST(DocumentsTest, InTokenFilesADocumentEndsWithItsSeparator) {
  DataFolder folder;
  std::vector<Expected> first = GrowingDocuments(100, 2);
  first.back().token = 17;  // a file without a last separator; the next one begins a document
  const std::vector<Expected> second = GrowingDocuments(50, 2);
  const std::string a = folder.Write("a.bin", Raw(TokensOf(first)));
  const std::string b =
      folder.Write("b.bin", Header(20240520, 1, second.size()) + Raw(TokensOf(second)));
  std::vector<Expected> run = first;
  run.insert(run.end(), second.begin(), second.end());
  v1::DataSpec spec = Spec({a, b}, "tokens");
  spec.mutable_packing()->set_mask_documents(true);
  spec.mutable_packing()->set_separator(2);
  for (const int64_t sequence : {1, 2, 7, 64, 150}) {
    const auto data = TokenDataset::Open(spec, sequence, 300);
    ASSERT_TRUE(data.ok()) << data.status();
    ExpectMaskedSamples(**data, sequence, run);
  }
}

TEST(DocumentsTest, OfMegatronsFilesTheIndexSaysWhereDocumentsBegin) {
  DataFolder folder;
  // Sequences of 2, 0, 3, 1 and 2 tokens; documents are {0, 1}, {2}, nothing, {3, 4}.
  folder.Write("m.idx", MegatronIndexFile(4, 4, {2, 0, 3, 1, 2}, {0, 2, 3, 3, 5}));
  const std::string m = folder.Write("m.bin", Raw<int32_t>({1, 2, 3, 4, 5, 6, 7, 8}));
  folder.Write("n.idx", MegatronIndexFile(8, 2, {2}, {0, 1}));
  const std::string n = folder.Write("n.bin", Raw<uint16_t>({1, 2}));
  const std::vector<Expected> run = {{1, true}, {2}, {3, true}, {4},       {5},
                                     {6, true}, {7}, {8},       {1, true}, {2}};
  v1::DataSpec spec = Spec({m, n}, "tokens");
  spec.mutable_packing()->set_mask_documents(true);
  for (const int64_t sequence : {1, 2, 3, 4, 9}) {
    const auto data = TokenDataset::Open(spec, sequence, 300);
    ASSERT_TRUE(data.ok()) << data.status();
    ExpectMaskedSamples(**data, sequence, run);
  }
}

TEST(DocumentsTest, AnIndexWrittenToDuringTheJobIsNoticedInsteadOfFollowed) {
  DataFolder folder;
  constexpr int64_t kCount = 100000;  // an index beyond the mapping threshold
  std::vector<int64_t> documents(kCount + 1);
  std::iota(documents.begin(), documents.end(), 0);
  const std::string index =
      folder.Write("m.idx", MegatronIndexFile(8, 2, std::vector<int32_t>(kCount, 1), documents));
  v1::DataSpec spec =
      Spec({folder.Write("m.bin", Raw(std::vector<uint16_t>(kCount, 7)))}, "tokens");
  spec.mutable_packing()->set_mask_documents(true);
  const auto data = TokenDataset::Open(spec, 4, 300);
  ASSERT_TRUE(data.ok()) << data.status();
  std::vector<int32_t> starts(4);
  (*data)->DocumentStarts(1, absl::MakeSpan(starts));
  EXPECT_THAT(starts, ElementsAre(0, 1, 2, 3));
  {
    std::fstream writer(index, std::ios::in | std::ios::out | std::ios::binary);
    writer.seekp(34 + 12 * kCount);
    for (int64_t i = 0; i <= kCount; ++i) writer << Raw<int64_t>({kCount + 1});
  }
  (*data)->DocumentStarts(1, absl::MakeSpan(starts));
  EXPECT_THAT(starts, Each(0));
  EXPECT_EQ((*data)->status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT((*data)->status().message(), HasSubstr(index));
}

TEST(DocumentsTest, MasksThatNothingTellsTheBoundariesForAreRefusedWithWhatToWrite) {
  DataFolder folder;
  const std::string raw = folder.Write("a.bin", Raw<uint16_t>({1, 2, 3}));
  v1::DataSpec spec = Spec({raw}, "tokens");
  spec.mutable_packing()->set_mask_documents(true);
  EXPECT_THAT(ErrorOf(spec), AllOf(HasSubstr(raw), HasSubstr("data.packing.separator"),
                                   HasSubstr("mask_documents: false")));
  folder.Write("a.idx", MegatronIndexFile(8, 2, {1, 2}, {0}));
  EXPECT_THAT(ErrorOf(spec), AllOf(HasSubstr("a.idx"), HasSubstr("mask_documents: false")));
  spec.mutable_packing()->set_mask_documents(false);
  EXPECT_TRUE(TokenDataset::Open(spec, 1, 300).ok());
}

// Prompts.
TEST(DocumentsTest, PromptTokensCarryNoLossAndTheSeparatorDoes) {
  DataFolder folder;
  const std::string lines = folder.Write("a.jsonl", R"({"prompt": "qabr", "completion": "ab"})"
                                                    "\n"
                                                    R"({"prompt": "s", "completion": "tu"})"
                                                    "\n"
                                                    R"({"text": "v"})"
                                                    "\n");
  // The prompt's last 'a' and the completion's first 'b' would not become one token either.
  v1::DataSpec spec = Spec({lines}, "./pairs");
  const auto data = TokenDataset::Open(spec, 10, 300, Pairs());
  ASSERT_TRUE(data.ok()) << data.status();
  ASSERT_EQ((*data)->token_count(), 11);
  std::vector<int32_t> tokens(10), targets(10);
  (*data)->Sample(0, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(tokens, ElementsAre('q', 256, 'r', 256, 257, 's', 't', 'u', 257, 'v'));
  EXPECT_THAT(targets, ElementsAre(-1, -1, 256, 257, -1, 't', 'u', 257, 'v', 257));

  spec.mutable_packing()->set_mask_documents(true);
  for (const int64_t sequence : {1, 2, 3, 10}) {
    const auto masked = TokenDataset::Open(spec, sequence, 300, Pairs());
    ASSERT_TRUE(masked.ok()) << masked.status();
    ExpectMaskedSamples(**masked, sequence,
                        {{'q', true, true},
                         {256, false, true},
                         {'r', false, true},
                         {256},
                         {257},
                         {'s', true, true},
                         {'t'},
                         {'u'},
                         {257},
                         {'v', true},
                         {257}});
  }
}

TEST(DocumentsTest, PromptAndCompletionAreTurnedIntoTokensApart) {
  DataFolder folder;
  const std::string lines =
      folder.Write("a.jsonl", "{\"prompt\": \"xa\", \"completion\": \"by\"}\n");
  EXPECT_THAT(RunOf(Spec({lines}, "bytes"), {}).size(), 4u);
  const auto data = TokenDataset::Open(Spec({lines}, "./pairs"), 4, 300, Pairs());
  ASSERT_TRUE(data.ok()) << data.status();
  std::vector<int32_t> tokens(4), targets(4);
  (*data)->Sample(0, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(tokens, ElementsAre('x', 'a', 'b', 'y'));
  EXPECT_THAT(targets, ElementsAre(-1, 'b', 'y', 257));
}

TEST(DocumentsTest, ASampleWithinAPromptCarriesNoLossAtAll) {
  DataFolder folder;
  const std::string prompt(100, 'p');
  const std::string lines = folder.Write(
      "a.jsonl", absl::StrCat("{\"prompt\": \"", prompt, "\", \"completion\": \"c\"}\n"));
  const auto data = TokenDataset::Open(Spec({lines}, "bytes"), 20, 256);
  ASSERT_TRUE(data.ok()) << data.status();
  ASSERT_EQ((*data)->sample_count(), 5);
  std::vector<int32_t> tokens(20), targets(20);
  (*data)->Sample(1, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(tokens, Each('p'));
  EXPECT_THAT(targets, Each(-1));
  (*data)->Sample(4, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_EQ(targets[18], -1);
  EXPECT_EQ(targets[19], 'c');
  EXPECT_TRUE((*data)->status().ok());
}

TEST(DocumentsTest, PromptsAloneAreRefused) {
  DataFolder folder;
  const std::string lines =
      folder.Write("a.jsonl", "{\"prompt\": \"xyz\", \"completion\": \"\"}\n");
  EXPECT_THAT(ErrorOf(Spec({lines}, "bytes")), HasSubstr("prompts alone"));
}

TEST(DocumentsTest, MessagesCallTheListByItsName) {
  DataFolder folder;
  DatasetOptions options;
  options.key = "eval.data";
  EXPECT_THAT(ErrorOf(Spec({}, "bytes"), options), HasSubstr("eval.data is empty"));
  EXPECT_THAT(ErrorOf(Spec({folder.At("none")}, "bytes"), options),
              HasSubstr("find eval.data entry"));
  EXPECT_THAT(ErrorOf(Spec({folder.Write("a", "x")}, "bytes"), options), HasSubstr("eval.data ("));
}

}  // namespace
}  // namespace zeroshard
