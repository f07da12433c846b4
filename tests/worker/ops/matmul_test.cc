#include "worker/ops/matmul.h"

#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/ops/typed_values.h"
#include "worker/ops/cpu_isa.h"
#include "worker/ops/ops.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Shape {
  int64_t m, n, k;
};

struct Case {
  Shape shape;
  bool transpose_a, transpose_b;
  DType ab_type, c_type;
  bool bias, accumulate;
};

// Operands of a case; c holds what is there before the product.
struct Operands {
  explicit Operands(const Case& c)
      : a(TypedValues::Random(c.shape.m * c.shape.k, c.ab_type, 1)),
        b(TypedValues::Random(c.shape.k * c.shape.n, c.ab_type, 2)),
        bias(TypedValues::Random(c.shape.n, c.ab_type, 3)),
        before(TypedValues::Random(c.shape.m * c.shape.n, c.c_type, 4)) {}

  MatmulArgs Args(const Case& c, TypedValues* result) const {
    return {.a = a.data(),
            .b = b.data(),
            .c = result->data(),
            .bias = c.bias ? bias.data() : nullptr,
            .m = c.shape.m,
            .n = c.shape.n,
            .k = c.shape.k,
            .transpose_a = c.transpose_a,
            .transpose_b = c.transpose_b,
            .ab_type = c.ab_type,
            .c_type = c.c_type,
            .accumulate = c.accumulate};
  }

  TypedValues a, b, bias, before;
};

std::vector<Case> CasesOf(const Shape& shape) {
  std::vector<Case> cases;
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      for (const auto& [ab, c] :
           {std::pair{DType::kF32, DType::kF32}, std::pair{DType::kBF16, DType::kF32},
            std::pair{DType::kBF16, DType::kBF16}, std::pair{DType::kF16, DType::kF32},
            std::pair{DType::kF16, DType::kF16}}) {
        cases.push_back({shape, ta, tb, ab, c, false, false});
        cases.push_back({shape, ta, tb, ab, c, true, false});
        cases.push_back({shape, ta, tb, ab, c, false, true});
      }
    }
  }
  return cases;
}

std::string Describe(const Case& c) {
  return testing::PrintToString(std::tuple(c.shape.m, c.shape.n, c.shape.k)) +
         (c.transpose_a ? " A^T" : "") + (c.transpose_b ? " B^T" : "") + " " + NameOf(c.ab_type) +
         " to " + NameOf(c.c_type) + (c.bias ? " bias" : "") + (c.accumulate ? " accumulate" : "");
}

TypedValues Compute(const Case& c, const Operands& operands, Ops* ops) {
  TypedValues result = operands.before;
  const absl::Status status = ops->Matmul(operands.Args(c, &result));
  EXPECT_TRUE(status.ok()) << status;
  return result;
}

// |error| of a sum of k products of values up to 1 in fp32, then rounded once to c_type.
void ExpectNaive(const Case& c, const Operands& o, const TypedValues& result) {
  const auto [m, n, k] = c.shape;
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double wanted = 0;
      for (int64_t l = 0; l < k; ++l) {
        wanted +=
            o.a[c.transpose_a ? l * m + i : i * k + l] * o.b[c.transpose_b ? j * k + l : l * n + j];
      }
      if (c.bias) wanted += o.bias[j];
      if (c.accumulate) wanted += o.before[i * n + j];
      const double allowed =
          RoundingOf(c.c_type) * std::abs(wanted) + 0x1p-24 * static_cast<double>(k + 2) + 1e-7;
      ASSERT_NEAR(result[i * n + j], wanted, allowed) << "at " << i << ", " << j;
    }
  }
}

class MatmulShape : public testing::TestWithParam<Shape> {};

TEST_P(MatmulShape, IsTheNaiveProductInEveryLayoutAndType) {
  const auto ops = MakeCpuOps(1);
  for (const Case& c : CasesOf(GetParam())) {
    SCOPED_TRACE(Describe(c));
    const Operands operands(c);
    ExpectNaive(c, operands, Compute(c, operands, ops.get()));
    if (HasFatalFailure()) return;
  }
}

TEST_P(MatmulShape, HasTheSameBitsForAnyThreadCount) {
  std::vector<std::unique_ptr<Ops>> teams;
  for (int threads = 1; threads <= 4; ++threads) teams.push_back(MakeCpuOps(threads));
  for (const Case& c : CasesOf(GetParam())) {
    SCOPED_TRACE(Describe(c));
    const Operands operands(c);
    const TypedValues wanted = Compute(c, operands, teams[0].get());
    for (int threads = 2; threads <= 4; ++threads) {
      EXPECT_TRUE(Compute(c, operands, teams[static_cast<size_t>(threads) - 1].get()) == wanted)
          << threads << " threads";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MatmulShape,
    testing::Values(Shape{1, 1, 1}, Shape{3, 5, 7}, Shape{17, 33, 65}, Shape{128, 64, 96},
                    Shape{129, 257, 131}, Shape{1, 300, 40}, Shape{200, 1, 70},
                    // Past one panel of k, and where oneDNN would split the sum over k.
                    Shape{8, 16, 2100}, Shape{64, 64, 2048}, Shape{2, 3, 5000}, Shape{5, 128, 2048},
                    Shape{3, 190, 4096}),
    [](const auto& param) {
      const Shape& s = param.param;
      return std::to_string(s.m) + "x" + std::to_string(s.n) + "x" + std::to_string(s.k);
    });

// The layers of a GPT-2 of 124 M parameters over a few positions: too large for the naive product.
TEST(MatmulTest, LargeShapesHaveTheSameBitsForAnyThreadCount) {
  const auto one = MakeCpuOps(1), two = MakeCpuOps(2), four = MakeCpuOps(4);
  for (const Case& c : {
           Case{{32, 2304, 768}, false, false, DType::kBF16, DType::kBF16, true, false},
           Case{{16, 768, 3072}, false, true, DType::kF32, DType::kF32, false, false},
           Case{{768, 768, 32}, true, false, DType::kBF16, DType::kF32, false, true},
           Case{{16, 50257, 64}, false, true, DType::kBF16, DType::kF32, false, false},
           Case{{16, 64, 50257}, false, false, DType::kBF16, DType::kBF16, false, false},
           Case{{50257, 64, 16}, true, false, DType::kF32, DType::kF32, false, true},
           Case{{50257, 16, 64}, false, true, DType::kBF16, DType::kBF16, false, false},
       }) {
    SCOPED_TRACE(Describe(c));
    const Operands operands(c);
    const TypedValues wanted = Compute(c, operands, one.get());
    EXPECT_TRUE(Compute(c, operands, two.get()) == wanted);
    EXPECT_TRUE(Compute(c, operands, four.get()) == wanted);
  }
}

// Padded or unusual operands fall to kernels that are slow and whose bits depend on the threads.
TEST(MatmulTest, TakesTheFastKernelsWhereTheProcessorHasThem) {
  if (!cpu::HasBrgemm()) GTEST_SKIP() << "no AVX-512 here, or DNNL_MAX_CPU_ISA hides it";
  for (const Shape& shape : {Shape{128, 2304, 768}, Shape{2304, 768, 128}, Shape{128, 768, 3072},
                             Shape{128, 50257, 768}, Shape{50257, 768, 128}, Shape{7, 13, 29}}) {
    for (const Case& c : CasesOf(shape)) {
      if (c.ab_type == DType::kBF16 && !cpu::HasNativeBf16()) continue;
      for (const int threads : {1, 2}) {
        cpu::ProductContext context;
        const cpu::ProductKey key{.m = shape.m,
                                  .n = shape.n,
                                  .k = shape.k,
                                  .transpose_a = c.transpose_a,
                                  .transpose_b = c.transpose_b,
                                  .ab_type = c.ab_type,
                                  .c_type = c.c_type,
                                  .bias = c.bias,
                                  .accumulate = c.accumulate,
                                  .threads = threads};
        EXPECT_THAT(context.Find(key)->implementation(), StartsWith("brg:")) << Describe(c);
      }
    }
  }
}

TEST(MatmulTest, CutsProductsIntoFixedBlocksWhereTheProcessorLacksFastKernels) {
  const Case c{{300, 300, 64}, false, false, DType::kBF16, DType::kF32, false, false};
  const Operands operands(c);
  TypedValues result = operands.before;
  cpu::ProductContext context;
  const cpu::MatmulPath path = cpu::ChoosePath(operands.Args(c, &result), 2, &context);
  EXPECT_EQ(path, cpu::HasNativeBf16() ? cpu::MatmulPath::kWhole : cpu::MatmulPath::kBlocks);
}

TEST(MatmulTest, ProductsOfTwoInstancesOnTwoThreadsDoNotMeet) {
  const Case c{{96, 160, 224}, true, true, DType::kBF16, DType::kF32, false, false};
  const Operands operands(c);
  const TypedValues wanted = Compute(c, operands, MakeCpuOps(1).get());
  std::vector<std::thread> ranks;
  std::vector<int> wrong(2, 0);
  for (size_t rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto ops = MakeCpuOps(2);
      for (int i = 0; i < 100; ++i) wrong[rank] += !(Compute(c, operands, ops.get()) == wanted);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_THAT(wrong, testing::Each(0));
}

TEST(MatmulTest, EmptySumIsTheBiasOrLeavesTheResult) {
  const auto ops = MakeCpuOps(1);
  const Case bias{{3, 4, 0}, false, false, DType::kBF16, DType::kBF16, true, false};
  ExpectNaive(bias, Operands(bias), Compute(bias, Operands(bias), ops.get()));
  const Case kept{{3, 4, 0}, false, false, DType::kF32, DType::kF32, false, true};
  EXPECT_TRUE(Compute(kept, Operands(kept), ops.get()) == Operands(kept).before);
  EXPECT_TRUE(ops->Matmul({.m = 0, .n = 4, .k = 4}).ok());
}

TEST(MatmulTest, NanReachesItsRowOnly) {
  const Case c{{4, 5, 6}, false, false, DType::kBF16, DType::kBF16, false, false};
  Operands operands(c);
  operands.a.Set(1 * 6 + 2, std::numeric_limits<float>::quiet_NaN());
  const TypedValues result = Compute(c, operands, MakeCpuOps(1).get());
  for (int64_t i = 0; i < 20; ++i) EXPECT_EQ(std::isnan(result[i]), i / 5 == 1) << i;
}

TEST(MatmulTest, RefusesWhatCannotBe) {
  const auto ops = MakeCpuOps(1);
  float x[4] = {};
  const auto message = [&](MatmulArgs args) {
    const absl::Status status = ops->Matmul(args);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(message({.a = x, .b = x, .c = x, .m = -1, .n = 2, .k = 2}), HasSubstr("negative"));
  EXPECT_THAT(message({.a = x, .b = x, .c = x, .m = 2, .n = 2, .k = int64_t{1} << 40}),
              HasSubstr("2147483647"));
  EXPECT_THAT(message({.a = x, .c = x, .m = 2, .n = 2, .k = 2}), HasSubstr("operand is a null"));
  EXPECT_THAT(message({.a = x, .b = x, .m = 2, .n = 2, .k = 2}), HasSubstr("result is a null"));
  EXPECT_THAT(message({.a = x, .b = x, .c = x, .m = 2, .n = 2, .k = 2, .ab_type = DType::kI32}),
              HasSubstr("int32"));
  EXPECT_THAT(message({.a = x, .b = x, .c = x, .m = 2, .n = 2, .k = 2, .c_type = DType::kBF16}),
              HasSubstr("bf16"));
}

TEST(MatmulTest, CountsItsSeconds) {
  const auto ops = MakeCpuOps(1);
  EXPECT_EQ(ops->MatmulSeconds(), 0);
  const Case c{{64, 64, 64}, false, false, DType::kF32, DType::kF32, false, false};
  Compute(c, Operands(c), ops.get());
  EXPECT_GT(ops->MatmulSeconds(), 0);
}

TEST(CpuIsaTest, FingerprintNamesWhatDecidesTheBits) {
  EXPECT_TRUE(cpu::CpuIsSupported().ok()) << cpu::CpuIsSupported();
  const std::string fingerprint = MakeCpuOps(1)->Fingerprint();
  EXPECT_THAT(fingerprint, HasSubstr("onednn "));
  const char* cap = std::getenv("DNNL_MAX_CPU_ISA");
  if (cap != nullptr && std::string(cap) == "AVX2") {
    EXPECT_THAT(fingerprint, testing::AllOf(StartsWith("avx2,"), HasSubstr("highway AVX2")));
  }
}

}  // namespace
}  // namespace zeroshard
