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

// The state of columns [begin, end) after v rows of them.
template <class T>
HWY_INLINE ColumnState StateOf(const T* logits, int64_t ld, int64_t v, int64_t begin, int64_t end) {
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
  return state;
}

// The losses of columns [begin, end) from their whole state and their targets' logits; columns
// without a target get no poison and a scale of 0. Returns what their exponentials are multiplied
// by.
std::vector<float> LossesOf(ColumnState& state, const std::vector<float>& target_logit,
                            const int32_t* targets, int64_t begin, int64_t end, float* losses) {
  std::vector<float> scale(state.sum.size());
  for (int64_t at = 0; at < end - begin; ++at) {
    if (targets[begin + at] < 0) {
      losses[begin + at] = 0;
      state.poison[at] = 0;
      continue;
    }
    const double above = static_cast<double>(state.max[at]) - target_logit[at];
    losses[begin + at] =
        static_cast<float>(above + std::log(static_cast<double>(state.sum[at]))) + state.poison[at];
    scale[at] = 1.0f / state.sum[at];
  }
  return scale;
}

// The gradient of columns [begin, end) of logits, in place. `targets`: rows of these logits, -1:
// the column's is none of them. target_logit is used up.
template <class T>
HWY_INLINE void WriteGradient(T* logits, const int32_t* targets, int64_t ld, int64_t v,
                              float gradient_scale, int64_t begin, int64_t end,
                              const ColumnState& state, const std::vector<float>& scale,
                              std::vector<float>& target_logit) {
  const int64_t columns = end - begin;
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

// The targets' logits, 0 where there is none.
template <class T>
HWY_INLINE std::vector<float> TargetLogits(const T* logits, const int32_t* targets, int64_t ld,
                                           int64_t begin, int64_t end) {
  std::vector<float> target_logit(static_cast<size_t>(RoundUp(end - begin, 64)));
  for (int64_t at = 0; at < end - begin; ++at) {
    const int32_t target = targets[begin + at];
    if (target >= 0) target_logit[at] = ToFloat(logits + target * ld + begin + at);
  }
  return target_logit;
}

// Columns [begin, end).
template <class T>
HWY_INLINE void CrossEntropyTyped(T* logits, const int32_t* targets, int64_t ld, int64_t v,
                                  float gradient_scale, int64_t begin, int64_t end, float* losses) {
  ColumnState state = StateOf(logits, ld, v, begin, end);
  std::vector<float> target_logit = TargetLogits(logits, targets, ld, begin, end);
  const std::vector<float> scale = LossesOf(state, target_logit, targets, begin, end, losses);
  if (gradient_scale == 0) return;
  WriteGradient(logits, targets, ld, v, gradient_scale, begin, end, state, scale, target_logit);
}

// Columns [begin, end) of part [3, ld].
template <class T>
HWY_INLINE void SoftmaxPartTyped(const T* logits, const int32_t* local_targets, int64_t ld,
                                 int64_t v, int64_t begin, int64_t end, float* part) {
  const ColumnState state = StateOf(logits, ld, v, begin, end);
  const std::vector<float> target_logit = TargetLogits(logits, local_targets, ld, begin, end);
  for (int64_t at = 0; at < end - begin; ++at) {
    part[begin + at] = state.max[at];
    part[ld + begin + at] = state.sum[at] + state.poison[at];
    part[2 * ld + begin + at] = target_logit[at];
  }
}

// What all ranks' parts come to. A NaN among the sums is poison.
ColumnState JoinParts(const float* parts, int ranks, int64_t ld, int64_t begin, int64_t end,
                      std::vector<float>& target_logit) {
  const size_t room = target_logit.size();
  ColumnState state{std::vector<float>(room, -std::numeric_limits<float>::infinity()),
                    std::vector<float>(room), std::vector<float>(room)};
  for (int64_t at = 0; at < end - begin; ++at) {
    const auto of = [&](int rank, int64_t which) {
      return parts[(rank * 3 + which) * ld + begin + at];
    };
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      state.max[at] = std::max(state.max[at], of(rank, 0));
      target_logit[at] += of(rank, 2);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      // A rank whose rows are all padding has no exponentials.
      if (of(rank, 1) == 0) continue;
      sum += static_cast<double>(of(rank, 1)) *
             std::exp(static_cast<double>(of(rank, 0)) - static_cast<double>(state.max[at]));
    }
    state.sum[at] = static_cast<float>(sum);
    if (std::isnan(sum)) state.poison[at] = std::numeric_limits<float>::quiet_NaN();
  }
  return state;
}

template <class T>
HWY_INLINE void CrossEntropyOfPartsTyped(const float* parts, int ranks, T* logits,
                                         const int32_t* targets, const int32_t* local_targets,
                                         int64_t ld, int64_t v, float gradient_scale, int64_t begin,
                                         int64_t end, float* losses) {
  std::vector<float> target_logit(static_cast<size_t>(RoundUp(end - begin, 64)));
  ColumnState state = JoinParts(parts, ranks, ld, begin, end, target_logit);
  const std::vector<float> scale = LossesOf(state, target_logit, targets, begin, end, losses);
  if (gradient_scale == 0) return;
  WriteGradient(logits, local_targets, ld, v, gradient_scale, begin, end, state, scale,
                target_logit);
}

void CrossEntropyRange(void* logits, const int32_t* targets, int64_t ld, int64_t v, DType dtype,
                       float gradient_scale, int64_t begin, int64_t end, float* losses) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    CrossEntropyTyped(As<T>(logits), targets, ld, v, gradient_scale, begin, end, losses);
  });
}

void SoftmaxPartRange(const void* logits, const int32_t* local_targets, int64_t ld, int64_t v,
                      DType dtype, int64_t begin, int64_t end, float* part) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    SoftmaxPartTyped(As<T>(logits), local_targets, ld, v, begin, end, part);
  });
}

void CrossEntropyOfPartsRange(const float* parts, int ranks, void* logits, const int32_t* targets,
                              const int32_t* local_targets, int64_t ld, int64_t v, DType dtype,
                              float gradient_scale, int64_t begin, int64_t end, float* losses) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    CrossEntropyOfPartsTyped(parts, ranks, As<T>(logits), targets, local_targets, ld, v,
                             gradient_scale, begin, end, losses);
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(CrossEntropyRange);
HWY_EXPORT(SoftmaxPartRange);
HWY_EXPORT(CrossEntropyOfPartsRange);

void CrossEntropyColumns(void* logits, const int32_t* targets, int64_t rows, int64_t v, DType dtype,
                         float gradient_scale, float* losses, int threads) {
  AssertFloat(dtype);
  ParallelColumns(v, rows, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(CrossEntropyRange)
    (logits, targets, rows, v, dtype, gradient_scale, begin, end, losses);
  });
}

void SoftmaxPart(const void* logits, const int32_t* local_targets, int64_t rows, int64_t v,
                 DType dtype, float* part, int threads) {
  AssertFloat(dtype);
  ParallelColumns(v, rows, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(SoftmaxPartRange)(logits, local_targets, rows, v, dtype, begin, end, part);
  });
}

void CrossEntropyOfParts(const float* parts, int ranks, void* logits, const int32_t* targets,
                         const int32_t* local_targets, int64_t rows, int64_t v, DType dtype,
                         float gradient_scale, float* losses, int threads) {
  AssertFloat(dtype);
  ParallelColumns(v, rows, threads, [&](int64_t begin, int64_t end) {
    HWY_DYNAMIC_DISPATCH(CrossEntropyOfPartsRange)
    (parts, ranks, logits, targets, local_targets, rows, v, dtype, gradient_scale, begin, end,
     losses);
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
