// What a store does with jobs, streams and memory.
#include "shard_store/state/store_host.h"

#include <atomic>
#include <filesystem>
#include <future>
#include <set>

#include "tests/shard_store/state/host_fixture.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

class StoreHostTest : public StoreHostFixture {};
class EachStateHost : public EachStateFixture {};

INSTANTIATE_TEST_SUITE_P(In, EachStateHost, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

TEST_P(EachStateHost, AJobsWholeLife) {
  TestStore store;
  TestJob job("run-1", {.trainable = {"wpe.weight", "blocks.*"}, .nvme = GetParam()});
  job.Tell(&store);
  v1::StoreReport report = job.WaitForStep(&store, 0);
  EXPECT_EQ(report.usage().chunks(), job.chunks_.size());
  EXPECT_EQ(report.map_version(), 1u);

  absl::Status ended;
  const auto stream = job.Open(&store, [&](const absl::Status& status) { ended = status; });
  ASSERT_NE(stream, nullptr);
  job.ExpectParameters(&store, stream, 0);
  for (const uint64_t step : {1, 2, 3}) {
    job.PushAll(&store, stream.get(), step);
    const uint32_t trained = job.chunks_.rbegin()->first - 1;
    auto early = job.Pull(&store, stream, step, trained);
    EXPECT_FALSE(IsDone(early));
    job.Decide(step, step == 2);
    job.Tell(&store);
    const auto answer = early.get();
    ASSERT_TRUE(answer.ok()) << answer.status();
    job.WaitForStep(&store, step);
    job.ExpectParameters(&store, stream, step);
  }
  EXPECT_EQ(store.host->TakeUpdateSeconds().size(), 2u);
  EXPECT_EQ(store.host->TakeUpdateSeconds().size(), 0u);
  EXPECT_GT(store.host->traffic().pushed, 0u);
  EXPECT_GT(store.host->traffic().pulled, 0u);

  // The digest of the weights.
  WeightDigest digest;
  for (size_t u = 0; u < job.model_.units.size(); ++u)
    digest.Add(u, 0, job.reference_.Values(StateKind::kMaster, static_cast<int>(u)));
  job.next_.set_digest_step(3);
  job.Tell(&store);
  report = job.WaitFor(&store, [](const auto& r) { return r.digest_step() == 3; });
  EXPECT_EQ(report.digest_low(), digest.low);
  EXPECT_EQ(report.digest_high(), digest.high);

  // A new generation: what is staged is gone, what waits is told, the old stream says nothing.
  ASSERT_TRUE(job.Push(&store, stream.get(), 4, job.chunks_.rbegin()->first - 1).ok());
  auto waits = job.Pull(&store, stream, 4, job.chunks_.rbegin()->first - 1);
  EXPECT_FALSE(IsDone(waits));
  job.next_.set_generation(2);
  job.next_.clear_digest_step();
  job.Tell(&store);
  EXPECT_TRUE(absl::IsAborted(waits.get().status()));
  EXPECT_TRUE(absl::IsAborted(ended));
  EXPECT_FALSE(job.Push(&store, stream.get(), 4, job.chunks_.rbegin()->first - 1).ok());
  const auto second = job.Open(&store);
  job.ExpectParameters(&store, second, 3);
  job.Step(&store, second, 4);
  job.ExpectParameters(&store, second, 4);

  // Everything goes back to the start, in a new epoch.
  job.next_.set_epoch(2);
  job.next_.set_generation(3);
  job.next_.set_map_version(2);
  job.next_.mutable_job()->mutable_base()->set_epoch(2);
  job.next_.clear_decision();
  job.reference_ = Reference(job.model_, job.shape_);
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto third = job.Open(&store);
  job.ExpectParameters(&store, third, 0);
  job.Step(&store, third, 1);
  job.ExpectParameters(&store, third, 1);

  // It is over.
  job.next_.set_drop(true);
  job.Tell(&store);
  job.WaitFor(&store, [](const auto& r) { return r.dropped(); });
  EXPECT_EQ(store.host->usage().master_bytes(), 0u);
  EXPECT_FALSE(job.Push(&store, third.get(), 2, job.chunks_.rbegin()->first).ok());
}

TEST_F(StoreHostTest, DropOfWhatIsNotHereIsAnswered) {
  TestStore store;
  TestJob job("run-1");
  job.next_.set_drop(true);
  job.next_.clear_job();
  for (int i = 0; i < 2; ++i) {
    job.Tell(&store);
    job.WaitFor(&store, [](const auto& r) { return r.dropped(); });
  }
}

TEST_F(StoreHostTest, StreamsAreOfAGenerationThatIsOpenOfAJobThatIsHere) {
  TestStore store;
  TestJob job("run-1");
  job.next_.set_generation(2);
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  v1::BulkHello hello;
  hello.set_run_id("run-1");
  const auto open = [&](uint64_t generation) {
    hello.set_generation(generation);
    return store.host->Open(hello, [](const absl::Status&) {}).status();
  };
  EXPECT_TRUE(absl::IsFailedPrecondition(open(1)));
  EXPECT_TRUE(open(2).ok());
  EXPECT_TRUE(absl::IsUnavailable(open(3)));
  hello.set_run_id("run-2");
  EXPECT_TRUE(absl::IsUnavailable(open(2)));
  // A frame must be of its stream's generation.
  const auto stream = job.Open(&store);
  bulk::Header header = job.Frame(1, 0);
  header.generation = 3;
  EXPECT_TRUE(absl::IsInvalidArgument(store.host->Push(stream.get(), header, {})));
}

TEST_F(StoreHostTest, APullEndsWithItsStreamAndOneThatCanNeverBeAnsweredAtOnce) {
  TestStore store;
  TestJob job("run-1");
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto stream = job.Open(&store);
  auto waits = job.Pull(&store, stream, 1, 0);
  EXPECT_FALSE(IsDone(waits));
  store.host->Close(stream);
  EXPECT_TRUE(absl::IsCancelled(waits.get().status()));
  const auto other = job.Open(&store);
  job.Step(&store, other, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(job.Pull(&store, other, 0, 0).get().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(job.Pull(&store, other, 9, 0).get().status()));
  EXPECT_TRUE(absl::IsInvalidArgument([&] {
    auto promise = std::promise<absl::Status>();
    bulk::Header header = job.Frame(1, 0);
    header.count += 1;
    store.host->Pull(other, header, [&](auto answer) { promise.set_value(answer.status()); });
    return promise.get_future().get();
  }()));
}

TEST_F(StoreHostTest, TwoJobsShareTheMemoryAndOneTooManyIsRefusedWithTheNumbers) {
  TestJob a("run-a", {.seed = 1}), b("run-b", {.bf16 = false, .seed = 2}), c("run-c");
  const uint64_t bytes = a.Bytes() + b.Bytes();
  TestStore store(bytes);
  a.Tell(&store);
  b.Tell(&store);
  a.WaitForStep(&store, 0);
  b.WaitForStep(&store, 0);
  c.Tell(&store);
  const v1::StoreReport refused = c.WaitForFailure(&store);
  EXPECT_EQ(refused.error_code(), "RESOURCE_EXHAUSTED");
  EXPECT_THAT(refused.problem(), HasSubstr(std::to_string(bytes)));
  const auto stream_a = a.Open(&store), stream_b = b.Open(&store);
  for (const uint64_t step : {1, 2}) {
    a.Step(&store, stream_a, step);
    b.Step(&store, stream_b, step);
  }
  a.ExpectParameters(&store, stream_a, 2);
  b.ExpectParameters(&store, stream_b, 2);
  // With one of them gone there is room; also where its memory is given back only now.
  auto pinned = a.Pull(&store, stream_a, 2, 0).get();
  ASSERT_TRUE(pinned.ok());
  b.next_.set_drop(true);
  b.Tell(&store);
  c.next_.set_map_version(2);
  c.Tell(&store);
  c.WaitForStep(&store, 0);
  EXPECT_THAT(store.host->Reports().size(), testing::AnyOf(2u, 3u));  // run-b may be forgotten
  store.host->Clear();
  EXPECT_EQ(store.host->Reports().size(), 0u);
  EXPECT_TRUE(absl::IsFailedPrecondition(a.Pull(&store, stream_a, 2, 0).get().status()));
  *pinned = {};
}

TEST_F(StoreHostTest, WhatWaitsWhereTheStateIsOfNoUseIsToldSo) {
  TestStore store;
  TestJob job("run-1");
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto stream = job.Open(&store);
  auto waits = job.Pull(&store, stream, 1, 0);
  job.Decide(1);  // with nothing staged
  job.Tell(&store);
  job.WaitForFailure(&store);
  EXPECT_TRUE(absl::IsUnavailable(waits.get().status()));
  EXPECT_TRUE(absl::IsUnavailable(job.Push(&store, stream.get(), 1, 0)));
  absl::Status told;
  store.host->WaitForPush(stream, job.Frame(1, 0),
                          [&](const absl::Status& status) { told = status; });
  EXPECT_TRUE(absl::IsUnavailable(told)) << told;
}

// While a change of chunks goes on, and where it fails, what stays is held and no more.
TEST_F(StoreHostTest, AChangeThatFailsLeavesWhatStaysAndCountsThatAlone) {
  TestJob job("run-1");
  const auto place = [&](const std::set<uint32_t>& here) {
    v1::StoreMap* map = job.next_.mutable_job()->mutable_map();
    for (uint32_t c = 0; c < job.chunks_.size(); ++c)
      map->set_placement(static_cast<int>(c), here.contains(c) ? 0 : kNoStore);
  };
  std::set<uint32_t> all;
  for (const auto& [id, chunk] : job.chunks_) all.insert(id);
  TestStore store(job.Bytes(all) - 1);
  place({0, 1, 2});
  job.Tell(&store);
  v1::StoreReport report = job.WaitForStep(&store, 0);
  EXPECT_EQ(store.host->memory().used, job.Bytes({0, 1, 2}));
  EXPECT_EQ(store.host->memory().held, job.Bytes({0, 1, 2}));
  all.erase(1);
  all.erase(2);
  place(all);  // fits
  job.next_.set_map_version(2);
  v1::StoreJob* own = job.next_.mutable_job();
  own->mutable_map()->add_stores()->set_member("store-1");
  own->mutable_copy()->set_epoch(1);
  for (const uint32_t id : all) {
    if (id == 0) continue;
    v1::StoreJob::Copy* copy = own->add_copies();
    copy->set_chunk(id);
    copy->set_from_store(1);
  }
  own->mutable_spec()->mutable_timeouts()->set_start_seconds(1);
  // Nobody is there to copy from: what was allocated is held, as the failed job has it.
  job.Tell(&store);
  report = job.WaitForFailure(&store);
  EXPECT_EQ(report.error_code(), "UNAVAILABLE");
  EXPECT_EQ(store.host->memory().used, store.host->memory().held);
  EXPECT_EQ(store.host->memory().held, job.Bytes(all));

  // One that does not fit.
  TestJob large("run-2");
  TestStore small(large.Bytes({0, 1, 2}));
  job.next_.set_run_id("run-2");
  job.next_.set_map_version(1);
  v1::StoreDirective change = job.next_;
  change.set_map_version(2);
  job.next_.mutable_job()->clear_copies();
  job.next_.mutable_job()->clear_copy();
  place({0, 1, 2});
  job.Tell(&small);
  job.WaitForStep(&small, 0);
  small.host->OnDirective(change);
  report = job.WaitForFailure(&small);
  EXPECT_EQ(report.error_code(), "RESOURCE_EXHAUSTED");
  EXPECT_EQ(small.host->memory().used, job.Bytes({0}));
  EXPECT_EQ(small.host->memory().held, job.Bytes({0}));
  const v1::StoreUsage usage = small.host->usage();
  EXPECT_EQ(usage.chunks(), 1u);
  EXPECT_EQ(usage.master_bytes() + usage.exp_avg_bytes() + usage.exp_avg_sq_bytes() +
                usage.parameter_bytes() + usage.staging_bytes(),
            job.Bytes({0}));
}

// Ends `store` within the time that the test has, and finds nothing of it left.
void ExpectEnds(TestStore* store, TestJob* job) {
  store->host->Clear();
  const int reports = store->reports.count();
  EXPECT_TRUE(store->host->Reports().empty());
  EXPECT_EQ(store->host->jobs(), 0u);
  v1::BulkHello hello;
  hello.set_run_id(job->run_id());
  hello.set_generation(1);
  EXPECT_TRUE(absl::IsUnavailable(store->host->Open(hello, [](const absl::Status&) {}).status()));
  store->host = nullptr;
  EXPECT_EQ(store->reports.count(), reports) << "a report of what was forgotten";
  for (const auto& entry : std::filesystem::directory_iterator(store->disk.path()))
    EXPECT_NE(entry.path().extension(), ".chunks") << entry.path();
}

TEST_P(EachStateHost, AStoreThatLoadsFromOneThatIsNotThereCanEnd) {
  TestStore store;
  TestJob job("run-1", {.nvme = GetParam()});
  job.SetStores(2, 2);
  v1::StoreJob* own = job.next_.mutable_job();
  own->mutable_spec()->mutable_timeouts()->set_start_seconds(3600);
  own->mutable_copy()->set_epoch(1);
  for (const auto& [id, chunk] : job.chunks_) {
    v1::StoreJob::Copy* copy = own->add_copies();
    copy->set_chunk(id);
    copy->set_from_store(1);
  }
  std::promise<void> asked;
  std::atomic<int> times = 0;
  store.connect = [&](const auto&, const auto&) {
    if (times++ == 0) asked.set_value();
    return absl::UnavailableError("nobody there");
  };
  job.Tell(&store);
  ASSERT_EQ(asked.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
  ExpectEnds(&store, &job);
}

TEST_P(EachStateHost, AStoreCanEndInTheMiddleOfAStepOfASnapshotAndOfPulls) {
  TestStore store;
  TestJob job("run-1", {.nvme = GetParam()});
  const MemoryFolder folder;
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  absl::Status ended;
  const auto stream = job.Open(&store, [&](const absl::Status& status) { ended = status; });
  job.Step(&store, stream, 1);
  store.files.Close(uint64_t{40000});
  job.OrderSnapshot(1, folder);
  job.Tell(&store);
  store.files.WaitForWriter();
  auto waits = job.Pull(&store, stream, 3, 0);
  job.PushAll(&store, stream.get(), 2);
  job.Decide(2);
  job.Tell(&store);  // chunks that the snapshot wants are held back
  job.WaitFor(&store, [](const auto& r) { return r.phase() == v1::STORE_PHASE_APPLYING; });
  store.host->Clear();
  EXPECT_TRUE(absl::IsFailedPrecondition(waits.get().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
  EXPECT_TRUE(absl::IsFailedPrecondition(job.Push(&store, stream.get(), 2, 0)));
  store.files.Open();
  ExpectEnds(&store, &job);
}

}  // namespace
}  // namespace zeroshard::store
