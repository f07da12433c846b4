// The arithmetic of Add, Convert, AccumulateF32, RoundInPlace and AddRounded.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// y may be a or b.
template <class T>
struct AddOp {
  const T* a;
  const T* b;
  T* y;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float first[N], second[N];
    Load<N>(a + i, first);
    Load<N>(b + i, second);
    for (int k = 0; k < N; ++k) first[k] += second[k];
    Store<N>(first, y + i);
  }
};

template <class From, class To>
struct ConvertOp {
  const From* in;
  To* out;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float values[N];
    Load<N>(in + i, values);
    Store<N>(values, out + i);
  }
};

template <class T>
struct AccumulateOp {
  const T* x;
  float* acc;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float values[N], sums[N];
    Load<N>(x + i, values);
    Load<N>(acc + i, sums);
    for (int k = 0; k < N; ++k) sums[k] += values[k];
    Store<N>(sums, acc + i);
  }
};

struct RoundOp {
  float* x;
  DType wire;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float values[N];
    Load<N>(x + i, values);
    for (int k = 0; k < N; ++k) values[k] = Rounded(values[k], wire);
    Store<N>(values, x + i);
  }
};

// gradient = wire(gradient + wire(sum)), of N elements.
template <int N, class S, class G>
ZS_HOST_DEVICE void AddRoundedElements(const S* sum, DType wire, G* gradient) {
  float sums[N], values[N];
  Load<N>(sum, sums);
  Load<N>(gradient, values);
  for (int k = 0; k < N; ++k) values[k] = Rounded(values[k] + Rounded(sums[k], wire), wire);
  Store<N>(values, gradient);
}

template <class S, class G>
struct AddRoundedOp {
  const S* sum;
  DType wire;
  G* gradient;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    AddRoundedElements<N>(sum + i, wire, gradient + i);
  }
};

}  // namespace zeroshard::cuda
