// Texts that the model continues while it trains.
#include "gmock/gmock.h"
#include "tests/worker/train/checkpoint_harness.h"
#include "worker/generate/continuation.h"
#include "worker/generate/generator.h"
#include "worker/generate/memory_parameters.h"
#include "worker/generate/text_stream.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

v1::JobSpec SampleSpecOf(const std::string& text, Shape shape, const std::string& dir,
                         std::vector<std::string> more = {}) {
  more.push_back("model.vocab_size=256");
  v1::JobSpec spec = SavingSpec(text, shape, 4, dir, std::move(more));
  spec.mutable_sample()->set_interval_steps(3);
  spec.mutable_sample()->add_prompts("The ");
  spec.mutable_sample()->add_prompts("a");
  spec.mutable_sample()->set_max_tokens(12);
  spec.mutable_sample()->set_temperature(0.8);
  return spec;
}

MemoryDataset Bytes() { return MemoryDataset(ChainTokens(24 * 40 + 1, 256), 24); }

TEST(SamplesTest, AreTheSameAtAnyShapeAndWhatGenerateGivesForTheCheckpoint) {
  const auto tokenizer = Tokenizer::Load("bytes");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const MemoryDataset data = Bytes();
  MemoryFolder folder;
  std::vector<std::string> first;
  for (const Shape shape : {Shape{1, 0}, Shape{2, 1}, Shape{3, 3}, Shape{4, 2}, Shape{4, 3}}) {
    RunOptions options{.world = shape.world};
    options.tokenizer = tokenizer->get();
    const std::string dir = folder / absl::StrFormat("%d-%d", shape.world, shape.stage);
    const auto results =
        TrainJob(SampleSpecOf(TinyLlama(), shape, dir, {"deterministic=true"}), options, data);
    ExpectAllOk(results);
    for (size_t rank = 1; rank < results.size(); ++rank) EXPECT_TRUE(results[rank].samples.empty());
    std::vector<std::string> seen;
    for (const v1::SampleRecord& record : results[0].samples)
      seen.push_back(absl::StrFormat("%d %s: %s", record.step(), record.prompt(), record.text()));
    ASSERT_EQ(seen.size(), 4u) << "two prompts after steps 3 and 4";
    if (first.empty()) first = seen;
    EXPECT_EQ(seen, first) << "world " << shape.world << " stage " << shape.stage;
  }
  // The second prompt's last answer, from the checkpoint's weights in memory.
  const auto reader = CheckpointReader::Open(folder / ("4-3/" + CheckpointName(4)));
  ASSERT_TRUE(reader.ok()) << reader.status();
  const v1::JobSpec& spec = (*reader)->manifest().spec;
  const auto table = MakeModelTable(spec.model());
  ASSERT_TRUE(table.ok());
  const Model model = MakeModel(*table, false);
  const auto device = MakeCpuDevice();
  const auto ops = MakeCpuOps(1);
  const auto weights = MemoryParameters::Load(*table, *(*reader)->Source(StateKind::kMaster),
                                              device.get(), ops.get(), DType::kF32);
  ASSERT_TRUE(weights.ok()) << weights.status();
  ContinuationOptions options;
  options.prompt = {'a'};
  options.max_tokens = 12;
  options.sampling.temperature = 0.8;
  options.sampling.seed = spec.seed();
  auto generator = Generator::Create(&model, device.get(), ops.get(), DType::kF32, 12);
  ASSERT_TRUE(generator.ok()) << generator.status();
  const auto answer = Continue(options, generator->get(), weights->get());
  ASSERT_TRUE(answer.ok()) << answer.status();
  TextStream stream(tokenizer->get());
  std::string text = "4 a: ";
  for (int32_t token : answer->tokens) text += *stream.Add(token);
  EXPECT_EQ(first[3], text + stream.Finish());
}

TEST(SamplesTest, ChangeNoBitOfTraining) {
  const auto tokenizer = Tokenizer::Load("bytes");
  ASSERT_TRUE(tokenizer.ok());
  const MemoryDataset data = Bytes();
  for (const Shape shape : {Shape{1, 0}, Shape{2, 3}}) {
    RunOptions options{.world = shape.world};
    options.tokenizer = tokenizer->get();
    const v1::JobSpec with = SampleSpecOf(TinyGpt2(), shape, "");
    v1::JobSpec without = with;
    without.clear_sample();
    EXPECT_EQ(TrainFingerprint(with, options, data), TrainFingerprint(without, options, data));
  }
}

TEST(SamplesTest, APromptThatTheModelCannotTakeIsRefused) {
  const auto tokenizer = Tokenizer::Load("bytes");
  ASSERT_TRUE(tokenizer.ok());
  RunOptions options{.world = 1};
  options.tokenizer = tokenizer->get();
  v1::JobSpec spec = SampleSpecOf(TinyGpt2(), {1, 0}, "");
  spec.mutable_sample()->set_prompts(1, std::string(25, 'x'));
  auto results = TrainJob(spec, options, Bytes());
  EXPECT_EQ(results[0].status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("has 25 tokens; wanted 1 to 24"));
  spec = SampleSpecOf(TinyGpt2(), {1, 0}, "", {"model.vocab_size=61"});
  spec.mutable_model()->set_vocab_size(61);
  results = TrainJob(spec, options, TinyData());
  EXPECT_EQ(results[0].status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("vocabulary of 61"));
}

}  // namespace
}  // namespace zeroshard
