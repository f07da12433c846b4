#include "worker/generate/generator.h"

#include <gmock/gmock.h>

#include <cmath>

#include "common/safetensors/safetensors.h"
#include "tests/worker/generate/tiny_model.h"
#include "worker/generate/continuation.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int32_t> SomeTokens(int64_t count) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>(i * 7919 % 257));
  return tokens;
}

double LargestDifference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double largest = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  return largest;
}

// generate.safetensors: transformers in fp64, prompts of 7, 1 and 131 tokens.
class GreedySearch : public testing::TestWithParam<const char*> {};

TEST_P(GreedySearch, AnswersAsTransformersDoes) {
  const auto file =
      SafetensorsFile::Open(std::string(ZEROSHARD_REFERENCE_DIR) + "/generate.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  TinyModel tiny(GetParam());
  for (int index = 0; index < 3; ++index) {
    const std::string stem = absl::StrCat(GetParam(), ".", index, ".");
    SCOPED_TRACE(stem);
    const std::vector<int32_t> prompt = *(*file)->ReadInts(stem + "prompt");
    const std::vector<int32_t> greedy = *(*file)->ReadInts(stem + "greedy");
    const std::vector<float> logits = *(*file)->ReadFloats(stem + "logits");
    const auto answer =
        Continue({.prompt = prompt, .max_tokens = static_cast<int64_t>(greedy.size())},
                 tiny.generator.get(), tiny.parameters.get());
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->tokens, greedy);

    const auto middle = logits.begin() + static_cast<int64_t>(logits.size() / 2);
    std::vector<int32_t> all = prompt;
    EXPECT_LT(LargestDifference(tiny.Logits(all, all.size()), {logits.begin(), middle}), 2e-4);
    all.insert(all.end(), greedy.begin(), greedy.end() - 1);
    EXPECT_LT(LargestDifference(tiny.Logits(all, 1), {middle, logits.end()}), 2e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GreedySearch,
                         testing::Values("gpt2", "llama", "llama_tied", "llama_biased", "qwen2"),
                         [](const auto& info) { return std::string(info.param); });

class GeneratorTest : public testing::TestWithParam<const char*> {};

// Through an attention tile's end.
TEST_P(GeneratorTest, TheCacheChangesNothing) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    TinyModel tiny(GetParam(), type);
    const std::vector<int32_t> tokens = SomeTokens(140);
    const std::vector<float> whole = tiny.Logits(tokens, 140);
    double size = 0;
    for (const float x : whole) size = std::max(size, std::abs(static_cast<double>(x)));
    for (const size_t step : {1, 3, 64, 139}) {
      EXPECT_LT(LargestDifference(tiny.Logits(tokens, step), whole),
                (type == DType::kBF16 ? 5e-2 : 1e-5) * size)
          << step << " " << NameOf(type);
    }
  }
}

TEST_P(GeneratorTest, TheSameBitsForAnyThreadCountAndAfterAnotherSequence) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    TinyModel one(GetParam(), type, 1);
    const std::vector<float> wanted = one.Logits(SomeTokens(12), 5);
    one.Logits(SomeTokens(90), 90);
    EXPECT_EQ(one.Logits(SomeTokens(12), 5), wanted);
    for (const int threads : {2, 3}) {
      EXPECT_EQ(TinyModel(GetParam(), type, threads).Logits(SomeTokens(12), 5), wanted) << threads;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, GeneratorTest, testing::Values("gpt2", "llama", "llama_tied"),
                         [](const auto& info) { return std::string(info.param); });

// What the ZeRO engine relies on: each pass begins, then lends every unit once in order.
class Recorder : public ParameterLender {
 public:
  explicit Recorder(ParameterLender* lender) : lender_(lender) {}
  absl::Status BeginPass() override {
    calls.emplace_back("pass");
    return absl::OkStatus();
  }
  absl::StatusOr<LentParameters> Borrow(int unit) override {
    if (unit == refused) return absl::UnavailableError("no such luck");
    calls.push_back(absl::StrCat("+", unit));
    return lender_->Borrow(unit);
  }
  absl::Status GiveBack(int unit) override {
    calls.push_back(absl::StrCat("-", unit));
    return absl::OkStatus();
  }
  std::vector<std::string> calls;
  int refused = -1;

 private:
  ParameterLender* lender_;
};

TEST(GeneratorLendingTest, EveryPassBorrowsEveryUnitOnceInOrder) {
  TinyModel tiny("gpt2");  // two blocks
  Recorder recorder(tiny.parameters.get());
  ASSERT_TRUE(tiny.generator->Step(SomeTokens(5), &recorder).ok());
  EXPECT_THAT(recorder.calls, ElementsAre("pass", "+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3"));
}

TEST(GeneratorLendingTest, AnErrorOfTheLenderIsTheAnswer) {
  TinyModel tiny("gpt2");
  Recorder recorder(tiny.parameters.get());
  recorder.refused = 2;
  EXPECT_EQ(tiny.generator->Step(SomeTokens(5), &recorder).status(),
            absl::UnavailableError("no such luck"));
}

// A prompt longer than a pass takes two, with the same result as in other cuts.
TEST(GeneratorLendingTest, ALongPromptTakesSeveralPasses) {
  v1::JobSpec spec = Reference::Load("llama_tied")->spec();
  spec.mutable_model()->set_sequence_length(1100);
  const ModelTable table = *MakeModelTable(spec.model());
  const Reference reference = *Reference::Load("llama_tied");
  const auto device = MakeCpuDevice();
  const auto ops = MakeCpuOps(1);
  const auto parameters =
      *MemoryParameters::Load(table, ReferenceSource(&reference), device.get(), DType::kF32);
  const Model model = MakeModel(table, false);
  const auto generator = *Generator::Create(&model, device.get(), ops.get(), DType::kF32, 1100);
  const std::vector<int32_t> tokens = SomeTokens(1030);
  Recorder recorder(parameters.get());
  const auto once = generator->Step(tokens, &recorder);
  ASSERT_TRUE(once.ok()) << once.status();
  const std::vector<float> wanted(once->begin(), once->end());
  EXPECT_EQ(std::count(recorder.calls.begin(), recorder.calls.end(), "pass"), 2);
  EXPECT_EQ(std::count(recorder.calls.begin(), recorder.calls.end(), "+2"), 2);
  generator->Reset();
  std::vector<float> got;
  for (size_t at = 0; at < tokens.size(); at += 515) {
    const auto logits = generator->Step({tokens.data() + at, 515}, parameters.get());
    ASSERT_TRUE(logits.ok()) << logits.status();
    got.assign(logits->begin(), logits->end());
  }
  EXPECT_LT(LargestDifference(got, wanted), 1e-4);
}

TEST(GeneratorRefusalTest, NamesWhatCannotBe) {
  TinyModel tiny("llama", DType::kF32, 1, 10);
  const auto refused = [&](const std::vector<int32_t>& tokens) {
    return std::string(tiny.generator->Step(tokens, tiny.parameters.get()).status().message());
  };
  EXPECT_THAT(refused({}), HasSubstr("no token"));
  EXPECT_THAT(refused({1, 257}), HasSubstr("token 1 of the sequence is 257"));
  EXPECT_THAT(refused({-1}), HasSubstr("is -1"));
  EXPECT_THAT(refused(SomeTokens(11)), HasSubstr("do not fit into 10 positions"));
  EXPECT_EQ(tiny.generator->length(), 0);
  EXPECT_THAT(std::string(Generator::Create(&tiny.model, tiny.device.get(), tiny.ops.get(),
                                            DType::kF32, 145)
                              .status()
                              .message()),
              HasSubstr("1 to 144"));
}

TEST(GeneratorMemoryTest, AllocatesWhatItSays) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    TinyModel tiny("llama", type, 1, 50);
    EXPECT_EQ(tiny.device->memory().Bytes(MemoryKind::kActivations),
              Generator::Bytes(tiny.reference.table().config, type, 50));
  }
}

}  // namespace
}  // namespace zeroshard
