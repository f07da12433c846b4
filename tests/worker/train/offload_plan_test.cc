// What a rank of an offloaded job holds and moves is the plan's, and how long it waits is told.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <tuple>

#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

// Memory by kind and traffic, to ranks and to stores, are the plan's.
void ExpectPlanHolds(const v1::JobSpec& spec, int world, const TokenDataset& data) {
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok()) << model.status();
  const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, world));
  MemoryStores stores(spec, {});
  const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
  for (int rank = 0; rank < world; ++rank) {
    SCOPED_TRACE(absl::StrFormat("rank %d", rank));
    const RankResult& result = results[static_cast<size_t>(rank)];
    ASSERT_TRUE(result.status.ok()) << result.status;
    const RankPlan plan = PlanRank(*model, policy, rank);
    const auto held = [&](MemoryKind kind) {
      return static_cast<uint64_t>(result.memory[static_cast<int>(kind)]);
    };
    EXPECT_EQ(held(MemoryKind::kParameters), plan.parameters);
    EXPECT_EQ(held(MemoryKind::kGradients), plan.gradients);
    EXPECT_EQ(held(MemoryKind::kOptimizer), 0u);
    EXPECT_EQ(plan.optimizer, 0u);
    EXPECT_EQ(held(MemoryKind::kActivations), plan.activations);
    // At the start a rank pulls what it keeps, and the ranks gather what they keep whole.
    uint64_t first_pull = 0, first_gather = 0;
    const uint64_t size = SizeOf(policy.options.dtype);
    for (size_t u = 0; u < policy.layouts.size(); ++u) {
      const ShardLayout& layout = policy.layouts[u];
      if (!policy.KeepsParameters(static_cast<int>(u))) continue;
      first_pull += static_cast<uint64_t>(layout.End(rank) - layout.Begin(rank)) * size;
      if (policy.resident[u])
        first_gather += static_cast<uint64_t>(layout.shard * (world - 1)) * size;
    }
    EXPECT_EQ(stores.pushed(rank), plan.push * spec.steps());
    EXPECT_EQ(stores.pulled(rank), plan.pull * spec.steps() + first_pull);
    for (int op = 0; op < kCollectiveOps; ++op) {
      for (int phase = 0; phase < kPhases; ++phase) {
        const bool gathers = op == static_cast<int>(CollectiveOp::kAllGather) &&
                             phase == static_cast<int>(Phase::kStep);
        EXPECT_EQ(result.traffic[op][phase],
                  plan.step[op][phase] * spec.steps() + (gathers ? first_gather : 0))
            << NameOf(static_cast<CollectiveOp>(op)) << " " << NameOf(static_cast<Phase>(phase));
      }
    }
  }
}

TEST(OffloadPlanTest, MemoryAndTrafficOfARunEqualThePlan) {
  const MemoryDataset data = TinyData();
  for (int world : {1, 2, 3}) {
    for (int stage : {1, 2, 3}) {
      for (Offload offload : OffloadsOf(stage)) {
        for (const char* more :
             {"steps=2", "bf16.enabled=true", "model.trainable=['blocks.1.*', 'wpe.weight']",
              "zero_optimization.stage3_param_persistence_threshold=4000",
              "zero_optimization.stage3_max_reuse_distance=1000000000", "train_batch_size=2"}) {
          SCOPED_TRACE(absl::StrFormat("stage %d world %d offload %d %s", stage, world,
                                       static_cast<int>(offload), more));
          ExpectPlanHolds(Spec(TinyGpt2(), {world, stage}, offload, {more}), world, data);
        }
      }
    }
  }
}

// What is gathered at once, with what is kept for the next, is at most max_live_parameters (and
// what shards are rounded up by).
TEST(OffloadPlanTest, PulledParametersStayUnderMaxLiveParameters) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> more = {"steps=2", "model.layers=6",
                                         "zero_optimization.stage3_max_reuse_distance=1000000000"};
  const auto buffers = [&](int world, int64_t max_live) {
    std::vector<std::string> all = more;
    all.push_back(absl::StrFormat("zero_optimization.stage3_max_live_parameters=%d", max_live));
    const v1::JobSpec spec = Spec(TinyLlama(), {world, 3}, Offload::kAll, all);
    MemoryStores stores(spec, {});
    const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
    ExpectAllOk(results);
    EXPECT_EQ(results[0].memory[static_cast<int>(MemoryKind::kParameters)], 0);
    return results[0].peak[static_cast<int>(MemoryKind::kBuffers)];
  };
  const v1::JobSpec spec = Spec(TinyLlama(), {1, 3}, Offload::kAll, more);
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok());
  int64_t widest = 0, all = 0;
  for (const UnitTable& unit : model->units) {
    widest = std::max(widest, unit.length);
    all += unit.length;
  }
  for (int world : {1, 2}) {
    // Buffers that are not gathers: the difference between two bounds is what counts.
    const int64_t least = buffers(world, widest);
    const int64_t slack = static_cast<int64_t>(model->units.size()) * 64 * world * 4;
    for (int64_t units : {2, 3}) {
      const int64_t peak = buffers(world, units * widest);
      EXPECT_LE(peak, least + (units - 1) * widest * 4 + slack) << world << " " << units;
      EXPECT_GT(peak, least) << "room that is there is used";
    }
    EXPECT_GT(buffers(world, 2 * all), least + 3 * widest * 4) << "the bound is what held it";
  }
}

// Gradients of a step in one round leave as they come, so that depth costs nothing; with
// accumulation each block is kept.
TEST(OffloadPlanTest, GradientsOnTheDeviceDoNotGrowWithTheModel) {
  const MemoryDataset data = TinyData();
  const auto peak = [&](int world, int stage, int layers, int batch, MemoryKind kind) {
    const v1::JobSpec spec =
        Spec(TinyGpt2(), {world, stage}, Offload::kOptimizer,
             {"steps=2", "bf16.enabled=true", absl::StrFormat("model.layers=%d", layers),
              absl::StrFormat("train_batch_size=%d", batch),
              "zero_optimization.stage3_prefetch_bucket_size=0"});
    MemoryStores stores(spec, {});
    const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
    ExpectAllOk(results);
    return results[0].peak[static_cast<int>(kind)];
  };
  for (int world : {1, 2, 3}) {
    for (int stage : {2, 3}) {
      SCOPED_TRACE(absl::StrFormat("stage %d world %d", stage, world));
      const int one_round = 2 * world;
      EXPECT_EQ(peak(world, stage, 12, one_round, MemoryKind::kGradients),
                peak(world, stage, 4, one_round, MemoryKind::kGradients));
      // A block's sum of squares, here and where the host reads it.
      EXPECT_EQ(peak(world, stage, 12, one_round, MemoryKind::kBuffers),
                peak(world, stage, 4, one_round, MemoryKind::kBuffers) +
                    8 * 2 * static_cast<int64_t>(sizeof(NormAccumulator)));
      EXPECT_GT(peak(world, stage, 12, 2 * one_round, MemoryKind::kGradients),
                peak(world, stage, 4, 2 * one_round, MemoryKind::kGradients));
    }
  }
}

// The time that ranks wait for their stores is the phase "offload", not "communication".
TEST(OffloadTest, WaitingForTheStoresIsTheOffloadPhase) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer, {"steps=2"});
  MemoryStores::Options options;
  std::mutex mutex;
  std::condition_variable changed;
  bool released = false;
  // The update of step 1 begins when rank 0 has stood in its next forward for a while.
  options.before_update = [&](uint64_t step, int) {
    if (step != 1) return;
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return released; });
  };
  MemoryStores stores(spec, options);
  RunOptions run{.world = 2};
  std::thread releases;
  constexpr std::chrono::milliseconds kHeld(200);
  run.on_step = [&](int rank, const v1::StepRecord& record) {
    if (rank != 0 || record.step() != 1) return;
    releases = std::thread([&] {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, kHeld, [] { return false; });
      released = true;
      changed.notify_all();
    });
  };
  const auto results = TrainOffloaded(spec, run, data, &stores);
  releases.join();
  ExpectAllOk(results);
  for (const RankResult& result : results) {
    const auto offload = std::chrono::nanoseconds(
        static_cast<int64_t>(result.phases[static_cast<int>(StepPhase::kOffload)]));
    EXPECT_GT(offload, kHeld / 2);
    EXPECT_EQ(result.phases[static_cast<int>(StepPhase::kOptimizer)], 0u);
  }
}

TEST(OffloadTest, CommitsSayWhereTheDataGoOn) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 1}, Offload::kOptimizer);
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> seen;
  MemoryStores::Options options;
  options.on_commit = [&](const v1::StepRecord& record, uint64_t next, uint64_t samples) {
    EXPECT_GT(record.tokens(), 0u);
    seen.emplace_back(record.step(), next, samples);
  };
  MemoryStores stores(spec, options);
  ExpectAllOk(TrainOffloaded(spec, {.world = 2}, data, &stores));
  const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> wanted = {
      {1, 6, 40}, {2, 12, 40}, {3, 18, 40}, {4, 24, 40}};
  EXPECT_EQ(seen, wanted);
}

}  // namespace
}  // namespace zeroshard
