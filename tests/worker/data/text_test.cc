// Byte tokens: which files, in which order, and that nothing but a byte order mark is changed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "tests/worker/data/data_folder.h"
#include "worker/data/dataset.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

v1::DataSpec Bytes(const std::vector<std::string>& paths) {
  v1::DataSpec spec;
  for (const std::string& path : paths) spec.add_train(path);
  spec.set_tokenizer("bytes");
  return spec;
}

// The whole run of tokens as a string, read in samples of one token.
std::string AllText(const v1::DataSpec& spec) {
  auto data = TokenDataset::Open(spec, 1, 256);
  EXPECT_TRUE(data.ok()) << data.status();
  if (!data.ok()) return "";
  std::string text;
  int32_t token = 0, target = 0;
  for (int64_t i = 0; i < (*data)->sample_count(); ++i) {
    (*data)->Sample(i, absl::MakeSpan(&token, 1), absl::MakeSpan(&target, 1));
    text.push_back(static_cast<char>(token));
  }
  text.push_back(static_cast<char>(target));
  EXPECT_EQ((*data)->token_count(), static_cast<int64_t>(text.size()));
  return text;
}

TEST(TextTest, ByteOrderMarkIsStrippedAtEachFilesStartOnly) {
  DataFolder folder;
  const std::string bom = "\xEF\xBB\xBF";
  const std::string a = folder.Write("a", bom + "one" + bom);
  const std::string b = folder.Write("b", bom + "two");
  EXPECT_EQ(AllText(Bytes({a, b})), "one" + bom + "two");
}

TEST(TextTest, PartOfAByteOrderMarkIsText) {
  DataFolder folder;
  EXPECT_EQ(AllText(Bytes({folder.Write("a", "\xEF\xBB")})), "\xEF\xBB");
}

TEST(TextTest, CarriageReturnsNulsAndInvalidUtf8AreKept) {
  DataFolder folder;
  const std::string content("line\r\nnul\0\x92 end", 16);
  EXPECT_EQ(AllText(Bytes({folder.Write("a", content)})), content);
}

TEST(TextTest, NothingIsInsertedBetweenFilesEvenWithoutAFinalNewline) {
  DataFolder folder;
  const std::string a = folder.Write("a", "no newline");
  const std::string b = folder.Write("b", "next\n");
  EXPECT_EQ(AllText(Bytes({a, b})), "no newlinenext\n");
  EXPECT_EQ(AllText(Bytes({b, a})), "next\nno newline");  // entries in the order they were given
}

TEST(TextTest, AMappedFileReadsLikeACopiedOne) {
  DataFolder folder;
  // A three-byte character over every offset modulo 4096 of a file beyond the mapping threshold.
  std::string content;
  while (content.size() < (3 << 20)) content += "\xE2\x82\xAC";
  auto data = TokenDataset::Open(Bytes({folder.Write("big", content)}), 4096, 256);
  ASSERT_TRUE(data.ok()) << data.status();
  ASSERT_EQ((*data)->token_count(), static_cast<int64_t>(content.size()));
  std::vector<int32_t> tokens(4096), targets(4096);
  for (int64_t i : {int64_t{0}, int64_t{1}, int64_t{511}, (*data)->sample_count() - 1}) {
    (*data)->Sample(i, absl::MakeSpan(tokens), absl::MakeSpan(targets));
    for (int64_t t = 0; t < 4096; ++t) {
      ASSERT_EQ(tokens[t], static_cast<uint8_t>(content[i * 4096 + t]));
      ASSERT_EQ(targets[t], static_cast<uint8_t>(content[i * 4096 + t + 1]));
    }
  }
}

TEST(TextTest, FoldersAreReadRecursivelyInTheOrderOfPathBytes) {
  DataFolder folder;
  folder.Write("d/b", "4");
  folder.Write("d/B", "3");
  folder.Write("d-e", "2");  // '-' sorts before '/'
  folder.Write("a", "1");
  folder.Write("z/y/x", "5");
  EXPECT_EQ(AllText(Bytes({folder.path()})), "12345");
}

TEST(TextTest, HiddenNamesInFoldersAreSkipped) {
  DataFolder folder;
  folder.Write(".git/objects/pack", "binary");
  folder.Write(".DS_Store", "binary");
  folder.Write("text", "hello");
  EXPECT_EQ(AllText(Bytes({folder.path()})), "hello");
}

TEST(TextTest, ATextWithSeveralNamesIsReadOnce) {
  DataFolder folder;
  const std::string file = folder.Write("GPL-3", "the text");
  ASSERT_EQ(symlink("GPL-3", folder.At("GPL").c_str()), 0);
  ASSERT_EQ(link(file.c_str(), folder.At("hard").c_str()), 0);
  EXPECT_EQ(AllText(Bytes({folder.path()})), "the text");
  EXPECT_EQ(AllText(Bytes({file, folder.path(), file})), "the text");
}

TEST(TextTest, LinksToFoldersAndToNothingAreNotFollowedInAFolder) {
  DataFolder folder;
  folder.Write("sub/file", "text");
  ASSERT_EQ(symlink(".", folder.At("loop").c_str()), 0);
  ASSERT_EQ(symlink("nowhere", folder.At("dangling").c_str()), 0);
  EXPECT_EQ(AllText(Bytes({folder.path()})), "text");
  // A folder that the job itself names through a link is read.
  DataFolder other;
  ASSERT_EQ(symlink(folder.path().c_str(), other.At("data").c_str()), 0);
  EXPECT_EQ(AllText(Bytes({other.At("data")})), "text");
}

TEST(TextTest, PipesInAFolderDoNotHangTheOpen) {
  DataFolder folder;
  folder.Write("text", "hello");
  ASSERT_EQ(mkfifo(folder.At("pipe").c_str(), 0600), 0);
  EXPECT_EQ(AllText(Bytes({folder.path()})), "hello");
  auto named = TokenDataset::Open(Bytes({folder.At("pipe")}), 1, 256);
  EXPECT_EQ(named.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(TextTest, EmptyFilesInAFolderAreHarmlessAndANamedOneIsRefused) {
  DataFolder folder;
  const std::string empty = folder.Write("a", "");
  folder.Write("b", "text");
  EXPECT_EQ(AllText(Bytes({folder.path()})), "text");
  auto named = TokenDataset::Open(Bytes({empty}), 1, 256);
  EXPECT_EQ(named.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(named.status().message(), HasSubstr(empty + " is empty (0 bytes)"));
}

TEST(TextTest, MissingDataNamesTheEntry) {
  DataFolder folder;
  auto missing = TokenDataset::Open(Bytes({folder.At("none")}), 1, 256);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr(folder.At("none")));

  auto relative = TokenDataset::Open(Bytes({"no-such-data"}), 1, 256);
  EXPECT_THAT(relative.status().message(), HasSubstr(std::filesystem::current_path().string()));

  auto nothing = TokenDataset::Open(Bytes({}), 1, 256);
  EXPECT_THAT(nothing.status().message(), HasSubstr("data.train is empty"));

  std::filesystem::create_directory(folder.At("void"));
  auto none = TokenDataset::Open(Bytes({folder.At("void")}), 1, 256);
  EXPECT_THAT(none.status().message(), HasSubstr("holds no files"));
}

TEST(TextTest, TooLittleTextSaysHowMuchIsNeeded) {
  DataFolder folder;
  const std::string file = folder.Write("a", "12345678");
  auto exact = TokenDataset::Open(Bytes({file}), 8, 256);
  EXPECT_EQ(exact.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(exact.status().message(), HasSubstr("needs at least 9 tokens"));
  EXPECT_THAT(exact.status().message(), HasSubstr("has 8"));
  auto one = TokenDataset::Open(Bytes({file}), 7, 256);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ((*one)->sample_count(), 1);
}

TEST(TextTest, ByteTokensNeedAVocabularyOf256) {
  DataFolder folder;
  auto data = TokenDataset::Open(Bytes({folder.Write("a", "text")}), 1, 255);
  EXPECT_EQ(data.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(data.status().message(), HasSubstr("model.vocab_size is 255"));
}

TEST(TextTest, ATokenizerThatIsNotThereIsRefused) {
  DataFolder folder;
  v1::DataSpec spec = Bytes({folder.Write("a", "text")});
  spec.set_tokenizer(folder.At("tokenizer.json"));
  auto data = TokenDataset::Open(spec, 1, 256);
  EXPECT_FALSE(data.ok());
  EXPECT_THAT(data.status().message(), HasSubstr(folder.At("tokenizer.json")));
  spec.clear_tokenizer();
  EXPECT_THAT(TokenDataset::Open(spec, 1, 256).status().message(),
              HasSubstr("data.tokenizer is empty"));
}

}  // namespace
}  // namespace zeroshard
