// LayerNorm (Ba, Kiros & Hinton 2016) and RMSNorm (Zhang & Sennrich 2019). With h = (x - mean) rstd
// (RMSNorm: mean = 0) and e = dy w, averages over a row's columns:
//   dx = rstd (e - avg(e) - h avg(e h))  (RMSNorm: without avg(e)),  dw = sum dy h,  db = sum dy.
#include <cmath>
#include <cstdint>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/norms.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

// The variance comes from a second pass over the deviations: no cancellation.
template <class T>
HWY_INLINE void LayerNormTyped(const T* x, const T* weight, const T* bias, int64_t rows,
                               int64_t cols, float eps, T* y, float* mean, float* rstd) {
  for (int64_t row = 0; row < rows; ++row, x += cols, y += cols) {
    float sum;
    SumRow<1>(
        cols, [=](int64_t i, int64_t n, V* term) ZEROSHARD_KERNEL { term[0] = LoadN(x + i, n); },
        &sum);
    const float center = sum / static_cast<float>(cols);
    SumRow<1>(
        cols,
        [=](int64_t i, int64_t n, V* term) ZEROSHARD_KERNEL {
          V deviation = hn::Sub(LoadN(x + i, n), Set(center));
          if (HWY_UNLIKELY(n < kLanes)) {
            const auto inside = hn::FirstN(D(), static_cast<size_t>(n));
            deviation = hn::IfThenElseZero(inside, deviation);
          }
          term[0] = hn::Mul(deviation, deviation);
        },
        &sum);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(cols) + eps);
    mean[row] = center;
    rstd[row] = scale;
    ForEach(cols, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
      const V h = hn::Mul(hn::Sub(LoadN(x + i, n), Set(center)), Set(scale));
      StoreN(Fma(h, LoadN(weight + i, n), LoadN(bias + i, n)), y + i, n);
    });
  }
}

template <class T>
HWY_INLINE void RmsNormTyped(const T* x, const T* weight, int64_t rows, int64_t cols, float eps,
                             T* y, float* rstd) {
  for (int64_t row = 0; row < rows; ++row, x += cols, y += cols) {
    float sum;
    SumRow<1>(
        cols,
        [=](int64_t i, int64_t n, V* term) ZEROSHARD_KERNEL {
          const V v = LoadN(x + i, n);
          term[0] = hn::Mul(v, v);
        },
        &sum);
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(cols) + eps);
    rstd[row] = scale;
    ForEach(cols, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
      const V h = hn::Mul(LoadN(x + i, n), Set(scale));
      StoreN(hn::Mul(h, LoadN(weight + i, n)), y + i, n);
    });
  }
}

// dx of some rows; mean is null for RMSNorm.
template <class T>
HWY_INLINE void NormInputGrad(const T* dy, const T* x, const T* weight, const float* mean,
                              const float* rstd, int64_t rows, int64_t cols, bool accumulate,
                              T* dx) {
  for (int64_t row = 0; row < rows; ++row, dy += cols, x += cols, dx += cols) {
    const float center = mean == nullptr ? 0.0f : mean[row];
    const float scale = rstd[row];
    float sums[2];
    SumRow<2>(
        cols,
        [=](int64_t i, int64_t n, V* term) ZEROSHARD_KERNEL {
          const V h = hn::Mul(hn::Sub(LoadN(x + i, n), Set(center)), Set(scale));
          term[0] = hn::Mul(LoadN(dy + i, n), LoadN(weight + i, n));
          term[1] = hn::Mul(term[0], h);
        },
        sums);
    const float average = mean == nullptr ? 0.0f : sums[0] / static_cast<float>(cols);
    const float slope = sums[1] / static_cast<float>(cols);
    ForEach(cols, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
      const V h = hn::Mul(hn::Sub(LoadN(x + i, n), Set(center)), Set(scale));
      const V e = hn::Mul(LoadN(dy + i, n), LoadN(weight + i, n));
      const V inner = Fma(h, Set(-slope), hn::Sub(e, Set(average)));
      if (accumulate) {
        StoreN(Fma(inner, Set(scale), LoadN(dx + i, n)), dx + i, n);
      } else {
        StoreN(hn::Mul(inner, Set(scale)), dx + i, n);
      }
    });
  }
}

template <class T>
HWY_INLINE void LayerNormWeightGrad(const T* dy, const T* x, const float* mean, const float* rstd,
                                    int64_t rows, int64_t cols, int64_t begin, int64_t end,
                                    float* weight_sums, float* bias_sums) {
  float* const outputs[2] = {weight_sums, bias_sums};
  FoldRows<2>(
      rows, begin, end,
      [=](int64_t row, int64_t col, int64_t n, V* term) ZEROSHARD_KERNEL {
        const V deviation = hn::Sub(LoadN(x + row * cols + col, n), Set(mean[row]));
        term[1] = LoadN(dy + row * cols + col, n);
        term[0] = hn::Mul(term[1], hn::Mul(deviation, Set(rstd[row])));
      },
      outputs);
}

template <class T>
HWY_INLINE void RmsNormWeightGrad(const T* dy, const T* x, const float* rstd, int64_t rows,
                                  int64_t cols, int64_t begin, int64_t end, float* weight_sums) {
  float* const outputs[1] = {weight_sums};
  FoldRows<1>(
      rows, begin, end,
      [=](int64_t row, int64_t col, int64_t n, V* term) ZEROSHARD_KERNEL {
        const V h = hn::Mul(LoadN(x + row * cols + col, n), Set(rstd[row]));
        term[0] = hn::Mul(LoadN(dy + row * cols + col, n), h);
      },
      outputs);
}

void LayerNormRows(const void* x, const void* weight, const void* bias, int64_t rows, int64_t cols,
                   float eps, DType dtype, void* y, float* mean, float* rstd) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    LayerNormTyped(As<T>(x), As<T>(weight), As<T>(bias), rows, cols, eps, As<T>(y), mean, rstd);
  });
}

void RmsNormRows(const void* x, const void* weight, int64_t rows, int64_t cols, float eps,
                 DType dtype, void* y, float* rstd) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    RmsNormTyped(As<T>(x), As<T>(weight), rows, cols, eps, As<T>(y), rstd);
  });
}

void NormInputGradRows(const void* dy, const void* x, const void* weight, const float* mean,
                       const float* rstd, int64_t rows, int64_t cols, DType dtype, bool accumulate,
                       void* dx) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    NormInputGrad(As<T>(dy), As<T>(x), As<T>(weight), mean, rstd, rows, cols, accumulate,
                  As<T>(dx));
  });
}

void LayerNormWeightColumns(const void* dy, const void* x, const float* mean, const float* rstd,
                            int64_t rows, int64_t cols, DType dtype, int64_t begin, int64_t end,
                            float* weight_sums, float* bias_sums) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    LayerNormWeightGrad(As<T>(dy), As<T>(x), mean, rstd, rows, cols, begin, end, weight_sums,
                        bias_sums);
  });
}

void RmsNormWeightColumns(const void* dy, const void* x, const float* rstd, int64_t rows,
                          int64_t cols, DType dtype, int64_t begin, int64_t end,
                          float* weight_sums) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    RmsNormWeightGrad(As<T>(dy), As<T>(x), rstd, rows, cols, begin, end, weight_sums);
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(LayerNormRows);
HWY_EXPORT(RmsNormRows);
HWY_EXPORT(NormInputGradRows);
HWY_EXPORT(LayerNormWeightColumns);
HWY_EXPORT(RmsNormWeightColumns);

namespace {

void InputGrad(const void* dy, const void* x, const void* weight, const float* mean,
               const float* rstd, int64_t rows, int64_t cols, DType dtype, bool accumulate,
               void* dx, int threads) {
  ParallelRows(rows, cols, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(NormInputGradRows)
    (At(dy, begin * cols, dtype), At(x, begin * cols, dtype), weight,
     mean == nullptr ? nullptr : mean + begin, rstd + begin, end - begin, cols, dtype, accumulate,
     At(dx, begin * cols, dtype));
  });
}

}  // namespace

void LayerNormForward(const void* x, const void* weight, const void* bias, int64_t rows,
                      int64_t cols, float eps, DType dtype, void* y, float* mean, float* rstd,
                      int threads) {
  AssertFloat(dtype);
  ParallelRows(rows, cols, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(LayerNormRows)
    (At(x, begin * cols, dtype), weight, bias, end - begin, cols, eps, dtype,
     At(y, begin * cols, dtype), mean + begin, rstd + begin);
  });
}

void RmsNormForward(const void* x, const void* weight, int64_t rows, int64_t cols, float eps,
                    DType dtype, void* y, float* rstd, int threads) {
  AssertFloat(dtype);
  ParallelRows(rows, cols, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(RmsNormRows)
    (At(x, begin * cols, dtype), weight, end - begin, cols, eps, dtype, At(y, begin * cols, dtype),
     rstd + begin);
  });
}

// The weights' gradients come first, as they read all of dy and x, which dx may overwrite.
void LayerNormBackward(const void* dy, const void* x, const void* weight, const float* mean,
                       const float* rstd, int64_t rows, int64_t cols, DType dtype,
                       bool accumulate_dx, void* dx, void* d_weight, void* d_bias, int threads) {
  AssertFloat(dtype);
  ParallelColumns(rows, cols, threads, [&](int64_t begin, int64_t end) {
    const int64_t room = RoundUp(end - begin, 64);
    std::vector<float> sums(static_cast<size_t>(2 * room));
    HWY_DYNAMIC_DISPATCH(LayerNormWeightColumns)
    (dy, x, mean, rstd, rows, cols, dtype, begin, end, sums.data(), sums.data() + room);
    Convert(sums.data(), DType::kF32, end - begin, At(d_weight, begin, dtype), dtype, 1);
    Convert(sums.data() + room, DType::kF32, end - begin, At(d_bias, begin, dtype), dtype, 1);
  });
  InputGrad(dy, x, weight, mean, rstd, rows, cols, dtype, accumulate_dx, dx, threads);
}

void RmsNormBackward(const void* dy, const void* x, const void* weight, const float* rstd,
                     int64_t rows, int64_t cols, DType dtype, bool accumulate_dx, void* dx,
                     void* d_weight, int threads) {
  AssertFloat(dtype);
  ParallelColumns(rows, cols, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(static_cast<size_t>(RoundUp(end - begin, 64)));
    HWY_DYNAMIC_DISPATCH(RmsNormWeightColumns)
    (dy, x, rstd, rows, cols, dtype, begin, end, sums.data());
    Convert(sums.data(), DType::kF32, end - begin, At(d_weight, begin, dtype), dtype, 1);
  });
  InputGrad(dy, x, weight, nullptr, rstd, rows, cols, dtype, accumulate_dx, dx, threads);
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
