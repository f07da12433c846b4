// IEEE 754 half precision (binary16: 1 sign, 5 exponent, 10 mantissa bits), one value at a time:
// what the vector kernels compute with instructions, for loops' ends and targets that have none.
// The bits are those of x86's F16C. Pure functions.
#pragma once

#include <bit>
#include <cstdint>

namespace zeroshard {

// The type of an element in memory.
struct Fp16 {
  uint16_t bits;
};

// Exact; a NaN keeps its payload and becomes quiet.
constexpr float FloatOf(Fp16 half) {
  const uint32_t sign = uint32_t{half.bits & 0x8000u} << 16;
  const uint32_t exponent = (half.bits >> 10) & 0x1Fu;
  const uint32_t mantissa = half.bits & 0x3FFu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  if (exponent == 0x1F) {
    const uint32_t quiet = mantissa != 0 ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13) | quiet);
  }
  return std::bit_cast<float>(sign | ((exponent + 127 - 15) << 23) | (mantissa << 13));
}

// To nearest, ties to even; 65520 and more become infinity, 2^-25 and less zero. A NaN keeps the
// upper bits of its payload and becomes quiet.
constexpr Fp16 HalfOf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const auto signed_half = [sign](uint32_t half) {
    return Fp16{static_cast<uint16_t>(sign | half)};
  };
  if (magnitude > 0x7F800000u) return signed_half(0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return signed_half(0x7C00u);
  // The bits below the last that is kept; a subnormal's unit is 2^-24 whatever its exponent.
  const uint32_t exponent = magnitude >> 23;
  if (exponent < 127 - 25) return signed_half(0);
  const bool subnormal = exponent < 127 - 14;
  const uint32_t dropped = subnormal ? 13 + (127 - 14 - exponent) : 13;
  const uint32_t kept =
      subnormal ? (magnitude & 0x007FFFFFu) | 0x00800000u : magnitude - (uint32_t{127 - 15} << 23);
  const uint32_t half_unit_less_one = (1u << (dropped - 1)) - 1;
  return signed_half((kept + half_unit_less_one + ((kept >> dropped) & 1u)) >> dropped);
}

}  // namespace zeroshard
