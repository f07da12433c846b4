// The arithmetic of LayerNorm (Ba, Kiros & Hinton 2016) and RMSNorm (Zhang & Sennrich 2019). With
// h = (x - mean) rstd (RMSNorm: mean = 0) and e = dy w, averages over a row's columns:
//   dx = rstd (e - avg(e) - h avg(e h))  (RMSNorm: without avg(e)),  dw = sum dy h,  db = sum dy.
//
// A row belongs to a team of threads: each adds up what its columns have (ThreadCols, in rising
// order), then FoldTeam adds those of a warp by halves, and those of the warps by halves.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/each.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// kCenter: LayerNorm; else RMSNorm, without mean and bias.
template <class T, bool kCenter>
struct NormOp {
  const T* x;
  const T* weight;
  const T* bias;
  int64_t cols;
  float eps;
  T* y;
  float* mean;
  float* rstd;

  // One thread's part of the sum of x.
  template <class Cols>
  ZS_HOST_DEVICE float Sum(int64_t row, const Cols& mine) const {
    float sum = 0;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float v[N];
      Load<N>(x + row * cols + col, v);
      for (int i = 0; i < N; ++i) sum += v[i];
    });
    return sum;
  }

  // And of the sum of (x - center)^2: a second pass over the deviations, which cancels nothing.
  template <class Cols>
  ZS_HOST_DEVICE float Squares(int64_t row, float center, const Cols& mine) const {
    float sum = 0;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float v[N];
      Load<N>(x + row * cols + col, v);
      for (int i = 0; i < N; ++i) {
        const float deviation = v[i] - center;
        sum = Fma(deviation, deviation, sum);
      }
    });
    return sum;
  }

  ZS_HOST_DEVICE float Mean(float sum) const { return Divide(sum, static_cast<float>(cols)); }
  ZS_HOST_DEVICE float Scale(float squares) const {
    return Divide(1.0f, SquareRoot(Divide(squares, static_cast<float>(cols)) + eps));
  }

  // y and, by one thread, the statistics.
  template <class Cols>
  ZS_HOST_DEVICE void Write(int64_t row, float center, float scale, const Cols& mine) const {
    if (mine.first()) {
      if constexpr (kCenter) mean[row] = center;
      rstd[row] = scale;
    }
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float v[N], w[N];
      Load<N>(x + row * cols + col, v);
      Load<N>(weight + col, w);
      for (int i = 0; i < N; ++i) v[i] = (v[i] - center) * scale;
      if constexpr (kCenter) {
        float b[N];
        Load<N>(bias + col, b);
        for (int i = 0; i < N; ++i) v[i] = Fma(v[i], w[i], b[i]);
      } else {
        for (int i = 0; i < N; ++i) v[i] *= w[i];
      }
      Store<N>(v, y + row * cols + col);
    });
  }
};

// dx; it may be dy or x, as a thread reads its elements before it writes them.
template <class T, bool kCenter>
struct NormGradOp {
  const T* dy;
  const T* x;
  const T* weight;
  const float* mean;
  const float* rstd;
  int64_t cols;
  bool accumulate;
  T* dx;

  ZS_HOST_DEVICE float Center(int64_t row) const {
    if constexpr (kCenter) {
      return mean[row];
    } else {
      return 0;
    }
  }

  // One thread's part of the sums of e and e h.
  template <class Cols>
  ZS_HOST_DEVICE void Sums(int64_t row, const Cols& mine, float (&sums)[2]) const {
    const float center = Center(row), scale = rstd[row];
    float first = 0, second = 0;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float d[N], v[N], w[N];
      Load<N>(dy + row * cols + col, d);
      Load<N>(x + row * cols + col, v);
      Load<N>(weight + col, w);
      for (int i = 0; i < N; ++i) {
        const float e = d[i] * w[i];
        first += e;
        second = Fma(e, (v[i] - center) * scale, second);
      }
    });
    sums[0] = first;
    sums[1] = second;
  }

  template <class Cols>
  ZS_HOST_DEVICE void Write(int64_t row, const float (&sums)[2], const Cols& mine) const {
    const float center = Center(row), scale = rstd[row];
    const float average = kCenter ? Divide(sums[0], static_cast<float>(cols)) : 0.0f;
    const float slope = Divide(sums[1], static_cast<float>(cols));
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float d[N], v[N], w[N];
      Load<N>(dy + row * cols + col, d);
      Load<N>(x + row * cols + col, v);
      Load<N>(weight + col, w);
      for (int i = 0; i < N; ++i) {
        const float h = (v[i] - center) * scale;
        d[i] = Fma(h, -slope, d[i] * w[i] - average);
      }
      if (accumulate) {
        Load<N>(dx + row * cols + col, v);
        for (int i = 0; i < N; ++i) d[i] = Fma(d[i], scale, v[i]);
      } else {
        for (int i = 0; i < N; ++i) d[i] *= scale;
      }
      Store<N>(d, dx + row * cols + col);
    });
  }
};

// Terms (column_sum.h) of the weight's gradient, and of the bias's where there is a center.
template <class T, bool kCenter>
struct NormWeightTerms {
  static constexpr int kSums = kCenter ? 2 : 1;

  const T* dy;
  const T* x;
  const float* mean;
  const float* rstd;
  int64_t cols;

  template <int N>
  ZS_HOST_DEVICE void Terms(int64_t row, int64_t col, float (&terms)[kSums][N]) const {
    const float scale = rstd[row];
    float center = 0;
    if constexpr (kCenter) center = mean[row];
    float d[N], v[N];
    Load<N>(dy + row * cols + col, d);
    Load<N>(x + row * cols + col, v);
    for (int i = 0; i < N; ++i) {
      terms[0][i] = d[i] * ((v[i] - center) * scale);
      if constexpr (kCenter) terms[1][i] = d[i];
    }
  }
};

// Threads that share a row: 32 have no need to wait for each other, a long row is better shared.
inline int NormTeam(int64_t cols) {
  if (cols <= 2048) return 32;
  return cols <= 8192 ? 128 : 512;
}

}  // namespace zeroshard::cuda
