// How offloaded jobs are refused, and how they end badly.
#include <chrono>
#include <condition_variable>
#include <limits>
#include <mutex>

#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

TEST(OffloadTest, ARunThatBeganWithACheckpointHasAsManySamplesAsThat) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  const std::string dir = folder / "ckpt";
  ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {1, 0}, 2, dir), {.world = 1}, data));
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer);
  v1::StateVersion base;
  base.set_step(2);
  MemoryStores stores(spec, {.base = base});
  RunOptions options = Resume(2, dir + "/" + CheckpointName(2), 2);
  options.next_sample = 12;
  const auto refused =
      TrainOffloaded(spec, options, MemoryDataset(ChainTokens(24 * 41 + 1, 61), 24), &stores);
  EXPECT_EQ(refused[0].status.code(), absl::StatusCode::kInvalidArgument) << refused[0].status;
  EXPECT_THAT(std::string(refused[0].status.message()),
              testing::AllOf(HasSubstr("has 41 samples"), HasSubstr("had 40")));
  EXPECT_FALSE(refused[1].status.ok());
  EXPECT_TRUE(stores.decisions().empty());
  MemoryStores right(spec, {.base = base});
  ExpectAllOk(TrainOffloaded(spec, options, data, &right));
}

TEST(OffloadTest, AFirstStepThatIsNotTheOneAfterTheVersionIsRefused) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {1, 1}, Offload::kOptimizer);
  v1::StateVersion base;
  base.set_step(2);
  MemoryStores stores(spec, {.base = base});
  const auto results = TrainOffloaded(spec, {.world = 1}, data, &stores);
  EXPECT_TRUE(absl::IsInvalidArgument(results[0].status)) << results[0].status;
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("wanted 3"));
  const auto without = TrainJob(spec, {.world = 1}, data);
  EXPECT_TRUE(absl::IsInvalidArgument(without[0].status)) << "no stores at all";
}

// One rank's call fails: it says why, and the others end with it.
TEST(OffloadFaults, AnErrorOfAStoreEndsAllRanksPromptly) {
  const MemoryDataset data = TinyData();
  for (const auto call : {MemoryStores::Call::kPush, MemoryStores::Call::kPull}) {
    for (int stage : {1, 3}) {
      for (Offload offload : OffloadsOf(stage)) {
        const v1::JobSpec spec = Spec(TinyGpt2(), {3, stage}, offload, {"bf16.enabled=true"});
        MemoryStores::Options options;
        options.on_call = [&](MemoryStores::Call seen, int rank, uint64_t step,
                              int unit) -> absl::Status {
          if (seen != call || rank != 1 || step != 2 || unit != 1) return absl::OkStatus();
          return absl::DeadlineExceededError("store-0: chunk 1 of step 2: nothing moved for 3s");
        };
        MemoryStores stores(spec, options);
        const auto start = std::chrono::steady_clock::now();
        const auto results = TrainOffloaded(spec, {.world = 3}, data, &stores);
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
        EXPECT_TRUE(absl::IsDeadlineExceeded(results[1].status)) << results[1].status;
        EXPECT_THAT(std::string(results[1].status.message()), HasSubstr("chunk 1 of step 2"));
        for (const RankResult& result : results) EXPECT_FALSE(result.status.ok());
      }
    }
  }
}

// What a rank sees of the stores, and when it lets go of it.
class Watched : public StateStore {
 public:
  Watched(std::unique_ptr<StateStore> store, std::function<void()> gone)
      : store_(std::move(store)), gone_(std::move(gone)) {}
  ~Watched() override {
    store_.reset();
    gone_();
  }
  v1::StateVersion base() const override { return store_->base(); }
  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    return store_->Push(step, unit, begin, end, data, after);
  }
  Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
             const Event& after) override {
    return store_->Pull(step, unit, begin, end, out, after);
  }
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next,
                                          uint64_t samples) override {
    return store_->Commit(record, next, samples);
  }
  void Abort(const std::string& reason) override { store_->Abort(reason); }
  const OffloadCounters& counters() const override { return store_->counters(); }

 private:
  std::unique_ptr<StateStore> store_;
  const std::function<void()> gone_;
};

// A rank that has an error to tell at the start waits neither for the others nor for its own pulls.
TEST(OffloadFaults, AFailedPullAtTheStartIsToldAtOnce) {
  const MemoryDataset data = TinyData();
  for (int stage : {1, 3}) {
    const v1::JobSpec spec = Spec(TinyGpt2(), {2, stage}, Offload::kOptimizer);
    std::mutex mutex;
    std::condition_variable changed;
    bool gone = false, in_time = true;
    MemoryStores::Options options;
    options.on_call = [&](MemoryStores::Call, int rank, uint64_t, int unit) -> absl::Status {
      if (rank == 1) {  // has nothing before the other has given up
        std::unique_lock lock(mutex);
        in_time &= changed.wait_for(lock, std::chrono::seconds(30), [&] { return gone; });
      }
      if (rank == 0 && unit == 3) return absl::DataLossError("store-0: chunk 3 is damaged");
      return absl::OkStatus();
    };
    MemoryStores stores(spec, options);
    RunOptions run{.world = 2};
    run.store = [&](int rank) -> std::unique_ptr<StateStore> {
      auto store = stores.MakeRank(rank);
      if (rank != 0) return store;
      return std::make_unique<Watched>(std::move(store), [&] {
        std::lock_guard lock(mutex);
        gone = true;
        changed.notify_all();
      });
    };
    const auto results = TrainJob(spec, run, data);
    EXPECT_EQ(results[0].status, absl::DataLossError("store-0: chunk 3 is damaged"));
    EXPECT_FALSE(results[1].status.ok());
    EXPECT_TRUE(in_time) << "stage " << stage;
  }
}

TEST(OffloadFaults, StoresThatAreAbortedEndEveryRankWithTheReason) {
  const MemoryDataset data = TinyData();
  for (int stage : {1, 2, 3}) {
    for (Offload offload : OffloadsOf(stage)) {
      const int world = stage == 3 ? 3 : 2;  // in one round, and in two
      const v1::JobSpec spec = Spec(TinyGpt2(), {world, stage}, offload);
      MemoryStores::Options options;
      MemoryStores* all = nullptr;
      options.before_update = [&](uint64_t step, int) {
        if (step == 2) all->Abort("generation 3 has begun");
      };
      MemoryStores stores(spec, options);
      all = &stores;
      const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
      for (const RankResult& result : results) {
        EXPECT_FALSE(result.status.ok());
        EXPECT_THAT(std::string(result.status.message()),
                    AnyOf(HasSubstr("generation 3 has begun"), HasSubstr("a rank failed"),
                          HasSubstr("gone")));
        EXPECT_LE(result.records.size(), 2u);
      }
      const bool named = std::any_of(results.begin(), results.end(), [](const RankResult& r) {
        return r.status.message().find("generation 3 has begun") != std::string::npos;
      });
      EXPECT_TRUE(named) << results[0].status << results[1].status;
    }
  }
}

TEST(OffloadFaults, ACommitThatIsRefusedEndsTheRunAtItsStep) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer);
  MemoryStores::Options options;
  MemoryStores* all = nullptr;
  options.on_commit = [&](const v1::StepRecord& record, uint64_t, uint64_t) {
    if (record.step() == 3) all->Abort("the coordinator has another generation");
  };
  MemoryStores stores(spec, options);
  all = &stores;
  const auto results = TrainOffloaded(spec, {.world = 2}, data, &stores);
  EXPECT_TRUE(absl::IsAborted(results[0].status)) << results[0].status;
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("another generation"));
  EXPECT_EQ(results[0].records.size(), 2u) << "step 3 was not committed";
  EXPECT_FALSE(results[1].status.ok());
  EXPECT_EQ(stores.decisions().size(), 2u);
}

TEST(OffloadFaults, NoStepIsCommittedBeforeWhatWasReportedIsDelivered) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer);
  MemoryStores stores(spec, {});
  std::vector<uint64_t> asked;
  RunOptions options{.world = 2};
  options.before_commit = [&](int rank, uint64_t step) {
    EXPECT_EQ(rank, 0);
    EXPECT_EQ(stores.decisions().size(), asked.size());
    asked.push_back(step);
    if (step != 3) return absl::OkStatus();
    stores.Abort("the report was refused");
    return absl::FailedPreconditionError("the report was refused");
  };
  const auto results = TrainOffloaded(spec, options, data, &stores);
  EXPECT_EQ(results[0].status, absl::FailedPreconditionError("the report was refused"));
  EXPECT_FALSE(results[1].status.ok());
  EXPECT_EQ(asked, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(stores.decisions().size(), 2u);
}

TEST(OffloadFaults, ANonFiniteStepIsNeverCommitted) {
  const MemoryDataset data = TinyData();
  for (int world : {2, 3}) {  // three micro-batches: of three ranks one round
    for (int stage : {1, 2, 3}) {
      for (Offload offload : OffloadsOf(stage)) {
        const v1::JobSpec spec = Spec(TinyGpt2(), {world, stage}, offload);
        MemoryStores stores(spec, {});
        stores.Set("blocks.1.mlp.fc.bias", 5, std::numeric_limits<float>::quiet_NaN());
        const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
        for (const RankResult& result : results) {
          EXPECT_TRUE(IsNonFinite(result.status)) << result.status;
          EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 1: non-finite loss"));
          EXPECT_EQ(result.status, results[0].status) << "one message on all ranks";
        }
        EXPECT_TRUE(stores.decisions().empty());
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
