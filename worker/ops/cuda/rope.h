// The rotation of Rope (ops.h), with the CPU's order of operations.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// Row `position` of the tables [positions, half]: of the fp32 angle, in fp64, rounded once.
struct RopeTableOp {
  const float* frequencies;
  int64_t half;
  float* cosines;
  float* sines;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t position, const Cols& mine) const {
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      for (int64_t i = col; i < col + N; ++i) {
        const double angle = static_cast<float>(position) * frequencies[i];
        cosines[position * half + i] = static_cast<float>(cos(angle));
        sines[position * half + i] = static_cast<float>(sin(angle));
      }
    });
  }
};

// Row = token; its columns are the pairs of all heads, half of them a head.
template <class T>
struct RopeOp {
  T* x;
  int64_t ld, seq;
  uint32_t half;
  const float* cosines;  // of the sequences' first position
  const float* sines;
  float sign;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t token, const Cols& mine) const {
    const int64_t position = token % seq * half;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      const uint32_t head = static_cast<uint32_t>(col) / half;
      const uint32_t pair = static_cast<uint32_t>(col) % half;
      T* const first = x + token * ld + int64_t{head} * 2 * half + pair;
      float c[N], s[N], a[N], b[N];
      Load<N>(cosines + position + pair, c);
      Load<N>(sines + position + pair, s);
      Load<N>(first, a);
      Load<N>(first + half, b);
      for (int i = 0; i < N; ++i) {
        const float sine = s[i] * sign, left = a[i], right = b[i];
        a[i] = Fma(left, c[i], -(right * sine));
        b[i] = Fma(right, c[i], left * sine);
      }
      Store<N>(a, first);
      Store<N>(b, first + half);
    });
  }
};

}  // namespace zeroshard::cuda
