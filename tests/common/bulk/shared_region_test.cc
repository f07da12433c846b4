// Regions of shared memory: what is made is mapped, what anybody else may have left there is not,
// and nothing stays.
#include "common/bulk/shared_region.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "common/checksum.h"
#include "tests/common/temp_folder.h"

namespace zeroshard::bulk {
namespace {

using ::testing::HasSubstr;

constexpr char kOther[] = "zeroshard-0123456789abcdef0123456789abcdef";

size_t Entries(const std::string& folder) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

size_t Mappings() {
  const std::string maps = Contents("/proc/self/maps");
  size_t count = 0;
  for (size_t at = maps.find("zeroshard-"); at != std::string::npos;
       at = maps.find("zeroshard-", at + 1)) {
    ++count;
  }
  return count;
}

class SharedRegionTest : public ::testing::Test {
 protected:
  std::shared_ptr<SharedRegion> Make(int slots = 1) {
    auto made = SharedRegion::Make(slots, folder_.path());
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *made : nullptr;
  }
  // Why the region is not mapped after its file was changed.
  std::string Refusal(const std::function<void(const std::string& path)>& change) {
    const auto made = Make();
    if (made == nullptr) return "";
    change(folder_ / made->name());
    const absl::Status status = SharedRegion::Map(made->name(), folder_.path()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return std::string(status.message());
  }
  static void Write(const std::string& path, off_t at, const std::string& bytes) {
    const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    EXPECT_EQ(pwrite(fd, bytes.data(), bytes.size(), at), static_cast<ssize_t>(bytes.size()));
    close(fd);
  }

  MemoryFolder folder_;
};

TEST_F(SharedRegionTest, WhatOneSideWritesTheOtherReads) {
  const auto made = Make(3);
  ASSERT_NE(made, nullptr);
  const auto mapped = SharedRegion::Map(made->name(), folder_.path());
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ((*mapped)->slots(), 3);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(made->Take(), i);
    made->Slot(i)[0] = static_cast<char>('a' + i);
    made->Slot(i)[kMaxPayload - 1] = static_cast<char>('x' + i);
  }
  EXPECT_EQ(made->Take(), std::nullopt);
  for (int i = 0; i < 3; ++i) {
    auto claim = (*mapped)->ClaimSlot(i);
    ASSERT_TRUE(claim.ok()) << claim.status();
    EXPECT_EQ((*mapped)->Slot(i)[0], 'a' + i);
    EXPECT_EQ((*mapped)->Slot(i)[kMaxPayload - 1], 'x' + i);
    EXPECT_EQ(made->Take(), std::nullopt);
    claim->Release();
    claim->Release();
    EXPECT_EQ(made->Take(), i);
  }
}

TEST_F(SharedRegionTest, TheFormatIsTheOneWrittenDown) {
  const auto made = Make(2);
  ASSERT_NE(made, nullptr);
  const std::string content = Contents(folder_ / made->name());
  ASSERT_EQ(content.size(), 4096 + 2 * kMaxPayload);
  EXPECT_EQ(content.substr(0, 56), "ZSREGION" +
                                       std::string("\1\0\0\0\2\0\0\0\0\x10\x20\0\0\0\0\0", 16) +
                                       made->name().substr(10));
  EXPECT_EQ(content.substr(56), std::string(content.size() - 56, '\0'));
  ASSERT_EQ(made->Take(), 0);
  ASSERT_EQ(made->Take(), 1);
  made->Free(0);
  made->SetWaiting();
  const std::string later = Contents(folder_ / made->name());
  EXPECT_EQ(later.substr(64, 4), std::string("\1\0\0\0", 4));
  EXPECT_EQ(later.substr(128, 4), std::string("\0\0\0\0", 4));
  EXPECT_EQ(later.substr(192, 4), std::string("\1\0\0\0", 4));
}

TEST_F(SharedRegionTest, OnlyTheUserMayOpenItWhateverTheUmask) {
  const mode_t before = umask(0777);
  const auto made = Make();
  umask(before);
  ASSERT_NE(made, nullptr);
  struct stat file {};
  ASSERT_EQ(stat((folder_ / made->name()).c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0600u);
  EXPECT_GE(file.st_blocks * 512, file.st_size);
  EXPECT_TRUE(SharedRegion::Map(made->name(), folder_.path()).ok());
}

TEST_F(SharedRegionTest, WaitingIsToldOnceToTheOtherSide) {
  const auto made = Make();
  ASSERT_NE(made, nullptr);
  const auto mapped = SharedRegion::Map(made->name(), folder_.path());
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_FALSE(made->TakeWaiting());
  (*mapped)->SetWaiting();
  EXPECT_TRUE(made->TakeWaiting());
  EXPECT_FALSE(made->TakeWaiting());
}

TEST_F(SharedRegionTest, AClaimKeepsTheMemoryMapped) {
  auto made = Make();
  ASSERT_NE(made, nullptr);
  auto mapped = SharedRegion::Map(made->name(), folder_.path());
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  ASSERT_EQ(made->Take(), 0);
  made->Slot(0)[5] = 'k';
  auto claim = (*mapped)->ClaimSlot(0);
  ASSERT_TRUE(claim.ok()) << claim.status();
  const char* const at = (*mapped)->Slot(0);
  made.reset();
  mapped->reset();
  EXPECT_EQ(at[5], 'k');
  SharedRegion::Claim other = *std::move(claim);
  EXPECT_TRUE(other.held());
  other = SharedRegion::Claim();
  EXPECT_EQ(Mappings(), 0u);
}

TEST_F(SharedRegionTest, NamesThatAreNoRegionsAreNotLookedFor) {
  for (const std::string& name : std::vector<std::string>{
           "", "zeroshard-", "/etc/passwd", "../../etc/passwd", std::string(kOther) + "0",
           std::string(kOther).substr(0, 41), "/" + std::string(kOther),
           "zeroshard-0123456789ABCDEF0123456789ABCDEF",
           "zeroshard-0123456789abcdef/../../etc/hosts",
           "zeroshard-0123456789abcdef0123456789abcde\n",
           "nccl-shard-0123456789abcdef0123456789abcdef",
           std::string("zeroshard-0123456789abcdef0123456789abcde\0", 42)}) {
    EXPECT_EQ(SharedRegion::Map(name, folder_.path()).status().code(),
              absl::StatusCode::kInvalidArgument)
        << name;
  }
  EXPECT_EQ(SharedRegion::Map(kOther, folder_.path()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(SharedRegionTest, ALinkAFolderOrAPipeIsNotFollowed) {
  const auto made = Make();
  ASSERT_NE(made, nullptr);
  const std::string path = folder_ / kOther;
  ASSERT_EQ(symlink(made->name().c_str(), path.c_str()), 0);
  EXPECT_EQ(SharedRegion::Map(kOther, folder_.path()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_EQ(mkdir(path.c_str(), 0700), 0);
  EXPECT_EQ(SharedRegion::Map(kOther, folder_.path()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(rmdir(path.c_str()), 0);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_THAT(SharedRegion::Map(kOther, folder_.path()).status().message(),
              HasSubstr("no regular file"));
}

TEST_F(SharedRegionTest, AFileThatIsNotAsOneIsMadeIsRefusedWithTheReason) {
  EXPECT_THAT(Refusal([](const auto& path) { chmod(path.c_str(), 0644); }), HasSubstr("mode"));
  EXPECT_THAT(Refusal([this](const auto& path) {
                EXPECT_EQ(link(path.c_str(), (folder_ / kOther).c_str()), 0);
              }),
              HasSubstr("2 names"));
  EXPECT_THAT(Refusal([](const auto& path) { EXPECT_EQ(truncate(path.c_str(), 0), 0); }),
              HasSubstr("no region has 0 bytes"));
  EXPECT_THAT(Refusal([](const auto& path) { EXPECT_EQ(truncate(path.c_str(), 1 << 20), 0); }),
              HasSubstr("bytes"));
  // One slot more, which the head does not know of, and which is a hole.
  EXPECT_THAT(
      Refusal([](const auto& path) { EXPECT_EQ(truncate(path.c_str(), 4096 + (2 << 20)), 0); }),
      HasSubstr("not all of it is allocated"));
  EXPECT_THAT(Refusal([](const auto& path) {
                EXPECT_EQ(truncate(path.c_str(), off_t{4096} + (off_t{1} << 40)), 0);
              }),
              HasSubstr("no region has"));
}

TEST_F(SharedRegionTest, AHeadThatSaysOtherThanTheFileIsRefused) {
  const auto with = [this](off_t at, const std::string& bytes) {
    return Refusal([&](const std::string& path) { Write(path, at, bytes); });
  };
  EXPECT_THAT(with(0, "X"), HasSubstr("ZSREGION"));
  EXPECT_THAT(with(8, "\2"), HasSubstr("version 2"));
  EXPECT_THAT(with(12, "\2"), HasSubstr("2 slots"));
  EXPECT_THAT(with(12, "\xff\xff\xff\xff"), HasSubstr("slots"));
  EXPECT_THAT(with(16, "\1"), HasSubstr("bytes"));
  EXPECT_THAT(with(55, "g"), HasSubstr("another name"));
}

TEST_F(SharedRegionTest, WhereThereIsNoRoomNoneIsMade) {
  EXPECT_EQ(SharedRegion::Make(1, folder_ / "none").status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(SharedRegion::Make(0, folder_.path()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SharedRegion::Make(SharedRegion::kMostSlots + 1, folder_.path()).status().code(),
            absl::StatusCode::kInvalidArgument);
  // In a process that may write no more than a part of a file.
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    const bool refused =
        setrlimit(RLIMIT_FSIZE, &limit) == 0 &&
        absl::IsResourceExhausted(SharedRegion::Make(2, folder_.path()).status()) &&
        Entries(folder_.path()) == 0;
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

TEST_F(SharedRegionTest, ThousandsLeaveNoNamesDescriptorsOrMappings) {
  const size_t descriptors = Entries("/proc/self/fd");
  for (int i = 0; i < 1000; ++i) {
    const auto made = Make();
    ASSERT_NE(made, nullptr);
    const auto mapped = SharedRegion::Map(made->name(), folder_.path());
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    if (i % 2 == 0) made->Unlink();
  }
  EXPECT_EQ(Entries(folder_.path()), 0u);
  EXPECT_EQ(Entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(Mappings(), 0u);
}

TEST_F(SharedRegionTest, UnlinkTakesTheNameAndLeavesTheMemory) {
  const auto made = Make();
  ASSERT_NE(made, nullptr);
  made->Unlink();
  EXPECT_EQ(Entries(folder_.path()), 0u);
  EXPECT_EQ(SharedRegion::Map(made->name(), folder_.path()).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_EQ(made->Take(), 0);
  made->Slot(0)[0] = 'a';
  made->Unlink();
}

// Names are only judged once they are older than a minute; the file's clock cannot be set back, so
// the test asks with a later one.
TEST_F(SharedRegionTest, NamesOfKilledMakersGoAndThoseOfLivingOnesStay) {
  const auto alive = Make();
  ASSERT_NE(alive, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const auto made = SharedRegion::Make(1, folder_.path());
    raise(SIGKILL);
    _exit(1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  ASSERT_EQ(Entries(folder_.path()), 2u);
  const absl::Time now = absl::Now();
  EXPECT_EQ(SharedRegion::RemoveStale(folder_.path(), now), 0);
  EXPECT_EQ(SharedRegion::RemoveStale(folder_.path(), now + absl::Seconds(120)), 1);
  ASSERT_EQ(Entries(folder_.path()), 1u);
  EXPECT_TRUE(SharedRegion::Map(alive->name(), folder_.path()).ok());
}

TEST_F(SharedRegionTest, FilesOfOthersAreNotRemoved) {
  for (const char* name : {"nccl-1", "zeroshard-x"}) {
    close(open((folder_ / name).c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  }
  EXPECT_EQ(SharedRegion::RemoveStale(folder_.path(), absl::Now() + absl::Hours(1)), 0);
  EXPECT_EQ(Entries(folder_.path()), 2u);
}

TEST(CopyWithCrc32cTest, IsACopyAndItsChecksum) {
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{8191}, size_t{8192}, size_t{8193}, size_t{100003}}) {
    std::string from(size, '\0');
    for (size_t i = 0; i < size; ++i) from[i] = static_cast<char>(i * 131 >> 3);
    std::string to(size, '\0');
    EXPECT_EQ(CopyWithCrc32c(from.data(), size, to.data()), Crc32c(from.data(), size));
    EXPECT_EQ(to, from);
  }
}

}  // namespace
}  // namespace zeroshard::bulk
