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

// The two hashes of a block are chains of dependent multiplications. Several blocks side by side
// keep the processor busy: about three times as fast as one after the other.
constexpr size_t kBlock = 64, kSide = 4;

template <size_t kBlocks>
void AddBlocks(uint64_t unit, uint64_t element, const float* values, size_t length,
               WeightDigest* digest) {
  uint64_t a[kBlocks], b[kBlocks];
  for (size_t k = 0; k < kBlocks; ++k) {
    a[k] = Mix(Mix(unit) ^ (element + k * kBlock));
    b[k] = Mix(~a[k]);
  }
  for (size_t i = 0; i < length; ++i) {
    for (size_t k = 0; k < kBlocks; ++k) {
      uint32_t bits = 0;
      std::memcpy(&bits, &values[k * kBlock + i], sizeof(bits));
      a[k] = Mix(a[k] ^ bits);
      b[k] = Mix(b[k] + bits);
    }
  }
  for (size_t k = 0; k < kBlocks; ++k) {
    digest->low += a[k];
    digest->high += b[k];
  }
}

}  // namespace

void WeightDigest::Add(uint64_t unit, uint64_t element, absl::Span<const float> values) {
  size_t at = 0;
  for (; at + kSide * kBlock <= values.size(); at += kSide * kBlock)
    AddBlocks<kSide>(unit, element + at, values.data() + at, kBlock, this);
  for (; at < values.size(); at += kBlock)
    AddBlocks<1>(unit, element + at, values.data() + at, std::min(kBlock, values.size() - at),
                 this);
}

void WeightDigest::Combine(const WeightDigest& other) {
  low += other.low;
  high += other.high;
}

std::string WeightDigest::Hex() const { return absl::StrFormat("%016x%016x", high, low); }

}  // namespace zeroshard
