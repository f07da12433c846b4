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
    for (const DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
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

// Of half number `bits`, by its definition.
double HalfByDefinition(uint32_t bits) {
  const int exponent = static_cast<int>((bits >> 10) & 31);
  const int mantissa = static_cast<int>(bits & 1023);
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits >> 15) != 0 ? -magnitude : magnitude;
}

std::vector<uint16_t> ToFp16(const std::vector<float>& in) {
  std::vector<uint16_t> out(in.size());
  Convert(in.data(), DType::kF32, static_cast<int64_t>(in.size()), out.data(), DType::kF16, 1);
  return out;
}

constexpr uint32_t kInfiniteHalf = 0x7C00;

TEST(ConvertFp16Test, EveryPatternWidensToItsValueAndComesBack) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  ForEachTarget([&](const std::string& target) {
    std::vector<float> wide(all.size());
    Convert(all.data(), DType::kF16, 65536, wide.data(), DType::kF32, 1);
    const std::vector<uint16_t> back = ToFp16(wide);
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const uint32_t magnitude = bits & 0x7FFF;
      EXPECT_EQ(std::signbit(wide[bits]), (bits >> 15) != 0) << target << " " << bits;
      if (magnitude > kInfiniteHalf) {
        EXPECT_TRUE(std::isnan(wide[bits])) << target << " " << bits;
        EXPECT_EQ(back[bits], bits | 0x0200) << target;  // quiet
      } else {
        const double wanted = magnitude == kInfiniteHalf
                                  ? std::copysign(INFINITY, (bits >> 15) != 0 ? -1.0 : 1.0)
                                  : HalfByDefinition(bits);
        EXPECT_EQ(wide[bits], wanted) << target << " " << bits;
        EXPECT_EQ(back[bits], bits) << target;
      }
    }
  });
}

// Of each two neighbours the midpoint, which fp32 has exactly, and the values beside it.
TEST(ConvertFp16Test, BetweenNeighboursTheNearestIsTakenAndTheEvenOneOfTwo) {
  std::vector<float> in;
  std::vector<uint16_t> wanted;
  for (uint32_t bits = 0; bits < kInfiniteHalf; ++bits) {
    const bool last = bits + 1 == kInfiniteHalf;  // whose neighbour would be 65536
    const double above = last ? 65536 : HalfByDefinition(bits + 1);
    const auto middle = static_cast<float>((HalfByDefinition(bits) + above) / 2);
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float signed_middle = sign != 0 ? -middle : middle;
      in.push_back(signed_middle);
      wanted.push_back(static_cast<uint16_t>(sign | (bits % 2 == 0 ? bits : bits + 1)));
      in.push_back(std::nextafter(signed_middle, 0.0f));
      wanted.push_back(static_cast<uint16_t>(sign | bits));
      in.push_back(std::nextafter(signed_middle, sign != 0 ? -1e9f : 1e9f));
      wanted.push_back(static_cast<uint16_t>(sign | (bits + 1)));
    }
  }
  ForEachTarget([&](const std::string& target) { EXPECT_EQ(ToFp16(in), wanted) << target; });
}

TEST(ConvertFp16Test, WhatIsTooLargeIsInfiniteAndWhatIsTooSmallZero) {
  const std::vector<float> in = {65519.996f, 65520.0f,        1e30f,     INFINITY,   -65520.0f,
                                 0x1p-25f,   0x1.000002p-25f, 0x1p-149f, -0x1p-149f, -0.0f};
  ForEachTarget([&](const std::string& target) {
    EXPECT_EQ(ToFp16(in), (std::vector<uint16_t>{0x7BFF, 0x7C00, 0x7C00, 0x7C00, 0xFC00, 0, 1, 0,
                                                 0x8000, 0x8000}))
        << target;
  });
}

// The compiler's conversion is another implementation.
TEST(ConvertFp16Test, AgreesWithTheCompilersOnValuesOfAllSizes) {
  std::vector<float> in;
  std::vector<uint16_t> wanted;
  uint32_t state = 1;
  for (int i = 0; i < 300000; ++i) {
    state = state * 1664525u + 1013904223u;
    float value;
    std::memcpy(&value, &state, 4);
    if (std::isnan(value)) continue;
    int exponent = 0;  // half of them within fp16's range
    const float mantissa = std::frexp(value, &exponent);
    in.push_back(i % 2 == 0 || std::isinf(value) ? value : std::ldexp(mantissa, i % 45 - 26));
    wanted.push_back(HalfBits(in.back()));
  }
  ForEachTarget([&](const std::string& target) { EXPECT_EQ(ToFp16(in), wanted) << target; });
}

TEST(ConvertFp16Test, TheTwoNarrowTypesConvertIntoEachOther) {
  const Values in = {1.5, -3.25, 1e-7, 70000, 0x1.01p0};
  Tensor bf16(DType::kBF16, in), half(DType::kF16, 5), back(DType::kBF16, 5);
  Convert(bf16.data(), DType::kBF16, 5, half.data(), DType::kF16, 1);
  Convert(half.data(), DType::kF16, 5, back.data(), DType::kBF16, 1);
  const Values values = bf16.values();
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_EQ(half.values()[i], RoundToFp16(values[i]));
    EXPECT_EQ(back.values()[i], RoundToBf16(RoundToFp16(values[i])));
  }
}

}  // namespace
}  // namespace zeroshard::cpu
