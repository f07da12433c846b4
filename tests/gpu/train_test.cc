// Training on a GPU: the CPU's curves, PyTorch's values, and the rules that make the numbers the
// same at any ZeRO stage, through the trainer and with everything that a job uses.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/gpu/gpu_backend.h"
#include "tests/worker/train/fp16_harness.h"
#include "tests/worker/train/fp16_reference.h"
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

using More = std::vector<std::string>;

More With(More more, const More& rest) {
  more.insert(more.end(), rest.begin(), rest.end());
  return more;
}

class GpuTraining : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const absl::Status none = CheckCudaDevice(0); !none.ok()) GTEST_SKIP() << none;
  }
  const char* Job() const { return GetParam() == std::string("gpt2") ? TinyGpt2() : TinyLlama(); }

  std::vector<RankResult> Train(const More& more, Shape shape, const RankBackend& backend) {
    const std::vector<RankResult> results =
        TrainJob(Spec(Job(), shape, Offload::kNone, more),
                 {.world = shape.world, .threads = 2, .backend = backend}, data_);
    ExpectAllOk(results);
    return results;
  }
  const MemoryDataset data_ = TinyData();
};
INSTANTIATE_TEST_SUITE_P(Models, GpuTraining, testing::Values("gpt2", "llama"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(GpuTraining, TwentyStepsHaveTheCpusCurveAndLearn) {
  struct Precision {
    More settings;
    double tolerance;
  };
  for (const Precision& precision :
       {Precision{{"bf16.enabled=false"}, 5e-4},
        {{"bf16.enabled=true"}, 2e-2},
        {{"fp16.enabled=true", "fp16.initial_scale_power=12"}, 5e-3}}) {
    const More more = With({"steps=20"}, precision.settings);
    const auto wanted = Train(more, {1, 0}, {});
    for (const int world : {1, 2}) {
      for (const int stage : {0, 1, 2, 3}) {
        SCOPED_TRACE(testing::Message()
                     << precision.settings[0] << " world " << world << " stage " << stage);
        const auto seen = Train(more, {world, stage}, GpuBackend());
        ExpectCurve(seen[0].records, wanted[0].records, precision.tolerance);
        EXPECT_LT(seen[0].records.back().loss(), seen[0].records.front().loss());
      }
    }
  }
}

TEST_P(GpuTraining, DeterministicIsTheSameBitsAtAnyWorldSizeAndStage) {
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true", "fp16.enabled=true"}) {
    const More more = {"deterministic=true", precision, "train_batch_size=10"};
    const std::string wanted = Fingerprint(Train(more, {1, 0}, GpuBackend())[0]);
    for (const int world : {1, 2}) {
      for (const int stage : {0, 1, 2, 3}) {
        for (const RankResult& rank : Train(more, {world, stage}, GpuBackend()))
          EXPECT_EQ(Fingerprint(rank), wanted)
              << precision << " world " << world << " stage " << stage;
      }
    }
  }
}

// Steps that overflow first, and good ones later.
TEST_P(GpuTraining, Fp16ScalesAndSkipsAreTheSameAtAnyStageAndInTheStores) {
  const More more = With({"fp16.enabled=true"}, kOverflowsAtFirst);
  const std::string wanted = ScaledFingerprint(Train(more, {1, 0}, GpuBackend())[0]);
  EXPECT_THAT(wanted, testing::HasSubstr("0x1p+24 skipped 0x1p+23 skipped"));
  for (const Shape shape : {Shape{2, 0}, Shape{2, 1}, Shape{1, 2}, Shape{2, 3}}) {
    SCOPED_TRACE(testing::Message() << "world " << shape.world << " stage " << shape.stage);
    const auto seen = Train(more, shape, GpuBackend());
    EXPECT_EQ(ScaledFingerprint(seen[0]), wanted);
    EXPECT_LT(SkippedOf(seen[0]).size(), seen[0].records.size()) << "some steps are good";
  }
  const v1::JobSpec spec = Spec(Job(), {2, 3}, Offload::kAll, more);
  MemoryStores stores(spec, {});
  const auto offloaded =
      TrainOffloaded(spec, {.world = 2, .backend = GpuBackend()}, data_, &stores);
  ExpectAllOk(offloaded);
  stores.WaitForVersion(spec.steps());
  EXPECT_EQ(ScaledFingerprint(offloaded[0]) + stores.Digest(), wanted);
}

TEST(GpuReference, Fp16ScalesAndSkipsArePyTorchs) {
  if (const absl::Status none = CheckCudaDevice(0); !none.ok()) GTEST_SKIP() << none;
  ExpectFp16IsPyTorchs(1, 0, GpuBackend());
  ExpectFp16IsPyTorchs(2, 3, GpuBackend());
}

TEST_P(GpuTraining, Fp32StagesAgreeBitForBitWithOneRound) {
  for (const int world : {1, 2}) {
    const More more = {absl::StrFormat("train_batch_size=%d", 2 * world)};
    const std::string wanted = Fingerprint(Train(more, {world, 0}, GpuBackend())[0]);
    for (const int stage : {1, 2, 3})
      EXPECT_EQ(Fingerprint(Train(more, {world, stage}, GpuBackend())[0]), wanted)
          << "world " << world << " stage " << stage;
  }
}

TEST_P(GpuTraining, SettingsChangeNoBit) {
  const More base = {"bf16.enabled=true"};
  const std::string wanted = Fingerprint(Train(base, {2, 3}, GpuBackend())[0]);
  for (const char* setting :
       {"activation_checkpointing=true", "zero_optimization.overlap_comm=false",
        "zero_optimization.stage3_max_reuse_distance=1000000000",
        "zero_optimization.stage3_prefetch_bucket_size=0",
        "zero_optimization.stage3_param_persistence_threshold=4000",
        "zero_optimization.reduce_bucket_size=64"})
    EXPECT_EQ(Fingerprint(Train(With(base, {setting}), {2, 3}, GpuBackend())[0]), wanted)
        << setting;
}

TEST_P(GpuTraining, DropoutAndSparseRowsAreNearTheCpus) {
  const More more = {"model.vocab_size=997", "model.embd_pdrop=0.1", "model.attn_pdrop=0.2",
                     "model.resid_pdrop=0.1"};
  const MemoryDataset data(ChainTokens(24 * 40 + 1, 997), 24);
  for (const Shape shape : {Shape{1, 1}, Shape{2, 3}}) {
    const v1::JobSpec spec = Spec(Job(), shape, Offload::kNone, more);
    const auto run = [&](const RankBackend& backend) {
      const auto results =
          TrainJob(spec, {.world = shape.world, .threads = 2, .backend = backend}, data);
      ExpectAllOk(results);
      return results[0].records;
    };
    ExpectCurve(run(GpuBackend()), run({}), 1e-4);
  }
}

TEST_P(GpuTraining, MemoryIsThePlans) {
  for (const Shape shape : {Shape{1, 0}, Shape{2, 1}, Shape{2, 2}, Shape{2, 3}}) {
    const v1::JobSpec spec = Spec(Job(), shape, Offload::kNone, {"bf16.enabled=true"});
    const auto model = MakeModelTable(spec.model());
    ASSERT_TRUE(model.ok()) << model.status();
    const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, shape.world));
    const auto results = Train({"bf16.enabled=true"}, shape, GpuBackend());
    for (int rank = 0; rank < shape.world; ++rank) {
      const RankPlan plan = PlanRank(*model, policy, rank);
      const int64_t* held = results[static_cast<size_t>(rank)].memory;
      const auto of = [&](MemoryKind kind) {
        return static_cast<uint64_t>(held[static_cast<int>(kind)]);
      };
      EXPECT_EQ(of(MemoryKind::kParameters), plan.parameters);
      EXPECT_EQ(of(MemoryKind::kGradients), plan.gradients);
      EXPECT_EQ(of(MemoryKind::kOptimizer), plan.optimizer);
      EXPECT_EQ(of(MemoryKind::kActivations), plan.activations);
    }
  }
}

// The stores compute what the engine would have.
TEST_P(GpuTraining, OffloadChangesNoBit) {
  for (const Shape shape : {Shape{1, 1}, Shape{2, 2}, Shape{1, 3}, Shape{2, 3}}) {
    const More more = {"bf16.enabled=true", "deterministic=true"};
    const std::string wanted = Fingerprint(Train(more, shape, GpuBackend())[0]);
    for (const Offload offload : OffloadsOf(shape.stage)) {
      SCOPED_TRACE(testing::Message() << "world " << shape.world << " stage " << shape.stage
                                      << (offload == Offload::kAll ? " parameters too" : ""));
      const v1::JobSpec spec = Spec(Job(), shape, offload, more);
      MemoryStores stores(spec, {});
      const auto results =
          TrainOffloaded(spec, {.world = shape.world, .backend = GpuBackend()}, data_, &stores);
      ExpectAllOk(results);
      stores.WaitForVersion(spec.steps());
      EXPECT_EQ(Fingerprint(results[0]) + stores.Digest(), wanted);
    }
  }
}

TEST_P(GpuTraining, AResumedJobHasTheBitsOfOneThatRanThrough) {
  for (const Shape shape : {Shape{1, 0}, Shape{2, 3}}) {
    TempFolder folder;
    const auto save = [&](const std::string& dir, RunOptions options) {
      v1::JobSpec spec = SavingSpec(Job(), shape, 4, folder / dir, {"bf16.enabled=true"});
      spec.mutable_checkpoint()->set_interval_steps(2);
      options.world = shape.world;
      options.backend = GpuBackend();
      ExpectAllOk(TrainJob(spec, options, data_));
    };
    save("through", {});
    const auto path = [&](const std::string& dir, uint64_t step) {
      return folder / dir + "/" + CheckpointName(step);
    };
    save("resumed", Resume(shape.world, path("through", 2), 2));
    const State through = ReadState(path("through", 4));
    EXPECT_FALSE(through.of[0].empty());
    ExpectSameState(ReadState(path("resumed", 4)), through, "step 4");
    // A CPU's job goes on from it too, close by.
    v1::JobSpec spec = SavingSpec(Job(), shape, 4, "", {"bf16.enabled=true"});
    RunOptions on_cpu = Resume(shape.world, path("through", 2), 2);
    const auto results = TrainJob(spec, on_cpu, data_);
    ExpectAllOk(results);
    EXPECT_EQ(results[0].records.size(), 2u);
  }
}

}  // namespace
}  // namespace zeroshard
