#include "worker/ops/cached_attention.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/task_team.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/cached_attention.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"
#include "worker/ops/exp-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

// sum[cols] = the sum over rows of weights[row] * x[row], added from row 0 on; U vectors at a time
// stay in registers.
template <int U, class T>
HWY_INLINE void WeightedColumns(const float* weights, const T* x, int64_t ld, int64_t rows,
                                int64_t n, float divisor, T* out) {
  V sum[U];
  for (V& each : sum) each = hn::Zero(D());
  for (int64_t row = 0; row < rows; ++row) {
    const V weight = Set(weights[row]);
    for (int u = 0; u < U; ++u) {
      sum[u] = Fma(weight, LoadN(x + row * ld + u * kLanes, U == 1 ? n : kLanes), sum[u]);
    }
  }
  for (int u = 0; u < U; ++u) {
    StoreN(hn::Div(sum[u], Set(divisor)), out + u * kLanes, U == 1 ? n : kLanes);
  }
}

template <class T>
HWY_INLINE void QueryTyped(const T* q, const T* k, const T* v, int64_t ld, int64_t keys,
                           int64_t dim, float scale, float* weights, T* out) {
  float most = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < keys; ++j) {
    const T* key = k + j * ld;
    SumRow<1>(
        dim,
        [&](int64_t i, int64_t n, V* term)
            ZEROSHARD_KERNEL { *term = hn::Mul(LoadN(q + i, n), LoadN(key + i, n)); },
        weights + j);
    weights[j] *= scale;
    most = std::max(most, weights[j]);  // a NaN is found by the sum
  }
  ForEach(keys, [&](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    const V x = hn::Sub(LoadN(weights + i, n), Set(most));
    StoreN(hn::IfThenElse(hn::Eq(x, x), ExpOfNegative(x), x), weights + i, n);
  });
  float sum = 0;
  SumRow<1>(
      keys, [&](int64_t i, int64_t n, V* term) ZEROSHARD_KERNEL { *term = LoadN(weights + i, n); },
      &sum);
  constexpr int kUnroll = 4;
  int64_t col = 0;
  for (; col + kUnroll * kLanes <= dim; col += kUnroll * kLanes) {
    WeightedColumns<kUnroll>(weights, v + col, ld, keys, kLanes, sum, out + col);
  }
  for (; col < dim; col += kLanes) {
    WeightedColumns<1>(weights, v + col, ld, keys, dim - col, sum, out + col);
  }
}

void AttendQuery(const void* q, const void* k, const void* v, int64_t ld, int64_t keys, int64_t dim,
                 float scale, float* weights, void* out, DType dtype) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    QueryTyped(As<T>(q), As<T>(k), As<T>(v), ld, keys, dim, scale, weights, As<T>(out));
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(AttendQuery);

absl::Status CheckCachedAttention(const CachedAttentionArgs& args) {
  const auto refuse = [&args](auto... what) {
    return absl::InvalidArgumentError(absl::StrCat(
        "cached attention of ", args.rows, " positions after ", args.past, ", ", args.heads,
        " heads of ", args.head_dim, ", ", args.kv_heads, " key heads: ", what...));
  };
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const int64_t size : {args.past, args.rows, args.heads, args.kv_heads, args.head_dim}) {
    if (size < 0 || size > kMost) return refuse("no size may be negative or pass ", kMost);
  }
  if (!IsFloat(args.dtype)) {
    return refuse("the type is ", NameOf(args.dtype), ", wanted fp32, bf16 or fp16");
  }
  if (args.heads == 0 || args.kv_heads == 0 || args.head_dim == 0) {
    return refuse("there must be a head, a key head and a dimension");
  }
  if (args.heads % args.kv_heads != 0) {
    return refuse("the heads must be a multiple of the key heads");
  }
  return absl::OkStatus();
}

void CachedAttention(const CachedAttentionArgs& args, void* out, int threads,
                     std::vector<ProductContext>* contexts) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(args.head_dim));
  const int64_t ld = args.kv_heads * args.head_dim;
  const int64_t group = args.heads / args.kv_heads;
  RunTasks(threads, args.rows * args.heads, [&](int64_t task, int thread) {
    const int64_t row = task / args.heads, head = task % args.heads;
    const int64_t keys = args.past + row + 1;
    const int64_t at = task * args.head_dim;  // [rows, H*D] is [rows * H, D]
    const int64_t at_key = head / group * args.head_dim;
    float* weights =
        (*contexts)[static_cast<size_t>(thread)].buffer()->Get<float>(args.past + args.rows);
    HWY_DYNAMIC_DISPATCH(AttendQuery)
    (At(args.q, at, args.dtype), At(args.k, at_key, args.dtype), At(args.v, at_key, args.dtype), ld,
     keys, args.head_dim, scale, weights, At(out, at, args.dtype), args.dtype);
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
