// One step of AdamW: the arithmetic of common/kernels/adamw.h.
#pragma once

#include <cstdint>

#include "common/kernels/adamw.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// param may be master.
template <class G, class P>
struct AdamWOp {
  AdamWFactors factors;
  const G* grad;
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  P* param;
  Rounding rounding = {};
  uint32_t key = 0;  // RoundingKey(rounding)

  template <int N>
  ZS_HOST_DEVICE void At(int64_t i) const {
    float g[N], m[N], v[N], p[N];
    Load<N>(grad + i, g);
    Load<N>(exp_avg + i, m);
    Load<N>(exp_avg_sq + i, v);
    for (int k = 0; k < N; ++k) {
      g[k] *= factors.grad_scale;
      m[k] = Fma(g[k], factors.rest1, m[k] * factors.beta1);
      v[k] = Fma(g[k] * g[k], factors.rest2, v[k] * factors.beta2);
    }
    Store<N>(m, exp_avg + i);
    Store<N>(v, exp_avg_sq + i);
    Load<N>(master + i, p);  // not before the stores: the gradient's registers are free by now
    for (int k = 0; k < N; ++k) {
      const float denom = Fma(SquareRoot(v[k]), factors.correction, factors.eps);
      p[k] = Fma(-factors.step_size, Divide(m[k], denom), p[k] * factors.decay);
    }
    Store<N>(p, master + i);
    if constexpr (Element<P>::kType == DType::kBF16) {
      if (rounding.stochastic) return StoreStochastic<N>(p, i);
    }
    Store<N>(p, param + i);
  }

 private:
  template <int N>
  ZS_HOST_DEVICE void StoreStochastic(const float* p, int64_t i) const {
    float rounded[N];  // which Store no longer changes
    for (int k = 0; k < N; ++k) {
      const auto element = static_cast<uint64_t>(rounding.first + i + k);
      const uint32_t kept = StochasticBf16(BitsOf(p[k]), key, element);
      rounded[k] = p[k] != p[k] ? p[k] : FromBits(kept << 16);
    }
    Store<N>(rounded, param + i);
  }
};

}  // namespace zeroshard::cuda
