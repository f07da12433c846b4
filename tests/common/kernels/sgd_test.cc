#include "common/kernels/sgd.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/worker/ops/vector_test_util.h"

namespace zeroshard::cpu {
namespace {

struct State {
  Values master, buffer;
};

State RandomState(int64_t n) { return {RandomValues(n, 1), RandomValues(n, 2, 0.1)}; }

SgdArgs Args() {
  return {.learning_rate = 3e-3f, .momentum = 0.9f, .weight_decay = 0.1f, .grad_scale = 0.37f};
}

struct Result {
  State state;
  Values param;
};

Result Step(const SgdArgs& args, const State& from, const Values& gradient,
            DType grad_type = DType::kF32, DType param_type = DType::kF32, int threads = 1,
            int skip = 0) {
  const int64_t n = static_cast<int64_t>(gradient.size());
  Tensor master(DType::kF32, from.master, skip), buffer(DType::kF32, from.buffer, skip);
  Tensor grad(grad_type, gradient, skip), param(param_type, n, skip);
  Sgd(args, n, grad.data(), grad_type, master.floats(), buffer.floats(), param.data(), param_type,
      threads);
  return {{master.values(), buffer.values()}, param.values()};
}

// lr 1/4, momentum 1/2, decay 1/8, scale 1/2; p = 2, g = 3: g = 3/2 + 2/8 = 7/4 = b,
// p = 2 - 7/16 = 25/16. Then g = -1: g = -1/2 + 25/128 = -39/128, b = 7/8 - 39/128 = 73/128,
// p = 25/16 - 73/512 = 727/512.
TEST(SgdTest, TwoStepsByHand) {
  const SgdArgs args{
      .learning_rate = 0.25f, .momentum = 0.5f, .weight_decay = 0.125f, .grad_scale = 0.5f};
  const Result first = Step(args, {{2}, {0}}, {3});
  EXPECT_EQ(first.state.buffer[0], 1.75);
  EXPECT_EQ(first.state.master[0], 25.0 / 16);
  EXPECT_EQ(first.param[0], 25.0 / 16);
  const Result second = Step(args, first.state, {-1}, DType::kF32, DType::kBF16);
  EXPECT_EQ(second.state.buffer[0], 73.0 / 128);
  EXPECT_EQ(second.state.master[0], 727.0 / 512);
  EXPECT_EQ(second.param[0], 182.0 / 128);  // 181.75 / 128 in eight significant bits
}

// torch.optim.SGD of PyTorch 2.5.1 on a CPU, three steps.
TEST(SgdTest, AgreesWithPyTorch) {
  const Values start = {1.0, -2.0, 0.25, 3.5, -0.125};
  const std::vector<Values> gradients = {
      {0.5, -1.0, 0.75, -0.0625, 2.0}, {-0.25, 0.5, 1.5, 0.3, -1.0}, {0.1, 0.2, -0.3, 0.4, -0.5}};
  const struct {
    SgdArgs args;
    std::vector<Values> weights;
  } cases[] = {
      {{.learning_rate = 0.1f, .momentum = 0.9f, .weight_decay = 0.01f},
       {{0.949000001, -1.898, 0.17475, 3.50274992, -0.324874997},
        {0.927151024, -1.85430205, -0.0431497544, 3.47172213, -0.404437631},
        {0.896559775, -1.83311951, -0.209216386, 3.40032554, -0.42563957}}},
      {{.learning_rate = 0.05f, .weight_decay = 0.1f},
       {{0.969999969, -1.93999994, 0.211250007, 3.48562503, -0.224374995},
        {0.977649987, -1.95529997, 0.135193765, 3.453197, -0.173253119},
        {0.967761755, -1.95552349, 0.149517804, 3.41593099, -0.147386849}}},
  };
  for (const auto& c : cases) {
    State state = {start, Values(start.size())};
    for (size_t step = 0; step < gradients.size(); ++step) {
      state = Step(c.args, state, gradients[step]).state;
      for (size_t i = 0; i < start.size(); ++i) {
        EXPECT_FLOAT_EQ(static_cast<float>(state.master[i]), static_cast<float>(c.weights[step][i]))
            << "step " << step + 1 << ", element " << i;
      }
    }
  }
}

// The order of operations of the header, one rounding a line.
TEST(SgdTest, IsTheDocumentedSequenceOfRoundings) {
  const SgdArgs args = Args();
  const State from = RandomState(777);
  const Values gradient = RandomValues(777, 5);
  State expected = from;
  for (size_t i = 0; i < gradient.size(); ++i) {
    const float p = static_cast<float>(from.master[i]);
    const float scaled = static_cast<float>(gradient[i]) * args.grad_scale;
    const float g = std::fma(p, args.weight_decay, scaled);
    const float kept = static_cast<float>(from.buffer[i]) * args.momentum;
    const float b = kept + g;
    expected.buffer[i] = b;
    expected.master[i] = std::fma(-args.learning_rate, b, p);
  }
  ForEachTarget([&](const std::string& target) {
    const State actual = Step(args, from, gradient).state;
    EXPECT_EQ(actual.master, expected.master) << target;
    EXPECT_EQ(actual.buffer, expected.buffer) << target;
  });
}

TEST(SgdTest, SameBitsForThreadsAlignmentAndInstructions) {
  for (const int64_t n : kSizes) {
    const State from = RandomState(n);
    const Values gradient = RandomValues(n, 6);
    const auto run = [&](DType grad_type) {
      return [&, grad_type](DType dtype, int threads, int skip) -> std::vector<Output> {
        const Result r = Step(Args(), from, gradient, grad_type, dtype, threads, skip);
        return {{r.param}, {r.state.master, false}, {r.state.buffer, false}};
      };
    };
    ExpectReproducible(run(DType::kF32));
    ExpectReproducible(run(DType::kBF16));
    // These gradients are the same in both types.
    ExpectSame(run(DType::kBF16)(DType::kF32, 1, 0), run(DType::kF32)(DType::kF32, 1, 0),
               "the gradient's type");
  }
}

TEST(SgdTest, AnElementHasTheSameBitsAloneAndInAVector) {
  const State from = RandomState(65);
  const Values gradient = RandomValues(65, 7);
  const State together = Step(Args(), from, gradient).state;
  for (size_t i = 0; i < 65; ++i) {
    const State alone = Step(Args(), {{from.master[i]}, {from.buffer[i]}}, {gradient[i]}).state;
    EXPECT_EQ(alone.master[0], together.master[i]) << i;
    EXPECT_EQ(alone.buffer[0], together.buffer[i]) << i;
  }
}

TEST(SgdTest, TheParametersMayBeTheMasterWeights) {
  const State from = RandomState(1001);
  const Values gradient = RandomValues(1001, 8);
  Tensor master(DType::kF32, from.master), buffer(DType::kF32, from.buffer);
  Tensor grad(DType::kF32, gradient);
  Sgd(Args(), 1001, grad.data(), DType::kF32, master.floats(), buffer.floats(), master.data(),
      DType::kF32, 2);
  EXPECT_EQ(master.values(), Step(Args(), from, gradient).state.master);
}

TEST(SgdTest, NothingBesideTheRangeIsTouched) {
  const State from = RandomState(10);
  Tensor master(DType::kF32, from.master), buffer(DType::kF32, from.buffer);
  Tensor grad(DType::kF32, RandomValues(10, 10)), param(DType::kBF16, 10);
  Sgd(Args(), 3, grad.data(), DType::kF32, master.floats() + 4, buffer.floats() + 4,
      static_cast<uint16_t*>(param.data()) + 4, DType::kBF16, 1);
  for (size_t i = 0; i < 10; ++i) {
    const bool inside = i >= 4 && i < 7;
    EXPECT_EQ(master.values()[i] != from.master[i], inside) << i;
    EXPECT_EQ(buffer.values()[i] != from.buffer[i], inside) << i;
    EXPECT_EQ(param.values()[i] != RoundToBf16(777), inside) << i;
  }
}

}  // namespace
}  // namespace zeroshard::cpu
