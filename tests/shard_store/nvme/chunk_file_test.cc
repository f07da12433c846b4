#include "shard_store/nvme/chunk_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/checksum.h"
#include "shard_store/nvme/stale_files.h"
#include "tests/shard_store/nvme/chunk_file_fixture.h"

namespace zeroshard::nvme {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Verdict = DiskHook::Verdict;

template <typename T>
T Field(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

INSTANTIATE_TEST_SUITE_P(Engines, ChunkFileTest, ::testing::Values(Engine::kRing, Engine::kThreads),
                         EngineName);

TEST_P(ChunkFileTest, EverySectionOfEveryChunkIsReadAsItWasWritten) {
  Make();
  const std::vector<std::pair<uint32_t, Section>> sections = {
      {0, kMaster},     {0, kExpAvg},  {0, kExpAvgSq},  {0, kParameters},
      {0, kStaging},    {1, kMaster},  {1, kExpAvg},    {1, kExpAvgSq},
      {1, kParameters}, {1, kStaging}, {2, kParameters}};
  for (const auto& [chunk, section] : sections) ASSERT_TRUE(Write(chunk, section, 7, 1).ok());
  for (const auto& [chunk, section] : sections) {
    const auto seen = Read(chunk, section, 7);
    ASSERT_TRUE(seen.ok()) << seen.status();
    EXPECT_EQ(*seen, Values(chunk, section, 1));
  }
}

TEST_P(ChunkFileTest, PartsOfASectionAreReadAcrossBlocksWithOneBuffer) {
  Make();
  ASSERT_TRUE(Write(1, kMaster, 7, 1).ok());
  const std::vector<char> all = Values(1, kMaster, 1);
  pool_.reset();
  const auto small = Pool(1);
  for (const auto& [begin, count] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 1}, {(1 << 20) - 3, 7}, {(1 << 20), 400}, {5, all.size() - 5}, {all.size(), 0}}) {
    std::vector<char> seen(count);
    ASSERT_TRUE(file_->ReadRange(1, kMaster, 7, begin, absl::MakeSpan(seen), small.get()).ok());
    EXPECT_TRUE(std::equal(seen.begin(), seen.end(), all.begin() + static_cast<ptrdiff_t>(begin)));
  }
  std::vector<char> beyond(2);
  EXPECT_TRUE(absl::IsInvalidArgument(
      file_->ReadRange(1, kMaster, 7, all.size() - 1, absl::MakeSpan(beyond), small.get())));
}

TEST_P(ChunkFileTest, OnlyTheVersionThatIsThereCanBeRead) {
  Make();
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(1, kMaster, 7).status())) << "nothing was written";
  ASSERT_TRUE(Write(1, kMaster, 7, 1).ok());
  const auto seen = Read(1, kMaster, 8);
  EXPECT_TRUE(absl::IsFailedPrecondition(seen.status()));
  EXPECT_THAT(std::string(seen.status().message()),
              AllOf(HasSubstr("version 8 asked for"), HasSubstr("version 7 is here"),
                    HasSubstr("chunk 1 master")));
  ASSERT_TRUE(Write(2, kParameters, 0, 1).ok());
  EXPECT_TRUE(Read(2, kParameters, 8).ok()) << "frozen chunks have one version for ever";
}

TEST_P(ChunkFileTest, WhatIsNotKeptHereIsRefused) {
  Make();
  for (const BlockId& id : std::vector<BlockId>{
           {9, kMaster, 0}, {0, kMaster, 1}, {0, kMaster, -1}, {2, kMaster, 0}, {2, kStaging, 0}}) {
    EXPECT_TRUE(absl::IsInvalidArgument(file_->Write(id, 1, pool_->TryTake(), nullptr)));
    EXPECT_TRUE(absl::IsInvalidArgument(file_->Read(id, 1, pool_->TryTake(), nullptr)));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(file_->Write({0, kMaster, 0}, 1, IoBuffer(), nullptr)));
  EXPECT_EQ(pool_->free(), 8);
}

TEST_P(ChunkFileTest, AFlippedByteIsNamed) {
  Make();
  ASSERT_TRUE(Write(1, kExpAvg, 7, 1).ok());
  const auto* entry = file_->layout().Find(1);
  const uint64_t offset = entry->home.section[kExpAvg] + entry->BlockOffset(kExpAvg, 1);
  const char was = Values(1, kExpAvg, 1)[(1 << 20) + 17];
  Poke(offset + 17, std::string(1, static_cast<char>(was ^ 4)));
  EXPECT_EQ(counters_.errors, 0u);
  const auto seen = Read(1, kExpAvg, 7);
  EXPECT_TRUE(absl::IsDataLoss(seen.status())) << seen.status();
  EXPECT_EQ(counters_.errors, 1u);
  const std::vector<char> all = Values(1, kExpAvg, 1);
  std::vector<char> flipped(all.begin() + (1 << 20), all.end());
  const uint32_t wanted = Crc32c(flipped.data(), flipped.size());
  flipped[17] ^= 4;
  EXPECT_THAT(std::string(seen.status().message()),
              AllOf(HasSubstr(file_->path()), HasSubstr("chunk 1 exp_avg block 1"),
                    HasSubstr(absl::StrCat("offset ", offset)),
                    HasSubstr(absl::StrFormat("%08x seen, %08x of version 7 wanted",
                                              Crc32c(flipped.data(), flipped.size()), wanted))));
  // The other block is whole, and can be read.
  std::vector<char> first(100);
  EXPECT_TRUE(file_->ReadRange(1, kExpAvg, 7, 0, absl::MakeSpan(first), pool_.get()).ok());
}

TEST_P(ChunkFileTest, ADamagedLabelIsFound) {
  Make();
  ASSERT_TRUE(Write(0, kMaster, 7, 1).ok());
  const uint64_t label = file_->layout().Find(0)->home.section[kMaster] + 4096;
  Poke(label + 24, "x");
  EXPECT_TRUE(absl::IsDataLoss(Read(0, kMaster, 7).status()));
}

TEST_P(ChunkFileTest, ALostWriteIsFoundAndToldFromDamage) {
  Make();
  ASSERT_TRUE(Write(0, kMaster, 7, 1).ok());
  faults_.Set([](const DiskHook::Attempt& attempt) {
    return attempt.write ? Answer(attempt.bytes) : Verdict{};
  });
  ASSERT_TRUE(Write(0, kMaster, 8, 2).ok()) << "the disk says that it has it";
  const auto seen = Read(0, kMaster, 8);
  EXPECT_TRUE(absl::IsDataLoss(seen.status()));
  EXPECT_THAT(std::string(seen.status().message()),
              HasSubstr("of version 7: the write of version 8 never reached the disk"));
}

TEST_P(ChunkFileTest, ALostFirstWriteIsFound) {
  Make();
  faults_.Set([](const DiskHook::Attempt& attempt) {
    return attempt.write ? Answer(attempt.bytes) : Verdict{};
  });
  ASSERT_TRUE(Write(0, kMaster, 1, 2).ok());
  EXPECT_TRUE(absl::IsDataLoss(Read(0, kMaster, 1).status()));
}

TEST_P(ChunkFileTest, AWriteInTheWrongPlaceIsFound) {
  Make();
  ASSERT_TRUE(Write(0, kMaster, 7, 1).ok());
  ASSERT_TRUE(Write(0, kExpAvg, 7, 1).ok());
  const auto* entry = file_->layout().Find(0);
  const std::string master = Contents(file_->path()).substr(entry->home.section[kMaster], 8192);
  Poke(entry->home.section[kExpAvg], master);
  const auto seen = Read(0, kExpAvg, 7);
  EXPECT_TRUE(absl::IsDataLoss(seen.status()));
  EXPECT_THAT(std::string(seen.status().message()), HasSubstr("label is that of chunk 0 master"));
}

TEST_P(ChunkFileTest, HalfAWriteIsFound) {
  Make();
  ASSERT_TRUE(Write(1, kMaster, 7, 1).ok());
  const uint64_t begin = file_->layout().Find(1)->home.section[kMaster];
  const std::string before = Contents(file_->path()).substr(begin, 512 * 1024);
  ASSERT_TRUE(Write(1, kMaster, 8, 2).ok());
  Poke(begin, before);
  EXPECT_TRUE(absl::IsDataLoss(Read(1, kMaster, 8).status()));
}

TEST_P(ChunkFileTest, AWriteThatFailedLeavesNothingToRead) {
  Make();
  ASSERT_TRUE(Write(0, kMaster, 7, 1).ok());
  faults_.Set([](const DiskHook::Attempt& a) { return a.write ? Answer(-EIO) : Verdict{}; });
  const absl::Status status = Write(0, kMaster, 8, 2);
  EXPECT_THAT(std::string(status.message()), HasSubstr(strerror(EIO)));
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(0, kMaster, 8).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(0, kMaster, 7).status()));
}

TEST_P(ChunkFileTest, AFullDiskIsMetWhenTheFileIsMadeAndLeavesNone) {
  uint64_t wanted = 0;
  faults_.allocate = [&](uint64_t bytes) {
    wanted = bytes;
    return ENOSPC;
  };
  const auto file = ChunkFile::Create(options_);
  EXPECT_TRUE(absl::IsResourceExhausted(file.status()));
  EXPECT_THAT(std::string(file.status().message()),
              AllOf(HasSubstr(absl::StrCat("reserve ", wanted, " bytes")),
                    HasSubstr(folder_.path()), HasSubstr("bytes are free there")));
  EXPECT_EQ(wanted, ChunkLayout::Make(options_.chunks, options_.spare_slots)->file_bytes());
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_P(ChunkFileTest, ALargerFileThanTheDiskIsRefusedByTheDiskItself) {
  struct statfs space;
  ASSERT_EQ(statfs(folder_.path().c_str(), &space), 0);
  const uint64_t free =
      static_cast<uint64_t>(space.f_bavail) * static_cast<uint64_t>(space.f_bsize);
  constexpr uint64_t kSlot = 3 * ((1 << 20) + 3 * 4096);  // of the larger chunk here
  options_.spare_slots = static_cast<int>(free / kSlot + free / kSlot / 2 + 10);
  EXPECT_TRUE(absl::IsResourceExhausted(ChunkFile::Create(options_).status()));
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_P(ChunkFileTest, AFailedHeaderLeavesNoFile) {
  faults_.Set([](const DiskHook::Attempt&) { return Answer(-EIO); });
  EXPECT_FALSE(ChunkFile::Create(options_).ok());
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_P(ChunkFileTest, TheHeaderSaysWhoseFileItIs) {
  Make();
  const std::string bytes = Contents(file_->path());
  EXPECT_EQ(bytes.substr(0, 8), "ZSNVME\r\n");
  EXPECT_EQ(Field<uint32_t>(bytes, 8), 1u);
  EXPECT_EQ(Field<uint32_t>(bytes, 12), 3u);
  EXPECT_EQ(Field<uint64_t>(bytes, 16), 3u);
  EXPECT_EQ(Field<uint64_t>(bytes, 32), bytes.size());
  EXPECT_EQ(Field<uint32_t>(bytes, 40), 1u);
  EXPECT_STREQ(bytes.substr(48, 64).c_str(), "run-1");
  EXPECT_STREQ(bytes.substr(112, 64).c_str(), "me");
  EXPECT_EQ(Field<uint32_t>(bytes, 176), Crc32c(bytes.data(), 176));
  // Elements and bytes of each section, as the format has them.
  std::string layout;
  for (const auto& [chunk, elements, each] :
       std::vector<std::tuple<uint32_t, int64_t, std::string>>{
           {0, 1, {4, 4, 4, 2, 2}},
           {1, kBlockElements + 100, {4, 4, 4, 2, 2}},
           {2, 5000, {0, 0, 0, 2, 0}}}) {
    layout.append(reinterpret_cast<const char*>(&chunk), 4);
    layout.append(reinterpret_cast<const char*>(&elements), 8);
    layout += each;
  }
  EXPECT_EQ(Field<uint32_t>(bytes, 44), Crc32c(layout.data(), layout.size()));
}

TEST_P(ChunkFileTest, TheFileGoesWithItsOwnerAndItsSpaceIsTakenAtOnce) {
  Make();
  struct stat info;
  ASSERT_EQ(stat(file_->path().c_str(), &info), 0);
  EXPECT_EQ(static_cast<uint64_t>(info.st_size), file_->layout().file_bytes());
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, file_->layout().file_bytes());
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_THAT(Names(), ElementsAre(AllOf(HasSubstr("zeroshard-run-1-"), HasSubstr(".chunks"))));
  file_.reset();
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_P(ChunkFileTest, FilesOfStoresThatEndedAreRemovedAndOthersLeft) {
  Make();
  const auto make = [&](const std::string& name) {
    std::ofstream(folder_ / name) << "left by a killed store";
  };
  make("zeroshard-old-0123.chunks");
  make("zeroshard-notes.txt");
  make("chunks");
  ASSERT_EQ(symlink((folder_ / "chunks").c_str(), (folder_ / "zeroshard-link.chunks").c_str()), 0);
  ASSERT_EQ(mkfifo((folder_ / "zeroshard-pipe.chunks").c_str(), 0600), 0);
  auto second = options_;
  second.run_id = "run-2";
  const auto other = ChunkFile::Create(second);
  ASSERT_TRUE(other.ok()) << other.status();
  const std::string mine = std::filesystem::path(file_->path()).filename();
  const std::string its = std::filesystem::path((*other)->path()).filename();
  EXPECT_THAT(Names(),
              ::testing::UnorderedElementsAre(mine, its, "zeroshard-notes.txt", "chunks",
                                              "zeroshard-link.chunks", "zeroshard-pipe.chunks"));
  make("zeroshard-old-4567.chunks");
  ASSERT_TRUE(RemoveStaleFiles(folder_.path(), absl::Seconds(10)).ok());
  EXPECT_THAT(Names(), Not(::testing::Contains("zeroshard-old-4567.chunks")));
  EXPECT_THAT(Names(), ::testing::IsSupersetOf({mine, its}));
}

TEST_P(ChunkFileTest, AFolderThatIsNotThereAndOddRunsAreRefused) {
  options_.run_id = "../run";
  EXPECT_TRUE(absl::IsInvalidArgument(ChunkFile::Create(options_).status()));
  options_.run_id = "run";
  options_.dir = folder_ / "none";
  const auto file = ChunkFile::Create(options_);
  EXPECT_TRUE(absl::IsNotFound(file.status()));
  EXPECT_THAT(std::string(file.status().message()), HasSubstr(folder_ / "none"));
}

TEST_P(ChunkFileTest, NothingOfItIsInThePageCache) {
  Make();
  struct statfs info;
  ASSERT_EQ(statfs(file_->path().c_str(), &info), 0);
  constexpr long kTmpfs = 0x01021994;
  if (!file_->direct() || info.f_type == kTmpfs) GTEST_SKIP() << "it lies in the page cache";
  WriteState(1, 1, 1);
  ExpectHas(1, 1, 1);
  const int fd = open(file_->path().c_str(), O_RDONLY | O_CLOEXEC);
  const size_t bytes = file_->layout().file_bytes();
  void* const map = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(map, MAP_FAILED);
  std::vector<unsigned char> resident((bytes + 4095) / 4096);
  ASSERT_EQ(mincore(map, bytes, resident.data()), 0);
  EXPECT_EQ(std::count_if(resident.begin(), resident.end(), [](int page) { return page & 1; }), 0);
  munmap(map, bytes);
  close(fd);
}

TEST_P(ChunkFileTest, TheChecksumOfASectionIsThatOfItsBytes) {
  Make();
  ASSERT_TRUE(Write(1, kMaster, 7, 1).ok());
  const std::vector<char> all = Values(1, kMaster, 1);
  const auto crc = file_->SectionCrc(1, kMaster, 7);
  ASSERT_TRUE(crc.ok());
  EXPECT_EQ(*crc, Crc32c(all.data(), all.size()));
  EXPECT_TRUE(absl::IsFailedPrecondition(file_->SectionCrc(1, kMaster, 6).status()));
}

}  // namespace
}  // namespace zeroshard::nvme
