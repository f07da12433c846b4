#include "common/safetensors/safetensors.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using testing::UnorderedElementsAre;

class SafetensorsTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = absl::StrCat(testing::TempDir(), "/safetensors_XXXXXX");
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }
  static std::string Bytes(const std::string& json, size_t data) {
    std::string file(8, '\0');
    const uint64_t length = json.size();
    std::memcpy(file.data(), &length, 8);
    return file + json + std::string(data, '\x01');
  }
  absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& bytes) const {
    std::ofstream(Path("file"), std::ios::binary) << bytes;
    return SafetensorsFile::Open(Path("file"));
  }
  // Refused, naming the file and each of `parts`.
  void ExpectRefused(const std::string& bytes, std::vector<std::string> parts) const {
    const absl::Status status = Open(bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    parts.push_back(Path("file"));
    for (const std::string& part : parts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }

  std::string folder_;
};

constexpr char kTwo[] = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                        R"("b":{"dtype":"BF16","shape":[3,1],"data_offsets":[8,14]}})";

TEST_F(SafetensorsTest, WhatIsWrittenIsReadBack) {
  const std::vector<float> floats = {1.5f, -2.0f, 3e-40f, 0.0f};
  const std::vector<uint16_t> halves = {0x3F80, 0xC000};  // 1 and -2
  const std::vector<int32_t> ints = {-1, 2147483647, 7};
  ASSERT_TRUE(WriteSafetensors(Path("x"),
                               {{"z \"quoted\"", DType::kF32, {2, 2}, floats.data()},
                                {"halves", DType::kBF16, {2}, halves.data()},
                                {"ints", DType::kI32, {3}, ints.data()},
                                {"none", DType::kF32, {0, 5}, nullptr},
                                {"scalar", DType::kF32, {}, floats.data()}},
                               {{"by", "a test"}})
                  .ok());
  const auto file = SafetensorsFile::Open(Path("x"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().size(), 5u);
  EXPECT_THAT((*file)->metadata(),
              UnorderedElementsAre(Pair("format", "pt"), Pair("by", "a test")));
  EXPECT_EQ((*file)->ReadFloats("z \"quoted\"").value(), floats);
  EXPECT_THAT((*file)->ReadFloats("halves").value(), ElementsAre(1.0f, -2.0f));
  EXPECT_EQ((*file)->ReadInts("ints").value(), ints);
  EXPECT_TRUE((*file)->ReadFloats("none").value().empty());
  EXPECT_THAT((*file)->ReadFloats("scalar").value(), ElementsAre(1.5f));
  EXPECT_THAT((*(*file)->Find("none"))->shape, ElementsAre(0, 5));
}

TEST_F(SafetensorsTest, WritingLeavesNoTemporaryFileAndStartsTheDataAligned) {
  const float one = 1;
  ASSERT_TRUE(WriteSafetensors(Path("x"), {{"a", DType::kF32, {1}, &one}}).ok());
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    EXPECT_EQ(entry.path().filename(), "x");
    ++files;
  }
  EXPECT_EQ(files, 1);
  EXPECT_EQ(std::filesystem::file_size(Path("x")) % 64, 4u);
}

TEST_F(SafetensorsTest, NamesTwiceReservedOrNotUtf8AreNotWritten) {
  const float one = 1;
  const SafetensorsTensor a{"a", DType::kF32, {1}, &one};
  EXPECT_FALSE(WriteSafetensors(Path("x"), {a, a}).ok());
  EXPECT_FALSE(WriteSafetensors(Path("x"), {{"__metadata__", DType::kF32, {1}, &one}}).ok());
  EXPECT_FALSE(WriteSafetensors(Path("x"), {{"\xFF", DType::kF32, {1}, &one}}).ok());
  EXPECT_FALSE(WriteSafetensors(Path("x"), {{"a", DType::kF32, {-1}, &one}}).ok());
  EXPECT_FALSE(std::filesystem::exists(Path("x")));
  EXPECT_THAT(std::string(WriteSafetensors(Path("no/x"), {a}).message()), HasSubstr(Path("no/x")));
}

TEST_F(SafetensorsTest, KeyOrderAndSpacesDoNotMatter) {
  const std::string json = R"({ "b" : {"data_offsets":[8,14],"shape":[3,1],"dtype":"BF16"},)"
                           R"( "a":{"shape":[2],"dtype":"F32","data_offsets":[0,8]}}     )";
  const auto file = Open(Bytes(json, 14));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*(*file)->Find("b"))->begin, 8u);
  EXPECT_EQ((*file)->Bytes(**(*file)->Find("b")).size(), 6u);
}

TEST_F(SafetensorsTest, MetadataMayBeAbsentEmptyOrHoldMoreText) {
  EXPECT_TRUE(Open(Bytes("{}", 0)).ok());
  EXPECT_TRUE(Open(Bytes(R"({"__metadata__":{}})", 0)).ok());
  const auto file = Open(Bytes(R"({"__metadata__":{"format":"pt","x":"y"}})", 0));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->metadata().size(), 2u);
}

TEST_F(SafetensorsTest, MetadataOtherThanTextIsRefused) {
  for (const char* value : {"1", "-1", "1.5", "null", "true", "{}", "[]", R"(["a"])"}) {
    ExpectRefused(Bytes(absl::StrCat(R"({"__metadata__":{"step":)", value, "}}"), 0),
                  {"__metadata__", "step", "text"});
  }
  ExpectRefused(Bytes(R"({"__metadata__":"pt"})", 0), {"__metadata__", "object"});
  ExpectRefused(Bytes(R"({"__metadata__":{"a":"1","a":"2"}})", 0), {"\"a\" twice"});
  ExpectRefused(Bytes(R"({"__metadata__":{},"__metadata__":{}})", 0), {"__metadata__", "twice"});
}

TEST_F(SafetensorsTest, AByteLessOrMoreIsRefusedWithBothSizes) {
  const std::string whole = Bytes(kTwo, 14);
  ASSERT_TRUE(Open(whole).ok());
  const std::string header = absl::StrCat("8 + ", sizeof(kTwo) - 1, " of header + 14 of data");
  ExpectRefused(whole.substr(0, whole.size() - 1),
                {absl::StrCat(whole.size() - 1, " bytes"), header, "cut short"});
  ExpectRefused(whole + "x", {absl::StrCat(whole.size() + 1, " bytes"), header, "too many"});
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(Open(whole.substr(0, size)).ok()) << size;
  }
}

TEST_F(SafetensorsTest, TheHeadersLengthIsBoundedBeforeItIsUsed) {
  std::string file(16, '{');
  for (uint64_t length :
       {uint64_t{100'000'001}, uint64_t{1} << 40, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    std::memcpy(file.data(), &length, 8);
    ExpectRefused(file, {absl::StrCat(length), "100000000"});
  }
  const uint64_t beyond = 9;
  std::memcpy(file.data(), &beyond, 8);
  ExpectRefused(file, {"cut short"});
}

TEST_F(SafetensorsTest, WrongOffsetsAreRefusedByTensorName) {
  const auto tensor = [](const char* name, const char* shape, const char* offsets) {
    return absl::StrCat("\"", name, R"(":{"dtype":"F32","shape":)", shape, R"(,"data_offsets":)",
                        offsets, "}");
  };
  const auto file = [](const std::string& a, const std::string& b, size_t data) {
    return Bytes(absl::StrCat("{", a, ",", b, "}"), data);
  };
  const std::string a = tensor("a", "[2]", "[0,8]");
  ExpectRefused(file(a, tensor("over", "[2]", "[4,12]"), 12),
                {"\"over\"", "begins at 4", "wanted 8"});
  ExpectRefused(file(a, tensor("same", "[2]", "[0,8]"), 8), {"\"same\"", "begins at 0"});
  ExpectRefused(file(a, tensor("gap", "[1]", "[12,16]"), 16),
                {"\"gap\"", "begins at 12", "wanted 8"});
  ExpectRefused(file(a, tensor("back", "[1]", "[12,8]"), 12), {"\"back\"", "ends at 8"});
  ExpectRefused(file(a, tensor("size", "[3]", "[8,16]"), 16), {"\"size\"", "12 bytes", "8 bytes"});
  ExpectRefused(file(a, tensor("vast", "[1099511627776,1099511627776]", "[8,16]"), 16),
                {"\"vast\"", "1099511627776", "2^63"});
  ExpectRefused(file(a, tensor("far", "[1]", "[18446744073709551608,18446744073709551612]"), 12),
                {"\"far\"", "begins at 18446744073709551608"});
  ExpectRefused(file(a, a, 8), {"\"a\"", "twice"});
  ExpectRefused(Bytes(absl::StrCat("{", tensor("first", "[1]", "[4,8]"), "}"), 8),
                {"\"first\"", "begins at 4", "wanted 0"});
}

TEST_F(SafetensorsTest, EmptyTensorsTakeNoBytesWhateverTheirOtherExtents) {
  EXPECT_TRUE(Open(Bytes(R"({"e":{"dtype":"F32","shape":[4611686018427387904,9,0],)"
                         R"("data_offsets":[0,0]}})",
                         0))
                  .ok());
}

TEST_F(SafetensorsTest, OtherJsonIsRefusedWithTheTensor) {
  const auto tensor = [](const char* body) { return Bytes(absl::StrCat("{\"t\":", body, "}"), 4); };
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[1]})"), {"\"t\"", "data_offsets"});
  ExpectRefused(tensor(R"({"dtype":"F32","data_offsets":[0,4]})"), {"\"t\"", "shape"});
  ExpectRefused(tensor(R"({"shape":[1],"data_offsets":[0,4]})"), {"\"t\"", "dtype"});
  ExpectRefused(tensor(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})"), {"\"t\"", "F33"});
  ExpectRefused(tensor(R"({"dtype":4,"shape":[1],"data_offsets":[0,4]})"), {"\"t\"", "4"});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})"), {"\"t\"", "-1"});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[1.0],"data_offsets":[0,4]})"), {"\"t\"", "1.0"});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[[1]],"data_offsets":[0,4]})"), {"\"t\""});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":1,"data_offsets":[0,4]})"), {"\"t\""});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4]})"), {"\"t\"", "two"});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0,2,4]})"), {"\"t\""});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1})"), {"\"x\""});
  ExpectRefused(tensor(R"({"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]})"),
                {"\"t\"", "shape", "twice"});
  ExpectRefused(tensor("3"), {"\"t\"", "object"});
  ExpectRefused(Bytes("[]", 0), {"'{'"});
  ExpectRefused(Bytes("", 0), {"'{'"});
  ExpectRefused(Bytes("{\"t\":", 0), {"JSON"});
  ExpectRefused(Bytes("{} x", 0), {"JSON"});
  ExpectRefused(Bytes("{\"\xFF\":{}}", 0), {"JSON"});
}

TEST_F(SafetensorsTest, MessagesStayOneReadableLine) {
  const std::string name = std::string(100'000, 'n') + "\\n";
  const absl::Status status = Open(Bytes(absl::StrCat("{\"", name, "\":1}"), 0)).status();
  EXPECT_LT(status.message().size(), 1000u);
  EXPECT_EQ(status.message().find('\n'), absl::string_view::npos);
}

TEST_F(SafetensorsTest, AMissingTensorOrFileOrAnotherTypeIsSaid) {
  const auto file = Open(Bytes(kTwo, 14));
  ASSERT_TRUE(file.ok()) << file.status();
  const absl::Status missing = (*file)->ReadFloats("aa").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), AllOf(HasSubstr("\"aa\""), HasSubstr("names are a")));
  EXPECT_THAT(std::string((*file)->ReadInts("a").status().message()),
              AllOf(HasSubstr("F32"), HasSubstr("I32")));
  EXPECT_EQ(SafetensorsFile::Open(Path("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(folder_).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace zeroshard
