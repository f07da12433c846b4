// exp and the logistic function on vectors. Include after vec-inl.h, once per target.
#include "common/kernels/vec-inl.h"

#if defined(ZEROSHARD_WORKER_OPS_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ZEROSHARD_WORKER_OPS_EXP_INL_H_
#undef ZEROSHARD_WORKER_OPS_EXP_INL_H_
#else
#define ZEROSHARD_WORKER_OPS_EXP_INL_H_
#endif

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

// exp(x) for x <= 0, within 2e-7 relatively; 0 below -86 (where it is under 5e-38) and for a NaN.
// x = n ln 2 + r with n whole and |r| <= ln(2)/2; exp(r) is its Taylor polynomial of degree 7,
// whose remainder is under r^8/8! = 5e-9.
HWY_INLINE V ExpOfNegative(V x) {
  const hn::Rebind<int32_t, D> di;
  constexpr float kLn2High = 0x1.62e43p-1f;  // ln 2 is their sum
  constexpr float kLn2Low = -0x1.05c61p-29f;
  const V shift = Set(0x1.8p23f);  // adding it rounds to a whole number, in the low mantissa bits
  const V shifted = Fma(x, Set(0x1.715476p0f), shift);
  const V n = hn::Sub(shifted, shift);
  V r = Fma(n, Set(-kLn2High), x);
  r = Fma(n, Set(-kLn2Low), r);
  V p = Set(1.0f / 5040);
  p = Fma(p, r, Set(1.0f / 720));
  p = Fma(p, r, Set(1.0f / 120));
  p = Fma(p, r, Set(1.0f / 24));
  p = Fma(p, r, Set(1.0f / 6));
  p = Fma(p, r, Set(0.5f));
  p = Fma(p, r, Set(1.0f));
  p = Fma(p, r, Set(1.0f));
  // 2^n is put together from the whole number in shifted's mantissa.
  const auto exponent =
      hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, int32_t{127} << 23));
  const V power = hn::BitCast(D(), exponent);
  return hn::IfThenElseZero(hn::Ge(x, Set(-86.0f)), hn::Mul(p, power));
}

struct Logistic {
  V value;  // s(x) = 1 / (1 + exp(-x))
  V slope;  // s(x) * (1 - s(x))
};
// Both from exp(-|x|), so that neither cancels nor overflows. For a NaN: 0, 0 or a NaN.
HWY_INLINE Logistic LogisticOf(V x) {
  const V e = ExpOfNegative(hn::Neg(hn::Abs(x)));
  const V r = hn::Div(Set(1.0f), hn::Add(Set(1.0f), e));
  const V er = hn::Mul(e, r);
  return {hn::IfThenElse(hn::Ge(x, hn::Zero(D())), r, er), hn::Mul(er, r)};
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
