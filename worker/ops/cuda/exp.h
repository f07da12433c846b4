// exp and the logistic function, by the GPU's own exponential and reciprocal.
#pragma once

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// 2^x for |x| <= 1/2. The GPU's instruction is within 2 units of the last place (PTX ISA,
// ex2.approx.ftz.f32).
ZS_HOST_DEVICE float PowerOfTwo(float x) {
#ifdef __CUDA_ARCH__
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
#else
  return std::exp2(x);
#endif
}

// 1 / x for x in [1, 2], within a unit of the last place: the GPU's instruction and one step of
// Newton's.
ZS_HOST_DEVICE float Reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
#else
  return 1.0f / x;
#endif
}

// exp(x) for x <= 0, within 4e-7 relatively; 0 below -86 (where it is under 5e-38) and for a NaN.
// x = n ln 2 + r with n whole and |r| <= ln(2)/2.
ZS_HOST_DEVICE float ExpOfNegative(float x) {
  constexpr float kLog2E = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62e43p-1f;  // ln 2 is their sum
  constexpr float kLn2Low = -0x1.05c61p-29f;
  constexpr float kShift = 0x1.8p23f;  // adding it rounds to a whole number, in the low bits
  const float shifted = Fma(x, kLog2E, kShift);
  const float n = shifted - kShift;
  const float r = Fma(n, -kLn2Low, Fma(n, -kLn2High, x));
  // 2^n is put together from the whole number in shifted's mantissa.
  const float power = FromBits((BitsOf(shifted) << 23) + (127u << 23));
  return x >= -86.0f ? PowerOfTwo(r * kLog2E) * power : 0.0f;
}

struct Logistic {
  float value;  // s(x) = 1 / (1 + exp(-x))
  float slope;  // s(x) * (1 - s(x))
};
// Both from exp(-|x|), so that neither cancels nor overflows. For a NaN: 0, 0 or a NaN.
ZS_HOST_DEVICE Logistic LogisticOf(float x) {
  const float e = ExpOfNegative(x < 0 ? x : -x);
  const float r = Reciprocal(1.0f + e);
  const float er = e * r;
  return {x >= 0 ? r : er, er * r};
}

}  // namespace zeroshard::cuda
