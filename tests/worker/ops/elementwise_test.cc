// Add, AccumulateF32, ColumnSum and PositionBackward.
#include <gtest/gtest.h>

#include "tests/worker/ops/vector_test_util.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

TEST(AddTest, IsTheRoundedSumAlsoInPlace) {
  for (const int64_t n : kSizes) {
    const Values a_in = RandomValues(n, 1), b_in = RandomValues(n, 2);
    ExpectReproducible([&](DType dtype, int threads, int skip) -> std::vector<Output> {
      Tensor a(dtype, a_in, skip), b(dtype, b_in, skip), y(dtype, n, skip);
      Add(a.data(), b.data(), n, dtype, y.data(), threads);
      Add(a.data(), b.data(), n, dtype, a.data(), threads);
      EXPECT_EQ(a.values(), y.values());
      return {{y.values()}};
    });
    Tensor a(DType::kF32, a_in), b(DType::kF32, b_in);
    Add(a.data(), b.data(), n, DType::kF32, b.data(), 1);
    const Values sums = b.values();
    for (size_t i = 0; i < sums.size(); ++i) {
      ASSERT_EQ(sums[i], static_cast<float>(a_in[i] + b_in[i]));
    }
  }
}

TEST(AccumulateTest, AddsOrReplacesInFp32) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t n : kSizes) {
      const Values x_in = RandomValues(n, 4), acc_in = RandomValues(n, 5, 0.001);
      Values sums(x_in.size());
      for (size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<float>(acc_in[i] + x_in[i]);
      for (const int threads : {1, 2, 3}) {
        Tensor x(dtype, x_in, threads), acc(DType::kF32, acc_in, threads);
        AccumulateF32(x.data(), dtype, n, true, acc.floats(), threads);
        EXPECT_EQ(acc.values(), sums);
        AccumulateF32(x.data(), dtype, n, false, acc.floats(), threads);
        EXPECT_EQ(acc.values(), x_in);
      }
    }
  }
}

Values ColumnSumOf(const Values& in, int64_t rows, int64_t cols, DType dtype, DType out_type,
                   int threads, int skip) {
  Tensor x(dtype, in, skip), out(out_type, cols, skip);
  ColumnSum(x.data(), rows, cols, dtype, out.data(), out_type, threads);
  return out.values();
}

TEST(ColumnSumTest, AgreesWithFp64) {
  for (const int64_t rows : {1, 63, 64, 65, 300}) {
    for (const int64_t cols : {1, 7, 65, 200}) {
      const Values x = RandomValues(rows * cols, 6);
      Values expected(static_cast<size_t>(cols));
      for (size_t i = 0; i < x.size(); ++i) expected[i % static_cast<size_t>(cols)] += x[i];
      ExpectClose(ColumnSumOf(x, rows, cols, DType::kF32, DType::kF32, 1, 0), expected, 1e-6,
                  "sums");
      ExpectReproducible([&](DType dtype, int threads, int skip) -> std::vector<Output> {
        return {{ColumnSumOf(x, rows, cols, dtype, dtype, threads, skip)},
                {ColumnSumOf(x, rows, cols, dtype, DType::kF32, threads, skip), false}};
      });
    }
  }
}

TEST(ColumnSumTest, ThreadsShareTheColumns) {
  const Values x = RandomValues(300 * 500, 7);
  ExpectReproducible([&](DType dtype, int threads, int skip) -> std::vector<Output> {
    return {{ColumnSumOf(x, 300, 500, dtype, DType::kF32, threads, skip), false}};
  });
}

TEST(ColumnSumTest, OfNoRowsIsZero) {
  EXPECT_EQ(ColumnSumOf({}, 0, 3, DType::kF32, DType::kF32, 1, 0), (Values{0, 0, 0}));
}

// 2^24 + 1 is no fp32 and falls back to 2^24: ones vanish beside 2^24, but not once they are
// summed.
TEST(ColumnSumTest, RowsAreSummedInBlocksOfSixtyFourFromTheFirst) {
  Values x(128, 1.0);
  for (size_t row = 0; row < 64; ++row) x[row] = row == 0 ? 16777216 : 0;
  EXPECT_EQ(ColumnSumOf(x, 128, 1, DType::kF32, DType::kF32, 1, 0)[0], 16777216.0 + 64);
  for (size_t row = 1; row < 64; ++row) x[row] = 1;
  EXPECT_EQ(ColumnSumOf(x, 64, 1, DType::kF32, DType::kF32, 1, 0)[0], 16777216.0);
}

TEST(PositionBackwardTest, SumsOverTheBatch) {
  const int64_t batch = 3, seq = 5, cols = 7;
  const Values dy_in = RandomValues(batch * seq * cols, 8);
  Tensor dy(DType::kF32, dy_in), d_pos(DType::kF32, seq * cols);
  PositionBackward(dy.data(), batch, seq, cols, DType::kF32, d_pos.data(), 1);
  const Values actual = d_pos.values();
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_FLOAT_EQ(static_cast<float>(actual[i]),
                    static_cast<float>(dy_in[i] + dy_in[i + 35] + dy_in[i + 70]));
  }
}

}  // namespace
}  // namespace zeroshard::cpu
