#include "worker/ops/dropout.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/dropout.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

using DU32 = hn::Rebind<uint32_t, D>;
using VU32 = hn::Vec<DU32>;

struct Wide {
  VU32 high, low;
};
// The 64-bit products of the lanes.
HWY_INLINE Wide Multiply(VU32 a, VU32 b) {
  const DU32 d;
#if HWY_TARGET == HWY_SCALAR
  const uint64_t product = uint64_t{hn::GetLane(a)} * hn::GetLane(b);
  return {.high = hn::Set(d, static_cast<uint32_t>(product >> 32)),
          .low = hn::Set(d, static_cast<uint32_t>(product))};
#else
  const hn::RepartitionToWide<DU32> d64;
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, a))),
                               hn::BitCast(d, hn::ShiftRight<32>(hn::BitCast(d64, b))));
  return {.high = hn::OddEven(hn::BitCast(d, odd), hn::BitCast(d, hn::ShiftRight<32>(even))),
          .low = hn::OddEven(hn::BitCast(d, hn::ShiftLeft<32>(odd)), hn::BitCast(d, even))};
#endif
}

// Philox4x32 of kLanes counters at once: block b in lane b.
HWY_INLINE void PhiloxLanes(VU32* counter, PhiloxKey key) {
  const DU32 d;
  const VU32 multiplier0 = hn::Set(d, 0xD2511F53u), multiplier1 = hn::Set(d, 0xCD9E8D57u);
  for (int round = 0; round < 10; ++round) {
    const Wide product0 = Multiply(multiplier0, counter[0]);
    const Wide product1 = Multiply(multiplier1, counter[2]);
    counter[0] = hn::Xor(hn::Xor(product1.high, counter[1]), hn::Set(d, key[0]));
    counter[2] = hn::Xor(hn::Xor(product0.high, counter[3]), hn::Set(d, key[1]));
    counter[1] = product1.low;
    counter[3] = product0.low;
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
}

// factors of the 4 * kLanes elements from 4 * block on.
HWY_INLINE void FactorsOfBlocks(PhiloxKey key, const PhiloxCounter& base, uint64_t block,
                                uint32_t last_dropped, V scale, float* factors) {
  const DU32 d;
  const auto low = static_cast<uint32_t>(block);
  const VU32 low_words = hn::Iota(d, low);
  // Lanes whose low word wrapped around belong to the next high word.
  const auto high = static_cast<uint32_t>(block >> 32);
  const VU32 high_words =
      hn::IfThenElse(hn::Lt(low_words, hn::Set(d, low)), hn::Set(d, high + 1), hn::Set(d, high));
  VU32 words[4] = {low_words, high_words, hn::Set(d, base[2]), hn::Set(d, base[3])};
  PhiloxLanes(words, key);
  V kept[4];
  for (int i = 0; i < 4; ++i) {
    const auto is_kept = hn::RebindMask(D(), hn::Gt(words[i], hn::Set(d, last_dropped)));
    kept[i] = hn::IfThenElseZero(is_kept, scale);
  }
  hn::StoreInterleaved4(kept[0], kept[1], kept[2], kept[3], D(), factors);
}

void DropoutFactors(PhiloxKey key, const PhiloxCounter& base, uint32_t last_dropped, float scale,
                    int64_t begin, int64_t n, float* factors) {
  constexpr int64_t kStride = 4 * kLanes;
  const V kept = Set(scale);
  alignas(64) float whole[kStride];
  int64_t element = begin / 4 * 4;  // of the next factor to draw
  int64_t done = 0;
  while (done < n) {
    const int64_t skip = begin + done - element;  // only the first time
    const auto block = static_cast<uint64_t>(element / 4);
    if (skip == 0 && n - done >= kStride) {
      FactorsOfBlocks(key, base, block, last_dropped, kept, factors + done);
      done += kStride;
    } else {
      FactorsOfBlocks(key, base, block, last_dropped, kept, whole);
      const int64_t count = std::min(kStride - skip, n - done);
      std::memcpy(factors + done, whole + skip, static_cast<size_t>(count) * sizeof(float));
      done += count;
    }
    element += kStride;
  }
}

template <class T>
HWY_INLINE void ApplyTyped(const T* x, const float* factors, int64_t size, T* y) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    StoreN(hn::Mul(LoadN(x + i, n), LoadN(factors + i, n)), y + i, n);
  });
}

void ApplyFactors(const void* x, const float* factors, int64_t size, DType dtype, void* y) {
  WithFloat(dtype,
            [&]<class T>(T) ZEROSHARD_KERNEL { ApplyTyped(As<T>(x), factors, size, As<T>(y)); });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(DropoutFactors);
HWY_EXPORT(ApplyFactors);

namespace {

PhiloxCounter Words(uint64_t first, uint64_t second) {
  return {static_cast<uint32_t>(first), static_cast<uint32_t>(first >> 32),
          static_cast<uint32_t>(second), static_cast<uint32_t>(second >> 32)};
}

}  // namespace

DropoutMask::DropoutMask(const DropoutArgs& args, int64_t sample)
    : first_(args.first_element),
      threshold_(static_cast<uint64_t>(
          std::llround(std::clamp(static_cast<double>(args.rate), 0.0, 1.0) * 0x1p32))),
      scale_(threshold_ >> 32 != 0
                 ? 0.0f
                 : static_cast<float>(1.0 / (1.0 - static_cast<double>(args.rate)))) {
  const PhiloxCounter stream =
      Philox4x32(Words(args.step, static_cast<uint64_t>(sample)),
                 {static_cast<uint32_t>(args.seed), static_cast<uint32_t>(args.seed >> 32)});
  key_ = {stream[0], stream[1]};
  base_ = {0, 0, stream[2] ^ args.site, stream[3]};
}

void DropoutMask::Factors(int64_t begin, int64_t n, float* factors) const {
  if (threshold_ == 0) {
    std::fill_n(factors, n, 1.0f);
    return;
  }
  HWY_DYNAMIC_DISPATCH(DropoutFactors)
  (key_, base_, static_cast<uint32_t>(threshold_ - 1), scale_, first_ + begin, n, factors);
}

void Dropout(const DropoutArgs& args, const void* x, int64_t batch, int64_t per_sample, DType dtype,
             void* y, int threads) {
  AssertFloat(dtype);
  if (args.rate <= 0) {
    if (y != x && batch * per_sample > 0) {
      std::memmove(y, x, static_cast<size_t>(batch * per_sample) * SizeOf(dtype));
    }
    return;
  }
  ParallelElements(batch * per_sample, threads, [&](int64_t begin, int64_t end) {
    constexpr int64_t kAtATime = 1024;
    alignas(64) std::array<float, kAtATime> factors;
    while (begin < end) {
      const int64_t sample = begin / per_sample, first = begin % per_sample;
      const DropoutMask mask(args, args.first_sample + sample);
      const int64_t stop = std::min(end, begin - first + per_sample);
      for (int64_t i = begin; i < stop; i += kAtATime) {
        const int64_t n = std::min(kAtATime, stop - i);
        mask.Factors(first + (i - begin), n, factors.data());
        HWY_DYNAMIC_DISPATCH(ApplyFactors)
        (At(x, i, dtype), factors.data(), n, dtype, At(y, i, dtype));
      }
      begin = stop;
    }
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
