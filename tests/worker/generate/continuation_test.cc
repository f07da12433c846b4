#include "worker/generate/continuation.h"

#include <gmock/gmock.h>

#include "tests/worker/generate/tiny_model.h"

namespace zeroshard {
namespace {

// Counts how often the model runs.
class Counter : public ParameterLender {
 public:
  explicit Counter(ParameterLender* lender) : lender_(lender) {}
  absl::Status BeginPass() override {
    ++passes;
    return absl::OkStatus();
  }
  absl::StatusOr<LentParameters> Borrow(int unit) override { return lender_->Borrow(unit); }
  absl::Status GiveBack(int unit) override { return absl::OkStatus(); }
  int passes = 0;

 private:
  ParameterLender* lender_;
};

class ContinuationTest : public testing::Test {
 protected:
  Continuation Run(const ContinuationOptions& options) {
    counter_.passes = 0;
    seen_.clear();
    auto answer = Continue(options, tiny_.generator.get(), &counter_, [this](int32_t token) {
      seen_.push_back(token);
      return absl::OkStatus();
    });
    EXPECT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(seen_, answer->tokens);
    return *answer;
  }

  TinyModel tiny_{"gpt2", DType::kF32, 1, 30};
  Counter counter_{tiny_.parameters.get()};
  std::vector<int32_t> seen_;
};

// The first token of an answer that did not occur in it before, from the third on.
size_t FirstNew(const std::vector<int32_t>& tokens) {
  for (size_t i = 2; i < tokens.size(); ++i) {
    if (std::count(tokens.begin(), tokens.begin() + static_cast<int64_t>(i), tokens[i]) == 0) {
      return i;
    }
  }
  ADD_FAILURE() << "the answer repeats itself from the start";
  return 0;
}

TEST_F(ContinuationTest, EndsBeforeTheEndOfTextTokenAlsoWhereItRunsToTheFullLength) {
  ContinuationOptions options{
      .prompt = {5, 6, 7}, .max_tokens = 20, .sampling = {.temperature = 1, .seed = 3}};
  const Continuation all = Run(options);
  EXPECT_EQ(all.tokens.size(), 20U);
  EXPECT_EQ(all.reason, StopReason::kMaxTokens);
  EXPECT_EQ(counter_.passes, 20);
  const size_t end = FirstNew(all.tokens);
  options.end_of_text = {all.tokens[end], 300};
  const Continuation ended = Run(options);
  EXPECT_EQ(ended.tokens, std::vector<int32_t>(all.tokens.begin(),
                                               all.tokens.begin() + static_cast<int64_t>(end)));
  EXPECT_EQ(ended.reason, StopReason::kEndOfText);
  EXPECT_EQ(counter_.passes, static_cast<int>(end) + 1);
  options.run_to_length = true;
  const Continuation whole = Run(options);
  EXPECT_EQ(whole.tokens, ended.tokens);
  EXPECT_EQ(whole.reason, StopReason::kEndOfText);
  EXPECT_EQ(counter_.passes, 20);
}

// 30 positions hold the prompt and 27 tokens; one more follows from the last of them.
TEST_F(ContinuationTest, EndsAtTheLastPosition) {
  const Continuation answer = Run({.prompt = {5, 6, 7}, .max_tokens = 100});
  EXPECT_EQ(answer.tokens.size(), 28U);
  EXPECT_EQ(answer.reason, StopReason::kPositions);
  const ContinuationOptions fits{.prompt = {5, 6, 7}, .max_tokens = 28};
  EXPECT_EQ(PositionsWanted(fits), 30);
  EXPECT_EQ(Run(fits).reason, StopReason::kMaxTokens);
}

TEST_F(ContinuationTest, ASeedDrawsTheSameTokensAndAnotherOneOthers) {
  ContinuationOptions options{
      .prompt = {5}, .max_tokens = 25, .sampling = {.temperature = 2, .seed = 3}};
  const Continuation first = Run(options);
  EXPECT_EQ(Run(options).tokens, first.tokens);
  options.sampling.seed = 4;
  EXPECT_NE(Run(options).tokens, first.tokens);
  options.sampling = {.temperature = 2, .top_k = 1, .seed = 4};
  const Continuation likeliest = Run(options);
  options.sampling = {};
  EXPECT_EQ(Run(options).tokens, likeliest.tokens);
}

TEST_F(ContinuationTest, StopsWithTheErrorOfWhoListens) {
  const auto answer = Continue({.prompt = {1}}, tiny_.generator.get(), tiny_.parameters.get(),
                               [](int32_t) { return absl::AbortedError("no one listens"); });
  EXPECT_EQ(answer.status(), absl::AbortedError("no one listens"));
}

TEST_F(ContinuationTest, RefusesSamplingThatCannotBe) {
  for (const SamplingOptions& sampling :
       {SamplingOptions{.temperature = -1}, SamplingOptions{.top_k = -1}}) {
    EXPECT_EQ(Continue({.prompt = {1}, .sampling = sampling}, tiny_.generator.get(),
                       tiny_.parameters.get())
                  .status()
                  .code(),
              absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace zeroshard
