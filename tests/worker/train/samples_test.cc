// Texts that the model continues while it trains.
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/hf/config.h"
#include "common/hf/export.h"
#include "gmock/gmock.h"
#include "tests/worker/generate/byte_tokenizer.h"
#include "tests/worker/train/checkpoint_harness.h"
#include "worker/generate/generate_main.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

v1::JobSpec SampleSpecOf(const std::string& text, Shape shape, const std::string& dir,
                         std::vector<std::string> more = {}) {
  more.insert(more.begin(), "model.vocab_size=256");
  v1::JobSpec spec = SavingSpec(text, shape, 4, dir, std::move(more));
  spec.mutable_data()->set_tokenizer("bytes");
  spec.mutable_sample()->set_interval_steps(3);
  spec.mutable_sample()->add_prompts("The ");
  spec.mutable_sample()->add_prompts("a");
  spec.mutable_sample()->set_max_tokens(8);
  spec.mutable_sample()->set_temperature(0.8);
  return spec;
}

MemoryDataset Bytes() { return MemoryDataset(ChainTokens(24 * 40 + 1, 256), 24); }

GenerateOptions AsSampled(const std::string& model, const std::string& prompt,
                          const std::string& tokenizer) {
  GenerateOptions options;
  options.model = model;
  options.prompt = prompt;
  options.tokenizer = tokenizer;
  options.max_tokens = 8;
  options.sampling = {.temperature = 0.8, .seed = 7};
  options.threads = 1;
  return options;
}

// What `generate` says behind the prompt.
std::string Generated(const std::string& model, const std::string& prompt,
                      const std::string& tokenizer = "") {
  std::ostringstream out, err;
  const absl::Status status = Generate(AsSampled(model, prompt, tokenizer), &out, &err);
  EXPECT_TRUE(status.ok()) << status;
  const std::string text = out.str();
  if (text.size() <= prompt.size()) return "";
  return text.substr(prompt.size(), text.size() - prompt.size() - 1);
}

std::vector<int32_t> GeneratedTokens(const std::string& model, const std::string& prompt) {
  std::ostringstream out, err;
  GenerateOptions options = AsSampled(model, prompt, "");
  options.json = true;
  EXPECT_TRUE(Generate(options, &out, &err).ok());
  return nlohmann::json::parse(out.str())["tokens"].get<std::vector<int32_t>>();
}

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
  const std::string last = folder / ("4-3/" + CheckpointName(4));
  EXPECT_EQ(first[2], "4 The : " + Generated(last, "The "));
  EXPECT_EQ(first[3], "4 a: " + Generated(last, "a"));
}

// A folder with a model, its tokenizer, which puts a token before each text, and what ends one.
v1::JobSpec SpecWithItsOwnTokenizer(const std::string& model, const std::string& dir) {
  v1::JobSpec spec = SampleSpecOf(TinyLlama(), {2, 3}, dir, Still({"model.vocab_size=257"}));
  spec.mutable_data()->set_tokenizer(model);
  spec.mutable_model()->set_init_from(model);
  const auto resolved = ResolveInitFrom(&spec);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  spec.set_steps(1);
  return spec;
}

TEST(SamplesTest, BeginAndEndAsGenerateDoes) {
  MemoryFolder folder;
  const std::string model = folder / "model";
  ExpectAllOk(
      TrainJob(SavingSpec(TinyLlama(), {1, 0}, 1, folder / "fresh", {"model.vocab_size=257"}),
               {.world = 1}, Bytes()));
  const auto fresh = CheckpointReader::Open(folder / ("fresh/" + CheckpointName(1)));
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  const absl::Status exported = ExportHfFolder((*fresh)->manifest().spec.model(),
                                               *(*fresh)->Source(StateKind::kMaster), model, {});
  ASSERT_TRUE(exported.ok()) << exported;
  std::ofstream(model + "/tokenizer.json") << ByteTokenizerJson();
  const auto tokenizer = Tokenizer::Load(model);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  RunOptions options{.world = 2};
  options.tokenizer = tokenizer->get();

  const auto endless =
      TrainJob(SpecWithItsOwnTokenizer(model, folder / "endless"), options, Bytes());
  ExpectAllOk(endless);
  ASSERT_EQ(endless[0].samples.size(), 2u);
  const std::string checkpoint = folder / ("endless/" + CheckpointName(1));
  const std::string text = endless[0].samples[0].text();
  EXPECT_EQ(text, Generated(checkpoint, "The "));
  EXPECT_NE(text, Generated(checkpoint, "The ", "bytes")) << "the first token is of no consequence";

  // One of the tokens of that answer ends a text.
  const std::vector<int32_t> tokens = GeneratedTokens(checkpoint, "The ");
  ASSERT_GE(tokens.size(), 3u);
  std::ofstream(model + "/generation_config.json")
      << absl::StrFormat(R"({"eos_token_id": [%d, 256]})", tokens[2]);
  const auto ended = TrainJob(SpecWithItsOwnTokenizer(model, folder / "ended"), options, Bytes());
  ExpectAllOk(ended);
  ASSERT_EQ(ended[0].samples.size(), 2u);
  EXPECT_EQ(ended[0].samples[0].text(), Generated(folder / ("ended/" + CheckpointName(1)), "The "));
  EXPECT_LT(ended[0].samples[0].text().size(), text.size());
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
  EXPECT_THAT(std::string(results[0].status.message()),
              HasSubstr("has 25 tokens, but the model has 24 positions"));
  spec = SampleSpecOf(TinyGpt2(), {1, 0}, "", {"model.vocab_size=61"});
  spec.mutable_model()->set_vocab_size(61);
  results = TrainJob(spec, options, TinyData());
  EXPECT_EQ(results[0].status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("vocabulary of 61"));
}

}  // namespace
}  // namespace zeroshard
