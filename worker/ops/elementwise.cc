// Add and AccumulateF32.
#include <cstdint>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/elementwise.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class T>
HWY_INLINE void AddTyped(const T* a, const T* b, int64_t size, T* y) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    StoreN(hn::Add(LoadN(a + i, n), LoadN(b + i, n)), y + i, n);
  });
}

void AddRange(const void* a, const void* b, int64_t size, DType dtype, void* y) {
  WithFloat(dtype,
            [&]<class T>(T) ZEROSHARD_KERNEL { AddTyped(As<T>(a), As<T>(b), size, As<T>(y)); });
}

template <class T>
HWY_INLINE void AccumulateTyped(const T* x, int64_t size, float* acc) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    StoreN(hn::Add(LoadN(acc + i, n), LoadN(x + i, n)), acc + i, n);
  });
}

void AccumulateRange(const void* x, int64_t size, DType dtype, float* acc) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL { AccumulateTyped(As<T>(x), size, acc); });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(AddRange);
HWY_EXPORT(AccumulateRange);

void Add(const void* a, const void* b, int64_t n, DType dtype, void* y, int threads) {
  AssertFloat(dtype);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AddRange)
    (At(a, begin, dtype), At(b, begin, dtype), end - begin, dtype, At(y, begin, dtype));
  });
}

void AccumulateF32(const void* x, DType dtype, int64_t n, bool accumulate, float* acc,
                   int threads) {
  if (!accumulate) {
    Convert(x, dtype, n, acc, DType::kF32, threads);
    return;
  }
  AssertFloat(dtype);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AccumulateRange)
    (At(x, begin, dtype), end - begin, dtype, acc + begin);
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
