// fp16 on a device that the host cannot reach: what overflowed is read when the device has computed
// it, so that every step is scaled, applied or skipped as on the CPU, whenever work is done.
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/train/fp16_harness.h"
#include "tests/worker/train/guarded_backend.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct Case {
  const char* name;
  bool llama;
  Shape shape;
  Offload offload = Offload::kNone;
  std::vector<std::string> more = {};
};

class GuardedFp16 : public testing::TestWithParam<Case> {};

std::string Train(const Case& c, const RankBackend& backend) {
  std::vector<std::string> more = kOverflowsAtFirst;
  more.push_back("steps=12");
  more.insert(more.end(), c.more.begin(), c.more.end());
  more.insert(more.begin(), "fp16.enabled=true");
  const v1::JobSpec spec = Spec(c.llama ? TinyLlama() : TinyGpt2(), c.shape, c.offload, more);
  const RunOptions options{.world = c.shape.world, .backend = backend};
  if (c.offload == Offload::kNone) return TrainScaled(spec, options, TinyData());
  MemoryStores stores(spec, {});
  RunOptions offloaded = options;
  offloaded.store = [&](int rank) { return stores.MakeRank(rank); };
  const std::string numbers = TrainScaled(spec, offloaded, TinyData());
  stores.WaitForVersion(spec.steps());
  return numbers + stores.Digest();
}

TEST_P(GuardedFp16, StepsAreScaledAndSkippedAsOnTheCpuWheneverWorkIsDone) {
  const std::string expected = Train(GetParam(), {});
  EXPECT_THAT(expected, HasSubstr("0x1p+24 skipped 0x1p+23 skipped"));
  const uint64_t seeds = GetParam().shape.world > 1 ? 2 * kSchedules : kSchedules;
  for (uint64_t seed = 0; seed < seeds; ++seed)
    EXPECT_EQ(Train(GetParam(), GuardedBackend(seed)), expected) << "device seed " << seed;
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, GuardedFp16,
    testing::Values(
        Case{"Alone", false, {1, 0}}, Case{"Stage0", true, {2, 0}}, Case{"Stage1", false, {2, 1}},
        Case{"Stage2Ragged", true, {3, 2}}, Case{"Stage3", false, {2, 3}},
        Case{"Accumulates", true, {2, 1}, Offload::kNone, {"deterministic=false"}},
        Case{"Checkpointing", true, {2, 3}, Offload::kNone, {"activation_checkpointing=true"}},
        Case{"SparseRows", false, {2, 3}, Offload::kNone, {"model.vocab_size=997"}},
        Case{"OffloadStage2", true, {2, 2}, Offload::kOptimizer},
        Case{"OffloadStage3", false, {2, 3}, Offload::kOptimizer},
        Case{"OffloadParam", true, {2, 3}, Offload::kAll},
        Case{"OffloadOneRoundStage2", true, {3, 2}, Offload::kOptimizer},
        Case{"OffloadOneRoundStage3", false, {3, 3}, Offload::kAll}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(GuardedFp16Test, AnOverflowOnOneRankSkipsTheStepOnAll) {
  const MemoryDataset data = DataWithARareToken();
  RunOptions options{.world = 3};
  options.prepare = MakeTheRareTokenOverflow;
  for (const int stage : {0, 2, 3}) {
    options.backend = {};
    const std::string expected = TrainScaled(OneOverflow({3, stage}), options, data);
    for (uint64_t seed = 0; seed < 2 * kSchedules; ++seed) {
      options.backend = GuardedBackend(seed);
      for (const RankResult& rank : TrainJob(OneOverflow({3, stage}), options, data)) {
        ASSERT_TRUE(rank.status.ok()) << rank.status;
        EXPECT_THAT(SkippedOf(rank), ElementsAre(1)) << "stage " << stage << " seed " << seed;
        EXPECT_EQ(ScaledFingerprint(rank), expected) << "stage " << stage << " seed " << seed;
      }
    }
  }
}

// The error names the step's values, which the host has read by then.
TEST(GuardedFp16Test, AtTheLeastScaleTheJobFailsAsOnTheCpu) {
  const v1::JobSpec spec =
      Fp16(TinyGpt2(), {2, 1},
           {"fp16.initial_scale_power=31", "fp16.min_loss_scale=1073741824", "fp16.hysteresis=2"});
  const auto expected = TrainJob(spec, {.world = 2}, TinyData());
  for (uint64_t seed = 0; seed < kSchedules; ++seed) {
    const auto seen = TrainJob(spec, {.world = 2, .backend = GuardedBackend(seed)}, TinyData());
    for (const RankResult& rank : seen) {
      EXPECT_THAT(std::string(rank.status.message()), HasSubstr("step 3: non-finite gradient"));
      EXPECT_EQ(rank.status, expected[0].status) << "device seed " << seed;
    }
  }
}

}  // namespace
}  // namespace zeroshard
