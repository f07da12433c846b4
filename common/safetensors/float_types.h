// The types of weights as fp32, and fp32 as bf16. Pure functions, thread-safe.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace zeroshard {

enum class FloatType : uint8_t { kF32, kF16, kBF16 };

// Of a dtype in a safetensors header; nullopt for any other type.
std::optional<FloatType> FloatTypeOf(absl::string_view dtype);
constexpr int64_t SizeOf(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

// The values of `count` elements at `data`, which need not be aligned. Every F16 and BF16 value,
// subnormal ones, infinities and the payloads of NaNs included, is exactly an fp32 value.
void ToFloats(FloatType type, const char* data, int64_t count, float* out);

// To the nearest bf16, of two equally near the one that is even; beyond the largest, infinity; a
// NaN stays one.
void RoundToBf16(const float* values, int64_t count, uint16_t* out);

}  // namespace zeroshard
