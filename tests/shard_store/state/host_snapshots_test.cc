// Jobs of a store whose versions are written while they go on.
#include <filesystem>
#include <fstream>
#include <optional>

#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "tests/shard_store/state/host_fixture.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

// In the middle of what is written.
constexpr uint64_t kHalfway = 40000;

class HostSnapshotsTest : public StoreHostFixture {};
class EachHostSnapshots : public EachStateFixture {};

// A store whose job has done a step, and a folder for what is written of it.
struct Trained {
  explicit Trained(const JobShape& shape) : job("run-1", shape) {
    job.Tell(&store);
    job.WaitForStep(&store, 0);
    stream = job.Open(&store);
    job.Step(&store, stream, 1);
  }

  TestStore store;
  TestJob job;
  const MemoryFolder folder;
  std::shared_ptr<StoreHost::Stream> stream;
};

// As a stream does it.
std::future<absl::Status> PushWhenItMay(TestStore* store, TestJob* job,
                                        const std::shared_ptr<StoreHost::Stream>& stream,
                                        uint64_t step, uint32_t chunk) {
  auto staged = std::make_shared<std::promise<absl::Status>>();
  const absl::Status status = job->Push(store, stream.get(), step, chunk);
  if (!IsTooEarly(status)) {
    staged->set_value(status);
  } else {
    store->host->WaitForPush(stream, job->Frame(step, chunk), [=](const absl::Status& ready) {
      staged->set_value(ready.ok() ? job->Push(store, stream.get(), step, chunk) : ready);
    });
  }
  return staged->get_future();
}

INSTANTIATE_TEST_SUITE_P(In, EachHostSnapshots, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

TEST_P(EachHostSnapshots, APushThatIsEarlyBecauseThisReplicaIsSlowIsTakenOnceThereIsRoomForIt) {
  Trained here({.nvme = GetParam()});
  auto& [store, job, folder, stream] = here;
  // A snapshot that does not get on holds the next update back.
  store.files.Close();
  job.OrderSnapshot(1, folder);
  job.Tell(&store);
  store.files.WaitForWriter();
  const Reference then = job.reference_;
  job.PushAll(&store, stream.get(), 2);
  const uint32_t last = job.chunks_.rbegin()->first;
  auto waits = job.Pull(&store, stream, 2, last);
  job.Decide(2);
  job.Tell(&store);
  job.WaitFor(&store, [](const auto& r) { return r.phase() == v1::STORE_PHASE_APPLYING; });
  // Meanwhile those for which there is a copy, or a slot, are updated.
  const uint32_t first = job.chunks_.begin()->first;
  EXPECT_TRUE(job.Pull(&store, stream, 2, first).get().ok());
  auto of_first = PushWhenItMay(&store, &job, stream, 3, first);
  EXPECT_TRUE(IsTooEarly(job.Push(&store, stream.get(), 3, last)));
  auto of_last = PushWhenItMay(&store, &job, stream, 3, last);
  EXPECT_EQ(of_last.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_FALSE(IsDone(waits));
  // The same gradients again are no news.
  EXPECT_TRUE(job.Push(&store, stream.get(), 2, last).ok());
  store.files.Open();
  EXPECT_TRUE(of_first.get().ok());
  EXPECT_TRUE(of_last.get().ok());
  EXPECT_TRUE(waits.get().ok());
  const v1::StoreReport report =
      job.WaitFor(&store, [](const auto& r) { return r.snapshot().done(); });
  EXPECT_EQ(report.snapshot().problem(), "");
  EXPECT_EQ(store.host->TakeSnapshotSeconds().size(), 1u);
  EXPECT_EQ(store.host->disk_io().written_bytes > 0, GetParam());
  job.WaitForStep(&store, 2);
  job.ExpectParameters(&store, stream, 2);
  // With what came early.
  job.next_.clear_snapshot();
  for (const auto& [id, chunk] : job.chunks_) {
    if (id == first || id == last || !chunk.trained) continue;
    EXPECT_TRUE(job.Push(&store, stream.get(), 3, id).ok());
  }
  job.WaitFor(&store, [](const auto& r) { return r.sealed_step() == 3; });
  job.Decide(3);
  job.Tell(&store);
  job.WaitForStep(&store, 3);
  job.ExpectParameters(&store, stream, 3);

  // The snapshot is the version it was taken at, and a job can go on from it.
  Manifest manifest;
  manifest.run_id = job.run_id();
  manifest.job = "small";
  manifest.step = 1;
  manifest.world_size = 1;
  manifest.spec = job.spec_;
  manifest.files.push_back(
      {report.snapshot().file(), report.snapshot().bytes(), report.snapshot().crc32c()});
  std::ofstream(folder / "manifest.json") << FormatManifest(manifest);
  TestJob next("run-2");
  next.next_.mutable_job()->set_checkpoint(folder.path());
  next.next_.mutable_job()->mutable_base()->set_step(1);
  next.reference_ = then;
  next.Tell(&store);
  next.WaitForStep(&store, 1);
  const auto other = next.Open(&store);
  next.ExpectParameters(&store, other, 1);
  next.Step(&store, other, 2);
  next.ExpectParameters(&store, other, 2);

  // One byte of it changed: nothing is trained on that, and the file is named.
  std::fstream file(folder / report.snapshot().file(),
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-5, std::ios::end);
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(-5, std::ios::end);
  file.put(byte);
  file.close();
  TestJob damaged("run-3");
  damaged.next_.mutable_job()->set_checkpoint(folder.path());
  damaged.next_.mutable_job()->mutable_base()->set_step(1);
  damaged.Tell(&store);
  const v1::StoreReport failed = damaged.WaitForFailure(&store);
  EXPECT_EQ(failed.error_code(), "DATA_LOSS");
  EXPECT_THAT(failed.problem(), HasSubstr(report.snapshot().file()));
}

TEST_P(EachHostSnapshots, ASnapshotThatIsGivenUpHoldsNothingBackAndTheNextIsWritten) {
  for (const std::optional<uint64_t> data : {std::optional<uint64_t>(), {kHalfway}}) {
    SCOPED_TRACE(data ? "in the data" : "in the header");
    Trained here({.nvme = GetParam()});
    auto& [store, job, first, stream] = here;
    const MemoryFolder second;
    store.files.Close(data);
    job.OrderSnapshot(1, first);
    job.Tell(&store);
    store.files.WaitForWriter();
    job.PushAll(&store, stream.get(), 2);
    job.Decide(2);
    job.Tell(&store);
    job.next_.clear_snapshot();
    job.Tell(&store);
    job.WaitForStep(&store, 2);  // the writer is still held up
    job.Step(&store, stream, 3);
    job.OrderSnapshot(3, second);
    job.Tell(&store);
    store.files.Open();
    const v1::StoreReport report = job.WaitFor(
        &store, [](const auto& r) { return r.snapshot().done() && r.snapshot().step() == 3; });
    EXPECT_EQ(report.snapshot().problem(), "");
    job.Step(&store, stream, 4);
    job.ExpectParameters(&store, stream, 4);
  }
}

TEST_P(EachHostSnapshots, TheNextSnapshotDoesNotWaitOnTheThreadOfTheStepsForAWriteThatHangs) {
  Trained here({.nvme = GetParam()});
  auto& [store, job, folder, stream] = here;
  store.files.Close(kHalfway);
  job.OrderSnapshot(1, folder);
  job.Tell(&store);
  store.files.WaitForWriter();
  job.next_.clear_snapshot();
  job.Tell(&store);
  job.Step(&store, stream, 2);
  job.OrderSnapshot(2, folder);
  job.Tell(&store);
  // The thread of the job is free for this.
  job.next_.set_digest_step(2);
  job.Tell(&store);
  job.WaitFor(&store, [](const auto& r) { return r.digest_step() == 2; });
  job.next_.clear_snapshot();
  job.next_.clear_digest_step();
  job.Tell(&store);
  job.Step(&store, stream, 3);
  store.files.Open();
  job.ExpectParameters(&store, stream, 3);
}

// In memory, and on a disk, of exactly one job.
TEST_P(EachHostSnapshots, AWriteThatHangsKeepsNothingOfAJobThatIsOverOrWentBack) {
  TestJob job("run-1", {.nvme = GetParam()}), next("run-2", {.nvme = GetParam()});
  JobStateOptions options;
  options.spec = job.spec_;
  options.chunks = job.chunks_;
  options.nvme.chunk_elements = kChunk;
  const uint64_t bytes = BytesOf(options), disk_bytes = DiskBytesOf(options);
  TestStore store(bytes, GetParam() ? disk_bytes : 0);
  const MemoryFolder folder;
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto stream = job.Open(&store);
  job.Step(&store, stream, 1);
  store.files.Close(kHalfway);
  job.OrderSnapshot(1, folder);
  job.Tell(&store);
  store.files.WaitForWriter();
  // Back to the start, in a new epoch.
  job.next_.clear_snapshot();
  job.next_.clear_decision();
  job.next_.set_epoch(2);
  job.next_.set_generation(2);
  job.next_.set_map_version(2);
  job.next_.mutable_job()->mutable_base()->set_epoch(2);
  job.reference_ = Reference(job.model_, job.shape_);
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto other = job.Open(&store);
  job.Step(&store, other, 1);
  job.ExpectParameters(&store, other, 1);
  // Over.
  job.next_.set_drop(true);
  job.Tell(&store);
  job.WaitFor(&store, [](const auto& r) { return r.dropped(); });
  EXPECT_EQ(store.host->memory().used, 0u);
  EXPECT_EQ(store.host->memory().held, 0u);
  EXPECT_EQ(store.host->disk().used, 0u);
  EXPECT_EQ(store.host->disk().held, 0u);
  EXPECT_EQ(store.host->jobs(), 0u);
  next.Tell(&store);
  next.WaitForStep(&store, 0);
  EXPECT_EQ(store.host->memory().used, bytes);
  EXPECT_EQ(store.host->disk().used, disk_bytes);
  store.files.Open();
}

TEST_P(EachHostSnapshots, AStoreThatEndsDoesNotWaitForAWriteThatHangsAndNamesItsFolder) {
  TestStore store;
  TestJob job("run-1", {.nvme = GetParam()});
  const MemoryFolder folder;
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  store.files.Close(kHalfway);
  job.OrderSnapshot(0, folder);
  job.Tell(&store);
  store.files.WaitForWriter();
  const absl::Status status = store.host->Finish(absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("run-1"), HasSubstr(folder.path())));
  store.files.Open();
  EXPECT_TRUE(store.host->Finish(absl::Seconds(30)).ok());
}

TEST_P(EachHostSnapshots, AnExceptionInAWriterIsReportedWithItsStepAndTheJobGoesOn) {
  Trained here({.nvme = GetParam()});
  auto& [store, job, folder, stream] = here;
  store.files.Throw("a file system that throws");
  job.OrderSnapshot(1, folder);
  job.Tell(&store);
  const v1::StoreReport report =
      job.WaitFor(&store, [](const auto& r) { return r.snapshot().done(); });
  EXPECT_EQ(report.snapshot().step(), 1u);
  EXPECT_THAT(report.snapshot().problem(), HasSubstr("a file system that throws"));
  job.Step(&store, stream, 2);
  job.ExpectParameters(&store, stream, 2);
}

TEST_F(HostSnapshotsTest, WithoutAThreadMoreASnapshotOrAJobIsRefusedAndTheStoreGoesOn) {
  TestStore store;
  store.no_threads = true;
  TestJob job("run-1");
  job.Tell(&store);
  EXPECT_EQ(job.WaitForFailure(&store).error_code(), "RESOURCE_EXHAUSTED");
  EXPECT_EQ(store.host->jobs(), 0u);
  store.no_threads = false;
  const MemoryFolder folder;
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto stream = job.Open(&store);
  job.Step(&store, stream, 1);
  store.no_threads = true;
  job.OrderSnapshot(1, folder);
  job.Tell(&store);
  const v1::StoreReport report =
      job.WaitFor(&store, [](const auto& r) { return r.snapshot().done(); });
  EXPECT_EQ(report.snapshot().step(), 1u);
  EXPECT_THAT(report.snapshot().problem(), HasSubstr("no thread more"));
  job.Step(&store, stream, 2);
  job.ExpectParameters(&store, stream, 2);
}

}  // namespace
}  // namespace zeroshard::store
