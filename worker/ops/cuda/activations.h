// The arithmetic of GELU (tanh approximation) and SwiGLU.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/exp.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// 0.5 (1 + tanh(u)) = s(2u) with the logistic function s, so
// gelu(x) = x s(z), z = x (kGeluInner + kGeluCubic x^2), where u = sqrt(2/pi) (x + 0.044715 x^3)
// and z = 2u (Hendrycks & Gimpel 2016, section 2).
inline constexpr float kGeluInner = 1.5957691216057308f;   // 2 sqrt(2/pi)
inline constexpr float kGeluCubic = 0.07135481282823225f;  // 0.044715 kGeluInner

ZS_HOST_DEVICE float Gelu(float x) {
  return x * LogisticOf(x * Fma(x * x, kGeluCubic, kGeluInner)).value;
}

// s(z) + x s'(z) z', z' = kGeluInner + 3 kGeluCubic x^2.
ZS_HOST_DEVICE float GeluSlope(float x) {
  const float square = x * x;
  const Logistic s = LogisticOf(x * Fma(square, kGeluCubic, kGeluInner));
  return Fma(x * s.slope, Fma(square, 3 * kGeluCubic, kGeluInner), s.value);
}

template <class T>
struct GeluOp {
  const T* x;
  T* y;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float values[N];
    Load<N>(x + i, values);
    for (int k = 0; k < N; ++k) values[k] = Gelu(values[k]);
    Store<N>(values, y + i);
  }
};

template <class T>
struct GeluGradOp {
  const T* dy;
  const T* x;
  T* dx;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float gradient[N], values[N];
    Load<N>(dy + i, gradient);
    Load<N>(x + i, values);
    for (int k = 0; k < N; ++k) gradient[k] *= GeluSlope(values[k]);
    Store<N>(gradient, dx + i);
  }
};

template <class T>
struct SwiGluOp {
  const T* gate;
  const T* up;
  T* y;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float g[N], u[N];
    Load<N>(gate + i, g);
    Load<N>(up + i, u);
    for (int k = 0; k < N; ++k) u[k] = g[k] * LogisticOf(g[k]).value * u[k];
    Store<N>(u, y + i);
  }
};

// silu'(g) = s(g) + g s'(g).
template <class T>
struct SwiGluGradOp {
  const T* dy;
  const T* gate;
  const T* up;
  T* d_gate;
  T* d_up;

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float d[N], g[N], u[N];
    Load<N>(dy + i, d);
    Load<N>(gate + i, g);
    Load<N>(up + i, u);
    for (int k = 0; k < N; ++k) {
      const Logistic s = LogisticOf(g[k]);
      const float silu = g[k] * s.value;
      g[k] = d[k] * u[k] * Fma(g[k], s.slope, s.value);
      u[k] = d[k] * silu;
    }
    Store<N>(g, d_gate + i);
    Store<N>(u, d_up + i);
  }
};

}  // namespace zeroshard::cuda
