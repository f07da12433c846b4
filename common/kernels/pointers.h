// Untyped tensors: where element i lies.
#pragma once

#include <cassert>
#include <cstdint>

#include "common/types.h"

namespace zeroshard::cpu {

inline const void* At(const void* base, int64_t element, DType type) {
  return static_cast<const char*>(base) + element * static_cast<int64_t>(SizeOf(type));
}
inline void* At(void* base, int64_t element, DType type) {
  return static_cast<char*>(base) + element * static_cast<int64_t>(SizeOf(type));
}

inline void AssertFloat([[maybe_unused]] DType type) { assert(IsFloat(type)); }

}  // namespace zeroshard::cpu
