#include "common/kernels/adamw.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/worker/ops/vector_test_util.h"

namespace zeroshard::cpu {
namespace {

struct State {
  Values master, exp_avg, exp_avg_sq;
};

State RandomState(int64_t n) {
  State state{RandomValues(n, 1), RandomValues(n, 2, 0.1), RandomValues(n, 3, 0.1)};
  for (double& value : state.exp_avg_sq) value = std::abs(value);
  return state;
}

State ZeroMoments(Values master) {
  const Values zeros(master.size());
  return {std::move(master), zeros, zeros};
}

AdamWArgs Args(int64_t t) {
  AdamWArgs args;
  args.learning_rate = 3e-3f;
  args.beta2 = 0.95f;
  args.weight_decay = 0.1f;
  args.grad_scale = 0.37f;
  args.t = t;
  return args;
}

struct Result {
  State state;
  Values param;
};

Result Step(const AdamWArgs& args, const State& from, const Values& gradient,
            DType grad_type = DType::kF32, DType param_type = DType::kF32, int threads = 1,
            int skip = 0) {
  const int64_t n = static_cast<int64_t>(gradient.size());
  Tensor master(DType::kF32, from.master, skip), exp_avg(DType::kF32, from.exp_avg, skip);
  Tensor exp_avg_sq(DType::kF32, from.exp_avg_sq, skip);
  Tensor grad(grad_type, gradient, skip), param(param_type, n, skip);
  AdamW(args, n, grad.data(), grad_type, master.floats(), exp_avg.floats(), exp_avg_sq.floats(),
        param.data(), param_type, threads);
  return {{master.values(), exp_avg.values(), exp_avg_sq.values()}, param.values()};
}

void ExpectSameState(const State& actual, const State& expected, const std::string& what) {
  EXPECT_EQ(actual.master, expected.master) << what;
  EXPECT_EQ(actual.exp_avg, expected.exp_avg) << what;
  EXPECT_EQ(actual.exp_avg_sq, expected.exp_avg_sq) << what;
}

// beta1 1/2, beta2 3/4, lr 1/4, decay 1/2, eps 0; p = 1, g = 2:
// m = 1, v = 1, m/(1-1/2) = 2, sqrt(v/(1-3/4)) = 2, p = 1 (1 - 1/8) - 1/4 * 2/2 = 5/8.
TEST(AdamWTest, OneStepByHand) {
  AdamWArgs args;
  args.learning_rate = 0.25f;
  args.beta1 = 0.5f;
  args.beta2 = 0.75f;
  args.eps = 0;
  args.weight_decay = 0.5f;
  const Result first = Step(args, ZeroMoments({1}), {2});
  ExpectSameState(first.state, {{0.625}, {1}, {1}}, "t = 1");
  EXPECT_EQ(first.param[0], 0.625);
  // g = -4: m = 1/2 - 2 = -3/2, v = 3/4 + 4 = 19/4, both over 1 - beta^2: m -> -2, v -> 76/7.
  args.t = 2;
  const Result second = Step(args, first.state, {-4});
  EXPECT_EQ(second.state.exp_avg[0], -1.5);
  EXPECT_EQ(second.state.exp_avg_sq[0], 4.75);
  EXPECT_NEAR(second.state.master[0], 0.625 * 0.875 + 0.25 * 2 / std::sqrt(76.0 / 7), 1e-7);
}

// PyTorch's single-tensor AdamW in fp64.
void ReferenceStep(const AdamWArgs& args, const Values& gradient, State* state) {
  const double lr = args.learning_rate, beta1 = args.beta1, beta2 = args.beta2;
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double g = gradient[i] * args.grad_scale;
    double& p = state->master[i];
    double& m = state->exp_avg[i];
    double& v = state->exp_avg_sq[i];
    p *= 1 - lr * args.weight_decay;
    m = beta1 * m + (1 - beta1) * g;
    v = beta2 * v + (1 - beta2) * g * g;
    const double denom =
        std::sqrt(v) / std::sqrt(1 - std::pow(beta2, static_cast<double>(args.t))) + args.eps;
    p -= lr / (1 - std::pow(beta1, static_cast<double>(args.t))) * m / denom;
  }
}

TEST(AdamWTest, ThirtyStepsAgreeWithFp64) {
  State actual = ZeroMoments(RandomValues(1000, 4)), expected = actual;
  for (int64_t t = 1; t <= 30; ++t) {
    const Values gradient = RandomValues(1000, static_cast<uint32_t>(100 + t), 0.01, 0.002);
    actual = Step(Args(t), actual, gradient).state;
    ReferenceStep(Args(t), gradient, &expected);
  }
  ExpectClose(actual.exp_avg, expected.exp_avg, 1e-6, "exp_avg");
  ExpectClose(actual.exp_avg_sq, expected.exp_avg_sq, 1e-6, "exp_avg_sq");
  for (size_t i = 0; i < 1000; ++i) {
    EXPECT_NEAR(actual.master[i], expected.master[i], 2e-6 * std::abs(expected.master[i]) + 1e-7);
  }
}

// The order of operations of the header, one rounding a line.
TEST(AdamWTest, IsTheDocumentedSequenceOfRoundings) {
  for (const int64_t t : {1, 2, 7, 1000, 123456789}) {
    const AdamWArgs args = Args(t);
    const State from = RandomState(777);
    const Values gradient = RandomValues(777, 5);
    const auto power = [](double base, int64_t exponent) {
      double result = 1;
      while (exponent > 0) {
        if (exponent % 2 == 1) result *= base;
        base *= base;
        exponent /= 2;
      }
      return result;
    };
    const double lr = args.learning_rate, beta1 = args.beta1, beta2 = args.beta2;
    const float decay = static_cast<float>(1 - lr * args.weight_decay);
    const float rest1 = static_cast<float>(1 - beta1), rest2 = static_cast<float>(1 - beta2);
    const float step_size = static_cast<float>(lr / (1 - power(beta1, t)));
    const float correction = static_cast<float>(1 / std::sqrt(1 - power(beta2, t)));
    State expected = from;
    for (size_t i = 0; i < gradient.size(); ++i) {
      const float g = static_cast<float>(gradient[i]) * args.grad_scale;
      const float m_decayed = static_cast<float>(from.exp_avg[i]) * args.beta1;
      const float m = std::fma(g, rest1, m_decayed);
      const float square = g * g;
      const float v_decayed = static_cast<float>(from.exp_avg_sq[i]) * args.beta2;
      const float v = std::fma(square, rest2, v_decayed);
      const float denom = std::fma(std::sqrt(v), correction, args.eps);
      const float ratio = m / denom;
      const float p_decayed = static_cast<float>(from.master[i]) * decay;
      expected.exp_avg[i] = m;
      expected.exp_avg_sq[i] = v;
      expected.master[i] = std::fma(-step_size, ratio, p_decayed);
    }
    ForEachTarget([&](const std::string& target) {
      ExpectSameState(Step(args, from, gradient).state, expected, target);
    });
  }
}

TEST(AdamWTest, SameBitsForThreadsAlignmentAndInstructions) {
  for (const int64_t n : kSizes) {
    const State from = RandomState(n);
    const Values gradient = RandomValues(n, 6);
    for (const DType grad_type : {DType::kF32, DType::kBF16}) {
      const auto run = [&](DType dtype, int threads, int skip) -> std::vector<Output> {
        const Result r = Step(Args(3), from, gradient, grad_type, dtype, threads, skip);
        return {{r.param},
                {r.state.master, false},
                {r.state.exp_avg, false},
                {r.state.exp_avg_sq, false}};
      };
      ExpectReproducible(run);
      ExpectSame(run(DType::kF32, 1, 0),
                 {{Step(Args(3), from, gradient).param},
                  {Step(Args(3), from, gradient).state.master},
                  {Step(Args(3), from, gradient).state.exp_avg},
                  {Step(Args(3), from, gradient).state.exp_avg_sq}},
                 "the gradient's type");
    }
  }
}

TEST(AdamWTest, AnElementHasTheSameBitsAloneAndInAVector) {
  const State from = RandomState(65);
  const Values gradient = RandomValues(65, 7);
  const State together = Step(Args(5), from, gradient).state;
  for (size_t i = 0; i < 65; ++i) {
    const State alone =
        Step(Args(5), {{from.master[i]}, {from.exp_avg[i]}, {from.exp_avg_sq[i]}}, {gradient[i]})
            .state;
    ExpectSameState(alone, {{together.master[i]}, {together.exp_avg[i]}, {together.exp_avg_sq[i]}},
                    std::to_string(i));
  }
}

TEST(AdamWTest, TheParametersMayBeTheMasterWeights) {
  const State from = RandomState(1001);
  const Values gradient = RandomValues(1001, 8);
  Tensor master(DType::kF32, from.master), exp_avg(DType::kF32, from.exp_avg);
  Tensor exp_avg_sq(DType::kF32, from.exp_avg_sq), grad(DType::kF32, gradient);
  AdamW(Args(2), 1001, grad.data(), DType::kF32, master.floats(), exp_avg.floats(),
        exp_avg_sq.floats(), master.data(), DType::kF32, 2);
  EXPECT_EQ(master.values(), Step(Args(2), from, gradient).state.master);
}

TEST(AdamWTest, TheGradientScaleMultipliesTheGradient) {
  AdamWArgs scaled = Args(1), plain = Args(1);
  scaled.grad_scale = 0.25f;
  plain.grad_scale = 1;
  const State from = RandomState(64);
  const Values gradient = RandomValues(64, 9);
  Values quarter = gradient;
  for (double& value : quarter) value /= 4;
  ExpectSameState(Step(scaled, from, gradient).state, Step(plain, from, quarter).state, "scale");
}

// With a constant gradient both corrected moments are exact at every step: each moves by lr.
TEST(AdamWTest, AConstantGradientMovesByTheLearningRateAtEveryStep) {
  AdamWArgs args;
  args.learning_rate = 0.01f;
  State state = ZeroMoments({0});
  for (args.t = 1; args.t <= 11; ++args.t) {
    const double before = state.master[0];
    state = Step(args, state, {1}).state;
    EXPECT_NEAR((before - state.master[0]) / 0.01, 1, 1e-5) << args.t;
  }
}

TEST(AdamWTest, WithoutAGradientOnlyTheDecayActs) {
  AdamWArgs args;
  args.learning_rate = 0.5f;
  args.weight_decay = 0.125f;
  EXPECT_EQ(Step(args, ZeroMoments({1, -8}), {0, 0}).state.master, (Values{1 - 0.0625, -8 + 0.5}));
  args.weight_decay = 0;
  EXPECT_EQ(Step(args, ZeroMoments({1, -8}), {0, 0}).state.master, (Values{1, -8}));
}

TEST(AdamWTest, NothingBesideTheRangeIsTouched) {
  const State from = RandomState(10);
  Tensor master(DType::kF32, from.master), exp_avg(DType::kF32, from.exp_avg);
  Tensor exp_avg_sq(DType::kF32, from.exp_avg_sq), grad(DType::kF32, RandomValues(10, 10));
  Tensor param(DType::kBF16, 10);
  AdamW(Args(1), 3, grad.data(), DType::kF32, master.floats() + 4, exp_avg.floats() + 4,
        exp_avg_sq.floats() + 4, static_cast<uint16_t*>(param.data()) + 4, DType::kBF16, 1);
  for (size_t i = 0; i < 10; ++i) {
    const bool inside = i >= 4 && i < 7;
    EXPECT_EQ(master.values()[i] != from.master[i], inside) << i;
    EXPECT_EQ(exp_avg.values()[i] != from.exp_avg[i], inside) << i;
    EXPECT_EQ(exp_avg_sq.values()[i] != from.exp_avg_sq[i], inside) << i;
    EXPECT_EQ(param.values()[i] != RoundToBf16(777), inside) << i;
  }
}

}  // namespace
}  // namespace zeroshard::cpu
