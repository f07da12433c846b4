#include "worker/ops/tile_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/kernels/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/tile_kernels.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"
#include "worker/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

void PackBlock(const void* from, int64_t ld, DType from_type, int64_t rows, int64_t cols, void* to,
               DType to_type) {
  if (from_type == to_type) {
    const auto size = static_cast<int64_t>(SizeOf(from_type));
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(As<char>(to) + r * cols * size, As<char>(from) + r * ld * size,
                  static_cast<size_t>(cols * size));
    }
    return;
  }
  WithFloat(from_type, [&]<class T>(T) ZEROSHARD_KERNEL {
    for (int64_t r = 0; r < rows; ++r) {
      const T* in = As<T>(from) + r * ld;
      float* out = As<float>(to) + r * cols;
      ForEach(cols,
              [&](int64_t i, int64_t n) ZEROSHARD_KERNEL { StoreN(LoadN(in + i, n), out + i, n); });
    }
  });
}

void StoreBlock(const float* from, int64_t rows, int64_t cols, const void* bias, DType bias_type,
                bool accumulate, void* to, int64_t ld, DType to_type) {
  WithFloat(to_type, [&]<class T>(T) ZEROSHARD_KERNEL {
    WithFloat(bias_type, [&]<class B>(B) ZEROSHARD_KERNEL {
      for (int64_t r = 0; r < rows; ++r) {
        const float* in = from + r * cols;
        T* out = As<T>(to) + r * ld;
        ForEach(cols, [&](int64_t i, int64_t n) ZEROSHARD_KERNEL {
          V v = LoadN(in + i, n);
          if (bias != nullptr) v = hn::Add(v, LoadN(As<B>(bias) + i, n));
          if (accumulate) v = hn::Add(v, LoadN(out + i, n));
          StoreN(v, out + i, n);
        });
      }
    });
  });
}

void RowDots(const void* a, int64_t ld_a, const void* b, int64_t ld_b, DType dtype, int64_t rows,
             int64_t cols, float* out) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = As<T>(a) + r * ld_a;
      const T* y = As<T>(b) + r * ld_b;
      SumRow<1>(
          cols,
          [&](int64_t i, int64_t n, V* term)
              ZEROSHARD_KERNEL { *term = hn::Mul(LoadN(x + i, n), LoadN(y + i, n)); },
          out + r);
    }
  });
}

// Columns [begin, end) that a row sees; end >= begin.
struct Seen {
  int64_t begin, end;
  bool empty() const { return begin == end; }
  int64_t first_vector() const { return begin / kLanes * kLanes; }
};
HWY_INLINE Seen SeenBy(const ScoreTile& tile, int64_t row) {
  const int64_t end = std::clamp<int64_t>(row + tile.diagonal + 1, 0, tile.cols);
  if (tile.document_start == nullptr) return {0, end};
  return {std::clamp<int64_t>(tile.document_start[row] - tile.first_key, 0, end), end};
}

template <class T>
HWY_INLINE void ZeroFrom(T* row, int64_t begin, int64_t end) {
  if (begin < end) std::memset(row + begin, 0, static_cast<size_t>(end - begin) * sizeof(T));
}

// Elements from i on of a row of a tile, those that are not seen replaced by `instead`. i is at
// most one vector before `begin`, and before `end`.
HWY_INLINE V Masked(V v, int64_t i, Seen seen, V instead) {
  if (HWY_UNLIKELY(i < seen.begin)) {
    v = hn::IfThenElse(hn::FirstN(D(), static_cast<size_t>(seen.begin - i)), instead, v);
  }
  if (HWY_LIKELY(seen.end - i >= kLanes)) return v;
  return hn::IfThenElse(hn::FirstN(D(), static_cast<size_t>(seen.end - i)), v, instead);
}

// Zeros outside the vectors that hold what a row sees.
template <class T>
HWY_INLINE void ZeroAround(T* row, Seen seen, int64_t cols) {
  if (seen.empty()) {
    ZeroFrom(row, 0, cols);
    return;
  }
  ZeroFrom(row, 0, seen.first_vector());
  ZeroFrom(row, RoundUp(seen.end, kLanes), cols);
}

// The scale is positive, so that the largest score is the largest product. NaNs are found by the
// sum.
HWY_INLINE float RowMax(const float* row, Seen seen, int64_t cols) {
  const V lowest = Set(-std::numeric_limits<float>::infinity());
  V most = lowest;
  for (int64_t i = seen.first_vector(); i < seen.end; i += kLanes) {
    most = hn::Max(most, Masked(LoadN(row + i, cols - i), i, seen, lowest));
  }
  return hn::GetLane(hn::MaxOfLanes(D(), most));
}

// As ExpOfNegative, but a NaN stays one.
HWY_INLINE V ExpOrNan(V x) { return hn::IfThenElse(hn::Eq(x, x), ExpOfNegative(x), x); }

void SoftmaxStep(const ScoreTile& tile, const float* scores, float* max, float* sum, float* shrink,
                 void* weights, DType weight_type) {
  WithFloat(weight_type, [&]<class T>(T) ZEROSHARD_KERNEL {
    const V scale = Set(tile.scale);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const float* in = scores + r * tile.cols;
      T* out = As<T>(weights) + r * tile.cols;
      const float* factors = tile.factors == nullptr ? nullptr : tile.factors + r * tile.cols;
      const Seen seen = SeenBy(tile, r);
      if (seen.empty()) {
        ZeroAround(out, seen, tile.cols);
        shrink[r] = 1;
        continue;
      }
      const float most = std::max(max[r], tile.scale * RowMax(in, seen, tile.cols));
      const V minus_most = Set(-most);
      V total = hn::Zero(D());
      for (int64_t i = seen.first_vector(); i < seen.end; i += kLanes) {
        const int64_t n = tile.cols - i;
        V e = ExpOrNan(Fma(LoadN(in + i, n), scale, minus_most));
        e = Masked(e, i, seen, hn::Zero(D()));
        total = hn::Add(total, e);
        if (factors != nullptr) e = hn::Mul(e, LoadN(factors + i, n));
        StoreN(e, out + i, n);
      }
      ZeroAround(out, seen, tile.cols);
      shrink[r] = hn::GetLane(ExpOrNan(Set(max[r] - most)));
      sum[r] = std::fma(sum[r], shrink[r], hn::GetLane(hn::SumOfLanes(D(), total)));
      max[r] = most;
    }
  });
}

void ScaleRows(const float* factor, int64_t rows, int64_t cols, float* x) {
  for (int64_t r = 0; r < rows; ++r) {
    if (factor[r] == 1.0f) continue;
    float* row = x + r * cols;
    const V f = Set(factor[r]);
    ForEach(cols, [&](int64_t i, int64_t n)
                      ZEROSHARD_KERNEL { StoreN(hn::Mul(LoadN(row + i, n), f), row + i, n); });
  }
}

void FinishSoftmax(const float* x, const float* max, const float* sum, int64_t rows, int64_t cols,
                   void* to, int64_t ld, DType to_type, float* lse) {
  WithFloat(to_type, [&]<class T>(T) ZEROSHARD_KERNEL {
    for (int64_t r = 0; r < rows; ++r) {
      const float* in = x + r * cols;
      T* out = As<T>(to) + r * ld;
      const V total = Set(sum[r]);
      ForEach(cols, [&](int64_t i, int64_t n)
                        ZEROSHARD_KERNEL { StoreN(hn::Div(LoadN(in + i, n), total), out + i, n); });
      lse[r] = static_cast<float>(max[r] + std::log(static_cast<double>(sum[r])));
    }
  });
}

void SoftmaxGradient(const ScoreTile& tile, const float* scores, const float* d_weights,
                     const float* lse, const float* delta, void* weights, void* d_scores,
                     DType out_type) {
  WithFloat(out_type, [&]<class T>(T) ZEROSHARD_KERNEL {
    const V scale = Set(tile.scale);
    for (int64_t r = 0; r < tile.rows; ++r) {
      const float* s = scores + r * tile.cols;
      const float* dw = d_weights + r * tile.cols;
      T* w_out = As<T>(weights) + r * tile.cols;
      T* ds_out = As<T>(d_scores) + r * tile.cols;
      const float* factors = tile.factors == nullptr ? nullptr : tile.factors + r * tile.cols;
      const Seen seen = SeenBy(tile, r);
      const V minus_lse = Set(-lse[r]);
      const V d = Set(delta[r]);
      if (!seen.empty()) {
        for (int64_t i = seen.first_vector(); i < seen.end; i += kLanes) {
          const int64_t n = tile.cols - i;
          const V p = ExpOrNan(Fma(LoadN(s + i, n), scale, minus_lse));
          V w = p, d_p = LoadN(dw + i, n);
          if (factors != nullptr) {
            const V f = LoadN(factors + i, n);
            w = hn::Mul(p, f);
            d_p = hn::Mul(d_p, f);
          }
          const V ds = hn::Mul(hn::Mul(p, scale), hn::Sub(d_p, d));
          StoreN(Masked(w, i, seen, hn::Zero(D())), w_out + i, n);
          StoreN(Masked(ds, i, seen, hn::Zero(D())), ds_out + i, n);
        }
      }
      ZeroAround(w_out, seen, tile.cols);
      ZeroAround(ds_out, seen, tile.cols);
    }
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(PackBlock);
HWY_EXPORT(StoreBlock);
HWY_EXPORT(RowDots);
HWY_EXPORT(SoftmaxStep);
HWY_EXPORT(ScaleRows);
HWY_EXPORT(FinishSoftmax);
HWY_EXPORT(SoftmaxGradient);

void PackBlock(const void* from, int64_t ld, DType from_type, int64_t rows, int64_t cols, void* to,
               DType to_type) {
  HWY_DYNAMIC_DISPATCH(PackBlock)(from, ld, from_type, rows, cols, to, to_type);
}

void StoreBlock(const float* from, int64_t rows, int64_t cols, const void* bias, DType bias_type,
                bool accumulate, void* to, int64_t ld, DType to_type) {
  HWY_DYNAMIC_DISPATCH(StoreBlock)
  (from, rows, cols, bias, bias_type, accumulate, to, ld, to_type);
}

void RowDots(const void* a, int64_t ld_a, const void* b, int64_t ld_b, DType dtype, int64_t rows,
             int64_t cols, float* out) {
  HWY_DYNAMIC_DISPATCH(RowDots)(a, ld_a, b, ld_b, dtype, rows, cols, out);
}

void SoftmaxStep(const ScoreTile& tile, const float* scores, float* max, float* sum, float* shrink,
                 void* weights, DType weight_type) {
  HWY_DYNAMIC_DISPATCH(SoftmaxStep)(tile, scores, max, sum, shrink, weights, weight_type);
}

void ScaleRows(const float* factor, int64_t rows, int64_t cols, float* x) {
  HWY_DYNAMIC_DISPATCH(ScaleRows)(factor, rows, cols, x);
}

void FinishSoftmax(const float* x, const float* max, const float* sum, int64_t rows, int64_t cols,
                   void* to, int64_t ld, DType to_type, float* lse) {
  HWY_DYNAMIC_DISPATCH(FinishSoftmax)(x, max, sum, rows, cols, to, ld, to_type, lse);
}

void SoftmaxGradient(const ScoreTile& tile, const float* scores, const float* d_weights,
                     const float* lse, const float* delta, void* weights, void* d_scores,
                     DType out_type) {
  HWY_DYNAMIC_DISPATCH(SoftmaxGradient)
  (tile, scores, d_weights, lse, delta, weights, d_scores, out_type);
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
