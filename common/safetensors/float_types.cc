#include "common/safetensors/float_types.h"

#include <bit>
#include <cstring>

namespace zeroshard {
namespace {

// Scaling by a power of two brings a subnormal's leading bit to its place: its value is its
// mantissa x 2^-24, which fp32 holds exactly.
inline float FromHalf(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7FFFu;
  if (rest >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  if (rest >= 0x0400u) return std::bit_cast<float>(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(rest) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(small));
}

inline uint16_t Load16(const char* data) {
  uint16_t value = 0;
  std::memcpy(&value, data, sizeof(value));
  return value;
}

}  // namespace

std::optional<FloatType> FloatTypeOf(absl::string_view dtype) {
  if (dtype == "F32") return FloatType::kF32;
  if (dtype == "F16") return FloatType::kF16;
  if (dtype == "BF16") return FloatType::kBF16;
  return std::nullopt;
}

void ToFloats(FloatType type, const char* data, int64_t count, float* out) {
  if (count == 0) return;
  switch (type) {
    case FloatType::kF32:
      std::memcpy(out, data, static_cast<size_t>(count) * sizeof(float));
      return;
    case FloatType::kF16:
      for (int64_t i = 0; i < count; ++i) out[i] = FromHalf(Load16(data + 2 * i));
      return;
    case FloatType::kBF16:
      for (int64_t i = 0; i < count; ++i) {
        out[i] = std::bit_cast<float>(static_cast<uint32_t>(Load16(data + 2 * i)) << 16);
      }
      return;
  }
}

void RoundToBf16(const float* values, int64_t count, uint16_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(values[i]);
    // Half of the last kept bit, less one where that bit is zero: a tie goes to the even one.
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    out[i] = static_cast<uint16_t>((nan ? bits | 0x400000u : rounded) >> 16);
  }
}

}  // namespace zeroshard
