#include "worker/zero/digest.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"

namespace zeroshard {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that mixes every bit.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void WeightDigest::Add(uint64_t unit, uint64_t element, absl::Span<const float> values) {
  for (size_t at = 0; at < values.size(); at += 64) {
    const size_t end = std::min(values.size(), at + 64);
    uint64_t a = Mix(Mix(unit) ^ (element + at));
    uint64_t b = Mix(~a);
    for (size_t i = at; i < end; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &values[i], sizeof(bits));
      a = Mix(a ^ bits);
      b = Mix(b + bits);
    }
    low += a;
    high += b;
  }
}

void WeightDigest::Combine(const WeightDigest& other) {
  low += other.low;
  high += other.high;
}

std::string WeightDigest::Hex() const { return absl::StrFormat("%016x%016x", high, low); }

}  // namespace zeroshard
