// A store that copies chunks from one that does not answer: what ends that, when, and what is said
// of it meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "shard_store/state/load_state.h"
#include "shard_store/state/store_host.h"
#include "tests/shard_store/state/small_job.h"

namespace zeroshard::store {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Steady = std::chrono::steady_clock;

constexpr int64_t kChunk = 4096;
constexpr std::chrono::seconds kPatience(30);
// Far below what PeerTimeout is with the default timeouts.
constexpr std::chrono::seconds kAtOnce(10);

// Answers nothing until it is cancelled.
struct Silence {
  std::mutex mutex;
  std::condition_variable changed;
  int reading = 0, cancelled = 0;

  void AwaitReading() {
    std::unique_lock<std::mutex> lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, kPatience, [this] { return reading > 0; }));
  }
};

class SilentPeer : public PeerReader {
 public:
  explicit SilentPeer(std::shared_ptr<Silence> silence) : silence_(std::move(silence)) {}
  absl::Status Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind, int64_t begin,
                    absl::Span<float> values) override {
    std::unique_lock<std::mutex> lock(silence_->mutex);
    ++silence_->reading;
    silence_->changed.notify_all();
    EXPECT_TRUE(silence_->changed.wait_for(lock, kPatience, [this] { return ended_; }));
    return absl::CancelledError("cancelled");
  }
  void Cancel() override {
    std::lock_guard<std::mutex> lock(silence_->mutex);
    ended_ = true;
    ++silence_->cancelled;
    silence_->changed.notify_all();
  }

 private:
  const std::shared_ptr<Silence> silence_;
  bool ended_ = false;
};

class CopiesTest : public testing::Test {
 protected:
  CopiesTest() {
    spec_ = MakeSpec({});
    table_ = ChunkTable::Make(MakeModel(spec_), kChunk);
    directive_.set_term(1);
    directive_.set_run_id("small-1");
    directive_.set_generation(1);
    directive_.set_epoch(1);
    directive_.set_map_version(1);
    directive_.mutable_decision()->set_epoch(1);
    directive_.mutable_decision()->set_step(7);
    v1::StoreJob& job = *directive_.mutable_job();
    job.set_job("small");
    *job.mutable_spec() = spec_;
    job.mutable_base()->set_epoch(1);
    job.set_store(1);
    job.mutable_copy()->set_epoch(1);
    job.mutable_copy()->set_step(7);
    job.mutable_map()->set_replicas(2);
    for (const char* name : {"store-0", "store-1"}) {
      v1::StoreMap::Store& store = *job.mutable_map()->add_stores();
      store.set_member(name);
      store.set_address(std::string(name) + ":7000");
    }
    for (uint32_t c = 0; c < table_.chunks.size(); ++c) {
      for (const uint32_t store : {0u, 1u}) job.mutable_map()->add_placement(store);
      v1::StoreJob::Copy& copy = *job.add_copies();
      copy.set_chunk(c);
      copy.set_from_store(0);
    }
  }
  ~CopiesTest() override {
    host_.reset();  // its reports come here
  }

  void Make() {
    StoreHostOptions options;
    options.memory_limit = uint64_t{1} << 30;
    options.threads = 2;
    options.chunk_elements = kChunk;
    options.on_report = [this](const v1::StoreReport& report) {
      std::lock_guard<std::mutex> lock(mutex_);
      newest_ = report;
      if (report.phase() == v1::STORE_PHASE_LOADING) said_ += report.problem() + "\n";
      changed_.notify_all();
    };
    options.connect_peer =
        [this](const v1::StoreMap::Store&,
               const v1::BulkHello&) -> absl::StatusOr<std::unique_ptr<PeerReader>> {
      if (!refused_.ok()) return refused_;
      return std::make_unique<SilentPeer>(silence_);
    };
    options.start_thread = start_thread_;
    host_ = std::make_unique<StoreHost>(std::move(options));
  }
  void Copy() {
    Make();
    host_->OnDirective(directive_);
    silence_->AwaitReading();
    begun_ = Steady::now();
  }
  v1::StoreReport Await(const std::function<bool(const v1::StoreReport&)>& is) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kPatience, [&] { return is(newest_); }))
        << newest_.ShortDebugString();
    return newest_;
  }
  void ExpectAtOnce() const { EXPECT_LT(Steady::now() - begun_, kAtOnce); }

  v1::JobSpec spec_;
  ChunkTable table_;
  v1::StoreDirective directive_;
  absl::Status refused_;
  ThreadStarter start_thread_;
  const std::shared_ptr<Silence> silence_ = std::make_shared<Silence>();
  Steady::time_point begun_;
  std::mutex mutex_;
  std::condition_variable changed_;
  v1::StoreReport newest_;
  std::string said_;
  std::unique_ptr<StoreHost> host_;
};

TEST_F(CopiesTest, WithoutAThreadForEachStoreTheLoadFailsAtOnceWithWhatHasBegun) {
  v1::StoreJob& job = *directive_.mutable_job();
  v1::StoreMap::Store& store = *job.mutable_map()->add_stores();
  store.set_member("store-2");
  store.set_address("store-2:7000");
  const int last = job.copies_size() - 1;
  job.mutable_copies(last)->set_from_store(2);
  job.mutable_map()->set_placement(2 * last, 2);
  // That of the job, and that of the first store.
  start_thread_ = [left = std::make_shared<std::atomic<int>>(2)](std::function<void()> run) {
    if (--*left < 0) throw std::system_error(EAGAIN, std::generic_category());
    return std::thread(std::move(run));
  };
  Make();
  host_->OnDirective(directive_);
  const v1::StoreReport report =
      Await([](const auto& r) { return r.phase() == v1::STORE_PHASE_FAILED; });
  EXPECT_EQ(report.error_code(), "RESOURCE_EXHAUSTED");
  EXPECT_THAT(report.problem(), testing::HasSubstr("no thread more"));
}

TEST_F(CopiesTest, ADropEndsOneAtOnce) {
  Copy();
  v1::StoreDirective drop;
  drop.set_term(1);
  drop.set_run_id("small-1");
  drop.set_generation(1);
  drop.set_epoch(1);
  drop.set_drop(true);
  host_->OnDirective(drop);
  Await([](const auto& report) { return report.dropped(); });
  ExpectAtOnce();
}

TEST_F(CopiesTest, ANewEpochEndsOneAtOnceAndIsLoaded) {
  Copy();
  directive_.set_epoch(2);
  directive_.clear_decision();
  directive_.set_map_version(2);
  directive_.mutable_job()->mutable_base()->set_epoch(2);
  directive_.mutable_job()->clear_copies();
  directive_.mutable_job()->clear_copy();
  host_->OnDirective(directive_);
  Await([](const auto& report) {
    return report.version().epoch() == 2 && report.phase() == v1::STORE_PHASE_READY;
  });
  ExpectAtOnce();
}

TEST_F(CopiesTest, ANewMapWithAnotherSourceEndsOneAtOnce) {
  Copy();
  directive_.set_map_version(2);
  directive_.mutable_job()->mutable_map()->mutable_stores(0)->set_member("store-2");
  host_->OnDirective(directive_);
  std::unique_lock<std::mutex> lock(silence_->mutex);
  EXPECT_TRUE(
      silence_->changed.wait_for(lock, kPatience, [this] { return silence_->reading > 1; }));
  ExpectAtOnce();
}

TEST_F(CopiesTest, AFenceEndsOneAtOnce) {
  Copy();
  host_->Clear();
  host_.reset();
  ExpectAtOnce();
}

TEST_F(CopiesTest, TheEndOfTheProcessEndsOneAtOnce) {
  Copy();
  host_.reset();
  ExpectAtOnce();
}

TEST_F(CopiesTest, OneThatIsStoppedBetweenTriesEndsAtOnceToo) {
  refused_ = absl::UnavailableError("connection refused");
  Make();
  host_->OnDirective(directive_);
  Await([](const auto& report) { return !report.problem().empty(); });
  begun_ = Steady::now();
  host_.reset();
  ExpectAtOnce();
}

TEST_F(CopiesTest, SilenceFailsTheLoadNamingTheStoreAndIsSaidBefore) {
  directive_.mutable_job()->mutable_spec()->mutable_timeouts()->set_start_seconds(8);
  Copy();
  const v1::StoreReport report =
      Await([](const auto& report) { return report.phase() == v1::STORE_PHASE_FAILED; });
  EXPECT_EQ(report.error_code(), "UNAVAILABLE");
  EXPECT_THAT(report.problem(), AllOf(HasSubstr("chunk 0"), HasSubstr("store-0 at store-0:7000"),
                                      HasSubstr("nothing came for 2s")));
  EXPECT_GE(Steady::now() - begun_, std::chrono::milliseconds(1900));
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string all = std::to_string(table_.chunks.size());
  EXPECT_THAT(said_, AllOf(HasSubstr("is copying chunks from store-0 at store-0:7000: 0 of " + all),
                           HasSubstr("waits for store-0 at store-0:7000 since 1s")));
}

TEST_F(CopiesTest, AStoreThatHasForgottenTheJobFailsTheLoadAtOnce) {
  StoreHostOptions options;
  options.chunk_elements = kChunk;
  StoreHost other(options);
  v1::BulkHello hello;
  hello.set_run_id("small-1");
  EXPECT_EQ(other.Open(hello, nullptr).status().code(), absl::StatusCode::kUnavailable);
  hello.set_store(true);
  refused_ = other.Open(hello, nullptr).status();
  EXPECT_EQ(refused_.code(), absl::StatusCode::kNotFound);
  Make();
  begun_ = Steady::now();
  host_->OnDirective(directive_);
  const v1::StoreReport report =
      Await([](const auto& report) { return report.phase() == v1::STORE_PHASE_FAILED; });
  ExpectAtOnce();
  EXPECT_THAT(report.problem(), AllOf(HasSubstr("store-0"), HasSubstr("started anew")));
}

// After a fence the process goes on under another name, for which no word of before may count.
TEST_F(CopiesTest, NoReportIsUnderWayAnyMoreOnceAHostWasCleared) {
  std::mutex mutex;
  std::condition_variable changed;
  bool inside = false, open = false;
  StoreHostOptions options;
  options.memory_limit = uint64_t{1} << 30;
  options.chunk_elements = kChunk;
  options.on_report = [&](const v1::StoreReport&) {
    std::unique_lock<std::mutex> lock(mutex);
    inside = true;
    changed.notify_all();
    EXPECT_TRUE(changed.wait_for(lock, kPatience, [&] { return open; }));
    inside = false;
  };
  StoreHost host(std::move(options));
  directive_.mutable_job()->clear_copies();
  directive_.mutable_job()->clear_copy();
  directive_.clear_decision();
  const auto told = std::async(std::launch::async, [&] { host.OnDirective(directive_); });
  {
    std::unique_lock<std::mutex> lock(mutex);
    ASSERT_TRUE(changed.wait_for(lock, kPatience, [&] { return inside; }));
  }
  const auto cleared = std::async(std::launch::async, [&] {
    host.Clear();
    std::lock_guard<std::mutex> lock(mutex);
    EXPECT_FALSE(inside);
  });
  EXPECT_EQ(cleared.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  {
    std::lock_guard<std::mutex> lock(mutex);
    open = true;
    changed.notify_all();
  }
  ASSERT_EQ(cleared.wait_for(kPatience), std::future_status::ready);
  told.wait();
}

TEST(PeerTimeoutTest, IsOverWellBeforeTheCoordinatorsPatience) {
  v1::JobSpec spec;
  EXPECT_EQ(PeerTimeout(spec), absl::Seconds(30));  // of 120 and 600
  spec.mutable_timeouts()->set_start_seconds(20);
  EXPECT_EQ(PeerTimeout(spec), absl::Seconds(5));
  spec.mutable_timeouts()->set_step_seconds(8);
  EXPECT_EQ(PeerTimeout(spec), absl::Seconds(2));
  spec.mutable_timeouts()->set_start_seconds(100000);
  spec.mutable_timeouts()->set_step_seconds(100000);
  EXPECT_EQ(PeerTimeout(spec), absl::Seconds(30));
}

}  // namespace
}  // namespace zeroshard::store
