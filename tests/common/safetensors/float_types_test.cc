#include "common/safetensors/float_types.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

float Read16(FloatType type, uint16_t bits) {
  char bytes[3] = {};
  std::memcpy(bytes + 1, &bits, 2);  // not aligned
  float value = 0;
  ToFloats(type, bytes + 1, 1, &value);
  return value;
}

// IEEE 754, binary16: 1 + 5 + 10 bits, exponent bias 15, subnormals without the leading one.
TEST(FloatTypesTest, EveryHalfHasItsExactValue) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Read16(FloatType::kF16, static_cast<uint16_t>(bits));
    const int exponent = static_cast<int>(bits >> 10 & 31);
    const int mantissa = static_cast<int>(bits & 1023);
    ASSERT_EQ(std::signbit(value), bits >= 32768) << bits;
    if (exponent == 31) {
      ASSERT_EQ(std::isinf(value), mantissa == 0) << bits;
      ASSERT_EQ(std::isnan(value), mantissa != 0) << bits;
      ASSERT_EQ(std::bit_cast<uint32_t>(value) >> 13 & 1023, static_cast<uint32_t>(mantissa));
      continue;
    }
    const double wanted =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    ASSERT_EQ(std::fabs(static_cast<double>(value)), wanted) << bits;
  }
}

TEST(FloatTypesTest, EveryBf16IsTheUpperHalfOfItsFloatAndComesBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = Read16(FloatType::kBF16, static_cast<uint16_t>(bits));
    ASSERT_EQ(std::bit_cast<uint32_t>(value), bits << 16);
    uint16_t back = 0;
    RoundToBf16(&value, 1, &back);
    if (std::isnan(value)) {
      ASSERT_EQ(back, bits | 0x40u);  // made quiet
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

// bf16 has 8 bits of significand: around 1 its values are 2^-7 apart.
TEST(FloatTypesTest, RoundingGoesToTheNearestAndOfTwoToTheEvenOne) {
  const auto round = [](double value) {
    const auto single = static_cast<float>(value);
    uint16_t bits = 0;
    RoundToBf16(&single, 1, &bits);
    return static_cast<double>(Read16(FloatType::kBF16, bits));
  };
  const double gap = 0x1p-7;
  EXPECT_EQ(round(1 + 0.49 * gap), 1.0);
  EXPECT_EQ(round(1 + 0.5 * gap), 1.0);
  EXPECT_EQ(round(1 + 0.51 * gap), 1 + gap);
  EXPECT_EQ(round(1 + 1.5 * gap), 1 + 2 * gap);
  EXPECT_EQ(round(-(1 + 2.5 * gap)), -(1 + 2 * gap));
  EXPECT_EQ(round(0x1p-133), 0x1p-133);  // the smallest subnormal of bf16
  EXPECT_EQ(round(0x1p-135), 0.0);
  EXPECT_EQ(round(std::numeric_limits<float>::max()), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(round(std::numeric_limits<float>::quiet_NaN())));
  // A NaN whose payload lies in the bits that are cut off stays one.
  const float signalling = std::bit_cast<float>(0x7F800001u);
  uint16_t bits = 0;
  RoundToBf16(&signalling, 1, &bits);
  EXPECT_TRUE(std::isnan(Read16(FloatType::kBF16, bits)));
}

TEST(FloatTypesTest, OtherTypesAreNone) {
  EXPECT_EQ(FloatTypeOf("BF16"), FloatType::kBF16);
  for (const char* type : {"F64", "I8", "F8_E4M3", "bf16", ""}) {
    EXPECT_FALSE(FloatTypeOf(type).has_value()) << type;
  }
}

}  // namespace
}  // namespace zeroshard
