// The rules that make the numbers the same (architecture, section 5b).
#include <string>
#include <tuple>
#include <vector>

#include "tests/worker/train/cluster_harness.h"

namespace zeroshard {
namespace {

using Overrides = std::vector<std::string>;

Overrides With(Overrides base, const Overrides& more) {
  base.insert(base.end(), more.begin(), more.end());
  return base;
}

std::string Stage(int stage) { return absl::StrFormat("zero_optimization.stage=%d", stage); }

class SameNumbers : public testing::TestWithParam<const char*> {
 protected:
  const char* Job() const { return GetParam() == std::string("gpt2") ? TinyGpt2() : TinyLlama(); }
  std::string Train(const Overrides& overrides, int world, int threads = 1) {
    const MemoryDataset data = TinyData();
    return TrainFingerprint(
        MakeSpec(Job(), With(overrides, {absl::StrFormat("resources.workers=%d", world)})),
        {.world = world, .threads = threads}, data);
  }
};

INSTANTIATE_TEST_SUITE_P(Models, SameNumbers, testing::Values("gpt2", "llama"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(SameNumbers, Fp32StagesAgreeAtOneWorldSizeWithOneRound) {
  for (int world : {1, 2, 3}) {
    const Overrides one_round = {absl::StrFormat("train_batch_size=%d", 2 * world)};
    const std::string expected = Train(With(one_round, {Stage(0)}), world);
    for (int stage : {1, 2, 3})
      EXPECT_EQ(Train(With(one_round, {Stage(stage)}), world), expected)
          << "stage " << stage << " world " << world;
  }
}

TEST_P(SameNumbers, Fp32StagesAgreeInPairsWithSeveralRounds) {
  for (int world : {1, 2}) {
    EXPECT_EQ(Train({Stage(0)}, world), Train({Stage(1)}, world)) << world;
    EXPECT_EQ(Train({Stage(2)}, world), Train({Stage(3)}, world)) << world;
  }
}

TEST_P(SameNumbers, ScheduleSettingsChangeNothing) {
  const int world = 2;
  const std::string expected = Train({Stage(3)}, world);
  const std::vector<Overrides> settings = {
      {"zero_optimization.overlap_comm=false"},
      {"zero_optimization.reduce_bucket_size=64"},
      {"zero_optimization.reduce_bucket_size=1000"},
      {"zero_optimization.stage3_prefetch_bucket_size=0"},
      {"zero_optimization.stage3_prefetch_bucket_size=13000"},
      {"zero_optimization.stage3_max_live_parameters=0"},
      {"zero_optimization.stage3_max_reuse_distance=1000000000"},
      {"zero_optimization.stage3_param_persistence_threshold=4000"},
      {"activation_checkpointing=true"},
      {"activation_checkpointing=true", "zero_optimization.overlap_comm=false"},
  };
  for (const Overrides& setting : settings)
    EXPECT_EQ(Train(With({Stage(3)}, setting), world), expected) << setting[0];
}

TEST_P(SameNumbers, ThreadsChangeNothing) {
  for (const char* bf16 : {"bf16.enabled=false", "bf16.enabled=true"}) {
    const std::string expected = Train({Stage(2), bf16}, 1, 1);
    for (int threads : {2, 3}) EXPECT_EQ(Train({Stage(2), bf16}, 1, threads), expected) << threads;
  }
}

TEST_P(SameNumbers, CheckpointingChangesNothingInBf16) {
  EXPECT_EQ(Train({Stage(3), "bf16.enabled=true"}, 2),
            Train({Stage(3), "bf16.enabled=true", "activation_checkpointing=true"}, 2));
}

// Five micro-batches: ragged at worlds 2, 3 and 4, and one round with idle ranks where there are
// two.
TEST_P(SameNumbers, DeterministicIsTheSameAtAnyWorldSizeAndStage) {
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true",
                                "bf16={enabled: true, stochastic_rounding: true}"}) {
    for (const char* batch : {"train_batch_size=10", "train_batch_size=4"}) {
      const Overrides base = {"deterministic=true", precision, batch};
      const std::string expected = Train(With(base, {Stage(0)}), 1);
      for (int world : {1, 2, 3, 4})
        for (int stage : {0, 1, 2, 3})
          EXPECT_EQ(Train(With(base, {Stage(stage)}), world), expected)
              << precision << " " << batch << " stage " << stage << " world " << world;
    }
  }
}

TEST_P(SameNumbers, WithoutDeterministicWorldsAgreeWithinRounding) {
  const MemoryDataset data = TinyData();
  const auto train = [&](int world, int stage) {
    const auto results =
        TrainJob(MakeSpec(Job(), {Stage(stage), absl::StrFormat("resources.workers=%d", world)}),
                 {.world = world}, data);
    for (const auto& r : results) EXPECT_TRUE(r.status.ok()) << r.status;
    return results[0].records;
  };
  const auto expected = train(1, 0);
  for (int world : {2, 3, 4}) {
    for (int stage : {0, 1, 2, 3}) {
      const auto seen = train(world, stage);
      ASSERT_EQ(seen.size(), expected.size());
      for (size_t i = 0; i < seen.size(); ++i) {
        SCOPED_TRACE(absl::StrFormat("world %d stage %d step %d", world, stage, i + 1));
        EXPECT_NEAR(seen[i].loss(), expected[i].loss(), 1e-5 * expected[i].loss());
        EXPECT_NEAR(seen[i].grad_norm(), expected[i].grad_norm(), 1e-5 * expected[i].grad_norm());
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
