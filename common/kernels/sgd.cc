#include "common/kernels/sgd.h"

#include <cstdint>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "common/kernels/sgd.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class G, class P>
HWY_INLINE void SgdTyped(const SgdArgs& args, int64_t size, const G* grad, float* master,
                         float* buffer, P* param) {
  const V grad_scale = Set(args.grad_scale), decay = Set(args.weight_decay);
  const V momentum = Set(args.momentum), minus_rate = Set(-args.learning_rate);
  WithRounding<P>(args.rounding, [&](auto store) ZEROSHARD_KERNEL {
    ForEach(size, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
      const V old = LoadN(master + i, n);
      const V g = Fma(old, decay, hn::Mul(LoadN(grad + i, n), grad_scale));
      const V b = hn::Add(hn::Mul(LoadN(buffer + i, n), momentum), g);
      const V p = Fma(minus_rate, b, old);
      StoreN(b, buffer + i, n);
      StoreN(p, master + i, n);
      store(p, param, i, n);
    });
  });
}

template <class G>
HWY_INLINE void SgdByParam(const SgdArgs& args, int64_t size, const G* grad, float* master,
                           float* buffer, void* param, DType param_type) {
  WithFloat(param_type, [&]<class P>(P) ZEROSHARD_KERNEL {
    SgdTyped(args, size, grad, master, buffer, As<P>(param));
  });
}

void SgdRange(const SgdArgs& args, int64_t size, const void* grad, DType grad_type, float* master,
              float* buffer, void* param, DType param_type) {
  WithFloat(grad_type, [&]<class G>(G) ZEROSHARD_KERNEL {
    SgdByParam(args, size, As<G>(grad), master, buffer, param, param_type);
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(SgdRange);

void Sgd(const SgdArgs& args, int64_t n, const void* grad, DType grad_type, float* master,
         float* buffer, void* param, DType param_type, int threads) {
  AssertFloat(grad_type);
  AssertFloat(param_type);
  ParallelElements(n, threads, [&](int64_t begin, int64_t end) {
    SgdArgs part = args;
    part.rounding = args.rounding.From(begin);
    HWY_DYNAMIC_DISPATCH(SgdRange)
    (part, end - begin, At(grad, begin, grad_type), grad_type, master + begin, buffer + begin,
     At(param, begin, param_type), param_type);
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
