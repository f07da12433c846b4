// On a device that the host cannot reach a sequence has the CPU's logits bit for bit.
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/worker/device/guarded_device.h"
#include "tests/worker/device/guarded_ops.h"
#include "tests/worker/generate/tiny_model.h"

namespace zeroshard {
namespace {

class GuardedGenerator : public testing::TestWithParam<std::tuple<const char*, DType>> {
 protected:
  std::string Name() const { return std::get<0>(GetParam()); }
  DType Type() const { return std::get<1>(GetParam()); }
  std::unique_ptr<TinyModel> OnGuardedDevice(uint64_t seed) const {
    auto device = std::make_unique<GuardedDevice>(seed);
    auto ops = std::make_unique<GuardedOps>(device.get());
    return std::make_unique<TinyModel>(Name(), Type(), std::move(device), std::move(ops));
  }
};

TEST_P(GuardedGenerator, LogitsAreTheCpusWheneverWorkIsDone) {
  std::vector<int32_t> tokens;
  for (int32_t i = 0; i < 40; ++i) tokens.push_back(i * 7919 % 257);
  TinyModel cpu(Name(), Type());
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const auto guarded = OnGuardedDevice(seed);
    // Whole, in pieces behind a past, and again token by token over the cache of before.
    for (const size_t step : {40, 13, 1}) {
      EXPECT_EQ(guarded->Logits(tokens, step), cpu.Logits(tokens, step)) << seed << " " << step;
    }
    tokens.pop_back();
  }
}

// Its memory goes while what it asked for is still to be done.
TEST_P(GuardedGenerator, EndsWithWorkOnItsWay) {
  const auto guarded = OnGuardedDevice(1);
  EXPECT_EQ(guarded->generator->Step({}, guarded->parameters.get()).status().code(),
            absl::StatusCode::kInvalidArgument);
  class Refusing : public ParameterLender {
   public:
    explicit Refusing(ParameterLender* lender) : lender_(lender) {}
    absl::StatusOr<LentParameters> Borrow(int unit) override {
      if (unit == 2) return absl::UnavailableError("no such luck");
      return lender_->Borrow(unit);
    }
    absl::Status GiveBack(int unit) override { return lender_->GiveBack(unit); }

   private:
    ParameterLender* const lender_;
  } refusing(guarded->parameters.get());
  const std::vector<int32_t> tokens = {1, 2, 3};
  EXPECT_EQ(guarded->generator->Step(tokens, &refusing).status(),
            absl::UnavailableError("no such luck"));
  guarded->generator = nullptr;
  EXPECT_TRUE(guarded->device->compute()->Record().Wait().ok());
}

INSTANTIATE_TEST_SUITE_P(Models, GuardedGenerator,
                         testing::Combine(testing::Values("gpt2", "llama", "llama_tied", "qwen2"),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == DType::kF32 ? "_fp32" : "_bf16");
                         });

}  // namespace
}  // namespace zeroshard
