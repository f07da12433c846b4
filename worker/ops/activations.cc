// GELU (tanh approximation) and SwiGLU.
#include <cstdint>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/activations.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"
#include "worker/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

// 0.5 (1 + tanh(u)) = s(2u) with the logistic function s, so
// gelu(x) = x s(z), z = x (kInner + kCubic x^2), where u = sqrt(2/pi) (x + 0.044715 x^3), z = 2u
// (Hendrycks & Gimpel 2016, section 2).
inline constexpr float kInner = 1.5957691216057308f;   // 2 sqrt(2/pi)
inline constexpr float kCubic = 0.07135481282823225f;  // 0.044715 kInner

template <class T>
HWY_INLINE void GeluTyped(const T* x, int64_t size, T* y) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    const V v = LoadN(x + i, n);
    const V z = hn::Mul(v, Fma(hn::Mul(v, v), Set(kCubic), Set(kInner)));
    StoreN(hn::Mul(v, LogisticOf(z).value), y + i, n);
  });
}

// gelu'(x) = s(z) + x s'(z) z', z' = kInner + 3 kCubic x^2.
template <class T>
HWY_INLINE void GeluGradTyped(const T* dy, const T* x, int64_t size, T* dx) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    const V v = LoadN(x + i, n);
    const V square = hn::Mul(v, v);
    const V z = hn::Mul(v, Fma(square, Set(kCubic), Set(kInner)));
    const V dz = Fma(square, Set(3 * kCubic), Set(kInner));
    const Logistic s = LogisticOf(z);
    const V slope = Fma(hn::Mul(v, s.slope), dz, s.value);
    StoreN(hn::Mul(LoadN(dy + i, n), slope), dx + i, n);
  });
}

template <class T>
HWY_INLINE void SwiGluTyped(const T* gate, const T* up, int64_t size, T* y) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    const V g = LoadN(gate + i, n);
    const V silu = hn::Mul(g, LogisticOf(g).value);
    StoreN(hn::Mul(silu, LoadN(up + i, n)), y + i, n);
  });
}

// silu'(g) = s(g) + g s'(g).
template <class T>
HWY_INLINE void SwiGluGradTyped(const T* dy, const T* gate, const T* up, int64_t size, T* d_gate,
                                T* d_up) {
  ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    const V g = LoadN(gate + i, n);
    const V u = LoadN(up + i, n);
    const V d = LoadN(dy + i, n);
    const Logistic s = LogisticOf(g);
    StoreN(hn::Mul(hn::Mul(d, u), Fma(g, s.slope, s.value)), d_gate + i, n);
    StoreN(hn::Mul(d, hn::Mul(g, s.value)), d_up + i, n);
  });
}

void GeluRange(const void* x, int64_t n, DType dtype, void* y) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL { GeluTyped(As<T>(x), n, As<T>(y)); });
}

void GeluGradRange(const void* dy, const void* x, int64_t n, DType dtype, void* dx) {
  WithFloat(dtype,
            [&]<class T>(T) ZEROSHARD_KERNEL { GeluGradTyped(As<T>(dy), As<T>(x), n, As<T>(dx)); });
}

void SwiGluRange(const void* gate, const void* up, int64_t n, DType dtype, void* y) {
  WithFloat(dtype,
            [&]<class T>(T) ZEROSHARD_KERNEL { SwiGluTyped(As<T>(gate), As<T>(up), n, As<T>(y)); });
}

void SwiGluGradRange(const void* dy, const void* gate, const void* up, int64_t n, DType dtype,
                     void* d_gate, void* d_up) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    SwiGluGradTyped(As<T>(dy), As<T>(gate), As<T>(up), n, As<T>(d_gate), As<T>(d_up));
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(GeluRange);
HWY_EXPORT(GeluGradRange);
HWY_EXPORT(SwiGluRange);
HWY_EXPORT(SwiGluGradRange);

void GeluForward(const void* x, int64_t n, DType dtype, void* y, int threads) {
  AssertFloat(dtype);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(GeluRange)
    (At(x, begin, dtype), end - begin, dtype, At(y, begin, dtype));
  });
}

void GeluBackward(const void* dy, const void* x, int64_t n, DType dtype, void* dx, int threads) {
  AssertFloat(dtype);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(GeluGradRange)
    (At(dy, begin, dtype), At(x, begin, dtype), end - begin, dtype, At(dx, begin, dtype));
  });
}

void SwiGluForward(const void* gate, const void* up, int64_t n, DType dtype, void* y, int threads) {
  AssertFloat(dtype);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SwiGluRange)
    (At(gate, begin, dtype), At(up, begin, dtype), end - begin, dtype, At(y, begin, dtype));
  });
}

void SwiGluBackward(const void* dy, const void* gate, const void* up, int64_t n, DType dtype,
                    void* d_gate, void* d_up, int threads) {
  AssertFloat(dtype);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SwiGluGradRange)
    (At(dy, begin, dtype), At(gate, begin, dtype), At(up, begin, dtype), end - begin, dtype,
     At(d_gate, begin, dtype), At(d_up, begin, dtype));
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
