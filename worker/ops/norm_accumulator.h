// A sum of squares that does not depend on the order or the sharding: each 64-element block's sum
// (fp64, fixed lane order) is converted to a 128-bit fixed-point number, and those are added as
// integers. Plain data; 32 bytes, exchanged between ranks as it is (little endian).
#pragma once

#include <cstdint>

namespace zeroshard {

struct NormAccumulator {
  // Value = (high * 2^64 + low) * 2^-80 (unsigned): blocks from 2^-80 to 2^47 a sum.
  uint64_t low = 0;
  uint64_t high = 0;
  uint64_t nonfinite = 0;  // blocks that held an infinity or a NaN, or that exceed the range
  uint64_t reserved = 0;

  void AddBlock(double sum_of_squares);
  void Add(const NormAccumulator& other);  // saturates `nonfinite` on overflow
  double Value() const;
};
static_assert(sizeof(NormAccumulator) == 32);

}  // namespace zeroshard
