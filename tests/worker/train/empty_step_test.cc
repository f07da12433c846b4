// Steps none of whose tokens carries a loss.
#include <cmath>
#include <set>

#include "tests/worker/train/checkpoint_harness.h"

namespace zeroshard {
namespace {

// The second step's samples carry no loss.
MemoryDataset DataWithAnEmptyStep() {
  MemoryDataset data = TinyData();
  std::set<int64_t> masked;
  const SampleOrder order(data.sample_count(), 7);
  for (int64_t i = 6; i < 12; ++i) masked.insert(order.At(i));
  data.MaskTargets([masked](int64_t sample, int64_t) { return masked.contains(sample); });
  return data;
}

std::string At(const std::string& dir, uint64_t step) { return dir + "/" + CheckpointName(step); }

TEST(EmptyStepTest, CountsAndIsRecordedButChangesNothing) {
  const MemoryDataset data = DataWithAnEmptyStep();
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
    for (const Shape shape : {Shape{1, 0}, Shape{2, 1}, Shape{2, 2}, Shape{3, 3}}) {
      MemoryFolder folder;
      const std::string what =
          absl::StrFormat("world %d stage %d %s", shape.world, shape.stage, precision);
      v1::JobSpec spec = SavingSpec(TinyGpt2(), shape, 4, folder / "ckpt", {precision});
      spec.mutable_checkpoint()->set_interval_steps(1);
      const auto results = TrainJob(spec, {.world = shape.world}, data);
      ExpectAllOk(results, what);
      const v1::StepRecord& record = results[0].records.at(1);
      EXPECT_EQ(record.step(), 2u);
      EXPECT_EQ(record.tokens(), 0u);
      EXPECT_EQ(record.loss(), 0);
      EXPECT_EQ(record.grad_norm(), 0);
      EXPECT_EQ(record.learning_rate(), 3.0e-3) << "the schedule goes on: warm after 2 steps";
      const State before = ReadState(At(folder / "ckpt", 1));
      ExpectSameState(ReadState(At(folder / "ckpt", 2)), before, what);
      EXPECT_NE(ReadState(At(folder / "ckpt", 3)).of[0], before.of[0]) << "training goes on";
      const auto reader = CheckpointReader::Open(At(folder / "ckpt", 2));
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ((*reader)->manifest().next_sample, 12u);

      // A run that goes on from before it or from behind it is the same run.
      for (const uint64_t from : {1, 2}) {
        spec.mutable_checkpoint()->set_dir(folder / absl::StrCat("from-", from));
        const auto resumed =
            TrainJob(spec, Resume(shape.world, At(folder / "ckpt", from), from), data);
        ExpectAllOk(resumed, what);
        EXPECT_EQ(resumed[0].digest, results[0].digest) << what;
      }
    }
  }
}

// Three samples that are the same; the second step's carries no loss, and nothing moves a weight,
// so the gradient g is the same in steps 1 and 3, with m = g (1 - b1^2) and v = g^2 (1 - b2^2)
// after both. Step 3 divides them by 1 - b^3: it is Adam's third.
TEST(EmptyStepTest, AdamCountsIt) {
  std::vector<int32_t> tokens = ChainTokens(24, 61);
  for (size_t i = 0; i < 2 * 24 + 1; ++i) tokens.push_back(tokens[i]);
  MemoryDataset data(tokens, 24);
  const SampleOrder order(3, 7);
  data.MaskTargets([&](int64_t sample, int64_t) { return sample == order.At(1); });
  const std::vector<std::string> base = {"train_batch_size=1",
                                         "train_micro_batch_size_per_gpu=1",
                                         "optimizer.params.betas=[0.9, 0.999]",
                                         "optimizer.params.weight_decay=0",
                                         "optimizer.params.eps=1.0e-12",
                                         "gradient_clipping=0",
                                         "scheduler.type=constant",
                                         "scheduler.params={}"};
  const double b1 = 0.9, b2 = 0.999;
  const double m = (1 - b1 * b1) / (1 - b1 * b1 * b1), v = (1 - b2 * b2) / (1 - b2 * b2 * b2);
  const double right = m / std::sqrt(v);
  ASSERT_NEAR(right, 0.8586, 1e-3) << "a count of 2 would give 1";
  for (const Shape shape : {Shape{1, 0}, Shape{2, 3}}) {
    MemoryFolder folder;
    std::vector<std::string> still = base, moving = base;
    still.push_back("optimizer.params.lr=1.0e-30");
    moving.push_back("optimizer.params.lr=1.0e-3");
    ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), shape, 2, folder / "two", still),
                         {.world = shape.world}, data));
    ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), shape, 3, folder / "three", moving),
                         Resume(shape.world, At(folder / "two", 2), 2), data));
    const State before = ReadState(At(folder / "two", 2));
    const State after = ReadState(At(folder / "three", 3));
    const std::string name = "blocks.1.mlp.fc.weight";
    size_t counted = 0;
    for (size_t i = 0; i < before.of[0].at(name).size(); ++i) {
      if (std::abs(before.of[1].at(name)[i]) < 1e-6) continue;  // lost to rounding
      ++counted;
      const double moved = double{after.of[0].at(name)[i]} - double{before.of[0].at(name)[i]};
      ASSERT_NEAR(std::abs(moved) / 1e-3, right, 1e-3) << i;
    }
    EXPECT_GT(counted, before.of[0].at(name).size() / 2);
  }
}

}  // namespace
}  // namespace zeroshard
