// Jobs whose state is in files.
#include <filesystem>
#include <fstream>

#include "tests/shard_store/state/host_fixture.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

class HostDisksTest : public StoreHostFixture {};

TEST_F(HostDisksTest, AStoreWithoutAFolderRefusesAJobOnDisksByName) {
  TestStore store(kPlenty, 0);
  TestJob job("run-1", {.nvme = true});
  job.Tell(&store);
  const v1::StoreReport report = job.WaitForFailure(&store);
  EXPECT_EQ(report.error_code(), "FAILED_PRECONDITION");
  EXPECT_THAT(report.problem(), testing::AllOf(HasSubstr("job small"), HasSubstr("device: nvme"),
                                               HasSubstr("--nvme-dir")));
}

TEST_F(HostDisksTest, TheFolderHoldsNoMoreThanItsLimitAndNothingOnceTheJobIsOver) {
  TestJob a("run-a", {.nvme = true}), b("run-b", {.nvme = true});
  JobStateOptions options;
  options.spec = a.spec_;
  options.chunks = a.chunks_;
  options.nvme.chunk_elements = kChunk;
  const uint64_t bytes = DiskBytesOf(options);
  TestStore store(kPlenty, bytes);
  a.Tell(&store);
  const v1::StoreReport report = a.WaitForStep(&store, 0);
  EXPECT_EQ(report.usage().nvme_bytes(), bytes);
  EXPECT_EQ(report.usage().master_bytes(), 0u);
  const auto files = [&] {
    uint64_t seen = 0;
    for (const auto& entry : std::filesystem::directory_iterator(store.disk.path()))
      if (entry.path().extension() == ".chunks") seen += entry.file_size();
    return seen;
  };
  EXPECT_EQ(files(), bytes);
  b.Tell(&store);
  const v1::StoreReport refused = b.WaitForFailure(&store);
  EXPECT_EQ(refused.error_code(), "RESOURCE_EXHAUSTED");
  EXPECT_THAT(refused.problem(),
              testing::AllOf(HasSubstr("--nvme-limit"), HasSubstr(std::to_string(bytes))));
  a.next_.set_drop(true);
  a.Tell(&store);
  a.WaitFor(&store, [](const auto& r) { return r.dropped(); });
  EXPECT_EQ(files(), 0u);
  b.next_.set_map_version(2);
  b.Tell(&store);
  b.WaitForStep(&store, 0);
}

// Flips a byte in the middle of every block of the job's file.
void Damage(const TestStore& store) {
  for (const auto& entry : std::filesystem::directory_iterator(store.disk.path())) {
    if (entry.path().extension() != ".chunks") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::streamoff>(entry.file_size());
    for (std::streamoff at = 4096 + 100; at < size; at += 4096) {
      file.seekg(at);
      const auto byte = static_cast<char>(file.get() ^ 1);
      file.seekp(at);
      file.put(byte);
    }
  }
}

TEST_F(HostDisksTest, AFlippedByteFailsTheJobAndIsNeverTrainedOnOrSent) {
  for (const char* by : {"pull", "step", "digest", "snapshot"}) {
    SCOPED_TRACE(by);
    const std::string met = by;
    const MemoryFolder checkpoint;
    TestStore store;
    TestJob job("run-1", {.nvme = true});
    job.Tell(&store);
    job.WaitForStep(&store, 0);
    const auto stream = job.Open(&store);
    job.Step(&store, stream, 1);
    if (met != "step") Damage(store);
    if (met == "pull") {
      const absl::Status seen = job.Pull(&store, stream, 1, 0).get().status();
      EXPECT_TRUE(absl::IsUnavailable(seen)) << "who asked has lost a store: " << seen;
      EXPECT_THAT(std::string(seen.message()), HasSubstr("damaged"));
    } else if (met == "digest") {
      job.next_.set_digest_step(1);
      job.Tell(&store);
    } else if (met == "snapshot") {
      job.OrderSnapshot(1, checkpoint);
      job.Tell(&store);
    } else {
      job.PushAll(&store, stream.get(), 2);
      Damage(store);
      job.Decide(2);
      job.Tell(&store);
    }
    const v1::StoreReport report = job.WaitForFailure(&store);
    EXPECT_EQ(report.error_code(), "DATA_LOSS");
    EXPECT_THAT(report.problem(), testing::AllOf(HasSubstr(store.disk.path()), HasSubstr("chunk "),
                                                 HasSubstr("damaged")));
  }
}

}  // namespace
}  // namespace zeroshard::store
