// Element types shared by the planner, the devices, the kernels and the collectives.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zeroshard {

enum class DType : uint8_t { kF32, kBF16, kI32, kU8, kF16 };

constexpr size_t SizeOf(DType type) {
  switch (type) {
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

constexpr bool IsFloat(DType type) {
  return type == DType::kF32 || type == DType::kBF16 || type == DType::kF16;
}

constexpr const char* NameOf(DType type) {
  switch (type) {
    case DType::kF32:
      return "fp32";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "int32";
    case DType::kU8:
      return "uint8";
    case DType::kF16:
      return "fp16";
  }
  return "?";
}

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundUp(int64_t a, int64_t multiple) { return CeilDiv(a, multiple) * multiple; }

}  // namespace zeroshard
