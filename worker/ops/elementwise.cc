// Add, Convert and AccumulateF32.
#include <cstdint>
#include <cstring>

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
  if (dtype == DType::kBF16) {
    AddTyped(As<Bf16>(a), As<Bf16>(b), size, As<Bf16>(y));
  } else {
    AddTyped(As<float>(a), As<float>(b), size, As<float>(y));
  }
}

template <class From, class To>
HWY_INLINE void CopyTyped(const From* in, int64_t size, To* out) {
  ForEach(size,
          [=](int64_t i, int64_t n) ZEROSHARD_KERNEL { StoreN(LoadN(in + i, n), out + i, n); });
}

void WidenRange(const uint16_t* in, int64_t size, float* out) { CopyTyped(in, size, out); }
void NarrowRange(const float* in, int64_t size, uint16_t* out) { CopyTyped(in, size, out); }

template <class T>
HWY_INLINE void AccumulateTyped(const T* x, int64_t size, float* acc) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    StoreN(hn::Add(LoadN(acc + i, n), LoadN(x + i, n)), acc + i, n);
  });
}

void AccumulateRange(const void* x, int64_t size, DType dtype, float* acc) {
  if (dtype == DType::kBF16) {
    AccumulateTyped(As<Bf16>(x), size, acc);
  } else {
    AccumulateTyped(As<float>(x), size, acc);
  }
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(AddRange);
HWY_EXPORT(WidenRange);
HWY_EXPORT(NarrowRange);
HWY_EXPORT(AccumulateRange);

void Add(const void* a, const void* b, int64_t n, DType dtype, void* y, int threads) {
  AssertFloat(dtype);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(AddRange)
    (At(a, begin, dtype), At(b, begin, dtype), end - begin, dtype, At(y, begin, dtype));
  });
}

void Convert(const void* in, DType in_type, int64_t n, void* out, DType out_type, int threads) {
  AssertFloat(in_type);
  AssertFloat(out_type);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    const void* from = At(in, begin, in_type);
    void* to = At(out, begin, out_type);
    if (in_type == out_type) {
      std::memmove(to, from, static_cast<size_t>(end - begin) * SizeOf(in_type));
    } else if (in_type == DType::kBF16) {
      HWY_DYNAMIC_DISPATCH(WidenRange)
      (static_cast<const uint16_t*>(from), end - begin, static_cast<float*>(to));
    } else {
      HWY_DYNAMIC_DISPATCH(NarrowRange)
      (static_cast<const float*>(from), end - begin, static_cast<uint16_t*>(to));
    }
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
