// A file of three small chunks, over each engine.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shard_store/nvme/chunk_file.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/nvme/disk_faults.h"

namespace zeroshard::nvme {

inline ChunkShape Trained(int64_t elements) {
  const uint64_t n = static_cast<uint64_t>(elements);
  return {elements, {4 * n, 4 * n, 4 * n, 2 * n, 2 * n}};
}
inline ChunkShape Frozen(int64_t elements) {
  return {elements, {0, 0, 0, 2 * static_cast<uint64_t>(elements), 0}};
}

class ChunkFileTest : public OverEngines {
 protected:
  void SetUp() override {
    AsyncIoOptions io;
    io.counters = &counters_;
    Open(8, io);
    if (io_ == nullptr) return;
    pool_ = Pool(8);
    options_.dir = folder_.path();
    options_.run_id = "run-1";
    options_.incarnation = "me";
    options_.epoch = 3;
    options_.chunks = {{0, Trained(1)}, {1, Trained(kBlockElements + 100)}, {2, Frozen(5000)}};
    options_.spare_slots = 1;
    options_.io = io_.get();
    options_.hook = &faults_;
  }
  void TearDown() override {
    file_.reset();
    io_.reset();
  }
  void Make() {
    auto file = ChunkFile::Create(options_);
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = *file;
    RecordProperty("direct", file_->direct() ? "yes" : "no");
  }
  std::vector<char> Values(uint32_t chunk, Section section, uint32_t seed) const {
    const auto* entry = file_->layout().Find(chunk);
    return Bytes(static_cast<size_t>(entry->shape.elements) * entry->element_bytes[section],
                 seed * 100 + chunk * 10 + static_cast<uint32_t>(section));
  }
  absl::Status Write(uint32_t chunk, Section section, uint64_t version, uint32_t seed) {
    return file_->WriteSection(chunk, section, version, Values(chunk, section, seed), pool_.get());
  }
  absl::StatusOr<std::vector<char>> Read(uint32_t chunk, Section section, uint64_t version) {
    std::vector<char> bytes(Values(chunk, section, 0).size());
    const absl::Status status =
        file_->ReadRange(chunk, section, version, 0, absl::MakeSpan(bytes), pool_.get());
    if (!status.ok()) return status;
    return bytes;
  }
  void ExpectHas(uint32_t chunk, uint64_t version, uint32_t seed) {
    for (const Section section : {kMaster, kExpAvg, kExpAvgSq}) {
      const auto seen = Read(chunk, section, version);
      ASSERT_TRUE(seen.ok()) << seen.status();
      EXPECT_EQ(*seen, Values(chunk, section, seed)) << chunk << " " << NameOf(section);
    }
  }
  void WriteState(uint32_t chunk, uint64_t version, uint32_t seed) {
    for (const Section section : {kMaster, kExpAvg, kExpAvgSq}) {
      const absl::Status status = Write(chunk, section, version, seed);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void Update(uint32_t chunk, uint64_t version, uint32_t seed) {
    const auto begun = file_->BeginUpdate(chunk, nullptr);
    ASSERT_TRUE(begun.ok()) << begun.status();
    ASSERT_TRUE(*begun);
    WriteState(chunk, version, seed);
    file_->FinishUpdate(chunk);
  }
  // Changes bytes behind the program's back.
  void Poke(uint64_t offset, const std::string& bytes) {
    const int fd = open(file_->path().c_str(), O_WRONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)),
              static_cast<ssize_t>(bytes.size()));
    ASSERT_EQ(fdatasync(fd), 0);
    close(fd);
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      names.push_back(entry.path().filename());
    }
    return names;
  }

  IoCounters counters_;
  TempFolder folder_;
  ChunkFileOptions options_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<ChunkFile> file_;
};

}  // namespace zeroshard::nvme
