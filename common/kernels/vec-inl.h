// Vectors of fp32 over fp32, bf16 or fp16 memory, for the vector kernels here and in worker/ops.
// Included once per target (Highway's scheme): after foreach_target.h, before HWY_BEFORE_NAMESPACE
// of the kernel's own file. Everything here gives the same bits on every target: see Fma, SumRow
// and FoldRows.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/kernels/half.h"
#include "common/rounding.h"
#include "common/types.h"
#include "hwy/highway.h"

#if defined(ZEROSHARD_COMMON_KERNELS_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZEROSHARD_COMMON_KERNELS_VEC_INL_H_
#undef ZEROSHARD_COMMON_KERNELS_VEC_INL_H_
#else
#define ZEROSHARD_COMMON_KERNELS_VEC_INL_H_
#endif

// A lambda that is compiled for the target and inlined into the loop that takes it.
#define ZEROSHARD_KERNEL HWY_ATTR __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
using Bf16 = uint16_t;  // the bits of a bf16

inline constexpr int64_t kLanes = HWY_LANES(float);
inline constexpr int64_t kRowLanes = 32;  // of a sum over a row
inline constexpr int64_t kRowGroups = kRowLanes / kLanes;
inline constexpr int64_t kRowBlock = 64;  // rows summed before their sum joins the total

HWY_INLINE V Load(const float* p) { return hn::LoadU(D(), p); }
HWY_INLINE V Load(const Bf16* p) {
  const hn::Rebind<uint32_t, D> d32;
  const hn::Rebind<Bf16, D> d16;
  return hn::BitCast(D(), hn::ShiftLeft<16>(hn::PromoteTo(d32, hn::LoadU(d16, p))));
}

HWY_INLINE void Store(V v, float* p) { hn::StoreU(v, D(), p); }
// Rounds to nearest even by adding half a unit less one, plus one where the kept bit is odd. A NaN
// is cut off and made quiet instead, as the addition could turn it into an infinity.
HWY_INLINE void Store(V v, Bf16* p) {
  const hn::Rebind<uint32_t, D> d32;
  const hn::Rebind<Bf16, D> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d32, 0x7FFFu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x00400000u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto kept = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, rounded));
  hn::StoreU(hn::TruncateTo(d16, kept), d16, p);
}

HWY_INLINE V Load(const Fp16* p) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  alignas(64) float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = FloatOf(p[i]);
  return hn::Load(D(), lanes);
#else
  const hn::Rebind<uint16_t, D> bits;
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(D(), hn::BitCast(d16, hn::LoadU(bits, &p->bits)));
#endif
}
// To nearest even, as common/kernels/half.h.
HWY_INLINE void Store(V v, Fp16* p) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  alignas(64) float lanes[kLanes];
  hn::Store(v, D(), lanes);
  for (int64_t i = 0; i < kLanes; ++i) p[i] = HalfOf(lanes[i]);
#else
  const hn::Rebind<uint16_t, D> bits;
  const hn::Rebind<hwy::float16_t, D> d16;
  hn::StoreU(hn::BitCast(bits, hn::DemoteTo(d16, v)), bits, &p->bits);
#endif
}

// Calls f(T()) with the C++ type of a floating-point DType.
template <class F>
HWY_INLINE void WithFloat(DType type, F f) {
  if (type == DType::kBF16) {
    f(Bf16());
  } else if (type == DType::kF16) {
    f(Fp16());
  } else {
    f(float());
  }
}

template <class T>
HWY_NOINLINE V LoadTail(const T* p, int64_t n) {
  alignas(64) T lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(T));
  return Load(lanes);
}
template <class T>
HWY_NOINLINE void StoreTail(V v, T* p, int64_t n) {
  alignas(64) T lanes[kLanes];
  Store(v, lanes);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(T));
}

// The first min(n, kLanes) elements (n >= 1), zeros after them.
template <class T>
HWY_INLINE V LoadN(const T* p, int64_t n) {
  return HWY_LIKELY(n >= kLanes) ? Load(p) : LoadTail(p, n);
}
template <class T>
HWY_INLINE void StoreN(V v, T* p, int64_t n) {
  if (HWY_LIKELY(n >= kLanes)) {
    Store(v, p);
  } else {
    StoreTail(v, p, n);
  }
}

// As common/rounding.h says, where a run is rounded at random.
struct RandomBits {
  uint32_t key = 0;
  uint64_t first = 0;
};
HWY_INLINE void StoreStochastic(V v, const RandomBits& random, uint64_t element, Bf16* p) {
  const hn::Rebind<uint32_t, D> d32;
  const hn::Rebind<Bf16, D> d16;
  const auto mix = [=](auto x) ZEROSHARD_KERNEL {
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<16>(x)), hn::Set(d32, 0x85EBCA6Bu));
    x = hn::Mul(hn::Xor(x, hn::ShiftRight<13>(x)), hn::Set(d32, 0xC2B2AE35u));
    return hn::Xor(x, hn::ShiftRight<16>(x));
  };
  const auto bits = hn::BitCast(d32, v);
  // A vector may pass a multiple of 2^32: its later lanes have the next upper half.
  const uint32_t begin = static_cast<uint32_t>(element);
  const uint32_t upper = static_cast<uint32_t>(element >> 32);
  const auto low = hn::Iota(d32, begin);
  const auto high =
      hn::IfThenElse(hn::Lt(low, hn::Set(d32, begin)), hn::Set(d32, (upper + 1) * 0x9E3779B9u),
                     hn::Set(d32, upper * 0x9E3779B9u));
  const auto place = hn::Add(mix(hn::Xor(low, hn::Set(d32, random.key))), high);
  const auto noise = hn::ShiftRight<16>(mix(hn::Xor(place, bits)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x00400000u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto kept = hn::ShiftRight<16>(hn::IfThenElse(is_nan, quiet, hn::Add(bits, noise)));
  hn::StoreU(hn::TruncateTo(d16, kept), d16, p);
}

// Element i of a run, of which n remain.
HWY_INLINE void StoreStochasticN(V v, const RandomBits& random, int64_t i, int64_t n, Bf16* p) {
  const uint64_t element = random.first + static_cast<uint64_t>(i);
  if (HWY_LIKELY(n >= kLanes)) return StoreStochastic(v, random, element, p);
  alignas(64) Bf16 lanes[kLanes];
  StoreStochastic(v, random, element, lanes);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(Bf16));
}

// How parameters of a type are stored: f(store) with store(v, p, i, n).
template <class P, class F>
HWY_INLINE void WithRounding(const Rounding& rounding, F f) {
  if constexpr (std::is_same_v<P, Bf16>) {
    if (rounding.stochastic) {
      const RandomBits random{RoundingKey(rounding), static_cast<uint64_t>(rounding.first)};
      f([=](V v, P* p, int64_t i, int64_t n)
            ZEROSHARD_KERNEL { StoreStochasticN(v, random, i, n, p + i); });
      return;
    }
  }
  f([](V v, P* p, int64_t i, int64_t n) ZEROSHARD_KERNEL { StoreN(v, p + i, n); });
}

// a * b + c, rounded once. The fallback target has no such instruction; libm's is exact.
HWY_INLINE V Fma(V a, V b, V c) {
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR
  float x[kLanes], y[kLanes], z[kLanes];
  hn::StoreU(a, D(), x);
  hn::StoreU(b, D(), y);
  hn::StoreU(c, D(), z);
  for (int64_t i = 0; i < kLanes; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::LoadU(D(), z);
#else
  return hn::MulAdd(a, b, c);
#endif
}

HWY_INLINE V Set(float value) { return hn::Set(D(), value); }

// f(i, n) for each vector of [0, size), n elements of it remaining from i on.
template <class F>
HWY_INLINE void ForEach(int64_t size, F f) {
  for (int64_t i = 0; i < size; i += kLanes) f(i, size - i);
}

// sums[k] = the sum over [0, size) of the terms f(i, n, term) sets: term[k] for the elements from i
// on, of which n remain (zeros are wanted after them).
template <int K, class F>
HWY_INLINE void SumRow(int64_t size, F f, float* sums) {
  V total[K][kRowGroups];
  for (auto& groups : total) {
    for (auto& group : groups) group = hn::Zero(D());
  }
  V term[K];
  int64_t i = 0;
  for (; i + kRowLanes <= size; i += kRowLanes) {
#pragma GCC unroll 8
    for (int64_t g = 0; g < kRowGroups; ++g) {
      f(i + g * kLanes, kLanes, term);
#pragma GCC unroll 2
      for (int k = 0; k < K; ++k) total[k][g] = hn::Add(total[k][g], term[k]);
    }
  }
  for (int64_t g = 0; i < size; ++g, i += kLanes) {
    f(i, size - i, term);
    for (int k = 0; k < K; ++k) total[k][g] = hn::Add(total[k][g], term[k]);
  }
  for (int k = 0; k < K; ++k) {
    float lanes[kRowLanes];
    for (int64_t g = 0; g < kRowGroups; ++g) Store(total[k][g], lanes + g * kLanes);
    for (int64_t half = kRowLanes / 2; half > 0; half /= 2) {
      for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    sums[k] = lanes[0];
  }
}

// Sums over rows for columns [begin, end): f(row, col, n, term) sets term[k] for the columns from
// col on, of which n remain. totals[k] has room for end - begin rounded up to 64.
template <int K, int U, class F>
HWY_INLINE void FoldColumns(int64_t row, int64_t row_end, int64_t col, int64_t n, F f,
                            float* const* totals, int64_t begin) {
  V sum[K][U];
  for (auto& lane : sum) {
    for (auto& vector : lane) vector = hn::Zero(D());
  }
  V term[K];
  for (; row < row_end; ++row) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      f(row, col + u * kLanes, U == 1 ? n : kLanes, term);
#pragma GCC unroll 2
      for (int k = 0; k < K; ++k) sum[k][u] = hn::Add(sum[k][u], term[k]);
    }
  }
  for (int k = 0; k < K; ++k) {
    for (int u = 0; u < U; ++u) {
      float* total = totals[k] + (col - begin) + u * kLanes;
      Store(hn::Add(Load(total), sum[k][u]), total);
    }
  }
}
template <int K, class F>
HWY_INLINE void FoldRows(int64_t rows, int64_t begin, int64_t end, F f, float* const* totals) {
  constexpr int kUnroll = 4 / K;
  for (int k = 0; k < K; ++k) {
    std::memset(totals[k], 0, static_cast<size_t>(RoundUp(end - begin, 64)) * sizeof(float));
  }
  for (int64_t row = 0; row < rows; row += kRowBlock) {
    const int64_t row_end = row + kRowBlock < rows ? row + kRowBlock : rows;
    int64_t col = begin;
    for (; col + kUnroll * kLanes <= end; col += kUnroll * kLanes) {
      FoldColumns<K, kUnroll>(row, row_end, col, kLanes, f, totals, begin);
    }
    for (; col < end; col += kLanes) {
      FoldColumns<K, 1>(row, row_end, col, end - col, f, totals, begin);
    }
  }
}

template <class T>
const T* As(const void* p) {
  return static_cast<const T*>(p);
}
template <class T>
T* As(void* p) {
  return static_cast<T*>(p);
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
