// RoundInPlace and AddRounded.
#include <cstdint>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/rounding.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

// v as memory of type T would give it back: with Store's rounding, so the bits are Convert's.
template <class T>
HWY_INLINE V Rounded(V v) {
  alignas(64) T lanes[kLanes];
  Store(v, lanes);
  return Load(lanes);
}
template <>
HWY_INLINE V Rounded<float>(V v) {
  return v;
}

void RoundRange(float* x, int64_t size, DType wire) {
  WithFloat(wire, [&]<class Wire>(Wire) ZEROSHARD_KERNEL {
    ForEach(size, [=](int64_t i, int64_t n)
                      ZEROSHARD_KERNEL { StoreN(Rounded<Wire>(LoadN(x + i, n)), x + i, n); });
  });
}

template <class Wire, class S, class G>
HWY_INLINE void AddTyped(const S* sum, int64_t size, G* gradient) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    const V rounded = Rounded<Wire>(LoadN(sum + i, n));
    StoreN(Rounded<Wire>(hn::Add(LoadN(gradient + i, n), rounded)), gradient + i, n);
  });
}

template <class Wire, class S>
HWY_INLINE void AddToGradient(const S* sum, int64_t size, void* gradient, DType gradient_type) {
  WithFloat(gradient_type,
            [&]<class G>(G) ZEROSHARD_KERNEL { AddTyped<Wire>(sum, size, As<G>(gradient)); });
}

template <class Wire>
HWY_INLINE void AddOfWire(const void* sum, DType sum_type, int64_t size, void* gradient,
                          DType gradient_type) {
  WithFloat(sum_type, [&]<class S>(S) ZEROSHARD_KERNEL {
    AddToGradient<Wire>(As<S>(sum), size, gradient, gradient_type);
  });
}

void AddRoundedRange(const void* sum, DType sum_type, int64_t size, DType wire, void* gradient,
                     DType gradient_type) {
  WithFloat(wire, [&]<class Wire>(Wire) ZEROSHARD_KERNEL {
    AddOfWire<Wire>(sum, sum_type, size, gradient, gradient_type);
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(RoundRange);
HWY_EXPORT(AddRoundedRange);

void RoundInPlace(float* x, int64_t n, DType wire, int threads) {
  AssertFloat(wire);
  if (wire == DType::kF32) return;
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RoundRange)(x + begin, end - begin, wire);
  });
}

void AddRounded(const void* sum, DType sum_type, int64_t n, DType wire, void* gradient,
                DType gradient_type, int threads) {
  AssertFloat(sum_type);
  AssertFloat(wire);
  AssertFloat(gradient_type);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AddRoundedRange)
    (At(sum, begin, sum_type), sum_type, end - begin, wire, At(gradient, begin, gradient_type),
     gradient_type);
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
