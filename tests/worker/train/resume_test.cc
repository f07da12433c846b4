// Going on from a checkpoint: the state, the history, the data, and what is refused.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "tests/worker/train/checkpoint_harness.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

constexpr char kDeterministic[] = "deterministic=true";

std::string Step(const std::string& dir, uint64_t step) {
  return dir + "/" + absl::StrFormat("step-%08d", step);
}

// Every world size and stage to every other: a run that goes on from the checkpoint and has nothing
// left to train writes what it loaded into a folder of its own.
class Matrix : public testing::TestWithParam<int> {};

TEST_P(Matrix, EveryShapeLoadsWhatThisOneSavedBitForBit) {
  const Shape from = AllShapes()[static_cast<size_t>(GetParam())];
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  const std::string dir = folder / "from";
  ExpectAllOk(TrainJob(SavingSpec(TinyLlama(), from, 2, dir), {.world = from.world}, data));
  const State saved = ReadState(Step(dir, 2));
  ASSERT_FALSE(saved.of[0].empty());
  for (int kind = 0; kind < kStateKinds; ++kind)
    EXPECT_NE(saved.of[kind].at("blocks.1.mlp.up.weight")[5], 0) << "nothing was trained";
  for (const Shape to : AllShapes()) {
    const std::string what = absl::StrFormat("world %d stage %d to world %d stage %d", from.world,
                                             from.stage, to.world, to.stage);
    const std::string again = folder / absl::StrFormat("to-%d-%d", to.world, to.stage);
    ExpectAllOk(
        TrainJob(SavingSpec(TinyLlama(), to, 2, again), Resume(to.world, Step(dir, 2), 2), data),
        what);
    ExpectSameState(ReadState(Step(again, 2)), saved, what);
  }
}

INSTANTIATE_TEST_SUITE_P(From, Matrix, testing::Range(0, 16), [](const auto& info) {
  const Shape shape = AllShapes()[static_cast<size_t>(info.param)];
  return absl::StrFormat("World%dStage%d", shape.world, shape.stage);
});

// bf16 jobs keep fp32 masters: nothing is lost on the way to fp32 and back.
TEST(ResumeTest, PrecisionsLoadEachOthersStateBitForBit) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  const std::vector<std::string> precisions = {"bf16.enabled=false", "bf16.enabled=true"};
  for (const std::string& from : precisions) {
    const std::string dir = folder / ("from-" + from);
    ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {2, 3}, 2, dir, {from}), {.world = 2}, data));
    const State saved = ReadState(Step(dir, 2));
    for (const std::string& to : precisions) {
      const std::string again = folder / (from + "-" + to);
      ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {3, 1}, 2, again, {to}),
                           Resume(3, Step(dir, 2), 2), data));
      ExpectSameState(ReadState(Step(again, 2)), saved, from + " to " + to);
    }
  }
}

// Blocks frozen as a whole have only masters, tensors frozen within a trained block too; a bf16 job
// keeps the former in 16 bits, which is what it then saves.
TEST(ResumeTest, FrozenTensorsKeepTheirValues) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> frozen = {"model.trainable=['blocks.1.mlp.*', '*ln_f*']"};
  MemoryFolder folder;
  for (const std::string precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
    std::vector<std::string> more = frozen;
    more.push_back(precision);
    const std::string dir = folder / precision;
    ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {2, 2}, 2, dir, more), {.world = 2}, data));
    const State saved = ReadState(Step(dir, 2));
    EXPECT_EQ(saved.of[1].count("wte.weight"), 0u);
    EXPECT_EQ(saved.of[1].count("blocks.1.ln_1.weight"), 0u);
    EXPECT_EQ(saved.of[1].count("blocks.1.mlp.fc.weight"), 1u);
    for (const Shape to : {Shape{1, 0}, Shape{3, 3}}) {
      const std::string again = folder / absl::StrFormat("%s-%d", precision, to.world);
      ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), to, 2, again, more),
                           Resume(to.world, Step(dir, 2), 2), data));
      ExpectSameState(ReadState(Step(again, 2)), saved, precision);
    }
  }
}

std::vector<v1::StepRecord> Comparable(std::vector<v1::StepRecord> records) {
  for (v1::StepRecord& record : records) record.clear_seconds();
  return records;
}

void ExpectSameHistory(const std::vector<v1::StepRecord>& seen,
                       const std::vector<v1::StepRecord>& wanted, size_t skip,
                       const std::string& what) {
  const auto a = Comparable(seen), b = Comparable(wanted);
  ASSERT_EQ(a.size() + skip, b.size()) << what;
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_EQ(a[i].SerializeAsString(), b[i + skip].SerializeAsString())
        << what << ": " << a[i].ShortDebugString() << " | " << b[i + skip].ShortDebugString();
}

// 40 samples, 6 a step: the second epoch begins within step 7, behind the resume at step 4.
TEST(ResumeTest, TheHistoryIsTheUninterruptedRunsAtTheSameWorldSize) {
  const MemoryDataset data = TinyData();
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true",
                                "bf16={enabled: true, stochastic_rounding: true}"}) {
    for (const Shape shape : {Shape{1, 0}, Shape{2, 0}, Shape{2, 1}, Shape{3, 2}, Shape{2, 3}}) {
      MemoryFolder folder;
      const std::string what =
          absl::StrFormat("world %d stage %d %s", shape.world, shape.stage, precision);
      const std::vector<std::string> more = {precision};
      v1::JobSpec spec = SavingSpec(TinyGpt2(), shape, 9, folder / "ckpt", more);
      spec.mutable_checkpoint()->set_interval_steps(4);
      const auto whole = TrainJob(spec, {.world = shape.world}, data);
      ExpectAllOk(whole, what);
      ASSERT_EQ(whole[0].checkpoints.size(), 3u);
      spec.mutable_checkpoint()->set_dir(folder / "again");
      const auto resumed = TrainJob(spec, Resume(shape.world, Step(folder / "ckpt", 4), 4), data);
      ExpectAllOk(resumed, what);
      ExpectSameHistory(resumed[0].records, whole[0].records, 4, what);
      EXPECT_EQ(resumed[0].digest, whole[0].digest) << what;
      ExpectSameState(ReadState(Step(folder / "again", 9)), ReadState(Step(folder / "ckpt", 9)),
                      what);
    }
  }
}

TEST(ResumeTest, DeterministicHistoryIsTheSameAtAnyWorldSizeAndStage) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> more = {kDeterministic, "scheduler.params.total_steps=6"};
  MemoryFolder folder;
  const std::string dir = folder / "ckpt";
  const auto whole = TrainJob(SavingSpec(TinyLlama(), {1, 0}, 6, "", more), {.world = 1}, data);
  ExpectAllOk(TrainJob(SavingSpec(TinyLlama(), {3, 3}, 3, dir, more), {.world = 3}, data));
  for (const Shape to : {Shape{1, 1}, Shape{2, 2}, Shape{4, 0}, Shape{4, 3}}) {
    const auto resumed =
        TrainJob(SavingSpec(TinyLlama(), to, 6, "", more), Resume(to.world, Step(dir, 3), 3), data);
    ExpectAllOk(resumed);
    ExpectSameHistory(resumed[0].records, whole[0].records, 3,
                      absl::StrFormat("world %d stage %d", to.world, to.stage));
    EXPECT_EQ(resumed[0].digest, whole[0].digest);
  }
}

// One sample, seen in every step, and a learning rate too small to move an fp32 weight: the
// gradient is the same ten times. Then Adam's normalised update is m / (1 - b1^t) / sqrt(v / (1 -
// b2^t)) with m = g (1 - b1^10), v = g^2 (1 - b2^10) moved on once by g.
TEST(ResumeTest, AdamCountsItsStepsThroughASaveAndAResume) {
  const MemoryDataset data(ChainTokens(25, 61), 24);
  const std::vector<std::string> base = {"train_batch_size=1",
                                         "train_micro_batch_size_per_gpu=1",
                                         "optimizer.params.betas=[0.9, 0.999]",
                                         "optimizer.params.weight_decay=0",
                                         "optimizer.params.eps=1.0e-12",
                                         "gradient_clipping=0",
                                         "scheduler.type=constant",
                                         "scheduler.params={}"};
  const double b1 = 0.9, b2 = 0.999;
  const auto update = [&](int moments, int t) {
    const double m = 1 - std::pow(b1, moments), v = 1 - std::pow(b2, moments);
    return m / (1 - std::pow(b1, t)) / std::sqrt(v / (1 - std::pow(b2, t)));
  };
  const double right = update(11, 11), count_reset = update(11, 1), moments_lost = update(1, 11);
  ASSERT_NEAR(right, 1.000, 5e-4);
  ASSERT_NEAR(count_reset, 2.074, 5e-4);
  ASSERT_NEAR(moments_lost, 0.482, 5e-4);
  for (const Shape shape : {Shape{1, 0}, Shape{2, 3}}) {
    MemoryFolder folder;
    const std::string dir = folder / "ckpt";
    std::vector<std::string> still = base, moving = base;
    still.push_back("optimizer.params.lr=1.0e-30");
    moving.push_back("optimizer.params.lr=1.0e-3");
    ExpectAllOk(
        TrainJob(SavingSpec(TinyGpt2(), shape, 10, dir, still), {.world = shape.world}, data));
    RunOptions options = Resume(shape.world, Step(dir, 10), 10);
    const auto before = ReadState(Step(dir, 10));
    const std::string again = folder / "again";
    ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), shape, 11, again, moving), options, data));
    const auto after = ReadState(Step(again, 11));
    const std::vector<float>& w0 = before.of[0].at("blocks.1.mlp.fc.weight");
    const std::vector<float>& w1 = after.of[0].at("blocks.1.mlp.fc.weight");
    const std::vector<float>& m = before.of[1].at("blocks.1.mlp.fc.weight");
    int64_t counted = 0;
    for (size_t i = 0; i < w0.size(); ++i) {
      if (std::abs(m[i]) < 1e-6) continue;  // its second moment is lost to rounding
      ++counted;
      ASSERT_NEAR(std::abs(double{w1[i]} - double{w0[i]}) / 1e-3, right, 1e-3) << i;
    }
    EXPECT_GT(counted, static_cast<int64_t>(w0.size() / 2));
  }
}

TEST(ResumeTest, WeightsAloneStartAnew) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {2, 1}, 3, folder / "ckpt"), {.world = 2}, data));
  const State saved = ReadState(Step(folder / "ckpt", 3));
  RunOptions options{.world = 1};
  options.resume_from = Step(folder / "ckpt", 3);
  options.weights_only = true;
  options.tensors = {"wte.weight"};
  // Nothing moves: what it begins with is seen at its end.
  const auto results =
      TrainJob(SavingSpec(TinyGpt2(), {1, 0}, 1, folder / "anew", Still()), options, data);
  ExpectAllOk(results);
  EXPECT_EQ(results[0].tensors[0], saved.of[0].at("wte.weight"));
  // One step with fresh moments: m = (1 - b1) g and v = (1 - b2) g^2, so m^2 (1 - b2) = v (1 -
  // b1)^2.
  const State anew = ReadState(Step(folder / "anew", 1));
  const std::vector<float>& m = anew.of[1].at("blocks.0.mlp.fc.weight");
  const std::vector<float>& v = anew.of[2].at("blocks.0.mlp.fc.weight");
  double largest = 0;
  for (size_t i = 0; i < m.size(); ++i) {
    const double wanted = double{m[i]} * m[i] * 0.05 / 0.01;
    largest = std::max(largest, wanted);
    EXPECT_NEAR(v[i], wanted, 1e-4 * wanted + 1e-20);
  }
  EXPECT_GT(largest, 0);
}

// The samples of a step are told by the loss of each: a run that goes on with another batch size
// takes up the order where the first left it.
TEST(ResumeTest, AnotherBatchSizeGoesOnInTheSameOrder) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {1, 0}, 3, folder / "ckpt"), {.world = 1}, data));
  const auto reader = CheckpointReader::Open(Step(folder / "ckpt", 3));
  ASSERT_TRUE(reader.ok());
  EXPECT_EQ((*reader)->manifest().next_sample, 18u);
  EXPECT_EQ((*reader)->manifest().samples, 40u);
  ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {2, 2}, 5, folder / "again", {"train_batch_size=4"}),
                       Resume(2, Step(folder / "ckpt", 3), 3), data));
  const auto again = CheckpointReader::Open(Step(folder / "again", 5));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ((*again)->manifest().next_sample, 18u + 2 * 4);
}

// Its place among other data says nothing: they would be repeated or left out without a word.
TEST(ResumeTest, OtherDataAreRefusedUnlessTheRunStartsAnew) {
  MemoryFolder folder;
  const std::string from = Step(folder / "ckpt", 3);
  ExpectAllOk(
      TrainJob(SavingSpec(TinyGpt2(), {1, 0}, 3, folder / "ckpt"), {.world = 1}, TinyData()));
  const MemoryDataset other(ChainTokens(24 * 30 + 1, 61, 5), 24);
  const auto refused =
      TrainJob(SavingSpec(TinyGpt2(), {2, 1}, 4, folder / "again"), Resume(2, from, 3), other);
  for (const RankResult& result : refused) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInvalidArgument) << result.status;
    EXPECT_EQ(result.status, refused[0].status);
    EXPECT_THAT(std::string(result.status.message()),
                testing::AllOf(HasSubstr("30 samples"), HasSubstr("had 40"), HasSubstr(from),
                               HasSubstr("--weights-only")));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "again"));
  RunOptions anew{.world = 1};
  anew.resume_from = from;
  anew.weights_only = true;
  ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {1, 0}, 1, folder / "again"), anew, other));
}

class Refusals : public testing::Test {
 protected:
  void SetUp() override {
    ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {2, 1}, 2, dir_), {.world = 2}, data_));
  }
  // The one error that all ranks report.
  absl::Status Refused(const v1::JobSpec& spec, const RunOptions& options) {
    const auto results = TrainJob(spec, options, data_);
    for (const RankResult& result : results) {
      EXPECT_EQ(result.status, results[0].status) << "one error on all ranks";
      EXPECT_TRUE(result.records.empty());
    }
    return results[0].status;
  }
  MemoryFolder folder_;
  const std::string dir_ = folder_ / "ckpt";
  const MemoryDataset data_ = TinyData();
};

TEST_F(Refusals, AFlippedByteIsNamedWithItsFileOnEveryRank) {
  const std::string file = Step(dir_, 2) + "/state-00001-of-00002.safetensors";
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(-100, std::ios::end);
  const char byte = static_cast<char>(stream.get() ^ 1);
  stream.seekp(-100, std::ios::end);
  stream.put(byte);
  stream.close();
  const absl::Status status =
      Refused(SavingSpec(TinyGpt2(), {3, 3}, 4, ""), Resume(3, Step(dir_, 2), 2));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("state-00001-of-00002.safetensors"));
}

// Only its checksum tells: no value of the state is in it. It is another rank's to check than the
// state files.
TEST_F(Refusals, ADamagedFileThatIsNotReadIsNamedToo) {
  const std::string model = folder_ / "model", dir = folder_ / "with-assets";
  std::filesystem::create_directory(model);
  std::ofstream(model + "/tokenizer.json") << "{\"a\": 1}";
  v1::JobSpec spec = SavingSpec(TinyGpt2(), {2, 1}, 2, dir);
  spec.mutable_data()->set_tokenizer(model);
  ExpectAllOk(TrainJob(spec, {.world = 2}, data_));
  std::ofstream(Step(dir, 2) + "/assets/tokenizer.json") << "{\"a\": 2}";
  const absl::Status status =
      Refused(SavingSpec(TinyGpt2(), {3, 3}, 4, ""), Resume(3, Step(dir, 2), 2));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("assets/tokenizer.json is damaged"));
}

TEST_F(Refusals, AMissingFileIsNamed) {
  std::filesystem::remove(Step(dir_, 2) + "/state-00000-of-00002.safetensors");
  const absl::Status status =
      Refused(SavingSpec(TinyGpt2(), {2, 0}, 4, ""), Resume(2, Step(dir_, 2), 2));
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("state-00000-of-00002.safetensors"));
}

TEST_F(Refusals, AnotherModelIsRefusedByTensor) {
  const absl::Status status = Refused(SavingSpec(TinyGpt2(), {2, 0}, 4, "", {"model.layers=2"}),
                                      Resume(2, Step(dir_, 2), 2));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("blocks.2."));
}

TEST_F(Refusals, AStepThatIsNotTheNextIsRefused) {
  const absl::Status status =
      Refused(SavingSpec(TinyGpt2(), {1, 0}, 9, ""), Resume(1, Step(dir_, 2), 5));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("wanted 3"));
  const absl::Status late =
      Refused(SavingSpec(TinyGpt2(), {1, 0}, 1, ""), Resume(1, Step(dir_, 2), 2));
  EXPECT_EQ(late.code(), absl::StatusCode::kInvalidArgument) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("raise steps"));
}

TEST_F(Refusals, AFreshRunDoesNotWriteIntoAnothersFolder) {
  RunOptions options{.world = 3};
  options.run_id = "tiny-2";
  const absl::Status status = Refused(SavingSpec(TinyGpt2(), {3, 0}, 4, dir_), options);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("tiny-1"));
}

}  // namespace
}  // namespace zeroshard
