#include "common/kernels/convert.h"

#include <cstdint>
#include <cstring>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/kernels/convert.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class From, class To>
HWY_INLINE void CopyTyped(const From* in, int64_t size, To* out) {
  ForEach(size,
          [=](int64_t i, int64_t n) ZEROSHARD_KERNEL { StoreN(LoadN(in + i, n), out + i, n); });
}

void ConvertRange(const void* in, DType in_type, int64_t size, void* out, DType out_type) {
  WithFloat(in_type, [&]<class From>(From) ZEROSHARD_KERNEL {
    WithFloat(out_type,
              [&]<class To>(To) ZEROSHARD_KERNEL { CopyTyped(As<From>(in), size, As<To>(out)); });
  });
}

void RoundRange(const float* in, int64_t size, const Rounding& rounding, uint16_t* out) {
  WithRounding<Bf16>(rounding, [&](auto store) ZEROSHARD_KERNEL {
    ForEach(size,
            [=](int64_t i, int64_t n) ZEROSHARD_KERNEL { store(LoadN(in + i, n), out, i, n); });
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(ConvertRange);
HWY_EXPORT(RoundRange);

void Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type, int threads) {
  AssertFloat(in_type);
  AssertFloat(out_type);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    const void* from = At(in, begin, in_type);
    void* to = At(out, begin, out_type);
    if (in_type == out_type) {
      std::memmove(to, from, static_cast<size_t>(end - begin) * SizeOf(in_type));
    } else {
      HWY_DYNAMIC_DISPATCH(ConvertRange)(from, in_type, end - begin, to, out_type);
    }
  });
}

void RoundParameters(const float* in, int64_t n, const Rounding& rounding, void* out,
                     DType out_type, int threads) {
  if (!rounding.stochastic || out_type != DType::kBF16)
    return Convert(in, DType::kF32, n, out, out_type, threads);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RoundRange)
    (in + begin, end - begin, rounding.From(begin), static_cast<uint16_t*>(out) + begin);
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
