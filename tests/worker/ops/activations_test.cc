#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

double Gelu(double x) {
  const double inner = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
  return 0.5 * x * (1 + std::tanh(inner));
}
double Silu(double x) { return x / (1 + std::exp(-x)); }

Values GeluOf(const Values& in, DType dtype = DType::kF32, int threads = 1, int skip = 0) {
  Tensor x(dtype, in, skip), y(dtype, static_cast<int64_t>(in.size()), skip);
  GeluForward(x.data(), static_cast<int64_t>(in.size()), dtype, y.data(), threads);
  return y.values();
}

Values GeluGradientOf(const Values& dy_in, const Values& x_in, DType dtype = DType::kF32,
                      int threads = 1, int skip = 0) {
  const int64_t n = static_cast<int64_t>(x_in.size());
  Tensor x(dtype, x_in, skip), dy(dtype, dy_in, skip), dx(dtype, n, skip);
  GeluBackward(dy.data(), x.data(), n, dtype, dx.data(), threads);
  return dx.values();
}

Values SwiGluOf(const Values& gate_in, const Values& up_in, DType dtype = DType::kF32,
                int threads = 1, int skip = 0) {
  const int64_t n = static_cast<int64_t>(gate_in.size());
  Tensor gate(dtype, gate_in, skip), up(dtype, up_in, skip), y(dtype, n, skip);
  SwiGluForward(gate.data(), up.data(), n, dtype, y.data(), threads);
  return y.values();
}

std::vector<Output> SwiGluGradientOf(const Values& dy_in, const Values& gate_in,
                                     const Values& up_in, bool in_place = false,
                                     DType dtype = DType::kF32, int threads = 1, int skip = 0) {
  const int64_t n = static_cast<int64_t>(gate_in.size());
  Tensor gate(dtype, gate_in, skip), up(dtype, up_in, skip), dy(dtype, dy_in, skip);
  Tensor d_gate(dtype, n, skip), d_up(dtype, n, skip);
  Tensor& gate_out = in_place ? gate : d_gate;
  Tensor& up_out = in_place ? up : d_up;
  SwiGluBackward(dy.data(), gate.data(), up.data(), n, dtype, gate_out.data(), up_out.data(),
                 threads);
  return {{gate_out.values()}, {up_out.values()}};
}

// -30 to 30 in uneven steps that fp32 holds.
Values Sweep() {
  Values values;
  for (int i = -30 * 512; i <= 30 * 512; i += 3) values.push_back(i / 512.0);
  return values;
}

TEST(GeluTest, ForwardIsWithinAFewUnitsOfFp64) {
  const Values x = Sweep();
  const Values y = GeluOf(x);
  for (size_t i = 0; i < x.size(); ++i) {
    // 0.5 (1 + tanh) cancels below zero even in fp64: the logistic form is the reference there.
    const double z = 2 * std::sqrt(2 / std::numbers::pi) * (x[i] + 0.044715 * x[i] * x[i] * x[i]);
    const double expected = x[i] >= 0 ? Gelu(x[i]) : x[i] / (1 + std::exp(-z));
    const double relative = 4e-7 + 2e-7 * std::max(0.0, -z);
    ASSERT_NEAR(y[i], expected, relative * std::abs(expected) + 1e-35) << x[i];
    ASSERT_NEAR(y[i], Gelu(x[i]), 2e-7 * std::max(1.0, std::abs(x[i]))) << x[i];
  }
}

TEST(GeluTest, BackwardAgreesWithCentralDifferences) {
  const Values x = RandomValues(200, 1, 2), dy = RandomValues(200, 2);
  const Values expected = NumericalGradient(
      [&](const Values& at) {
        double loss = 0;
        for (size_t i = 0; i < at.size(); ++i) loss += dy[i] * Gelu(at[i]);
        return loss;
      },
      x);
  ExpectClose(GeluGradientOf(dy, x), expected, 4e-7, "dx");
}

TEST(GeluTest, FarFromZeroTheSlopeIsOneOrZero) {
  EXPECT_EQ(GeluGradientOf({1, 1, 1, 1}, {1e4, 1e15, -1e4, -1e15}), (Values{1, 1, 0, 0}));
  EXPECT_EQ(GeluOf({1e4, 1e15, 0}), (Values{1e4, static_cast<float>(1e15), 0}));
}

TEST(GeluTest, ANanStaysANan) {
  EXPECT_TRUE(std::isnan(GeluOf({NAN})[0]));
  EXPECT_TRUE(std::isnan(GeluOf({NAN}, DType::kBF16)[0]));
  EXPECT_TRUE(std::isnan(GeluGradientOf({1}, {NAN})[0]));
  EXPECT_TRUE(std::isnan(GeluGradientOf({NAN}, {1})[0]));
  EXPECT_TRUE(std::isnan(SwiGluOf({NAN}, {1})[0]));
  EXPECT_TRUE(std::isnan(SwiGluGradientOf({1}, {NAN}, {1})[0].values[0]));
}

TEST(GeluTest, SameBitsForThreadsAlignmentInstructionsAndRoundedOnceToBf16) {
  for (const int64_t n : kSizes) {
    const Values x = RandomValues(n, 3, 2), dy = RandomValues(n, 4);
    ExpectReproducible([&](DType dtype, int threads, int skip) -> std::vector<Output> {
      return {{GeluOf(x, dtype, threads, skip)}, {GeluGradientOf(dy, x, dtype, threads, skip)}};
    });
  }
}

TEST(GeluTest, AnElementHasTheSameBitsAloneAndInAVector) {
  const Values x = RandomValues(65, 5, 2);
  const Values together = GeluOf(x);
  for (size_t i = 0; i < x.size(); ++i) EXPECT_EQ(GeluOf({x[i]})[0], together[i]) << i;
}

TEST(SwiGluTest, ForwardIsWithinAFewUnitsOfFp64) {
  const Values gate = Sweep();
  const Values up = RandomValues(static_cast<int64_t>(gate.size()), 6);
  const Values y = SwiGluOf(gate, up);
  for (size_t i = 0; i < gate.size(); ++i) {
    const double expected = Silu(gate[i]) * up[i];
    ASSERT_NEAR(y[i], expected, 6e-7 * std::abs(expected)) << gate[i];
  }
}

TEST(SwiGluTest, BackwardAgreesWithCentralDifferences) {
  const Values gate = RandomValues(150, 7, 2), up = RandomValues(150, 8);
  const Values dy = RandomValues(150, 9);
  const auto loss = [&](const Values& g, const Values& u) {
    double sum = 0;
    for (size_t i = 0; i < g.size(); ++i) sum += dy[i] * Silu(g[i]) * u[i];
    return sum;
  };
  const auto outputs = SwiGluGradientOf(dy, gate, up);
  ExpectClose(outputs[0].values,
              NumericalGradient([&](const Values& g) { return loss(g, up); }, gate), 4e-7, "gate");
  ExpectClose(outputs[1].values,
              NumericalGradient([&](const Values& u) { return loss(gate, u); }, up), 4e-7, "up");
}

TEST(SwiGluTest, BackwardMayOverwriteItsInputs) {
  const Values gate = RandomValues(1001, 7, 2), up = RandomValues(1001, 8);
  const Values dy = RandomValues(1001, 9);
  ExpectSame(SwiGluGradientOf(dy, gate, up, /*in_place=*/true), SwiGluGradientOf(dy, gate, up),
             "in place");
}

TEST(SwiGluTest, SameBitsForThreadsAlignmentInstructionsAndRoundedOnceToBf16) {
  for (const int64_t n : kSizes) {
    const Values gate = RandomValues(n, 10, 2), up = RandomValues(n, 11), dy = RandomValues(n, 12);
    ExpectReproducible([&](DType dtype, int threads, int skip) {
      auto outputs = SwiGluGradientOf(dy, gate, up, false, dtype, threads, skip);
      outputs.push_back({SwiGluOf(gate, up, dtype, threads, skip)});
      return outputs;
    });
  }
}

}  // namespace
}  // namespace zeroshard::cpu
