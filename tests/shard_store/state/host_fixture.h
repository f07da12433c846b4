// A store's jobs driven by directives and frames, as coordinator and ranks do it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/log.h"
#include "shard_store/state/store_host.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/state/gated_files.h"
#include "tests/shard_store/state/small_job.h"

namespace zeroshard::store {

inline constexpr int64_t kChunk = 4096;

// Keeps the newest report of each run.
class Reports {
 public:
  void Add(const v1::StoreReport& report) {
    std::lock_guard<std::mutex> lock(mutex_);
    newest_[report.run_id()] = report;
    ++count_;
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
  int count() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return count_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, v1::StoreReport> newest_;
  int count_ = 0;
};

// A store with what it says and how it reaches others.
struct TestStore {
  explicit TestStore(uint64_t memory_limit = kPlenty, uint64_t nvme_limit = kPlenty,
                     int64_t chunk_elements = kChunk) {
    StoreHostOptions options;
    options.memory_limit = memory_limit;
    options.nvme_limit = nvme_limit;
    if (nvme_limit != 0) options.nvme_dir = disk.path();
    options.threads = 2;
    options.files = &files;
    options.chunk_elements = chunk_elements;
    options.on_report = [this](const v1::StoreReport& report) { reports.Add(report); };
    options.connect_peer = [this](const v1::StoreMap::Store& peer, const v1::BulkHello& hello) {
      return connect(peer, hello);
    };
    options.start_thread = [this](std::function<void()> run) {
      if (no_threads) throw std::system_error(EAGAIN, std::generic_category());
      return std::thread(std::move(run));
    };
    host = std::make_unique<StoreHost>(options);
  }

  MemoryFolder disk;
  Reports reports;
  GatedFiles files;
  std::atomic<bool> no_threads = false;  // no other is started for a job
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
  void Cancel() override {}  // it never waits

  uint64_t generation = 1;

 private:
  StoreHost* const host_;
  const std::shared_ptr<StoreHost::Stream> stream_;
};

inline absl::Status LocalPeer::Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind,
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
  explicit TestJob(const std::string& run_id, const JobShape& shape = {},
                   int64_t chunk_elements = kChunk)
      : shape_(shape),
        spec_(MakeSpec(shape)),
        model_(MakeModel(spec_)),
        chunks_(AllChunks(model_, chunk_elements)),
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

  // Of everything, from this store alone.
  void OrderSnapshot(uint64_t step, const MemoryFolder& folder) {
    v1::SnapshotOrder* order = next_.mutable_snapshot();
    order->Clear();
    order->set_step(step);
    order->set_folder(folder.path());
    order->set_count(1);
    for (const auto& [id, chunk] : chunks_) order->add_chunks(id);
  }
  // Of memory, of all its chunks or of some.
  uint64_t Bytes(const std::set<uint32_t>& some = {}) const {
    JobStateOptions options;
    options.spec = spec_;
    for (const auto& [id, chunk] : chunks_)
      if (some.empty() || some.contains(id)) options.chunks.emplace(id, chunk);
    return BytesOf(options);
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

inline bool IsDone(const std::future<absl::StatusOr<PinnedParameters>>& pull) {
  return pull.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

class StoreHostFixture : public testing::Test {
 protected:
  StoreHostFixture() { SetLogLevel(LogLevel::kError); }
  ~StoreHostFixture() override { SetLogLevel(LogLevel::kInfo); }
};

// Over jobs in memory and on the disk.
class EachStateFixture : public StoreHostFixture, public testing::WithParamInterface<bool> {};

}  // namespace zeroshard::store
