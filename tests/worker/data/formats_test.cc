// Which format a token file is read in, and what is wrong in each of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "tests/worker/data/data_folder.h"
#include "worker/data/dataset.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

absl::StatusOr<std::unique_ptr<TokenDataset>> OpenTokens(const std::vector<std::string>& paths,
                                                         const std::string& format,
                                                         int64_t sequence, int64_t vocab) {
  v1::DataSpec spec;
  for (const std::string& path : paths) spec.add_train(path);
  spec.set_tokenizer("tokens");
  spec.set_format(format);
  return TokenDataset::Open(spec, sequence, vocab);
}

std::vector<int32_t> Ids(const std::vector<std::string>& paths, const std::string& format,
                         int64_t vocab) {
  const auto data = OpenTokens(paths, format, 1, vocab);
  EXPECT_TRUE(data.ok()) << data.status();
  return data.ok() ? RunOf(**data) : std::vector<int32_t>();
}

std::string ErrorOf(const std::string& path, const std::string& format, int64_t sequence = 1,
                    int64_t vocab = 65536) {
  const auto data = OpenTokens({path}, format, sequence, vocab);
  EXPECT_EQ(data.status().code(), absl::StatusCode::kInvalidArgument) << data.status();
  return std::string(data.status().message());
}

// Writes `ids` in one of the formats; returns what data.train names.
struct Writer {
  const char* name;
  int64_t most;  // the greatest id it can hold
  std::function<std::string(const DataFolder&, const std::vector<int64_t>&)> write;
};

template <typename T>
std::vector<T> As(const std::vector<int64_t>& ids) {
  return {ids.begin(), ids.end()};
}

template <typename T>
Writer Megatron(const char* name, uint8_t code) {
  return {name, std::numeric_limits<T>::max(),
          [code](const DataFolder& folder, const std::vector<int64_t>& ids) {
            const auto half = static_cast<int32_t>(ids.size() / 2);
            const auto rest = static_cast<int32_t>(ids.size()) - half;
            folder.Write("m.idx", MegatronIndexFile(code, sizeof(T), {half, rest}, {0, 1, 2}));
            return folder.Write("m.bin", Raw(As<T>(ids)));
          }};
}

std::vector<Writer> Writers() {
  return {
      {"raw 16 bits", 65535,
       [](const DataFolder& folder, const std::vector<int64_t>& ids) {
         return folder.Write("r.bin", Raw(As<uint16_t>(ids)));
       }},
      {"llm.c 16 bits", 65535,
       [](const DataFolder& folder, const std::vector<int64_t>& ids) {
         return folder.Write("a.bin", Header(20240520, 1, ids.size()) + Raw(As<uint16_t>(ids)));
       }},
      {"llm.c 32 bits", 4294967295,
       [](const DataFolder& folder, const std::vector<int64_t>& ids) {
         return folder.Write("b.bin", Header(20240801, 7, ids.size()) + Raw(As<uint32_t>(ids)));
       }},
      Megatron<uint8_t>("Megatron uint8", 1),
      Megatron<int8_t>("Megatron int8", 2),
      Megatron<int16_t>("Megatron int16", 3),
      Megatron<int32_t>("Megatron int32", 4),
      Megatron<int64_t>("Megatron int64", 5),
      Megatron<uint16_t>("Megatron uint16", 8),
  };
}

TEST(FormatsTest, EachFormatGivesTheIdsThatWereWritten) {
  for (const Writer& writer : Writers()) {
    SCOPED_TRACE(writer.name);
    DataFolder folder;
    const int64_t most = std::min<int64_t>(writer.most, 200000);
    const std::string path = writer.write(folder, {5, 0, most, 7, 1});
    EXPECT_THAT(Ids({path}, "auto", 200001), ElementsAre(5, 0, most, 7, 1));
  }
}

TEST(FormatsTest, AnIdBeyondTheVocabularyIsRefusedInTheMiddleAndAsTheLastTarget) {
  for (const Writer& writer : Writers()) {
    SCOPED_TRACE(writer.name);
    for (const int64_t place : {5000, 8192, 10000}) {
      DataFolder folder;
      std::vector<int64_t> ids(10001, 3);
      ids[place] = 100;
      const std::string path = writer.write(folder, ids);
      EXPECT_THAT(ErrorOf(path, "auto", 100, 100),
                  AllOf(HasSubstr(path), HasSubstr(absl::StrCat("token ", place, " has id 100")),
                        HasSubstr("model.vocab_size is 100")));
      EXPECT_TRUE(OpenTokens({path}, "auto", 100, 101).ok());
    }
  }
}

TEST(FormatsTest, TooFewTokensAreRefusedAndNothingIsPadded) {
  for (const Writer& writer : Writers()) {
    SCOPED_TRACE(writer.name);
    DataFolder folder;
    std::vector<int64_t> ids(8);
    std::iota(ids.begin(), ids.end(), 1);
    EXPECT_THAT(ErrorOf(writer.write(folder, ids), "auto", 8, 100),
                AllOf(HasSubstr("needs at least 9 tokens"), HasSubstr("has 8")));
    ids.push_back(9);
    const auto data = OpenTokens({writer.write(folder, ids)}, "auto", 8, 100);
    ASSERT_TRUE(data.ok()) << data.status();
    EXPECT_EQ((*data)->sample_count(), 1);
    EXPECT_THAT(ErrorOf(writer.write(folder, {}), "auto"),
                testing::AnyOf(HasSubstr("is empty"), HasSubstr("holds no tokens")));
  }
}

TEST(FormatsTest, AByteMoreOrLessIsRefused) {
  for (const Writer& writer : Writers()) {
    SCOPED_TRACE(writer.name);
    DataFolder folder;
    const std::string path = writer.write(folder, std::vector<int64_t>(50, 3));
    const std::string content = Contents(path);
    std::filesystem::resize_file(path, content.size() - 1);
    EXPECT_THAT(ErrorOf(path, "auto"), HasSubstr("cut short"));
    std::filesystem::resize_file(path, content.size() + 1);
    EXPECT_THAT(ErrorOf(path, "auto"), HasSubstr("cut short"));
  }
}

TEST(FormatsTest, NegativeIdsAreRefusedWhateverTheVocabulary) {
  DataFolder folder;
  folder.Write("a.idx", MegatronIndexFile(3, 2, {3}, {0, 1}));
  const std::string path = folder.Write("a.bin", Raw<int16_t>({1, 2, -1}));
  EXPECT_THAT(ErrorOf(path, "auto", 1, 100000), HasSubstr("token 2 has id -1"));
  folder.Write("a.idx", MegatronIndexFile(5, 8, {2}, {0, 1}));
  folder.Write("a.bin", Raw<int64_t>({1, std::numeric_limits<int64_t>::min()}));
  EXPECT_THAT(ErrorOf(path, "auto"), HasSubstr("token 1 has id -9223372036854775808"));
}

// A Megatron pair, by each of its names.
TEST(FormatsTest, AMegatronPairIsNamedByItsPrefixOrEitherFile) {
  DataFolder folder;
  folder.Write("text_document.idx", MegatronIndexFile(8, 2, {2, 1}, {0, 1, 2}));
  const std::string bin = folder.Write("text_document.bin", Raw<uint16_t>({4, 5, 6}));
  for (const char* format : {"auto", "megatron", ""}) {
    for (const char* name : {"text_document", "text_document.bin", "text_document.idx"}) {
      EXPECT_THAT(Ids({folder.At(name)}, format, 10), ElementsAre(4, 5, 6)) << name << format;
    }
    EXPECT_THAT(Ids({folder.path()}, format, 10), ElementsAre(4, 5, 6)) << format;
  }
  const std::vector<std::string> twice = {folder.At("text_document.idx"), bin,
                                          folder.At("text_document")};
  EXPECT_THAT(Ids(twice, "auto", 10), ElementsAre(4, 5, 6));
}

TEST(FormatsTest, OfAFolderPairsAndOtherFilesAreEachReadTheirWay) {
  DataFolder folder;
  folder.Write("a.bin", Raw<uint16_t>({1, 2}));
  folder.Write("b.idx", MegatronIndexFile(4, 4, {2}, {0, 1}));
  folder.Write("b.bin", Raw<int32_t>({70000, 3}));
  folder.Write("c.bin", Header(20240520, 1, 1) + Raw<uint16_t>({4}));
  EXPECT_THAT(Ids({folder.path()}, "auto", 100000), ElementsAre(1, 2, 70000, 3, 4));
}

TEST(FormatsTest, AMegatronFormatWithoutAnIndexIsRefused) {
  DataFolder folder;
  const std::string path = folder.Write("a.bin", Raw<uint16_t>({1, 2}));
  EXPECT_THAT(ErrorOf(path, "megatron"), AllOf(HasSubstr(path), HasSubstr("a.idx is not there")));
  EXPECT_THAT(ErrorOf(folder.Write("tokens", "xx"), "megatron"), HasSubstr("does not end in .bin"));
}

// What could be two things.
TEST(FormatsTest, RawIdsThatStartLikeAHeaderAreRefusedUntilTheSpecSaysSo) {
  DataFolder folder;
  // 20240520 is 308 * 65536 + 55432.
  const std::string path = folder.Write("a.bin", Raw<uint16_t>({55432, 308, 1, 2}));
  EXPECT_THAT(ErrorOf(path, "auto"), HasSubstr("data.format: nanogpt"));
  EXPECT_THAT(Ids({path}, "nanogpt", 65536), ElementsAre(55432, 308, 1, 2));
}

TEST(FormatsTest, AHeaderIsNotReadAsIdsUnlessTheSpecSaysSo) {
  DataFolder folder;
  const std::string path = folder.Write("a.bin", Header(20240520, 1, 2) + Raw<uint16_t>({7, 8}));
  EXPECT_THAT(Ids({path}, "auto", 65536), ElementsAre(7, 8));
  EXPECT_THAT(Ids({path}, "llm.c", 65536), ElementsAre(7, 8));
  EXPECT_EQ(Ids({path}, "nanogpt", 65536).size(), 512u + 2);
  EXPECT_THAT(ErrorOf(folder.Write("raw", Raw<uint16_t>({1, 2, 3})), "llm.c"),
              HasSubstr("data.format is llm.c"));
}

TEST(FormatsTest, AFileOfAnotherKindBesideTheIdsIsNoIndex) {
  DataFolder folder;
  const std::string path = folder.Write("a.bin", Raw<uint16_t>({1, 2}));
  folder.Write("a.idx", "a label, say");
  EXPECT_THAT(ErrorOf(path, "auto"), AllOf(HasSubstr("a.idx"), HasSubstr("data.format")));
  EXPECT_THAT(ErrorOf(path, "megatron"), HasSubstr("does not start with MMIDIDX"));
  EXPECT_THAT(Ids({path}, "nanogpt", 10), ElementsAre(1, 2));
}

TEST(FormatsTest, AHeaderAndAnIndexThatBothFitAreRefusedUntilTheSpecSaysWhich) {
  DataFolder folder;
  const std::string content = Header(20240520, 1, 2) + Raw<uint16_t>({7, 8});
  const std::string path = folder.Write("a.bin", content);
  folder.Write("a.idx", MegatronIndexFile(8, 2, {514}, {0, 1}));
  EXPECT_THAT(ErrorOf(path, "auto"),
              AllOf(HasSubstr("llm.c's header"), HasSubstr("Megatron index")));
  EXPECT_THAT(Ids({path}, "llm.c", 65536), ElementsAre(7, 8));
  EXPECT_EQ(Ids({path}, "megatron", 65536).size(), 514u);
}

TEST(FormatsTest, TextIsNotReadAsIds) {
  DataFolder folder;
  std::string text;
  while (text.size() < 1000) text += "All work and no play makes Jack a dull boy.\r\n\t\xC3\xA9";
  text.resize(1000);
  const std::string path = folder.Write("a.bin", text);
  EXPECT_THAT(ErrorOf(path, "auto"), AllOf(HasSubstr("is text"), HasSubstr("data.tokenizer")));
  EXPECT_EQ(Ids({path}, "nanogpt", 65536).size(), 500u);
}

TEST(FormatsTest, Raw32BitIdsOfALargeVocabularyAreNotReadAs16BitOnes) {
  DataFolder folder;
  std::vector<uint32_t> ids(100);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = 1283 * i;  // up to 127,017
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", Raw(ids)), "auto", 8, 128256), HasSubstr("32-bit ids"));
}

TEST(FormatsTest, AnUnknownFormatIsRefused) {
  DataFolder folder;
  EXPECT_THAT(ErrorOf(folder.Write("a.bin", Raw<uint16_t>({1, 2})), "llmc"),
              AllOf(HasSubstr("\"llmc\""), HasSubstr("llm.c, nanogpt or megatron")));
}

// Indexes that cannot be right. Each starts from a right one of 2 sequences and 2 documents.
class BrokenIndex : public ::testing::Test {
 protected:
  std::string ErrorWith(const std::function<void(std::string*)>& change) {
    std::string index = MegatronIndexFile(8, 2, {2, 3}, {0, 1, 2});
    change(&index);
    folder_.Write("a.idx", index);
    const std::string path = folder_.Write("a.bin", Raw<uint16_t>({1, 2, 3, 4, 5}));
    const std::string error = ErrorOf(path, "auto");
    EXPECT_THAT(error, HasSubstr(folder_.At("a.idx")));
    return error;
  }
  template <typename T>
  std::string ErrorWith(size_t at, T value) {
    return ErrorWith(
        [&](std::string* index) { std::memcpy(&(*index)[at], &value, sizeof(value)); });
  }

  DataFolder folder_;
};

TEST_F(BrokenIndex, OfAnotherVersion) {
  EXPECT_THAT(ErrorWith<uint64_t>(9, 2), HasSubstr("has version 2; wanted 1"));
}

TEST_F(BrokenIndex, OfFloatsOrOfAnUnknownType) {
  EXPECT_THAT(ErrorWith<uint8_t>(17, 6), HasSubstr("type 6 (floating point)"));
  EXPECT_THAT(ErrorWith<uint8_t>(17, 7), HasSubstr("type 7 (floating point)"));
  EXPECT_THAT(ErrorWith<uint8_t>(17, 9), HasSubstr("type 9"));
  EXPECT_THAT(ErrorWith<uint8_t>(17, 0), HasSubstr("type 0"));
}

TEST_F(BrokenIndex, WhoseCountsDoNotFitItsSize) {
  for (const size_t at : {18, 26}) {
    for (const uint64_t count : {uint64_t{1}, uint64_t{5}, uint64_t{1} << 60, ~uint64_t{0}}) {
      EXPECT_THAT(ErrorWith<uint64_t>(at, count), HasSubstr("cut short or padded")) << count;
    }
  }
  EXPECT_THAT(ErrorWith([](std::string* index) { index->pop_back(); }),
              HasSubstr("cut short or padded"));
  EXPECT_THAT(ErrorWith([](std::string* index) { index->resize(20); }),
              HasSubstr("fewer than the header's 34"));
}

TEST_F(BrokenIndex, WithModesOfImages) {
  EXPECT_THAT(ErrorWith([](std::string* index) { index->append(2, '\0'); }),
              HasSubstr("a mode for each sequence"));
}

TEST_F(BrokenIndex, WithANegativeLength) {
  EXPECT_THAT(ErrorWith<int32_t>(34, -2), HasSubstr("sequence 0 has length -2"));
}

TEST_F(BrokenIndex, WhoseSequencesAreNotOneAfterTheOther) {
  EXPECT_THAT(ErrorWith<int64_t>(34 + 8, 2), HasSubstr("sequence 0 begins at byte 2; wanted 0"));
  EXPECT_THAT(ErrorWith<int64_t>(34 + 16, 6), HasSubstr("sequence 1 begins at byte 6; wanted 4"));
  EXPECT_THAT(ErrorWith<int64_t>(34 + 16, -4), HasSubstr("byte -4"));
}

TEST_F(BrokenIndex, WhoseSequencesAreNotTheFile) {
  EXPECT_THAT(ErrorWith<int32_t>(34 + 4, 4), HasSubstr("has 10"));
  EXPECT_THAT(ErrorWith<int32_t>(34 + 4, 2), HasSubstr("take 8 bytes"));
}

TEST_F(BrokenIndex, WhoseDocumentsAreOutOfRangeOrOrder) {
  const size_t documents = 34 + 2 * 12;
  EXPECT_THAT(ErrorWith<int64_t>(documents, 1), HasSubstr("first document begins at sequence 1"));
  EXPECT_THAT(ErrorWith<int64_t>(documents + 8, 3), HasSubstr("document index 1 is 3"));
  EXPECT_THAT(ErrorWith<int64_t>(documents + 8, -1), HasSubstr("document index 1 is -1"));
  EXPECT_THAT(ErrorWith<int64_t>(documents + 16, 0), HasSubstr("document index 2 is 0"));
}

}  // namespace
}  // namespace zeroshard
