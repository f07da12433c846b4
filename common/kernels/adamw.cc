#include "common/kernels/adamw.h"

#include <cmath>
#include <cstdint>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/kernels/adamw.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class G, class P>
HWY_INLINE void UpdateTyped(const AdamWFactors& factors, const Rounding& rounding, int64_t size,
                            const G* grad, float* master, float* exp_avg, float* exp_avg_sq,
                            P* param) {
  const V grad_scale = Set(factors.grad_scale), eps = Set(factors.eps);
  const V beta1 = Set(factors.beta1), rest1 = Set(factors.rest1);
  const V beta2 = Set(factors.beta2), rest2 = Set(factors.rest2);
  const V decay = Set(factors.decay), minus_step_size = Set(-factors.step_size);
  const V correction = Set(factors.correction);
  WithRounding<P>(rounding, [&](auto store) ZEROSHARD_KERNEL {
    ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
      const V g = hn::Mul(LoadN(grad + i, n), grad_scale);
      const V m = Fma(g, rest1, hn::Mul(LoadN(exp_avg + i, n), beta1));
      const V v = Fma(hn::Mul(g, g), rest2, hn::Mul(LoadN(exp_avg_sq + i, n), beta2));
      const V denom = Fma(hn::Sqrt(v), correction, eps);
      const V p = Fma(minus_step_size, hn::Div(m, denom), hn::Mul(LoadN(master + i, n), decay));
      StoreN(m, exp_avg + i, n);
      StoreN(v, exp_avg_sq + i, n);
      StoreN(p, master + i, n);
      store(p, param, i, n);
    });
  });
}

template <class G>
HWY_INLINE void UpdateByParam(const AdamWFactors& factors, const Rounding& rounding, int64_t size,
                              const G* grad, float* master, float* exp_avg, float* exp_avg_sq,
                              void* param, DType param_type) {
  WithFloat(param_type, [&]<class P>(P) ZEROSHARD_KERNEL {
    UpdateTyped(factors, rounding, size, grad, master, exp_avg, exp_avg_sq, As<P>(param));
  });
}

void UpdateRange(const AdamWFactors& factors, const Rounding& rounding, int64_t size,
                 const void* grad, DType grad_type, float* master, float* exp_avg,
                 float* exp_avg_sq, void* param, DType param_type) {
  WithFloat(grad_type, [&]<class G>(G) ZEROSHARD_KERNEL {
    UpdateByParam(factors, rounding, size, As<G>(grad), master, exp_avg, exp_avg_sq, param,
                  param_type);
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard {
namespace {

// Not std::pow, whose last bit depends on the C library.
double Power(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if (exponent & 1) result *= base;
  }
  return result;
}

}  // namespace

AdamWFactors AdamWFactorsOf(const AdamWArgs& args) {
  const double beta1 = args.beta1, beta2 = args.beta2, learning_rate = args.learning_rate;
  return {.grad_scale = args.grad_scale,
          .beta1 = args.beta1,
          .rest1 = static_cast<float>(1 - beta1),
          .beta2 = args.beta2,
          .rest2 = static_cast<float>(1 - beta2),
          .eps = args.eps,
          .decay = static_cast<float>(1 - learning_rate * args.weight_decay),
          .step_size = static_cast<float>(learning_rate / (1 - Power(beta1, args.t))),
          .correction = static_cast<float>(1 / std::sqrt(1 - Power(beta2, args.t)))};
}

namespace cpu {

HWY_EXPORT(UpdateRange);

void AdamW(const AdamWArgs& args, int64_t n, const void* grad, DType grad_type, float* master,
           float* exp_avg, float* exp_avg_sq, void* param, DType param_type, int threads) {
  AssertFloat(grad_type);
  AssertFloat(param_type);
  const AdamWFactors factors = AdamWFactorsOf(args);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(UpdateRange)
    (factors, args.rounding.From(begin), end - begin, At(grad, begin, grad_type), grad_type,
     master + begin, exp_avg + begin, exp_avg_sq + begin, At(param, begin, param_type), param_type);
  });
}

}  // namespace cpu
}  // namespace zeroshard
#endif  // HWY_ONCE
