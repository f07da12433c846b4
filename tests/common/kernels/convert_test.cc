#include "common/kernels/convert.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/worker/ops/vector_test_util.h"

namespace zeroshard::cpu {
namespace {

Values ThroughBf16(const Values& in, int skip = 0, int threads = 1) {
  const int64_t n = static_cast<int64_t>(in.size());
  Tensor wide(DType::kF32, in, skip), narrow(DType::kBF16, n, skip);
  Convert(wide.data(), DType::kF32, n, narrow.data(), DType::kBF16, threads);
  Tensor back(DType::kF32, n);
  Convert(narrow.data(), DType::kBF16, n, back.data(), DType::kF32, threads);
  EXPECT_THAT(back.values(), testing::Pointwise(testing::NanSensitiveDoubleEq(), narrow.values()));
  return back.values();
}

TEST(ConvertTest, RoundsToNearestEven) {
  Values in, expected;
  for (int64_t i = 0; i < 3000; ++i) {
    const double value = std::ldexp(1.0 + i / 65536.0, static_cast<int>(i % 200) - 100);
    in.push_back(i % 2 == 0 ? value : -value);
    expected.push_back(RoundToBf16(in.back()));
  }
  ForEachTarget([&](const std::string& target) { EXPECT_EQ(ThroughBf16(in), expected) << target; });
}

TEST(ConvertTest, TiesGoToTheEvenNeighbour) {
  EXPECT_EQ(ThroughBf16({1 + 1 / 256.0, 1 + 3 / 256.0, -1 - 1 / 256.0, 1 + 1 / 256.0 + 1e-6}),
            (Values{1, 1 + 4 / 256.0, -1, 1 + 2 / 256.0}));
}

TEST(ConvertTest, SubnormalsZerosAndInfinitiesSurvive) {
  const double tiny = std::ldexp(1.0, -133);  // bf16's smallest
  const double inf = std::numeric_limits<double>::infinity();
  const double largest = std::numeric_limits<float>::max();
  ForEachTarget([&](const std::string& target) {
    EXPECT_EQ(ThroughBf16({tiny, 1.5 * tiny, tiny / 2, -tiny, 0, inf, -inf, largest}),
              (Values{tiny, 2 * tiny, 0, -tiny, 0, inf, -inf, inf}))
        << target;
    EXPECT_TRUE(std::signbit(ThroughBf16({-0.0})[0]));
  });
}

TEST(ConvertTest, ANanStaysANanWhateverItsBits) {
  for (const uint32_t bits : {0x7F800001u, 0x7FFFFFFFu, 0xFF800001u, 0xFFFFFFFFu, 0x7FC00000u}) {
    ForEachTarget([&](const std::string& target) {
      uint16_t narrow = 0;
      Convert(&bits, DType::kF32, 1, &narrow, DType::kBF16, 1);
      EXPECT_EQ(narrow & 0x7FC0, 0x7FC0) << target;
      EXPECT_EQ(narrow >> 15, bits >> 31) << target;
    });
  }
}

TEST(ConvertTest, SameBitsForThreadsAndAlignment) {
  for (const int64_t n : kSizes) {
    Values in = RandomValues(n, 3);
    for (double& value : in) value = static_cast<float>(value * 1.2345);
    const Values expected = ThroughBf16(in);
    for (const int threads : {2, 3}) EXPECT_EQ(ThroughBf16(in, threads, threads), expected);
  }
}

TEST(ConvertTest, EqualTypesAreCopiedBitByBitAlsoOntoThemselves) {
  for (const int64_t n : kSizes) {
    std::vector<uint32_t> bits(static_cast<size_t>(n));
    for (size_t i = 0; i < bits.size(); ++i) bits[i] = 0x7F800001u + static_cast<uint32_t>(i) * 77;
    for (const DType type : {DType::kF32, DType::kBF16}) {
      std::vector<uint32_t> out(bits.size(), 5);
      Convert(bits.data(), type, n, out.data(), type, 3);
      const size_t bytes = static_cast<size_t>(n) * SizeOf(type);
      EXPECT_EQ(std::memcmp(out.data(), bits.data(), bytes), 0);
      Convert(out.data(), type, n, out.data(), type, 2);
      EXPECT_EQ(std::memcmp(out.data(), bits.data(), bytes), 0);
    }
  }
  Convert(nullptr, DType::kF32, 0, nullptr, DType::kBF16, 2);  // nothing
}

}  // namespace
}  // namespace zeroshard::cpu
