// A balanced Feistel network over the next even number of bits is a permutation of [0, 2^bits);
// walking the cycle until it lands below n makes it one of [0, n) (Black and Rogaway, "Ciphers with
// Arbitrary Finite Domains", 2002, section 4). The domain is below 4 n, so that takes fewer than
// four rounds of the network on average.
#include "worker/data/dataset.h"

namespace zeroshard {
namespace {

constexpr int kRounds = 8;

// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

SampleOrder::SampleOrder(int64_t samples, uint64_t seed)
    : samples_(samples < 1 ? 1 : samples), seed_(seed), bits_(2) {
  while (bits_ < 62 && (int64_t{1} << bits_) < samples_) bits_ += 2;
}

int64_t SampleOrder::At(int64_t position) const {
  const uint64_t key = Mix(Mix(seed_) ^ static_cast<uint64_t>(position / samples_));
  const int half = bits_ / 2;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  uint64_t value = position % samples_;
  do {
    uint64_t left = value >> half;
    uint64_t right = value & mask;
    for (int round = 0; round < kRounds; ++round) {
      const uint64_t next = left ^ (Mix(key ^ Mix(right * kRounds + round)) & mask);
      left = right;
      right = next;
    }
    value = (left << half) | right;
  } while (value >= static_cast<uint64_t>(samples_));
  return static_cast<int64_t>(value);
}

}  // namespace zeroshard
