// A sum of squares that does not depend on the order or the sharding: each 64-element block's sum
// (fp64, fixed lane order) is converted to a 192-bit fixed-point number, and those are added as
// integers. Plain data; 32 bytes, exchanged between ranks as it is (little endian).
//
// Range: a unit of the last place is 2^-96, the sum stays below 2^96. Gradients arrive summed over
// the tokens of a step, not averaged, so a norm can be 2^24 times a usual one: the limit, 2^48
// = 2.8e14, is a norm of 1.7e7 a token at 2^24 tokens. A block loses less than 2^-96 by truncation;
// 2^30 blocks (64 G parameters) lose less than 2^-66, which is 1e-12 of the sum for any norm
// above 1.3e-4, and 2^21 blocks (124 M parameters) for any norm above 5.6e-6. 128 bits cannot hold
// both ends.
#pragma once

#include <cstdint>

namespace zeroshard {

struct NormAccumulator {
  // Value = (high * 2^128 + middle * 2^64 + low) * 2^-96, unsigned.
  uint64_t low = 0;
  uint64_t middle = 0;
  uint64_t high = 0;
  // Blocks that held an infinity or a NaN or reached 2^96, plus how often the sum itself passed
  // 2^96.
  uint64_t nonfinite = 0;

  // sum_of_squares >= 0, an infinity or a NaN.
  void AddBlock(double sum_of_squares);
  void Add(const NormAccumulator& other);  // saturates `nonfinite` on overflow
  // The sum rounded to nearest even; infinity where `nonfinite` is not zero.
  double Value() const;
};
static_assert(sizeof(NormAccumulator) == 32);

}  // namespace zeroshard
