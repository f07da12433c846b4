// Files of token ids: the three layouts, and each way in which a file can be wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "tests/worker/data/data_folder.h"
#include "worker/data/dataset.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::DataSpec Tokens(const std::vector<std::string>& paths) {
  v1::DataSpec spec;
  for (const std::string& path : paths) spec.add_train(path);
  spec.set_tokenizer("tokens");
  return spec;
}

std::vector<uint16_t> Iota(int count) {
  std::vector<uint16_t> ids(count);
  std::iota(ids.begin(), ids.end(), 1);
  return ids;
}

std::string ErrorOf(const std::string& path, int64_t sequence, int64_t vocab) {
  auto data = TokenDataset::Open(Tokens({path}), sequence, vocab);
  EXPECT_EQ(data.status().code(), absl::StatusCode::kInvalidArgument) << data.status();
  return std::string(data.status().message());
}

std::vector<int32_t> AllTokens(const std::vector<std::string>& paths, int64_t vocab) {
  auto data = TokenDataset::Open(Tokens(paths), 1, vocab);
  EXPECT_TRUE(data.ok()) << data.status();
  if (!data.ok()) return {};
  std::vector<int32_t> all((*data)->token_count());
  for (int64_t i = 0; i < (*data)->sample_count(); ++i) {
    (*data)->Sample(i, absl::MakeSpan(&all[i], 1), absl::MakeSpan(&all[i + 1], 1));
  }
  return all;
}

TEST(TokensTest, ReadsRaw16BitIds) {
  DataFolder folder;
  const std::string file = folder.Write("train.bin", Raw<uint16_t>({5, 0, 65535, 7}));
  EXPECT_THAT(AllTokens({file}, 65536), ElementsAre(5, 0, 65535, 7));
}

TEST(TokensTest, ReadsLlmC16BitIdsBehindTheHeader) {
  DataFolder folder;
  const std::string file =
      folder.Write("a.bin", Header(20240520, 1, 3) + Raw<uint16_t>({50256, 1, 2}));
  EXPECT_THAT(AllTokens({file}, 50257), ElementsAre(50256, 1, 2));
}

TEST(TokensTest, ReadsLlmC32BitIdsBehindTheHeader) {
  DataFolder folder;
  const std::string file =
      folder.Write("a.bin", Header(20240801, 7, 3) + Raw<uint32_t>({128000, 1, 70000}));
  EXPECT_THAT(AllTokens({file}, 128256), ElementsAre(128000, 1, 70000));
}

TEST(TokensTest, FilesOfDifferentLayoutsJoinIntoOneRun) {
  DataFolder folder;
  const std::string a = folder.Write("a.bin", Raw<uint16_t>({1, 2}));
  const std::string b = folder.Write("b.bin", Header(20240801, 7, 1) + Raw<uint32_t>({3}));
  const std::string c = folder.Write("c.bin", Header(20240520, 1, 2) + Raw<uint16_t>({4, 5}));
  EXPECT_THAT(AllTokens({a, b, c}, 10), ElementsAre(1, 2, 3, 4, 5));
}

TEST(TokensTest, ASampleMaySpanSeveralFiles) {
  DataFolder folder;
  const std::string a = folder.Write("a.bin", Raw<uint16_t>({1, 2}));
  const std::string b = folder.Write("b.bin", Raw<uint16_t>({3}));
  const std::string c = folder.Write("c.bin", Raw<uint16_t>({4, 5, 6, 7}));
  auto data = TokenDataset::Open(Tokens({a, b, c}), 3, 10);
  ASSERT_TRUE(data.ok()) << data.status();
  ASSERT_EQ((*data)->sample_count(), 2);
  std::vector<int32_t> tokens(3), targets(3);
  (*data)->Sample(0, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(tokens, ElementsAre(1, 2, 3));
  EXPECT_THAT(targets, ElementsAre(2, 3, 4));
  (*data)->Sample(1, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(tokens, ElementsAre(4, 5, 6));
  EXPECT_THAT(targets, ElementsAre(5, 6, 7));
}

TEST(TokensTest, WhatIsLeftOverAtTheEndIsNotUsed) {
  DataFolder folder;
  const std::string file = folder.Write("a.bin", Raw(Iota(10)));
  for (auto [sequence, samples] :
       std::vector<std::pair<int, int>>{{9, 1}, {5, 1}, {4, 2}, {3, 3}}) {
    auto data = TokenDataset::Open(Tokens({file}), sequence, 100);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ((*data)->sample_count(), samples) << sequence;
  }
}

TEST(TokensTest, OfAFolderOnlyBinFilesAreRead) {
  DataFolder folder;
  folder.Write("train.bin", Raw<uint16_t>({1, 2, 3}));
  folder.Write("meta.pkl", "x");
  folder.Write("prepare.py", "print");
  EXPECT_THAT(AllTokens({folder.path()}, 10), ElementsAre(1, 2, 3));
}

// Ids that the model has no row for.
TEST(TokensTest, AnIdBeyondTheVocabularyInTheMiddleIsRefused) {
  DataFolder folder;
  std::vector<uint16_t> ids(20000, 3);
  ids[12345] = 300;
  const std::string file = folder.Write("a.bin", Raw(ids));
  EXPECT_THAT(ErrorOf(file, 8, 300), AllOf(HasSubstr(file), HasSubstr("token 12345 has id 300"),
                                           HasSubstr("model.vocab_size is 300")));
}

TEST(TokensTest, AnIdBeyondTheVocabularyAsTheLastTargetIsRefused) {
  DataFolder folder;
  std::vector<uint16_t> ids = Iota(9);
  ids[8] = 50257;
  const std::string file = folder.Write("a.bin", Raw(ids));
  EXPECT_THAT(ErrorOf(file, 8, 50257), HasSubstr("token 8 has id 50257"));
  ids[8] = 50256;
  folder.Write("a.bin", Raw(ids));
  EXPECT_TRUE(TokenDataset::Open(Tokens({file}), 8, 50257).ok());
}

TEST(TokensTest, A32BitIdIsNeverTakenForANegativeOne) {
  DataFolder folder;
  const std::string file =
      folder.Write("a.bin", Header(20240801, 7, 3) +
                                Raw<uint32_t>({1, std::numeric_limits<uint32_t>::max(), 2}));
  EXPECT_THAT(ErrorOf(file, 1, 128256), HasSubstr("token 1 has id 4294967295"));
}

// Files that cannot be what they are said to be.
TEST(TokensTest, AnEmptyFileIsRefused) {
  DataFolder folder;
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", ""), 8, 100), HasSubstr("is empty (0 bytes)"));
}

TEST(TokensTest, AnOddByteCountIsRefused) {
  DataFolder folder;
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", Raw(Iota(20)) + "x"), 8, 100),
              AllOf(HasSubstr("41 bytes"), HasSubstr("odd number of bytes")));
}

TEST(TokensTest, ExactlyOneSequenceIsOneTokenShort) {
  DataFolder folder;
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", Raw(Iota(8))), 8, 100),
              AllOf(HasSubstr("needs at least 9 tokens"), HasSubstr("has 8")));
}

TEST(TokensTest, OneTokenMoreThanASequenceIsOneSample) {
  DataFolder folder;
  auto data = TokenDataset::Open(Tokens({folder.Write("a.bin", Raw(Iota(9)))}), 8, 100);
  ASSERT_TRUE(data.ok()) << data.status();
  EXPECT_EQ((*data)->sample_count(), 1);
  std::vector<int32_t> tokens(8), targets(8);
  (*data)->Sample(0, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(tokens, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_THAT(targets, ElementsAre(2, 3, 4, 5, 6, 7, 8, 9));
}

TEST(TokensTest, AHeaderCountThatDisagreesWithTheSizeIsRefused) {
  DataFolder folder;
  const std::string ids = Raw(Iota(20));
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", Header(20240520, 1, 21) + ids), 8, 100),
              AllOf(HasSubstr("says 21 tokens"), HasSubstr("1066"), HasSubstr("1064")));
  EXPECT_THAT(ErrorOf(folder.Write("b.bin", Header(20240520, 1, 19) + ids), 8, 100),
              HasSubstr("cut short or padded"));
  EXPECT_THAT(ErrorOf(folder.Write("c.bin", Header(20240520, 1, -1) + ids), 8, 100),
              HasSubstr("says -1 tokens"));
  EXPECT_THAT(ErrorOf(folder.Write("d.bin", Header(20240801, 7, 20) + ids), 8, 100),
              HasSubstr("tokens of 4 bytes"));
}

TEST(TokensTest, AHeaderThatIsCutShortOrOfAnotherVersionIsRefused) {
  DataFolder folder;
  const std::string header = Header(20240520, 1, 0);
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", header.substr(0, 1022)), 8, 65536),
              HasSubstr("fewer than the header's 1024"));
  EXPECT_THAT(ErrorOf(folder.Write("b.bin", Header(20240520, 2, 0)), 8, 65536),
              HasSubstr("version 2; wanted version 1"));
}

TEST(TokensTest, FilesOfOtherFormatsAreRefusedByName) {
  DataFolder folder;
  EXPECT_THAT(ErrorOf(folder.Write("a.npy", "\x93NUMPY\x01 "), 1, 65536), HasSubstr("NumPy"));
  EXPECT_THAT(ErrorOf(folder.Write("a.idx", std::string("MMIDIDX\0\0\1", 10)), 1, 65536),
              HasSubstr("Megatron index"));
}

TEST(TokensTest, Raw32BitIdsAreNotReadAs16BitOnes) {
  DataFolder folder;
  std::vector<uint32_t> ids(100);
  std::iota(ids.begin(), ids.end(), 0);
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", Raw(ids)), 8, 50257), HasSubstr("32-bit ids"));
}

TEST(TokensTest, AFileWrittenToDuringTheJobIsNoticedInsteadOfIndexedWith) {
  DataFolder folder;
  const std::vector<uint16_t> ids(1 << 20, 3);  // 2 MiB: mapped
  const std::string file = folder.Write("a.bin", Raw(ids));
  auto data = TokenDataset::Open(Tokens({file}), 8, 100);
  ASSERT_TRUE(data.ok()) << data.status();
  std::vector<int32_t> tokens(8), targets(8);
  (*data)->Sample(0, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_TRUE((*data)->status().ok());
  {
    std::fstream writer(file, std::ios::in | std::ios::out | std::ios::binary);
    writer.seekp(2 * 16);
    writer << Raw<uint16_t>({100});
  }
  (*data)->Sample(1, absl::MakeSpan(tokens), absl::MakeSpan(targets));  // 16 is its last target
  (*data)->Sample(2, absl::MakeSpan(tokens), absl::MakeSpan(targets));
  EXPECT_THAT(targets, testing::Each(-1));
  EXPECT_THAT(tokens, testing::Each(0));
  EXPECT_EQ((*data)->status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT((*data)->status().message(), HasSubstr("token 16 is now 100"));
}

}  // namespace
}  // namespace zeroshard
