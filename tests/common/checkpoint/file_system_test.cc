#include "common/checkpoint/file_system.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>

#include "tests/common/checkpoint/small_state.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(FileSystem, PiecesOfAnySizeComeOutInOrder) {
  const TempFolder folder;
  FileSystem& files = FileSystem::Real();
  // Around the sizes at which pieces are no longer collected and the disk is told to write.
  const size_t buffer = size_t{256} << 10, block = size_t{8} << 20;
  std::string wanted;
  const auto file = files.Create(folder / "a");
  ASSERT_TRUE(file.ok()) << file.status();
  uint32_t next = 1;
  for (const size_t bytes : {size_t{0}, size_t{1}, buffer - 1, size_t{1}, buffer - 2, size_t{3},
                             buffer, buffer + 1, block - buffer, 2 * block + 5, size_t{17}}) {
    std::string piece(bytes, '\0');
    for (char& c : piece) c = static_cast<char>((next = next * 1664525 + 1013904223) >> 24);
    ASSERT_TRUE((*file)->Append(piece.data(), piece.size()).ok());
    wanted += piece;
  }
  ASSERT_TRUE((*file)->SyncAndClose().ok());
  EXPECT_TRUE(Contents(folder / "a") == wanted);
}

TEST(FileSystem, AFileThatIsThereIsNotWrittenOver) {
  const TempFolder folder;
  std::ofstream(folder / "a") << "kept";
  const auto file = FileSystem::Real().Create(folder / "a");
  EXPECT_EQ(file.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(Message(file.status()), AllOf(HasSubstr(folder / "a"), HasSubstr("File exists")));
  EXPECT_EQ(Contents(folder / "a"), "kept");
}

TEST(FileSystem, ErrorsNameThePathAndTheReason) {
  const TempFolder folder;
  FileSystem& files = FileSystem::Real();
  const std::string missing = folder / "no/such";
  EXPECT_THAT(Message(files.Create(missing).status()),
              AllOf(HasSubstr(missing), HasSubstr("No such file or directory")));
  EXPECT_THAT(Message(files.Rename(missing, folder / "b")),
              AllOf(HasSubstr(missing), HasSubstr(folder / "b"), HasSubstr("No such file")));
  EXPECT_THAT(Message(files.SyncFolder(missing)), AllOf(HasSubstr(missing), HasSubstr("No such")));
  std::ofstream(folder / "file") << "x";
  EXPECT_THAT(Message(files.MakeFolder(folder / "file")), HasSubstr(folder / "file"));
}

TEST(FileSystem, MakingWhatIsThereAndRemovingWhatIsNotAreFine) {
  const TempFolder folder;
  FileSystem& files = FileSystem::Real();
  EXPECT_TRUE(files.MakeFolder(folder / "a/b").ok());
  EXPECT_TRUE(files.MakeFolder(folder / "a/b").ok());
  EXPECT_TRUE(files.SyncFolder(folder / "a").ok());
  EXPECT_TRUE(files.RemoveAll(folder / "a").ok());
  EXPECT_FALSE(fs::exists(folder / "a"));
  EXPECT_TRUE(files.RemoveAll(folder / "a").ok());
}

// A file system of one megabyte of this test's own.
class SmallDisk {
 public:
  explicit SmallDisk(const std::string& path) : path_(path) {
    fs::create_directories(path);
    if (mount("zeroshard-test", path.c_str(), "tmpfs", 0, "size=1m") != 0) error_ = errno;
  }
  ~SmallDisk() {
    if (error_ == 0) umount2(path_.c_str(), MNT_DETACH);
  }
  int error() const { return error_; }

 private:
  const std::string path_;
  int error_ = 0;
};

TEST(FileSystem, ASaveOntoAFullDiskIsAbandonedAndTheNextOneThatFitsIsWhole) {
  const TempFolder folder;
  const SmallDisk disk(folder / "disk");
  if (disk.error() != 0) {
    GTEST_SKIP() << "mounting a tmpfs is not allowed here: " << std::strerror(disk.error());
  }
  FileSystem& files = FileSystem::Real();
  CheckpointStoreOptions options;
  options.dir = folder / "disk/checkpoints";
  options.job = "small";
  options.run_id = "run";
  const auto store = CheckpointStore::Open(&files, options);
  ASSERT_TRUE(store.ok()) << store.status();
  ASSERT_TRUE(Save(store->get(), &files, 1, 2, "run").ok());

  const auto begun = (*store)->Begin(2);
  ASSERT_TRUE(begun.ok()) << begun.status();
  const std::vector<float> large(1 << 19, 1.0f);  // 2 MiB
  const auto written = WriteStateFile(
      &files, *begun, 0, 1,
      {{StateKind::kMaster, "w", {1 << 19}, 0, static_cast<int64_t>(large.size()), large.data()}});
  EXPECT_EQ(written.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(written.status()),
              AllOf(HasSubstr(*begun + "/state-00000-of-00001.safetensors"),
                    HasSubstr("No space left on device")));
  (*store)->Abandon(2);

  const auto found = FindCheckpoint(options.dir);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(IsWhole(found->path, 1));
  const auto third = Save(store->get(), &files, 3, 2, "run");
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_TRUE(IsWhole(*third, 3));
}

}  // namespace
}  // namespace zeroshard
