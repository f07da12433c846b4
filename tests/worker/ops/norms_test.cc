#include <gtest/gtest.h>

#include <cmath>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

constexpr float kEps = 1e-5f;

struct Shape {
  int64_t rows, cols;
};
const std::vector<Shape> kShapes = {{1, 1},   {3, 7},    {2, 63},   {5, 64},
                                    {70, 65}, {3, 1000}, {200, 300}};

struct Inputs {
  Shape shape;
  Values x, weight, bias, dy, dx;

  explicit Inputs(Shape shape)
      : shape(shape),
        x(RandomValues(shape.rows * shape.cols, 1, 2, 0.5)),
        weight(RandomValues(shape.cols, 2, 0.3, 1)),
        bias(RandomValues(shape.cols, 3)),
        dy(RandomValues(shape.rows * shape.cols, 4)),
        dx(RandomValues(shape.rows * shape.cols, 5)) {}
};

Values ReferenceForward(const Inputs& in, bool center) {
  Values y(in.x.size());
  const size_t cols = static_cast<size_t>(in.shape.cols);
  for (size_t row = 0; row < in.x.size(); row += cols) {
    double mean = 0, square = 0;
    for (size_t i = 0; i < cols && center; ++i) mean += in.x[row + i] / static_cast<double>(cols);
    for (size_t i = 0; i < cols; ++i) {
      square += (in.x[row + i] - mean) * (in.x[row + i] - mean) / static_cast<double>(cols);
    }
    for (size_t i = 0; i < cols; ++i) {
      y[row + i] = (in.x[row + i] - mean) / std::sqrt(square + kEps) * in.weight[i] +
                   (center ? in.bias[i] : 0);
    }
  }
  return y;
}

// y, rstd (and mean).
std::vector<Output> Forward(const Inputs& in, bool center, DType dtype, int threads, int skip) {
  const auto [rows, cols] = in.shape;
  Tensor x(dtype, in.x, skip), weight(dtype, in.weight, skip), bias(dtype, in.bias, skip);
  Tensor y(dtype, rows * cols, skip), mean(DType::kF32, rows), rstd(DType::kF32, rows);
  if (!center) {
    RmsNormForward(x.data(), weight.data(), rows, cols, kEps, dtype, y.data(), rstd.floats(),
                   threads);
    return {{y.values()}, {rstd.values(), false}};
  }
  LayerNormForward(x.data(), weight.data(), bias.data(), rows, cols, kEps, dtype, y.data(),
                   mean.floats(), rstd.floats(), threads);
  return {{y.values()}, {rstd.values(), false}, {mean.values(), false}};
}

// dx, d_weight (and d_bias).
std::vector<Output> Backward(const Inputs& in, bool center, bool accumulate, DType dtype,
                             int threads, int skip, bool in_place = false) {
  const auto [rows, cols] = in.shape;
  const auto kept = Forward(in, center, DType::kF32, 1, 0);
  Tensor rstd(DType::kF32, kept[1].values), mean(DType::kF32, center ? kept[2].values : Values());
  Tensor x(dtype, in.x, skip), weight(dtype, in.weight, skip), dy(dtype, in.dy, skip);
  Tensor dx(dtype, in.dx, skip), d_weight(dtype, cols, skip), d_bias(dtype, cols, skip);
  Tensor& target = in_place ? dy : dx;
  if (!center) {
    RmsNormBackward(dy.data(), x.data(), weight.data(), rstd.floats(), rows, cols, dtype,
                    accumulate, target.data(), d_weight.data(), threads);
    return {{target.values()}, {d_weight.values()}};
  }
  LayerNormBackward(dy.data(), x.data(), weight.data(), mean.floats(), rstd.floats(), rows, cols,
                    dtype, accumulate, target.data(), d_weight.data(), d_bias.data(), threads);
  return {{target.values()}, {d_weight.values()}, {d_bias.values()}};
}

class NormsTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Kinds, NormsTest, testing::Values(true, false),
                         [](const auto& info) { return info.param ? "LayerNorm" : "RmsNorm"; });

TEST_P(NormsTest, ForwardAgreesWithFp64) {
  for (const Shape shape : kShapes) {
    const Inputs in(shape);
    ExpectClose(Forward(in, GetParam(), DType::kF32, 1, 0)[0].values,
                ReferenceForward(in, GetParam()), 1e-6, std::to_string(shape.cols));
  }
}

// fp32 numbers near 4096 are 5e-4 apart: the mean is off by about half of that, while a variance as
// the difference of mean squares (1.7e7, known to within 1) would be wrong altogether.
TEST_P(NormsTest, AFarOffMeanDoesNotCancel) {
  Inputs in({2, 200});
  in.x = RandomValues(400, 9, 1, 0);
  for (double& value : in.x) value = static_cast<float>(value + 4096);
  ExpectClose(Forward(in, GetParam(), DType::kF32, 1, 0)[0].values,
              ReferenceForward(in, GetParam()), 5e-4, "mean 4096, deviation 1");
}

TEST_P(NormsTest, KeepsTheStatistics) {
  const Inputs in({3, 65});
  const auto outputs = Forward(in, GetParam(), DType::kF32, 1, 0);
  for (size_t row = 0; row < 3; ++row) {
    double mean = 0, square = 0;
    for (size_t i = 0; i < 65; ++i) mean += in.x[row * 65 + i] / 65;
    if (!GetParam()) mean = 0;
    for (size_t i = 0; i < 65; ++i) square += std::pow(in.x[row * 65 + i] - mean, 2) / 65;
    EXPECT_NEAR(outputs[1].values[row], 1 / std::sqrt(square + kEps), 1e-6);
    if (GetParam()) {
      EXPECT_NEAR(outputs[2].values[row], mean, 1e-6);
    }
  }
}

TEST_P(NormsTest, BackwardAgreesWithCentralDifferences) {
  const bool center = GetParam();
  for (const Shape shape : {Shape{3, 7}, Shape{70, 5}, Shape{2, 65}}) {
    const Inputs in(shape);
    const auto loss = [&](Values Inputs::*member) {
      return [&in, center, member](const Values& values) {
        Inputs moved = in;
        moved.*member = values;
        return Dot(ReferenceForward(moved, center), in.dy);
      };
    };
    const auto outputs = Backward(in, center, false, DType::kF32, 1, 0);
    ExpectClose(outputs[0].values, NumericalGradient(loss(&Inputs::x), in.x), 2e-6, "dx");
    ExpectClose(outputs[1].values, NumericalGradient(loss(&Inputs::weight), in.weight), 2e-6, "dw");
    if (center) {
      ExpectClose(outputs[2].values, NumericalGradient(loss(&Inputs::bias), in.bias), 2e-6, "db");
    }
  }
}

TEST_P(NormsTest, BackwardAddsToTheInputGradientThatIsThere) {
  const Inputs in({5, 65});
  const auto alone = Backward(in, GetParam(), false, DType::kF32, 1, 0);
  const auto added = Backward(in, GetParam(), true, DType::kF32, 1, 0);
  Values expected = in.dx;
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += alone[0].values[i];
  ExpectClose(added[0].values, expected, 1e-7, "dx");
  EXPECT_EQ(added[1].values, alone[1].values);
}

TEST_P(NormsTest, BackwardMayOverwriteTheOutputGradient) {
  const Inputs in({70, 300});
  ExpectSame(Backward(in, GetParam(), false, DType::kF32, 2, 0, /*in_place=*/true),
             Backward(in, GetParam(), false, DType::kF32, 2, 0), "in place");
}

TEST_P(NormsTest, SameBitsForThreadsAlignmentInstructionsAndRoundedOnceToBf16) {
  for (const Shape shape : kShapes) {
    const Inputs in(shape);
    ExpectReproducible([&](DType dtype, int threads, int skip) {
      return Forward(in, GetParam(), dtype, threads, skip);
    });
    for (const bool accumulate : {false, true}) {
      ExpectReproducible([&](DType dtype, int threads, int skip) {
        return Backward(in, GetParam(), accumulate, dtype, threads, skip);
      });
    }
  }
}

}  // namespace
}  // namespace zeroshard::cpu
