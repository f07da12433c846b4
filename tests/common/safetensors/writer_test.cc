#include <filesystem>
#include <string>
#include <vector>

#include "common/safetensors/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

class SafetensorsWriterTest : public testing::Test {
 protected:
  int Files() const {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      files += entry.exists();
    }
    return files;
  }

  TempFolder folder_;
  const std::vector<SafetensorsLayout> layouts_ = {
      {"a", DType::kF32, {2, 3}}, {"none", DType::kF32, {0}}, {"b", DType::kBF16, {4}}};
  const std::vector<float> a_ = {1, 2, 3, 4, 5, 6};
  const std::vector<uint16_t> b_ = {0x3F80, 0x4000, 0x4040, 0x4080};  // 1, 2, 3, 4
};

TEST_F(SafetensorsWriterTest, PiecesMakeTheSameFileAsTheWhole) {
  ASSERT_TRUE(WriteSafetensors(folder_ / "whole", {{"a", DType::kF32, {2, 3}, a_.data()},
                                                   {"none", DType::kF32, {0}, nullptr},
                                                   {"b", DType::kBF16, {4}, b_.data()}})
                  .ok());
  const auto writer = SafetensorsWriter::Create(folder_ / "pieces", layouts_);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_EQ((*writer)->data_bytes(), 32u);
  std::string data(reinterpret_cast<const char*>(a_.data()), 24);
  data.append(reinterpret_cast<const char*>(b_.data()), 8);
  for (size_t at = 0; at < data.size(); at += 5) {  // across elements and tensors
    const size_t count = std::min<size_t>(5, data.size() - at);
    ASSERT_TRUE((*writer)->Append(data.data() + at, count).ok());
  }
  ASSERT_TRUE((*writer)->Finish().ok());
  EXPECT_EQ(Contents(folder_ / "pieces"), Contents(folder_ / "whole"));
}

TEST_F(SafetensorsWriterTest, NothingIsThereBeforeItIsFinishedNorAfterItIsGivenUp) {
  {
    auto writer = SafetensorsWriter::Create(folder_ / "x", layouts_);
    ASSERT_TRUE(writer.ok()) << writer.status();
    ASSERT_TRUE((*writer)->Append(a_.data(), 24).ok());
    EXPECT_FALSE(std::filesystem::exists(folder_ / "x"));
    const absl::Status early = (*writer)->Finish();
    EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(early.message()), HasSubstr("24 bytes were written; wanted 32"));
  }
  EXPECT_EQ(Files(), 0);
}

TEST_F(SafetensorsWriterTest, BytesBeyondTheLastTensorAreRefused) {
  auto writer = SafetensorsWriter::Create(folder_ / "x", layouts_);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const std::string data(33, '\0');
  EXPECT_EQ((*writer)->Append(data.data(), 33).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE((*writer)->Append(data.data(), 32).ok());
  EXPECT_TRUE((*writer)->Finish().ok());
  EXPECT_EQ((*writer)->Append(data.data(), 1).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Files(), 1);
}

TEST_F(SafetensorsWriterTest, AFullDiskIsSaidWithThePath) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  // The temporary file's name is known: a link there leads to a device without room.
  const std::string path = folder_ / "x";
  std::filesystem::create_symlink("/dev/full", path + "." + std::to_string(getpid()) + ".tmp");
  const auto writer = SafetensorsWriter::Create(path, layouts_);
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(writer.status().message()), HasSubstr(path));
  EXPECT_EQ(Files(), 0);
}

TEST_F(SafetensorsWriterTest, ReadPagesCanBeDroppedAndReadAgain) {
  ASSERT_TRUE(WriteSafetensors(folder_ / "x", {{"a", DType::kF32, {2, 3}, a_.data()}}).ok());
  const auto file = SafetensorsFile::Open(folder_ / "x");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->ReadFloats("a").value(), a_);
  (*file)->DropPages();
  EXPECT_EQ((*file)->ReadFloats("a").value(), a_);
}

}  // namespace
}  // namespace zeroshard
