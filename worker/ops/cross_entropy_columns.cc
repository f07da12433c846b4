#include "worker/ops/cross_entropy_columns.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/cross_entropy_columns.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"
#include "worker/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

inline constexpr int64_t kChunkRows =
    128;  // whose exponentials are summed before joining the total

// One column each; room for whole vectors.
struct ColumnState {
  std::vector<float> max;  // the largest logit so far
  std::vector<float> sum;  // of exp(logit - max)
  // 0, or NaN where a logit is not finite: comparisons and the exponential would swallow a NaN.
  std::vector<float> poison;
};

// Rows [row, row_end) of U vectors of columns from col on, of which n remain, join the state at
// `at`.
template <int U, class T>
HWY_INLINE void JoinChunk(const T* logits, int64_t ld, int64_t row, int64_t row_end, int64_t col,
                          int64_t n, ColumnState& state, int64_t at) {
  V old_max[U], max[U], poison[U], sum[U];
  for (int u = 0; u < U; ++u) {
    old_max[u] = max[u] = Load(&state.max[at + u * kLanes]);
    poison[u] = Load(&state.poison[at + u * kLanes]);
    sum[u] = hn::Zero(D());
  }
  const auto load = [&](int64_t r, int u) ZEROSHARD_KERNEL {
    const T* p = logits + r * ld + col + u * kLanes;
    return U == 1 ? LoadN(p, n) : Load(p);
  };
  for (int64_t r = row; r < row_end; ++r) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const V x = load(r, u);
      max[u] = hn::Max(max[u], x);
      poison[u] = Fma(x, hn::Zero(D()), poison[u]);
    }
  }
  for (int64_t r = row; r < row_end; ++r) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      sum[u] = hn::Add(sum[u], ExpOfNegative(hn::Sub(load(r, u), max[u])));
    }
  }
  for (int u = 0; u < U; ++u) {
    const V shrink = ExpOfNegative(hn::Sub(old_max[u], max[u]));
    float* total = &state.sum[at + u * kLanes];
    Store(Fma(Load(total), shrink, sum[u]), total);
    Store(max[u], &state.max[at + u * kLanes]);
    Store(poison[u], &state.poison[at + u * kLanes]);
  }
}

template <class T>
HWY_INLINE float ToFloat(const T* p) {
  alignas(64) float lanes[kLanes];
  Store(LoadTail(p, 1), lanes);
  return lanes[0];
}

// Columns [begin, end).
template <class T>
HWY_INLINE void CrossEntropyTyped(T* logits, const int32_t* targets, int64_t ld, int64_t v,
                                  float gradient_scale, int64_t begin, int64_t end, float* losses) {
  constexpr int kUnroll = 4;
  const int64_t columns = end - begin;
  const size_t room = static_cast<size_t>(RoundUp(columns, 64));
  ColumnState state{std::vector<float>(room, -std::numeric_limits<float>::infinity()),
                    std::vector<float>(room), std::vector<float>(room)};
  for (int64_t row = 0; row < v; row += kChunkRows) {
    const int64_t row_end = std::min(v, row + kChunkRows);
    int64_t at = 0;
    for (; at + kUnroll * kLanes <= columns; at += kUnroll * kLanes) {
      JoinChunk<kUnroll>(logits, ld, row, row_end, begin + at, kLanes, state, at);
    }
    for (; at < columns; at += kLanes) {
      JoinChunk<1>(logits, ld, row, row_end, begin + at, columns - at, state, at);
    }
  }

  // From here on: what a column's exponentials are multiplied by, and its target's logit.
  std::vector<float> scale(room);
  std::vector<float> target_logit(room);
  for (int64_t at = 0; at < columns; ++at) {
    const int32_t target = targets[begin + at];
    if (target < 0) {
      losses[begin + at] = 0;
      state.poison[at] = 0;
      continue;
    }
    target_logit[at] = ToFloat(logits + target * ld + begin + at);
    const double above = static_cast<double>(state.max[at]) - target_logit[at];
    losses[begin + at] =
        static_cast<float>(above + std::log(static_cast<double>(state.sum[at]))) + state.poison[at];
    scale[at] = 1.0f / state.sum[at];
  }
  if (gradient_scale == 0) return;

  const auto softmax = [&](V x, int64_t at) ZEROSHARD_KERNEL {
    return Fma(ExpOfNegative(hn::Sub(x, Load(&state.max[at]))), Load(&scale[at]),
               Load(&state.poison[at]));
  };
  const V factor = Set(gradient_scale);
  // target_logit becomes the target's gradient.
  for (int64_t at = 0; at < columns; at += kLanes) {
    const V p = softmax(Load(&target_logit[at]), at);
    Store(hn::Mul(hn::Sub(p, Set(1.0f)), factor), &target_logit[at]);
  }
  for (int64_t row = 0; row < v; ++row) {
    T* p = logits + row * ld + begin;
    int64_t at = 0;
    for (; at + kLanes <= columns; at += kLanes) {
      Store(hn::Mul(softmax(Load(p + at), at), factor), p + at);
    }
    if (at < columns) {
      const int64_t n = columns - at;
      StoreTail(hn::Mul(softmax(LoadTail(p + at, n), at), factor), p + at, n);
    }
  }
  for (int64_t at = 0; at < columns; ++at) {
    const int32_t target = targets[begin + at];
    if (target < 0) continue;
    StoreTail(Set(target_logit[at]), logits + target * ld + begin + at, 1);
  }
}

void CrossEntropyRange(void* logits, const int32_t* targets, int64_t ld, int64_t v, DType dtype,
                       float gradient_scale, int64_t begin, int64_t end, float* losses) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    CrossEntropyTyped(As<T>(logits), targets, ld, v, gradient_scale, begin, end, losses);
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(CrossEntropyRange);

void CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v, DType dtype,
                         float gradient_scale, float* losses, int threads) {
  AssertFloat(dtype);
  ParallelColumns(v, rows, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(CrossEntropyRange)
    (logits, targets, rows, v, dtype, gradient_scale, begin, end, losses);
  });
}

void AddLosses(const float* losses, const int32_t* targets, int64_t rows, double* sum) {
  double total = *sum;
  for (int64_t i = 0; i < rows; ++i) {
    if (targets[i] >= 0) total += static_cast<double>(losses[i]);
  }
  *sum = total;
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
