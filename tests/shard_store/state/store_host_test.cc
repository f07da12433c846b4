// A store's jobs driven by directives and frames, as coordinator and ranks do it.
#include "shard_store/state/store_host.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <future>
#include <mutex>

#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "common/log.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/state/gated_files.h"
#include "tests/shard_store/state/small_job.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

constexpr int64_t kChunk = 4096;
constexpr uint64_t kPlenty = uint64_t{1} << 30;

// Keeps the newest report of each run.
class Reports {
 public:
  void Add(const v1::StoreReport& report) {
    std::lock_guard<std::mutex> lock(mutex_);
    newest_[report.run_id()] = report;
    changed_.notify_all();
  }
  v1::StoreReport WaitFor(const std::string& run_id,
                          const std::function<bool(const v1::StoreReport&)>& is) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(
        changed_.wait_for(lock, std::chrono::seconds(30), [&] { return is(newest_[run_id]); }))
        << "the newest report is " << newest_[run_id].ShortDebugString();
    return newest_[run_id];
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, v1::StoreReport> newest_;
};

// A store with what it says and how it reaches others.
struct TestStore {
  explicit TestStore(uint64_t memory_limit = kPlenty, uint64_t nvme_limit = kPlenty) {
    StoreHostOptions options;
    options.memory_limit = memory_limit;
    options.nvme_limit = nvme_limit;
    if (nvme_limit != 0) options.nvme_dir = disk.path();
    options.threads = 2;
    options.files = &files;
    options.chunk_elements = kChunk;
    options.on_report = [this](const v1::StoreReport& report) { reports.Add(report); };
    options.connect_peer = [this](const v1::StoreMap::Store& peer, const v1::BulkHello& hello) {
      return connect(peer, hello);
    };
    host = std::make_unique<StoreHost>(options);
  }

  MemoryFolder disk;
  Reports reports;
  GatedFiles files;
  std::function<absl::StatusOr<std::unique_ptr<PeerReader>>(const v1::StoreMap::Store&,
                                                            const v1::BulkHello&)>
      connect = [](const auto&, const auto&) { return absl::UnavailableError("nobody there"); };
  std::unique_ptr<StoreHost> host;  // ends first
};

// Reads from a host in this process.
class LocalPeer : public PeerReader {
 public:
  static absl::StatusOr<std::unique_ptr<PeerReader>> Connect(StoreHost* host,
                                                             const v1::BulkHello& hello) {
    auto stream = host->Open(hello, [](const absl::Status&) {});
    if (!stream.ok()) return stream.status();
    return std::make_unique<LocalPeer>(host, *std::move(stream));
  }
  LocalPeer(StoreHost* host, std::shared_ptr<StoreHost::Stream> stream)
      : host_(host), stream_(std::move(stream)) {}
  ~LocalPeer() override { host_->Close(stream_); }
  absl::Status Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind, int64_t begin,
                    absl::Span<float> values) override;

  uint64_t generation = 1;

 private:
  StoreHost* const host_;
  const std::shared_ptr<StoreHost::Stream> stream_;
};

absl::Status LocalPeer::Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind,
                             int64_t begin, absl::Span<float> values) {
  bulk::Header header;
  header.type = bulk::FrameType::kState;
  header.generation = generation;
  header.epoch = version.epoch();
  header.step = version.step();
  header.chunk = chunk;
  header.begin = static_cast<uint32_t>(begin);
  header.count = static_cast<uint32_t>(values.size());
  header.code = static_cast<uint32_t>(kind);
  return host_->State(stream_.get(), header, values);
}

// A job as its coordinator and one rank have it.
class TestJob {
 public:
  explicit TestJob(const std::string& run_id, const JobShape& shape = {})
      : shape_(shape),
        spec_(MakeSpec(shape)),
        model_(MakeModel(spec_)),
        chunks_(AllChunks(model_, kChunk)),
        reference_(model_, shape) {
    next_.set_term(1);
    next_.set_run_id(run_id);
    next_.set_generation(1);
    next_.set_epoch(1);
    next_.set_map_version(1);
    v1::StoreJob* job = next_.mutable_job();
    job->set_job("small");
    *job->mutable_spec() = spec_;
    job->mutable_base()->set_epoch(1);
    SetStores(1, 1);
  }

  // All chunks on each of the first `replicas` stores, or of the first `held` of them.
  void SetStores(uint32_t stores, uint32_t replicas, uint32_t held = kNoStore) {
    v1::StoreMap* map = next_.mutable_job()->mutable_map();
    map->Clear();
    for (uint32_t i = 0; i < stores; ++i) {
      v1::StoreMap::Store* store = map->add_stores();
      store->set_member("store-" + std::to_string(i));
      store->set_address("127.0.0.1:" + std::to_string(7000 + i));
    }
    map->set_replicas(replicas);
    for (size_t c = 0; c < chunks_.size(); ++c)
      for (uint32_t r = 0; r < replicas; ++r) map->add_placement(r < held ? r : kNoStore);
  }

  const std::string& run_id() const { return next_.run_id(); }
  void Tell(TestStore* store) { store->host->OnDirective(next_); }
  v1::StoreReport WaitFor(TestStore* store,
                          const std::function<bool(const v1::StoreReport&)>& is) const {
    return store->reports.WaitFor(run_id(), is);
  }
  v1::StoreReport WaitForStep(TestStore* store, uint64_t step) const {
    return WaitFor(store, [&](const v1::StoreReport& report) {
      return report.phase() == v1::STORE_PHASE_READY && report.version().step() == step &&
             report.version().epoch() == next_.epoch();
    });
  }
  v1::StoreReport WaitForFailure(TestStore* store) const {
    return WaitFor(store, [](const auto& r) { return r.phase() == v1::STORE_PHASE_FAILED; });
  }

  std::shared_ptr<StoreHost::Stream> Open(
      TestStore* store,
      std::function<void(const absl::Status&)> on_end = [](const absl::Status&) {}) {
    v1::BulkHello hello;
    hello.set_run_id(run_id());
    hello.set_generation(next_.generation());
    auto stream = store->host->Open(hello, std::move(on_end));
    EXPECT_TRUE(stream.ok()) << stream.status();
    return stream.ok() ? *stream : nullptr;
  }

  bulk::Header Frame(uint64_t step, uint32_t chunk) const {
    bulk::Header header;
    header.generation = next_.generation();
    header.epoch = next_.epoch();
    header.step = step;
    header.chunk = chunk;
    header.count = static_cast<uint32_t>(chunks_.at(chunk).size());
    return header;
  }

  absl::Status Push(TestStore* store, StoreHost::Stream* stream, uint64_t step, uint32_t chunk) {
    const Chunk& at = chunks_.at(chunk);
    const size_t width = shape_.bf16 ? 2 : 4;
    const std::vector<char> gradient =
        GradientOf(model_, static_cast<size_t>(at.unit), step, shape_.bf16);
    bulk::Header header = Frame(step, chunk);
    header.bytes = header.count * static_cast<uint32_t>(width);
    const absl::Span<const char> part[] = {
        absl::MakeConstSpan(gradient).subspan(static_cast<size_t>(at.begin) * width, header.bytes)};
    return store->host->Push(stream, header, part);
  }
  void PushAll(TestStore* store, StoreHost::Stream* stream, uint64_t step) {
    for (const auto& [id, chunk] : chunks_) {
      if (!chunk.trained) continue;
      const absl::Status status = Push(store, stream, step, id);
      ASSERT_TRUE(status.ok()) << status;
    }
    WaitFor(store, [&](const v1::StoreReport& r) { return r.sealed_step() == step; });
  }

  std::future<absl::StatusOr<PinnedParameters>> Pull(
      TestStore* store, const std::shared_ptr<StoreHost::Stream>& stream, uint64_t step,
      uint32_t chunk) {
    auto promise = std::make_shared<std::promise<absl::StatusOr<PinnedParameters>>>();
    store->host->Pull(stream, Frame(step, chunk),
                      [promise](absl::StatusOr<PinnedParameters> answer) {
                        promise->set_value(std::move(answer));
                      });
    return promise->get_future();
  }
  void ExpectParameters(TestStore* store, const std::shared_ptr<StoreHost::Stream>& stream,
                        uint64_t step) {
    for (const auto& [id, chunk] : chunks_) {
      auto answer = Pull(store, stream, step, id).get();
      ASSERT_TRUE(answer.ok()) << answer.status();
      EXPECT_EQ(answer->bytes, absl::MakeConstSpan(reference_.Parameters(chunk))) << id;
    }
  }

  // Pushes, decides and applies `step` on these stores.
  void Decide(uint64_t step, bool skip = false) {
    v1::StepDecision decision = Decision(step, skip);
    decision.set_epoch(next_.epoch());
    decision.set_generation(next_.generation());
    *next_.mutable_decision() = decision;
    reference_.Step(decision);
  }
  void Step(TestStore* store, const std::shared_ptr<StoreHost::Stream>& stream, uint64_t step) {
    PushAll(store, stream.get(), step);
    Decide(step);
    Tell(store);
    WaitForStep(store, step);
  }

  const JobShape shape_;
  const v1::JobSpec spec_;
  const ModelTable model_;
  const std::map<uint32_t, Chunk> chunks_;
  Reference reference_;
  v1::StoreDirective next_;
};

bool IsDone(const std::future<absl::StatusOr<PinnedParameters>>& pull) {
  return pull.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

class StoreHostTest : public testing::Test {
 protected:
  StoreHostTest() { SetLogLevel(LogLevel::kError); }
  ~StoreHostTest() override { SetLogLevel(LogLevel::kInfo); }
};

// Over jobs in memory and on the disk.
class EachStateHost : public StoreHostTest, public testing::WithParamInterface<bool> {};

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
  JobStateOptions options;
  TestJob a("run-a", {.seed = 1}), b("run-b", {.bf16 = false, .seed = 2}), c("run-c");
  options.spec = a.spec_;
  options.chunks = a.chunks_;
  uint64_t bytes = BytesOf(options);
  options.spec = b.spec_;
  bytes += BytesOf(options);
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

TEST_F(StoreHostTest, APushThatIsEarlyBecauseThisReplicaIsSlowIsTakenOnceItsChunkIsReady) {
  TestStore store;
  TestJob job("run-1");
  const MemoryFolder folder;
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto stream = job.Open(&store);
  job.Step(&store, stream, 1);
  // A snapshot that does not get on holds the next update back.
  store.files.Close();
  v1::SnapshotOrder* order = job.next_.mutable_snapshot();
  order->set_step(1);
  order->set_folder(folder.path());
  order->set_count(1);
  for (const auto& [id, chunk] : job.chunks_) order->add_chunks(id);
  job.Tell(&store);
  store.files.WaitForWriter();
  const Reference then = job.reference_;
  job.PushAll(&store, stream.get(), 2);
  const uint32_t last = job.chunks_.rbegin()->first;
  auto waits = job.Pull(&store, stream, 2, last);
  job.Decide(2);
  job.Tell(&store);
  job.WaitFor(&store, [](const auto& r) { return r.phase() == v1::STORE_PHASE_APPLYING; });
  EXPECT_TRUE(absl::IsUnavailable(job.Push(&store, stream.get(), 3, last)));
  std::promise<absl::Status> ready;
  store.host->WaitForPush(stream, job.Frame(3, last),
                          [&](const absl::Status& status) { ready.set_value(status); });
  auto is_ready = ready.get_future();
  EXPECT_EQ(is_ready.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  EXPECT_FALSE(IsDone(waits));
  // The same gradients again are no news.
  EXPECT_TRUE(job.Push(&store, stream.get(), 2, last).ok());
  store.files.Open();
  EXPECT_TRUE(is_ready.get().ok());
  EXPECT_TRUE(waits.get().ok());
  EXPECT_TRUE(job.Push(&store, stream.get(), 3, last).ok());
  const v1::StoreReport report =
      job.WaitFor(&store, [](const auto& r) { return r.snapshot().done(); });
  EXPECT_EQ(report.snapshot().problem(), "");
  job.WaitForStep(&store, 2);
  job.ExpectParameters(&store, stream, 2);

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

TEST_P(EachStateHost, ASnapshotThatIsGivenUpHoldsNothingBackAndTheNextIsWritten) {
  TestStore store;
  TestJob job("run-1", {.nvme = GetParam()});
  const MemoryFolder first, second;
  job.Tell(&store);
  job.WaitForStep(&store, 0);
  const auto stream = job.Open(&store);
  job.Step(&store, stream, 1);
  store.files.Close();
  v1::SnapshotOrder* order = job.next_.mutable_snapshot();
  order->set_step(1);
  order->set_folder(first.path());
  order->set_count(1);
  for (const auto& [id, chunk] : job.chunks_) order->add_chunks(id);
  job.Tell(&store);
  store.files.WaitForWriter();
  job.PushAll(&store, stream.get(), 2);
  job.Decide(2);
  job.Tell(&store);
  job.WaitFor(&store, [](const auto& r) { return r.phase() == v1::STORE_PHASE_APPLYING; });
  job.next_.clear_snapshot();
  job.Tell(&store);
  job.WaitForStep(&store, 2);  // the writer is still held up
  order = job.next_.mutable_snapshot();
  order->set_step(2);
  order->set_folder(second.path());
  order->set_count(1);
  for (const auto& [id, chunk] : job.chunks_) order->add_chunks(id);
  job.Tell(&store);
  store.files.Open();
  const v1::StoreReport report = job.WaitFor(
      &store, [](const auto& r) { return r.snapshot().done() && r.snapshot().step() == 2; });
  EXPECT_EQ(report.snapshot().problem(), "");
  job.Step(&store, stream, 3);
  job.ExpectParameters(&store, stream, 3);
}

TEST_P(EachStateHost, ANewReplicaIsCopiedFromAnotherAndHasTheSameDigests) {
  TestStore first, second;
  TestJob job("run-1", {.trainable = {"wpe.weight", "blocks.*"}, .nvme = GetParam()});
  job.SetStores(2, 2, 1);
  job.Tell(&first);
  job.WaitForStep(&first, 0);
  const auto stream = job.Open(&first);
  job.Step(&first, stream, 1);

  int refused = 0;
  second.connect = [&](const v1::StoreMap::Store& peer,
                       const v1::BulkHello& hello) -> absl::StatusOr<std::unique_ptr<PeerReader>> {
    EXPECT_EQ(peer.member(), "store-0");
    EXPECT_EQ(hello.member(), "store-1");
    if (++refused <= 2) return absl::UnavailableError("not up yet");
    return LocalPeer::Connect(first.host.get(), hello);
  };
  job.SetStores(2, 2);
  job.next_.set_map_version(2);
  job.Tell(&first);
  v1::StoreDirective to_first = job.next_;
  job.next_.mutable_job()->set_store(1);
  job.next_.mutable_job()->mutable_copy()->set_epoch(1);
  job.next_.mutable_job()->mutable_copy()->set_step(1);
  for (const auto& [id, chunk] : job.chunks_) {
    v1::StoreJob::Copy* copy = job.next_.mutable_job()->add_copies();
    copy->set_chunk(id);
    copy->set_from_store(0);
  }
  job.Tell(&second);
  job.WaitForStep(&second, 1);
  const auto other = job.Open(&second);
  job.ExpectParameters(&second, other, 1);

  // The next step on both.
  job.PushAll(&first, stream.get(), 2);
  job.PushAll(&second, other.get(), 2);
  job.Decide(2);
  job.Tell(&second);
  *to_first.mutable_decision() = job.next_.decision();
  first.host->OnDirective(to_first);
  const v1::StoreReport b = job.WaitForStep(&second, 2);
  const v1::StoreReport a = job.WaitForStep(&first, 2);
  job.ExpectParameters(&first, stream, 2);
  job.ExpectParameters(&second, other, 2);
  ASSERT_EQ(b.chunk_digests_size(), static_cast<int>(job.chunks_.size()));
  EXPECT_THAT(b.chunk_digests(), testing::Contains(testing::Ne(0u)));
  EXPECT_THAT(a.chunk_digests(), testing::ElementsAreArray(b.chunk_digests()));
}

TEST_P(EachStateHost, TwoStoresCopyFromEachOtherAtOnce) {
  TestStore stores[2];
  TestJob job("run-1", {.nvme = GetParam()});
  const auto peer = [&](const v1::StoreMap::Store& store,
                        const v1::BulkHello& hello) -> absl::StatusOr<std::unique_ptr<PeerReader>> {
    return LocalPeer::Connect(stores[store.member() == "store-0" ? 0 : 1].host.get(), hello);
  };
  for (TestStore& store : stores) store.connect = peer;

  // Even chunks on the first, odd ones on the second.
  job.SetStores(2, 2);
  v1::StoreMap* map = job.next_.mutable_job()->mutable_map();
  for (uint32_t c = 0; c < job.chunks_.size(); ++c) {
    map->set_placement(static_cast<int>(2 * c), c % 2);
    map->set_placement(static_cast<int>(2 * c + 1), kNoStore);
  }
  const auto tell = [&](uint32_t i) {
    v1::StoreJob* own = job.next_.mutable_job();
    own->set_store(i);
    own->clear_copies();
    for (uint32_t c = 0; own->has_copy() && c < job.chunks_.size(); ++c) {
      if (c % 2 == i) continue;
      v1::StoreJob::Copy* copy = own->add_copies();
      copy->set_chunk(c);
      copy->set_from_store(1 - i);
    }
    job.Tell(&stores[i]);
  };
  for (uint32_t i = 0; i < 2; ++i) {
    tell(i);
    job.WaitForStep(&stores[i], 0);
    const auto stream = job.Open(&stores[i]);
    for (const auto& [id, chunk] : job.chunks_) {
      if (id % 2 != i || !chunk.trained) continue;
      const absl::Status status = job.Push(&stores[i], stream.get(), 1, id);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  job.Decide(1);
  for (uint32_t i = 0; i < 2; ++i) {
    tell(i);
    job.WaitForStep(&stores[i], 1);
  }

  job.SetStores(2, 2);
  job.next_.set_map_version(2);
  job.next_.mutable_job()->mutable_copy()->set_epoch(1);
  job.next_.mutable_job()->mutable_copy()->set_step(1);
  for (uint32_t i = 0; i < 2; ++i) tell(i);
  for (TestStore& store : stores) {
    job.WaitFor(&store, [](const v1::StoreReport& report) {
      return report.map_version() == 2 && report.phase() == v1::STORE_PHASE_READY;
    });
    job.ExpectParameters(&store, job.Open(&store), 1);
  }
}

TEST_F(StoreHostTest, APeerThatDoesNotAnswerFailsTheLoadAndIsNamed) {
  TestStore store;
  TestJob job("run-1");
  job.SetStores(2, 2);
  v1::StoreJob* to = job.next_.mutable_job();
  to->set_store(1);
  to->mutable_spec()->mutable_timeouts()->set_start_seconds(1);
  to->mutable_copy()->set_epoch(1);
  to->mutable_copy()->set_step(7);
  v1::StoreJob::Copy* copy = to->add_copies();
  copy->set_chunk(0);
  copy->set_from_store(0);
  for (const auto& [id, chunk] : job.chunks_) {
    if (id == 0) continue;
    copy = to->add_copies();
    copy->set_chunk(id);
    copy->set_from_store(0);
  }
  job.Tell(&store);
  const v1::StoreReport failed = job.WaitForFailure(&store);
  EXPECT_EQ(failed.error_code(), "UNAVAILABLE");
  EXPECT_THAT(failed.problem(), testing::AllOf(HasSubstr("store-0"), HasSubstr("127.0.0.1:7000"),
                                               HasSubstr("chunk 0")));
}

TEST_P(EachStateHost, DigestsAreToldWhereThereAreReplicas) {
  TestStore a, b;
  TestJob job("run-1", {.bf16 = false, .nvme = GetParam()});
  job.SetStores(2, 2);
  v1::StoreReport reports[2];
  TestStore* stores[] = {&a, &b};
  std::shared_ptr<StoreHost::Stream> streams[2];
  for (uint32_t i = 0; i < 2; ++i) {
    job.next_.mutable_job()->set_store(i);
    job.Tell(stores[i]);
    job.WaitForStep(stores[i], 0);
    streams[i] = job.Open(stores[i]);
    job.PushAll(stores[i], streams[i].get(), 1);
  }
  job.Decide(1);
  for (uint32_t i = 0; i < 2; ++i) {
    job.next_.mutable_job()->set_store(i);
    job.Tell(stores[i]);
    reports[i] = job.WaitForStep(stores[i], 1);
  }
  EXPECT_EQ(reports[0].chunk_digests_size(), static_cast<int>(job.chunks_.size()));
  EXPECT_THAT(reports[0].chunk_digests(), testing::ElementsAreArray(reports[1].chunk_digests()));
}

TEST_P(EachStateHost, AStoreCanEndInTheMiddleOfEverything) {
  const MemoryFolder folder;
  for (int i = 0; i < 3; ++i) {
    TestStore store;
    TestJob job("run-1", {.nvme = GetParam()});
    job.Tell(&store);
    if (i == 0) continue;  // loading
    job.WaitForStep(&store, 0);
    const auto stream = job.Open(&store);
    auto waits = job.Pull(&store, stream, 1, 0);
    job.PushAll(&store, stream.get(), 1);
    job.Decide(1);
    job.Tell(&store);  // applying
    if (i == 2) job.WaitForStep(&store, 1);
    store.host->Clear();
    (void)waits.get();
  }
}

TEST_F(StoreHostTest, AStoreWithoutAFolderRefusesAJobOnDisksByName) {
  TestStore store(kPlenty, 0);
  TestJob job("run-1", {.nvme = true});
  job.Tell(&store);
  const v1::StoreReport report = job.WaitForFailure(&store);
  EXPECT_EQ(report.error_code(), "FAILED_PRECONDITION");
  EXPECT_THAT(report.problem(), testing::AllOf(HasSubstr("job small"), HasSubstr("device: nvme"),
                                               HasSubstr("--nvme-dir")));
}

TEST_F(StoreHostTest, TheFolderHoldsNoMoreThanItsLimitAndNothingOnceTheJobIsOver) {
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

TEST_F(StoreHostTest, AFlippedByteFailsTheJobAndIsNeverTrainedOnOrSent) {
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
      EXPECT_TRUE(absl::IsDataLoss(job.Pull(&store, stream, 1, 0).get().status()));
    } else if (met == "digest") {
      job.next_.set_digest_step(1);
      job.Tell(&store);
    } else if (met == "snapshot") {
      v1::SnapshotOrder* order = job.next_.mutable_snapshot();
      order->set_step(1);
      order->set_folder(checkpoint.path());
      order->set_count(1);
      for (const auto& [id, chunk] : job.chunks_) order->add_chunks(id);
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
