// What a store may take, who it listens to, and what it says of a disk that hangs.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>

#include "absl/strings/match.h"
#include "common/plan/nvme_bytes.h"
#include "shard_store/state/writer_buffer.h"
#include "tests/shard_store/nvme/disk_faults.h"
#include "tests/shard_store/state/host_fixture.h"

namespace zeroshard::store {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

class HostLimitsTest : public StoreHostFixture {
 protected:
  // The store's host again, with what the options add.
  void Restart(TestStore* store, const std::function<void(StoreHostOptions*)>& add) {
    StoreHostOptions options;
    options.memory_limit = options.nvme_limit = kPlenty;
    options.nvme_dir = store->disk.path();
    options.threads = 2;
    options.files = &store->files;
    options.chunk_elements = kChunk;
    options.on_report = [store](const v1::StoreReport& report) { store->reports.Add(report); };
    add(&options);
    store->host = std::make_unique<StoreHost>(options);
  }
};

// --- who is listened to --------------------------------------------------------------------------

TEST_F(HostLimitsTest, ADirectiveForAnotherIncarnationOfThisStoreIsRefused) {
  TestStore store;
  Restart(&store, [](StoreHostOptions* options) { options->incarnation = [] { return "now"; }; });
  TestJob job("run-1");
  v1::StoreMap::Store* self = job.next_.mutable_job()->mutable_map()->mutable_stores(0);
  self->set_incarnation("before");
  job.Tell(&store);
  EXPECT_EQ(store.host->Reports().at(0).phase(), v1::STORE_PHASE_UNSPECIFIED);
  EXPECT_EQ(store.host->memory().used, 0u);
  self->set_incarnation("now");
  job.Tell(&store);
  job.WaitForStep(&store, 0);
}

TEST_F(HostLimitsTest, AStreamOfAnotherIncarnationThanItsRankHasInThisGenerationIsRefused) {
  TestStore store;
  TestJob job("run-1");
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto open = [&](const std::string& incarnation) {
    v1::BulkHello hello;
    hello.set_run_id(job.run_id());
    hello.set_generation(job.next_.generation());
    hello.set_member("worker-0");
    hello.set_incarnation(incarnation);
    return store.host->Open(hello, [](const absl::Status&) {});
  };
  const auto first = open("a");
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(open("a").ok());
  const absl::Status other = open("b").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(std::string(other.message()), AllOf(HasSubstr("rank 0"), HasSubstr("worker-0")));
  store.host->Close(*first);
  EXPECT_TRUE(absl::IsFailedPrecondition(open("b").status())) << "it has had a stream";
  job.next_.set_generation(2);
  job.Tell(&store);
  EXPECT_TRUE(open("b").ok());
}

TEST_F(HostLimitsTest, AStoreThatIsNotInTheMapOrNoMoreIsGivenNoState) {
  TestStore store;
  TestJob job("run-1");
  job.SetStores(2, 2);
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  v1::BulkHello hello;
  hello.set_run_id(job.run_id());
  hello.set_generation(1);
  hello.set_store(true);
  hello.set_rank(1);
  hello.set_member("store-7");
  EXPECT_TRUE(absl::IsUnavailable(store.host->Open(hello, nullptr).status()));
  hello.set_member("store-1");
  hello.set_incarnation("before");
  EXPECT_TRUE(absl::IsFailedPrecondition(store.host->Open(hello, nullptr).status()));
  hello.clear_incarnation();
  auto reader = LocalPeer::Connect(store.host.get(), hello);
  ASSERT_TRUE(reader.ok()) << reader.status();
  v1::StateVersion version;
  version.set_epoch(1);
  std::vector<float> values(64);
  const auto read = [&] {
    return (*reader)->Read(version, 0, StateKind::kMaster, 0, absl::MakeSpan(values));
  };
  EXPECT_TRUE(read().ok());
  job.SetStores(2, 2, 1);  // its replicas are gone
  job.next_.set_map_version(2);
  job.Tell(&store);
  EXPECT_TRUE(absl::IsUnavailable(read()));
}

// --- memory --------------------------------------------------------------------------------------

TEST_F(HostLimitsTest, TheBuffersOfAJobOnDisksAreToldAndCountAsWhatIsUsed) {
  TestStore store;
  TestJob disk("run-1", {.nvme = true}), memory("run-2");
  memory.Tell(&store);
  memory.WaitForStep(&store, 0);
  EXPECT_EQ(store.host->buffer_bytes(), 0u);
  const uint64_t used = store.host->memory().used;
  disk.Tell(&store);
  disk.WaitForStep(&store, 0);
  EXPECT_EQ(store.host->buffer_bytes(), NvmeMemoryBytes(kChunk));
  EXPECT_EQ(store.host->memory().used, used + NvmeMemoryBytes(kChunk));
  disk.next_.set_drop(true);
  disk.Tell(&store);
  disk.WaitFor(&store, [](const auto& r) { return r.dropped(); });
  EXPECT_EQ(store.host->buffer_bytes(), 0u);
}

TEST(WriterBufferTest, WhoWritesWaitsForItsTurnAndNoLongerThanItMay) {
  constexpr absl::Duration kLong = absl::Seconds(30);
  MemoryBudget writing(200);
  const std::atomic<bool> stop = true;
  auto first = TakeWriterBuffer(100, &writing, nullptr, kLong);
  auto second = TakeWriterBuffer(100, &writing, nullptr, kLong);
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::Status late =
      TakeWriterBuffer(100, &writing, nullptr, absl::Milliseconds(1)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(late)) << late;
  EXPECT_THAT(std::string(late.message()), AllOf(HasSubstr("200"), HasSubstr("checkpoint folder")));
  EXPECT_TRUE(absl::IsCancelled(TakeWriterBuffer(100, &writing, &stop, kLong).status()));
  // Who wants nothing waits for nothing.
  const auto none = TakeWriterBuffer(0, &writing, nullptr, absl::ZeroDuration());
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ((*none)->size(), 0u);
  auto third = std::async(std::launch::async,
                          [&] { return TakeWriterBuffer(100, &writing, nullptr, kLong); });
  first = absl::CancelledError();  // which gives it back
  EXPECT_TRUE(third.get().ok());
}

// --- a disk that hangs
// -----------------------------------------------------------------------------

TEST_F(HostLimitsTest, AStoreThatEndsWhileItsDiskHangsNamesThatAndNoCheckpointFolder) {
  nvme::DiskFaults faults;
  TestStore store;
  Restart(&store, [&](StoreHostOptions* options) {
    options->disk_hook = &faults;
    options->disk_stall_limit = absl::Seconds(1);
  });
  TestJob job("run-1", {.nvme = true});
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto stream = job.Open(&store);
  job.PushAll(&store, stream.get(), 1);
  std::promise<void> hangs;
  bool said = false;
  faults.Set([&](const nvme::DiskHook::Attempt&) {
    if (!std::exchange(said, true)) hangs.set_value();
    nvme::DiskHook::Verdict verdict;
    verdict.what = nvme::DiskHook::Verdict::kHang;
    return verdict;
  });
  job.Decide(1);
  job.Tell(&store);
  ASSERT_EQ(hangs.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
  const absl::Status status = store.host->Finish(absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("run-1"), HasSubstr("--nvme-dir"), HasSubstr(store.disk.path()),
                    Not(HasSubstr("snapshot"))));
  EXPECT_TRUE(store.host->Finish(absl::Seconds(60)).ok());
}

class EachHostLimits : public EachStateFixture {};

INSTANTIATE_TEST_SUITE_P(In, EachHostLimits, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

TEST_P(EachHostLimits, AStoreThatEndsNamesTheFoldersThatDoNotAnswerAndNoOther) {
  TestStore store;
  TestJob job("run-1", {.nvme = GetParam()});
  const MemoryFolder written, read;
  // Who opens it waits until somebody writes.
  const std::string pipe = read / "model.safetensors";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  store.files.Close();
  job.OrderSnapshot(0, written);
  job.Tell(&store);
  store.files.WaitForWriter();
  // A new epoch, that begins with what is in the other folder.
  job.next_.clear_snapshot();
  job.next_.set_epoch(2);
  job.next_.set_map_version(2);
  job.next_.mutable_job()->mutable_base()->set_epoch(2);
  job.next_.mutable_job()->mutable_spec()->mutable_model()->set_init_from(read.path());
  job.Tell(&store);
  job.WaitFor(&store, [&](const auto& r) {
    return r.problem().find("from " + read.path()) != std::string::npos;
  });
  const absl::Status both = store.host->Finish(absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(both)) << both;
  EXPECT_THAT(
      std::string(both.message()),
      AllOf(HasSubstr("run-1 is still reading " + read.path()),
            HasSubstr("writing a snapshot into " + written.path()), Not(HasSubstr("--nvme-dir"))));
  store.files.Open();
  // The writer's is over soon.
  absl::Status one = both;
  for (int i = 0; i < 600 && absl::StrContains(one.message(), "snapshot"); ++i)
    one = store.host->Finish(absl::Milliseconds(50));
  EXPECT_THAT(std::string(one.message()),
              AllOf(HasSubstr("still reading " + read.path()), Not(HasSubstr("snapshot"))));
  const int writer = open(pipe.c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_TRUE(store.host->Finish(absl::Seconds(60)).ok());
  close(writer);
}

}  // namespace
}  // namespace zeroshard::store
