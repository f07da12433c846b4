#include "worker/ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "worker/ops/simd_targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/cross_entropy.cc"
#include "hwy/foreach_target.h"
#include "worker/ops/exp-inl.h"
#include "worker/ops/parallel.h"
#include "worker/ops/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class T>
HWY_INLINE float LargestOf(const T* row, int64_t size) {
  const V lowest = Set(-std::numeric_limits<float>::infinity());
  V most[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes) {
    for (int k = 0; k < 4; ++k) most[k] = hn::Max(most[k], Load(row + i + k * kLanes));
  }
  for (; i < size; i += kLanes) {
    V x = LoadN(row + i, size - i);
    if (size - i < kLanes) {
      x = hn::IfThenElse(hn::FirstN(D(), static_cast<size_t>(size - i)), x, lowest);
    }
    most[0] = hn::Max(most[0], x);
  }
  float lanes[kLanes];
  Store(hn::Max(hn::Max(most[0], most[1]), hn::Max(most[2], most[3])), lanes);
  return *std::max_element(lanes, lanes + kLanes);
}

// As ExpOfNegative, but a NaN stays one.
HWY_INLINE V ExpOrNan(V x) { return hn::IfThenElse(hn::Eq(x, x), ExpOfNegative(x), x); }

template <class T>
HWY_INLINE float RowLoss(T* row, int64_t v, int32_t target, bool gradient) {
  if (target == -1) {
    if (gradient) std::memset(row, 0, static_cast<size_t>(v) * sizeof(T));
    return 0;
  }
  const bool known = target >= 0 && target < v;
  const float most = LargestOf(row, v);
  const V largest = Set(most);
  float total = 0;
  SumRow<1>(
      v,
      [&](int64_t i, int64_t n, V* term) ZEROSHARD_KERNEL {
        const V e = ExpOrNan(hn::Sub(LoadN(row + i, n), largest));
        *term = n < kLanes ? hn::IfThenElseZero(hn::FirstN(D(), static_cast<size_t>(n)), e) : e;
      },
      &total);
  if (!known) total = std::numeric_limits<float>::quiet_NaN();
  float lanes[kLanes];
  Store(LoadN(row + (known ? target : 0), 1), lanes);
  const float at_target = lanes[0];
  if (gradient) {
    const V inverse = Set(1.0f / total);
    const auto softmax = [&](int64_t i, int64_t n) ZEROSHARD_KERNEL {
      StoreN(hn::Mul(ExpOrNan(hn::Sub(LoadN(row + i, n), largest)), inverse), row + i, n);
    };
    ForEach(v, softmax);
    if (known) {
      // From the fp32 probability, so that the gradient is rounded once.
      const V p = hn::Mul(ExpOrNan(hn::Sub(Set(at_target), largest)), inverse);
      StoreN(hn::Sub(p, Set(1.0f)), row + target, 1);
    }
  }
  return static_cast<float>(std::log(static_cast<double>(total)) - (at_target - most));
}

void CrossEntropyRow(void* logits, int64_t row, int64_t v, DType dtype, int32_t target,
                     bool gradient, float* loss) {
  if (dtype == DType::kBF16) {
    *loss = RowLoss(As<Bf16>(logits) + row * v, v, target, gradient);
  } else {
    *loss = RowLoss(As<float>(logits) + row * v, v, target, gradient);
  }
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(CrossEntropyRow);

void CrossEntropy(void* logits, const int32_t* targets, int64_t rows, int64_t v, DType dtype,
                  bool gradient, float* losses, int threads) {
  if (v == 0) return;
  ParallelRows(rows, v, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(CrossEntropyRow)
      (logits, row, v, dtype, targets[row], gradient, losses + row);
    }
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
