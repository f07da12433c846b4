#include "worker/ops/norm_accumulator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/norm_accumulator.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

using D64 = hn::ScalableTag<double>;
using V64 = hn::Vec<D64>;
inline constexpr int64_t kLanes64 = HWY_LANES(double);
inline constexpr int64_t kSquareLanes = 8;
inline constexpr int64_t kSquareGroups = kSquareLanes / kLanes64;
inline constexpr int64_t kSquareBlock = 64;

HWY_INLINE V64 LoadWide(const float* p) {
  const hn::Rebind<float, D64> d32;
  return hn::PromoteTo(D64(), hn::LoadU(d32, p));
}
HWY_INLINE V64 LoadWide(const Bf16* p) {
  const hn::Rebind<float, D64> d32;
  const hn::Rebind<uint32_t, D64> du32;
  const hn::Rebind<Bf16, D64> d16;
  const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du32, hn::LoadU(d16, p)));
  return hn::PromoteTo(D64(), hn::BitCast(d32, bits));
}
HWY_INLINE V64 LoadWide(const Fp16* p) {
  alignas(64) float wide[kLanes64];
  for (int64_t i = 0; i < kLanes64; ++i) wide[i] = FloatOf(p[i]);
  return LoadWide(wide);
}

// Element i goes to lane i % 8; the lanes are folded by halves. Squares of fp32 numbers are exact
// in fp64, so a fused and an unfused multiply-add agree.
template <class T>
HWY_INLINE double BlockSum(const T* x) {
  V64 total[kSquareGroups];
  for (auto& group : total) group = hn::Zero(D64());
#pragma GCC unroll 8
  for (int64_t i = 0; i < kSquareBlock; i += kSquareLanes) {
#pragma GCC unroll 4
    for (int64_t g = 0; g < kSquareGroups; ++g) {
      const V64 v = LoadWide(x + i + g * kLanes64);
      total[g] = hn::MulAdd(v, v, total[g]);
    }
  }
  alignas(64) double lanes[kSquareLanes];
  for (int64_t g = 0; g < kSquareGroups; ++g) hn::StoreU(total[g], D64(), lanes + g * kLanes64);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
         ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

template <class T>
HWY_INLINE int64_t BlockSumsTyped(const T* x, int64_t size, double* sums) {
  int64_t blocks = 0;
  for (; size >= kSquareBlock; size -= kSquareBlock, x += kSquareBlock)
    sums[blocks++] = BlockSum(x);
  if (size > 0) {
    T padded[kSquareBlock] = {};
    std::memcpy(padded, x, static_cast<size_t>(size) * sizeof(T));
    sums[blocks++] = BlockSum(padded);
  }
  return blocks;
}

// The sums of squares of x's 64-element blocks (the last one padded with zeros); their number.
int64_t BlockSums(const void* x, int64_t size, DType dtype, double* sums) {
  int64_t blocks = 0;
  WithFloat(dtype,
            [&]<class T>(T) ZEROSHARD_KERNEL { blocks = BlockSumsTyped(As<T>(x), size, sums); });
  return blocks;
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard {

namespace {

constexpr int kFractionBits = 96;
constexpr int kMantissaBits = 52;
constexpr int kExponentBias = 1023;

// total += addend; true where it passed 2^192.
bool AddWords(const std::array<uint64_t, 3>& addend, NormAccumulator* total) {
  unsigned __int128 sum = static_cast<unsigned __int128>(total->low) + addend[0];
  total->low = static_cast<uint64_t>(sum);
  sum = (sum >> 64) + total->middle + addend[1];
  total->middle = static_cast<uint64_t>(sum);
  sum = (sum >> 64) + total->high + addend[2];
  total->high = static_cast<uint64_t>(sum);
  return (sum >> 64) != 0;
}

void AddSaturating(uint64_t addend, uint64_t* total) {
  if (__builtin_add_overflow(*total, addend, total)) *total = UINT64_MAX;
}

}  // namespace

void NormAccumulator::AddBlock(double sum_of_squares) {
  const uint64_t bits = std::bit_cast<uint64_t>(sum_of_squares);
  const int exponent = static_cast<int>(bits >> kMantissaBits);  // with the sign above it
  if (exponent >= kExponentBias + kFractionBits) {               // also infinity and NaN
    AddSaturating(1, &nonfinite);
    return;
  }
  if (exponent == 0) return;  // zero, or far below a unit
  const uint64_t one = uint64_t{1} << kMantissaBits;
  const uint64_t mantissa = one | (bits & (one - 1));
  const int shift = exponent - kExponentBias - kMantissaBits + kFractionBits;
  std::array<uint64_t, 3> words = {};
  if (shift < 0) {
    words[0] = shift > -64 ? mantissa >> -shift : 0;
  } else {
    const size_t word = static_cast<size_t>(shift) / 64;
    const unsigned __int128 wide = static_cast<unsigned __int128>(mantissa) << (shift % 64);
    words[word] = static_cast<uint64_t>(wide);
    if (word < 2) words[word + 1] = static_cast<uint64_t>(wide >> 64);  // else zero: below 2^96
  }
  if (AddWords(words, this)) AddSaturating(1, &nonfinite);
}

void NormAccumulator::Add(const NormAccumulator& other) {
  const uint64_t passed = AddWords({other.low, other.middle, other.high}, this) ? 1 : 0;
  AddSaturating(other.nonfinite, &nonfinite);
  AddSaturating(passed, &nonfinite);
}

double NormAccumulator::Value() const {
  if (nonfinite != 0) return std::numeric_limits<double>::infinity();
  const std::array<uint64_t, 4> words = {0, low, middle, high};
  for (int word = 3; word > 0; --word) {
    if (words[word] == 0) continue;
    // The 64 leading bits; whether any bit below is set rides on the last, so that the conversion,
    // which drops at least ten of them, rounds once and right.
    const int zeros = std::countl_zero(words[word]);
    const uint64_t below = words[word - 1];
    uint64_t leading = words[word] << zeros;
    bool rest = false;
    if (zeros > 0) {
      leading |= below >> (64 - zeros);
      rest = below << zeros != 0;
    } else {
      rest = below != 0;
    }
    for (int lower = word - 2; lower > 0; --lower) rest = rest || words[lower] != 0;
    if (rest) leading |= 1;
    return std::ldexp(static_cast<double>(leading), 64 * (word - 1) - zeros - kFractionBits);
  }
  return 0;
}

namespace cpu {

HWY_EXPORT(BlockSums);

void AddSquares(const void* x, int64_t n, DType dtype, NormAccumulator* acc, int threads) {
  AssertFloat(dtype);
  constexpr int64_t kBlocksAtOnce = 64;
  std::mutex mutex;
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    NormAccumulator part;
    double sums[kBlocksAtOnce];
    for (int64_t i = begin; i < end; i += 64 * kBlocksAtOnce) {
      const int64_t size = std::min(end - i, 64 * kBlocksAtOnce);
      const int64_t blocks = HWY_DYNAMIC_DISPATCH(BlockSums)(At(x, i, dtype), size, dtype, sums);
      for (int64_t block = 0; block < blocks; ++block) part.AddBlock(sums[block]);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    acc->Add(part);
  });
}

}  // namespace cpu
}  // namespace zeroshard
#endif  // HWY_ONCE
