#include "worker/comm/fold.h"

#include <bit>
#include <cstdint>

#include "common/kernels/half.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/comm/fold.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using VF = hn::Vec<F32>;

// Elements as they lie in memory: float, uint16_t for bf16, Fp16.
HWY_INLINE VF LoadWide(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE VF LoadWide(const uint16_t* from) {
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), from))));
}
// Highway's conversions of fp16 are instructions from AVX2 on; elsewhere common/kernels/half.h
// gives the same bits.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
using F16 = hn::Rebind<hwy::float16_t, F32>;
HWY_INLINE VF LoadWide(const Fp16* from) {
  return hn::PromoteTo(F32(), hn::BitCast(F16(), hn::LoadU(U16(), &from->bits)));
}
HWY_INLINE void StoreRounded(VF value, Fp16* to) {
  hn::StoreU(hn::BitCast(U16(), hn::DemoteTo(F16(), value)), U16(), &to->bits);
}
#else
HWY_INLINE VF LoadWide(const Fp16* from) {
  HWY_ALIGN float lanes[hn::MaxLanes(F32())];
  for (size_t i = 0; i < hn::Lanes(F32()); ++i) lanes[i] = FloatOf(from[i]);
  return hn::Load(F32(), lanes);
}
HWY_INLINE void StoreRounded(VF value, Fp16* to) {
  HWY_ALIGN float lanes[hn::MaxLanes(F32())];
  hn::Store(value, F32(), lanes);
  for (size_t i = 0; i < hn::Lanes(F32()); ++i) to[i] = HalfOf(lanes[i]);
}
#endif
HWY_INLINE void StoreRounded(VF value, float* to) { hn::StoreU(value, F32(), to); }
HWY_INLINE void StoreRounded(VF value, uint16_t* to) {
  const U32 u32;
  const auto bits = hn::BitCast(u32, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1));
  const auto nearest = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(u32, 0x7fff))));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u32, 0x40));
  const auto is_nan = hn::RebindMask(u32, hn::IsNaN(value));
  const auto result = hn::IfThenElse(is_nan, quiet, nearest);
  hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(hn::RebindToSigned<U32>(), result)), U16(), to);
}

inline float Wide(float value) { return value; }
inline float Wide(Fp16 value) { return FloatOf(value); }
inline float Wide(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }
inline void Round(float value, float* to) { *to = value; }
inline void Round(float value, Fp16* to) { *to = HalfOf(value); }
inline void Round(float value, uint16_t* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  *to = value != value ? static_cast<uint16_t>((bits >> 16) | 0x40)
                       : static_cast<uint16_t>((bits + ((bits >> 16) & 1) + 0x7fff) >> 16);
}

template <typename In, typename Out>
void Fold(const void* const* contributions, size_t n, size_t count, bool accumulate, Out* out) {
  constexpr size_t kUnroll = 4;  // independent sums, so that an addition's latency is hidden
  const F32 f32;
  const size_t lanes = hn::Lanes(f32);
  size_t i = 0;
  for (; i + kUnroll * lanes <= count; i += kUnroll * lanes) {
    VF s0 = hn::Zero(f32), s1 = s0, s2 = s0, s3 = s0;
    if (accumulate) {
      s0 = LoadWide(out + i);
      s1 = LoadWide(out + i + lanes);
      s2 = LoadWide(out + i + 2 * lanes);
      s3 = LoadWide(out + i + 3 * lanes);
    }
    for (size_t c = 0; c < n; ++c) {
      const In* from = static_cast<const In*>(contributions[c]) + i;
      s0 = hn::Add(s0, LoadWide(from));
      s1 = hn::Add(s1, LoadWide(from + lanes));
      s2 = hn::Add(s2, LoadWide(from + 2 * lanes));
      s3 = hn::Add(s3, LoadWide(from + 3 * lanes));
    }
    StoreRounded(s0, out + i);
    StoreRounded(s1, out + i + lanes);
    StoreRounded(s2, out + i + 2 * lanes);
    StoreRounded(s3, out + i + 3 * lanes);
  }
  for (; i < count; ++i) {
    float sum = accumulate ? Wide(out[i]) : 0.0f;
    for (size_t c = 0; c < n; ++c) sum += Wide(static_cast<const In*>(contributions[c])[i]);
    Round(sum, out + i);
  }
}

void FoldF32(const void* const* c, size_t n, size_t count, bool accumulate, void* out) {
  Fold<float>(c, n, count, accumulate, static_cast<float*>(out));
}
void FoldBF16(const void* const* c, size_t n, size_t count, bool accumulate, void* out) {
  Fold<uint16_t>(c, n, count, accumulate, static_cast<uint16_t*>(out));
}
void FoldBF16ToF32(const void* const* c, size_t n, size_t count, bool accumulate, void* out) {
  Fold<uint16_t>(c, n, count, accumulate, static_cast<float*>(out));
}
void FoldF16(const void* const* c, size_t n, size_t count, bool accumulate, void* out) {
  Fold<Fp16>(c, n, count, accumulate, static_cast<Fp16*>(out));
}
void FoldF16ToF32(const void* const* c, size_t n, size_t count, bool accumulate, void* out) {
  Fold<Fp16>(c, n, count, accumulate, static_cast<float*>(out));
}

}  // namespace HWY_NAMESPACE
}  // namespace zeroshard
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard {

HWY_EXPORT(FoldF32);
HWY_EXPORT(FoldBF16);
HWY_EXPORT(FoldBF16ToF32);
HWY_EXPORT(FoldF16);
HWY_EXPORT(FoldF16ToF32);

void FoldInRankOrder(absl::Span<const void* const> contributions, DType type, int64_t count,
                     bool accumulate, void* out, DType output_type) {
  const size_t n = contributions.size();
  const size_t elements = static_cast<size_t>(count);
  if (type == DType::kF32) {
    HWY_DYNAMIC_DISPATCH(FoldF32)(contributions.data(), n, elements, accumulate, out);
  } else if (type == DType::kF16 && output_type == DType::kF32) {
    HWY_DYNAMIC_DISPATCH(FoldF16ToF32)(contributions.data(), n, elements, accumulate, out);
  } else if (type == DType::kF16) {
    HWY_DYNAMIC_DISPATCH(FoldF16)(contributions.data(), n, elements, accumulate, out);
  } else if (output_type == DType::kF32) {
    HWY_DYNAMIC_DISPATCH(FoldBF16ToF32)(contributions.data(), n, elements, accumulate, out);
  } else {
    HWY_DYNAMIC_DISPATCH(FoldBF16)(contributions.data(), n, elements, accumulate, out);
  }
}

}  // namespace zeroshard
#endif  // HWY_ONCE
