// How a master weight becomes the 16-bit parameter that is computed with: to nearest even, or, for
// bf16, up or down at random with the probability that makes the expectation the weight itself
// (Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, section 3), so that
// changes smaller than half a unit are not lost from step to step.
//
// The randomness is a hash of the weight's own bits, its place and the job's seed. So the parameter
// is a function of the state alone: workers, stores, replicas, resumed jobs and any world size
// agree, and nothing beside the state need be kept.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ZEROSHARD_ROUNDING_HD __host__ __device__ __forceinline__
#else
#define ZEROSHARD_ROUNDING_HD inline
#endif

namespace zeroshard {

// A bijection of 32 bits in which each bit of the argument changes each of the result with a
// probability of about one half: the finaliser of MurmurHash3 (Appleby, public domain).
ZEROSHARD_ROUNDING_HD uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

struct Rounding {
  bool stochastic = false;  // of bf16 alone; other types are rounded to nearest
  uint64_t seed = 0;
  uint32_t unit = 0;
  int64_t first = 0;  // element of the unit's flat vector where a call's run begins

  Rounding At(int of_unit, int64_t begin) const {
    Rounding there = *this;
    there.unit = static_cast<uint32_t>(of_unit);
    there.first = begin;
    return there;
  }
  Rounding From(int64_t elements) const { return At(static_cast<int>(unit), first + elements); }
};

// The part of the hash that is one for a whole unit.
ZEROSHARD_ROUNDING_HD uint32_t RoundingKey(const Rounding& rounding) {
  return Mix(static_cast<uint32_t>(rounding.seed) ^
             Mix(static_cast<uint32_t>(rounding.seed >> 32) ^ Mix(rounding.unit + 1)));
}

// The bf16 that the fp32 number with these bits becomes at an element of the unit's vector; not for
// a NaN, whose payload the sum could carry into the sign. 16 random bits are added below the
// kept ones, and the sum is cut off.
ZEROSHARD_ROUNDING_HD uint16_t StochasticBf16(uint32_t bits, uint32_t key, uint64_t element) {
  const uint32_t place = Mix(key ^ static_cast<uint32_t>(element)) +
                         static_cast<uint32_t>(element >> 32) * 0x9E3779B9u;
  return static_cast<uint16_t>((bits + (Mix(place ^ bits) >> 16)) >> 16);
}

}  // namespace zeroshard
