// fp16 with loss scaling: near fp32, the same bits at every shape, skipped steps and what they
// leave, checkpoints and shard stores.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/spec/loss_scale.h"
#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/fp16_harness.h"
#include "tests/worker/train/memory_stores.h"

namespace zeroshard {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Fp16Test, TheLossCurveIsNearThatOfFp32) {
  const MemoryDataset data = TinyData();
  for (const char* model : {TinyGpt2(), TinyLlama()}) {
    const auto exact =
        TrainJob(MakeSpec(model, {"steps=20", "bf16.enabled=false"}), {.world = 1}, data);
    const auto half = TrainJob(Fp16(model, {2, 2}, {"steps=20", "fp16.initial_scale_power=12"}),
                               {.world = 2}, data);
    ExpectAllOk(half);
    ASSERT_EQ(half[0].records.size(), 20u);
    EXPECT_THAT(SkippedOf(half[0]), ElementsAre());
    for (size_t i = 0; i < 20; ++i) {
      const v1::StepRecord &seen = half[0].records[i], &wanted = exact[0].records[i];
      EXPECT_NEAR(seen.loss(), wanted.loss(), 5e-3 * wanted.loss()) << "step " << i + 1;
      EXPECT_NEAR(seen.grad_norm(), wanted.grad_norm(), 0.03 * wanted.grad_norm())
          << "step " << i + 1;
    }
    EXPECT_LT(half[0].records[19].loss(), 0.95 * half[0].records[0].loss());
  }
}

TEST(Fp16Test, EveryShapeGivesTheSameBitsAlsoWhereStepsAreSkipped) {
  const MemoryDataset data = TinyData();
  for (const char* model : {TinyGpt2(), TinyLlama()}) {
    const std::string expected =
        TrainScaled(Fp16(model, {1, 0}, kOverflowsAtFirst), {.world = 1}, data);
    EXPECT_THAT(expected, HasSubstr("0x1p+24 skipped 0x1p+23 skipped"));
    for (int world : {1, 2, 3, 4}) {
      for (int stage : {0, 1, 2, 3}) {
        EXPECT_EQ(
            TrainScaled(Fp16(model, {world, stage}, kOverflowsAtFirst), {.world = world}, data),
            expected)
            << "world " << world << " stage " << stage;
      }
    }
  }
}

TEST(Fp16Test, TheScaleFallsUntilStepsAreGoodAndGrowsAfterAWindow) {
  const auto results =
      TrainJob(Fp16(TinyGpt2(), {1, 0}, kOverflowsAtFirst), {.world = 1}, TinyData());
  ExpectAllOk(results);
  const auto& records = results[0].records;
  ASSERT_EQ(records.size(), 16u);
  EXPECT_TRUE(records[0].skipped());
  EXPECT_FALSE(std::isfinite(records[0].grad_norm()));
  EXPECT_TRUE(std::isfinite(records[0].loss())) << "the forward is not scaled";
  int grown = 0, good = 0;
  for (size_t i = 0; i + 1 < records.size(); ++i) {
    const double scale = records[i].loss_scale(), next = records[i + 1].loss_scale();
    good = records[i].skipped() ? 0 : good + 1;
    if (records[i].skipped()) {
      EXPECT_EQ(next, scale / 2) << "step " << i + 1;
    } else if (good == 2) {
      EXPECT_EQ(next, scale * 2) << "step " << i + 1;
      good = 0;
      ++grown;
    } else {
      EXPECT_EQ(next, scale) << "step " << i + 1;
    }
  }
  EXPECT_GT(grown, 0);
  EXPECT_LT(results[0].records.back().loss(), records[0].loss());
}

TEST(Fp16Test, ASkippedStepLeavesTheWeightsAsTheyWere) {
  for (int stage : {0, 1, 2, 3}) {
    const auto digest_after = [&](const std::string& steps, const std::string& power) {
      const auto results =
          TrainJob(Fp16(TinyLlama(), {2, stage},
                        {steps, "fp16.initial_scale_power=" + power, "deterministic=true"}),
                   {.world = 2}, TinyData());
      ExpectAllOk(results);
      return results[0].digest;
    };
    const std::string one = digest_after("steps=1", "40");
    EXPECT_EQ(digest_after("steps=3", "40"), one) << stage;
    EXPECT_NE(digest_after("steps=1", "10"), one) << stage;
  }
}

TEST(Fp16Test, AnOverflowOnOneRankSkipsTheStepOnAll) {
  const MemoryDataset data = DataWithARareToken();
  std::string expected;
  for (int world : {1, 3}) {
    for (int stage : {0, 3}) {
      RunOptions options{.world = world};
      options.prepare = MakeTheRareTokenOverflow;
      const auto results = TrainJob(OneOverflow({world, stage}), options, data);
      for (const RankResult& result : results) {
        ASSERT_TRUE(result.status.ok()) << result.status;
        EXPECT_THAT(SkippedOf(result), ElementsAre(1));
        EXPECT_THAT(ScalesOf(result), ElementsAre(1024, 1024, 1024, 1024)) << "by the hysteresis";
        EXPECT_TRUE(std::isnan(result.records[0].loss()));
        if (expected.empty()) expected = ScaledFingerprint(result);
        EXPECT_EQ(ScaledFingerprint(result), expected) << "world " << world << " stage " << stage;
      }
    }
  }
}

TEST(Fp16Test, AtTheLeastScaleTheJobFailsAndSaysWhy) {
  const v1::JobSpec spec =
      Fp16(TinyGpt2(), {2, 1},
           {"fp16.initial_scale_power=31", "fp16.min_loss_scale=1073741824", "fp16.hysteresis=2"});
  const auto results = TrainJob(spec, {.world = 2}, TinyData());
  for (const RankResult& result : results) {
    EXPECT_THAT(ScalesOf(result), ElementsAre(0x1p31, 0x1p31));
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal) << result.status;
    EXPECT_TRUE(IsNonFinite(result.status));
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 3: non-finite gradient"));
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("on rank "));
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("samples "));
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("fp16.min_loss_scale"));
    EXPECT_EQ(result.status, results[0].status) << "one message on all ranks";
  }
}

TEST(Fp16Test, WithAFixedScaleAnOverflowFails) {
  const auto results =
      TrainJob(Fp16(TinyGpt2(), {2, 3}, {"fp16.loss_scale=1e9"}), {.world = 2}, TinyData());
  for (const RankResult& result : results) {
    EXPECT_TRUE(IsNonFinite(result.status)) << result.status;
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("The loss scale was 1e+09"));
    EXPECT_TRUE(result.records.empty());
  }
  const auto good =
      TrainJob(Fp16(TinyGpt2(), {2, 3}, {"fp16.loss_scale=1000"}), {.world = 2}, TinyData());
  ExpectAllOk(good);
  EXPECT_THAT(ScalesOf(good[0]), ElementsAre(1000, 1000, 1000, 1000));
}

TEST(Fp16CheckpointTest, ARunThatGoesOnHasTheScaleAndTheBitsOfOneThatNeverStopped) {
  const MemoryDataset data = TinyData();
  const auto whole = TrainJob(Fp16(TinyLlama(), {1, 0}, kOverflowsAtFirst), {.world = 1}, data);
  ExpectAllOk(whole);
  ASSERT_EQ(whole[0].records.size(), 16u);
  // Once while steps are skipped, once after the first good ones.
  const auto first_good = std::find_if(whole[0].records.begin(), whole[0].records.end(),
                                       [](const auto& r) { return !r.skipped(); });
  ASSERT_NE(first_good, whole[0].records.end());
  for (const uint64_t stop : {uint64_t{2}, first_good->step()}) {
    const TempFolder folder;
    std::vector<std::string> first = kOverflowsAtFirst;
    first.push_back("checkpoint.dir=" + folder.path());
    first.push_back(absl::StrFormat("checkpoint.interval_steps=%d", stop));
    RunOptions stopping{.world = 2};
    stopping.wants_save = [&](int, uint64_t step) {
      return step == stop ? SaveRequest::kSaveAndStop : SaveRequest::kNone;
    };
    const auto begun = TrainJob(Fp16(TinyLlama(), {2, 3}, first), stopping, data);
    EXPECT_TRUE(absl::IsCancelled(begun[0].status)) << begun[0].status;
    const std::string path = absl::StrFormat("%s/step-%08d", folder.path(), stop);
    const auto reader = CheckpointReader::Open(path);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ((*reader)->manifest().loss_scale.scale(),
              whole[0].records[static_cast<size_t>(stop)].loss_scale());
    EXPECT_EQ((*reader)->manifest().loss_scale.skipped_steps(),
              std::min<uint64_t>(stop, first_good->step() - 1));

    const auto rest =
        TrainJob(Fp16(TinyLlama(), {3, 1}, kOverflowsAtFirst), Resume(3, path, stop), data);
    ExpectAllOk(rest);
    RankResult joined = begun[0];
    joined.records.insert(joined.records.end(), rest[0].records.begin(), rest[0].records.end());
    joined.digest = rest[0].digest;
    EXPECT_EQ(ScaledFingerprint(joined), ScaledFingerprint(whole[0])) << "stopped at " << stop;

    RunOptions anew = Resume(1, path, 0);
    anew.weights_only = true;
    const auto weights = TrainJob(Fp16(TinyLlama(), {1, 0}, kOverflowsAtFirst), anew, data);
    ExpectAllOk(weights);
    EXPECT_EQ(weights[0].records[0].loss_scale(), 0x1p24) << "steps and scale begin anew";
  }
}

TEST(Fp16CheckpointTest, OfABf16RunTheScaleBeginsAsInTheSpecification) {
  const TempFolder folder;
  const auto first =
      TrainJob(SavingSpec(TinyGpt2(), {1, 0}, 2, folder.path(), {"bf16.enabled=true"}),
               {.world = 1}, TinyData());
  ExpectAllOk(first);
  const std::string path = folder.path() + "/step-00000002";
  const auto reader = CheckpointReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->manifest().loss_scale.ByteSizeLong(), 0u);
  const auto results = TrainJob(Fp16(TinyGpt2(), {1, 0}, {"fp16.initial_scale_power=9"}),
                                Resume(1, path, 2), TinyData());
  ExpectAllOk(results);
  EXPECT_THAT(ScalesOf(results[0]), ElementsAre(512, 512));
}

TEST(Fp16OffloadTest, StoresGiveTheSameBitsAlsoWhereStepsAreSkipped) {
  const MemoryDataset data = TinyData();
  for (const char* model : {TinyGpt2(), TinyLlama()}) {
    for (int world : {1, 3}) {
      for (int stage : {1, 2, 3}) {
        const std::string expected =
            TrainScaled(Fp16(model, {world, stage}, kOverflowsAtFirst), {.world = world}, data);
        for (const char* parameters : {"none", "cpu"}) {
          if (stage < 3 && parameters == std::string("cpu")) continue;
          std::vector<std::string> more = kOverflowsAtFirst;
          more.push_back("zero_optimization.offload_optimizer.device=cpu");
          more.push_back(std::string("zero_optimization.offload_param.device=") + parameters);
          const v1::JobSpec spec = Fp16(model, {world, stage}, more);
          MemoryStores stores(spec, {});
          RunOptions options{.world = world};
          options.store = [&](int rank) { return stores.MakeRank(rank); };
          const std::string seen = TrainScaled(spec, options, data);
          stores.WaitForVersion(spec.steps());
          EXPECT_EQ(seen + stores.Digest(), expected) << "world " << world << " stage " << stage;
          const std::vector<v1::StepDecision> decisions = stores.decisions();
          EXPECT_TRUE(decisions[0].skip());
          // Adam counts the steps that were applied.
          const v1::StepDecision& last = decisions.back();
          const auto applied = std::count_if(decisions.begin(), decisions.end(),
                                             [](const auto& d) { return !d.skip(); });
          EXPECT_EQ(last.adam_step(), static_cast<uint64_t>(applied) + (last.skip() ? 1 : 0));
        }
      }
    }
  }
}

// Which unit overflowed is known from the squares of gradients that are gone by then.
TEST(Fp16OffloadTest, AnOverflowNamesTheUnitThatItWouldNameWithoutOffload) {
  for (const int stage : {2, 3}) {
    const Shape shape{3, stage};  // one round
    const std::string scale = "fp16.loss_scale=1e9";
    const auto expected = TrainJob(Fp16(TinyGpt2(), shape, {scale}), {.world = 3}, TinyData());
    EXPECT_THAT(std::string(expected[0].status.message()), HasSubstr("non-finite gradient"));
    const v1::JobSpec spec =
        Fp16(TinyGpt2(), shape,
             {scale, "zero_optimization.offload_optimizer.device=cpu", "resources.workers=3"});
    MemoryStores stores(spec, {});
    RunOptions options{.world = 3};
    options.store = [&](int rank) { return stores.MakeRank(rank); };
    for (const RankResult& result : TrainJob(spec, options, TinyData()))
      EXPECT_EQ(result.status, expected[0].status) << "stage " << stage;
    EXPECT_TRUE(stores.decisions().empty());
  }
}

TEST(Fp16OffloadTest, TheNextGenerationGoesOnWithTheScale) {
  const MemoryDataset data = TinyData();
  std::vector<std::string> more = kOverflowsAtFirst;
  more.push_back("zero_optimization.offload_optimizer.device=cpu");
  const v1::JobSpec spec = Fp16(TinyGpt2(), {2, 2}, more);
  MemoryStores whole(spec, {}), stores(spec, {});
  RunOptions options{.world = 2};
  options.store = [&](int rank) { return whole.MakeRank(rank); };
  const auto expected = TrainJob(spec, options, data);
  ExpectAllOk(expected);

  v1::JobSpec part = spec;
  part.set_steps(5);
  options.store = [&](int rank) { return stores.MakeRank(rank); };
  auto seen = TrainJob(part, options, data);
  ExpectAllOk(seen);
  stores.WaitForVersion(5);
  stores.Continue();
  options.first_step = 6;
  options.next_sample = 30;
  options.loss_scale = stores.loss_scale();
  const auto rest = TrainJob(spec, options, data);
  ExpectAllOk(rest);
  RankResult joined = seen[0];
  joined.records.insert(joined.records.end(), rest[0].records.begin(), rest[0].records.end());
  std::vector<double> scales = ScalesOf(joined);
  EXPECT_EQ(scales, ScalesOf(expected[0]));
  EXPECT_EQ(SkippedOf(joined), SkippedOf(expected[0]));
  stores.WaitForVersion(16);
  whole.WaitForVersion(16);
  EXPECT_EQ(stores.Digest(), whole.Digest());
}

// A coordinator that computes another scale than the ranks.
TEST(Fp16OffloadTest, ADecisionWithAnotherScaleEndsTheJob) {
  const v1::JobSpec spec =
      Fp16(TinyGpt2(), {1, 1}, {"zero_optimization.offload_optimizer.device=cpu"});
  v1::JobSpec other = spec;
  other.mutable_fp16()->set_initial_scale_power(20);
  MemoryStores stores(other, {});
  RunOptions options{.world = 1};
  options.store = [&](int rank) { return stores.MakeRank(rank); };
  const auto results = TrainJob(spec, options, TinyData());
  EXPECT_EQ(results[0].status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(results[0].status.message()),
              HasSubstr("goes on with a loss scale of 1.04858e+06"));
}

}  // namespace
}  // namespace zeroshard
