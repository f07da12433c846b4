// The column-major problems of row-major products, solved by a column-major interpreter of the
// test.
#include "worker/ops/cuda/matmul_problem.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace zeroshard::cuda {
namespace {

float At(const std::vector<float>& data, const ColumnMajor& matrix, int64_t row, int64_t column) {
  EXPECT_LT(row, matrix.rows);
  EXPECT_LT(column, matrix.columns);
  return data[static_cast<size_t>(column * matrix.ld + row)];
}

// As cuBLAS documents gemm: C = op(A) op(B) + beta C, with the bias added to each column.
void Solve(const ColumnMajorProblem& p, const std::vector<float>& left,
           const std::vector<float>& right, const std::vector<float>& bias,
           std::vector<float>* result) {
  for (int64_t column = 0; column < p.result.columns; ++column) {
    for (int64_t row = 0; row < p.result.rows; ++row) {
      float sum = 0;
      for (int64_t k = 0; k < p.depth; ++k) {
        sum += (p.left.transpose ? At(left, p.left, k, row) : At(left, p.left, row, k)) *
               (p.right.transpose ? At(right, p.right, column, k) : At(right, p.right, k, column));
      }
      float& to = (*result)[static_cast<size_t>(column * p.result.ld + row)];
      to = sum + (p.accumulate ? to : 0) + (p.bias ? bias[static_cast<size_t>(row)] : 0);
    }
  }
}

// Small integers: every sum is exact.
std::vector<float> Random(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(static_cast<int>(generator() % 17) - 8);
  return values;
}

TEST(ColumnMajorProblem, IsTheRowMajorProduct) {
  const int64_t sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {8, 2, 16}, {17, 33, 9}};
  for (const auto& [m, n, k] : sizes) {
    for (int flags = 0; flags < 16; ++flags) {
      const std::vector<float> a = Random(m * k, 1), b = Random(k * n, 2), bias = Random(n, 3);
      std::vector<float> c = Random(m * n, 4);
      const bool with_bias = (flags & 8) != 0;
      const MatmulArgs args{.a = a.data(),
                            .b = b.data(),
                            .c = c.data(),
                            .bias = with_bias ? bias.data() : nullptr,
                            .m = m,
                            .n = n,
                            .k = k,
                            .transpose_a = (flags & 1) != 0,
                            .transpose_b = (flags & 2) != 0,
                            .accumulate = (flags & 4) != 0};
      std::vector<float> wanted = c;
      for (int64_t row = 0; row < m; ++row) {
        for (int64_t column = 0; column < n; ++column) {
          float sum = 0;
          for (int64_t i = 0; i < k; ++i) {
            sum += a[static_cast<size_t>(args.transpose_a ? i * m + row : row * k + i)] *
                   b[static_cast<size_t>(args.transpose_b ? column * k + i : i * n + column)];
          }
          float& to = wanted[static_cast<size_t>(row * n + column)];
          to = sum + (args.accumulate ? to : 0) +
               (with_bias ? bias[static_cast<size_t>(column)] : 0);
        }
      }
      Solve(ProblemOf(args, false), b, a, bias, &c);
      EXPECT_EQ(c, wanted) << m << " " << n << " " << k << ", flags " << flags;
    }
  }
}

TEST(ColumnMajorProblem, LeavesToTheLibraryOnlyABiasOfTheResultsType) {
  const float bias = 0;
  MatmulArgs args{.bias = &bias, .m = 2, .n = 2, .k = 2, .ab_type = DType::kBF16};
  args.c_type = DType::kBF16;
  EXPECT_TRUE(ProblemOf(args, false).bias);
  args.c_type = DType::kF32;
  EXPECT_FALSE(ProblemOf(args, false).bias);
}

TEST(ColumnMajorProblem, RoundsOnlyFp32AndOnlyWhereThatIsAllowed) {
  MatmulArgs args{.m = 2, .n = 2, .k = 2};
  EXPECT_FALSE(ProblemOf(args, false).tf32);
  EXPECT_TRUE(ProblemOf(args, true).tf32);
  args.ab_type = DType::kBF16;
  EXPECT_FALSE(ProblemOf(args, true).tf32);
}

TEST(ColumnMajorProblem, LeavesGelusSlopeToTheLibraryInBf16AndOnlyAsItsEpilogueWantsIt) {
  alignas(256) static char memory[512];
  const MatmulArgs args{.m = 3, .n = 16, .k = 5, .ab_type = DType::kBF16, .c_type = DType::kBF16};
  EXPECT_TRUE(TakesGeluSlope(args, memory));
  EXPECT_TRUE(TakesGeluSlope(args, memory + 16));
  EXPECT_FALSE(TakesGeluSlope(args, memory + 8));
  const auto with = [&](auto change) {
    MatmulArgs changed = args;
    change(&changed);
    return TakesGeluSlope(changed, memory);
  };
  EXPECT_FALSE(with([](MatmulArgs* a) { a->n = 20; }));
  EXPECT_FALSE(with([](MatmulArgs* a) { a->k = 0; }));
  EXPECT_FALSE(with([](MatmulArgs* a) { a->accumulate = true; }));
  EXPECT_FALSE(with([](MatmulArgs* a) { a->bias = memory; }));
  EXPECT_FALSE(with([](MatmulArgs* a) { a->c_type = DType::kF32; }));
  EXPECT_FALSE(with([](MatmulArgs* a) { a->ab_type = a->c_type = DType::kF32; }));
  EXPECT_FALSE(with([](MatmulArgs* a) { a->ab_type = a->c_type = DType::kF16; }));
  // Another algorithm than the plain product's.
  ColumnMajorProblem problem = ProblemOf(args, false);
  const ColumnMajorProblem plain = problem;
  problem.gelu_slope = true;
  EXPECT_FALSE(problem == plain);
}

TEST(ColumnMajorProblem, TellsAddressesApartByWhatDividesThem) {
  alignas(256) static char memory[512];
  EXPECT_EQ(AlignmentOf(memory), 16);
  EXPECT_EQ(AlignmentOf(memory + 32), 16);
  EXPECT_EQ(AlignmentOf(memory + 8), 8);
  EXPECT_EQ(AlignmentOf(memory + 6), 2);
  EXPECT_EQ(AlignmentOf(memory + 48), 16);
  MatmulArgs args{.a = memory, .b = memory, .c = memory, .m = 2, .n = 3, .k = 4};
  const ColumnMajorProblem aligned = ProblemOf(args, false);
  args.b = memory + 64;
  EXPECT_TRUE(aligned == ProblemOf(args, false));
  args.b = memory + 2;
  const ColumnMajorProblem other = ProblemOf(args, false);
  EXPECT_FALSE(aligned == other);
  EXPECT_EQ(other.left.alignment, 2);  // the operands change places
  EXPECT_EQ(other.right.alignment, 16);
}

TEST(ColumnMajorProblem, IsDescribedAsItsCallerWroteIt) {
  MatmulArgs args{.m = 2, .n = 3, .k = 4, .transpose_b = true, .ab_type = DType::kBF16};
  args.accumulate = true;
  EXPECT_EQ(Describe(ProblemOf(args, true)),
            "product [2, 4] by [4, 3] (stored transposed) of bf16 into fp32, accumulated");
}

}  // namespace
}  // namespace zeroshard::cuda
