#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <thread>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

struct RopeShape {
  int64_t batch, seq, heads, head_dim, ld;
};
const std::vector<RopeShape> kShapes = {{1, 1, 1, 2, 2},
                                        {2, 9, 3, 10, 37},
                                        {1, 5, 2, 64, 200},
                                        {3, 130, 2, 34, 68},
                                        {2, 300, 4, 32, 150}};

std::vector<float> Frequencies(const RopeShape& s, double theta) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < s.head_dim / 2; ++i) {
    frequencies.push_back(static_cast<float>(
        std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(s.head_dim))));
  }
  return frequencies;
}

Values Rotated(const Values& in, const RopeShape& s, float theta, bool inverse,
               DType dtype = DType::kF32, int threads = 1, int skip = 0, int64_t first = 0) {
  Tensor x(dtype, in, skip);
  Rope(x.data(), s.ld, s.batch, s.seq, s.heads, s.head_dim, Frequencies(s, theta).data(), first,
       inverse, dtype, threads);
  return x.values();
}

Values Input(const RopeShape& s) { return RandomValues(s.batch * s.seq * s.ld, 1); }

// (x[i], x[i + D/2]) as a complex number, turned by position * theta^(-2i/D), rounded as
// documented.
Values Reference(Values x, const RopeShape& s, double theta, bool inverse, int64_t first_row = 0) {
  const std::vector<float> frequencies = Frequencies(s, theta);
  for (int64_t row = 0; row < s.batch * s.seq; ++row) {
    for (int64_t head = 0; head < s.heads; ++head) {
      for (int64_t i = 0; i < s.head_dim / 2; ++i) {
        double& first = x[static_cast<size_t>(row * s.ld + head * s.head_dim + i)];
        double& second =
            x[static_cast<size_t>(row * s.ld + head * s.head_dim + s.head_dim / 2 + i)];
        const double angle =
            static_cast<float>(first_row + row % s.seq) * frequencies[static_cast<size_t>(i)];
        const auto turned =
            std::complex<double>(first, second) * std::polar(1.0, inverse ? -angle : angle);
        first = turned.real();
        second = turned.imag();
      }
    }
  }
  return x;
}

TEST(RopeTest, TurnsEveryPairByItsAngleAndLeavesTheRestOfTheRowAlone) {
  for (const RopeShape& s : kShapes) {
    const Values x = Input(s);
    for (const bool inverse : {false, true}) {
      const Values actual = Rotated(x, s, 10000, inverse);
      ExpectClose(actual, Reference(x, s, 10000, inverse), 1e-7, "rotated");
      for (int64_t row = 0; row < s.batch * s.seq; ++row) {
        for (int64_t i = s.heads * s.head_dim; i < s.ld; ++i) {
          ASSERT_EQ(actual[static_cast<size_t>(row * s.ld + i)],
                    x[static_cast<size_t>(row * s.ld + i)]);
        }
      }
    }
  }
}

// A sequence given in two parts, as a cache is filled, also far from its beginning.
TEST(RopeTest, PositionsMayBeginAnywhere) {
  const RopeShape s{1, 30, 2, 64, 128};
  for (const int64_t first : {1, 29, 1000, 100000}) {
    ExpectClose(Rotated(Input(s), s, 10000, false, DType::kF32, 1, 0, first),
                Reference(Input(s), s, 10000, false, first), 1e-7, "rotated");
  }
}

TEST(RopeTest, TheInverseIsTheGradient) {
  const RopeShape s{1, 6, 1, 6, 6};
  const Values x = Input(s), dy = RandomValues(36, 2);
  const Values expected =
      NumericalGradient([&](const Values& at) { return Dot(Reference(at, s, 500, false), dy); }, x);
  ExpectClose(Rotated(dy, s, 500, true), expected, 1e-6, "dx");
}

TEST(RopeTest, EveryThetaAndHeadSizeHasItsOwnAngles) {
  const RopeShape narrow{1, 40, 1, 8, 16}, wide{1, 40, 1, 16, 16}, longer{1, 80, 1, 8, 8};
  for (int round = 0; round < 2; ++round) {
    for (const float theta : {10000.0f, 500000.0f, 100.0f}) {  // more tables than are kept
      for (const RopeShape& s : {narrow, wide, longer}) {
        ExpectClose(Rotated(Input(s), s, theta, false), Reference(Input(s), s, theta, false), 1e-7,
                    "rotated");
      }
    }
  }
}

TEST(RopeTest, ThreadsMayShareIt) {
  const RopeShape s{1, 64, 2, 32, 64};
  const Values x = Input(s), expected = Rotated(x, s, 777, false);
  std::vector<std::thread> threads;
  for (int k = 0; k < 4; ++k) {
    threads.emplace_back([&, k] {
      for (int i = 0; i < 20; ++i) {
        Rotated(x, s, static_cast<float>(1000 + i * 4 + k), false);
        EXPECT_EQ(Rotated(x, s, 777, false), expected);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(RopeTest, SameBitsForThreadsAlignmentInstructionsAndRoundedOnceToBf16) {
  for (const RopeShape& s : kShapes) {
    const Values x = Input(s);
    for (const bool inverse : {false, true}) {
      ExpectReproducible([&](DType dtype, int threads, int skip) -> std::vector<Output> {
        return {{Rotated(x, s, 10000, inverse, dtype, threads, skip)}};
      });
    }
  }
}

}  // namespace
}  // namespace zeroshard::cpu
