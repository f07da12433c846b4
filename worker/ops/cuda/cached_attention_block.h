// Attention of a query over cached keys, for generation: a block computes one query and head. A
// warp takes every fourth run of four keys and keeps its own maximum and sums, lanes along the
// head's dimension; the warps' sums are added in order. fp32 arithmetic.
#pragma once

#include "worker/ops/cuda/attention_plain.h"
#include "worker/ops/cuda/attention_tile.h"

namespace zeroshard::cuda::attention {

// As CachedAttentionArgs.
struct CachedParams {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* out = nullptr;
  int past = 0, rows = 0, heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1;
};

constexpr int kKeysAtOnce = 4;

ZS_HOST_DEVICE int64_t CachedBlocks(const CachedParams& p) {
  return static_cast<int64_t>(p.rows) * p.heads;
}
// Bytes of shared memory: of each warp its sums, maximum and sum of weights.
ZS_HOST_DEVICE int CachedShared(int head_dim) {
  return kWarps * (head_dim + 2) * static_cast<int>(sizeof(float));
}

template <class T, class Simt>
ZS_KERNEL_CODE void CachedBlock(const Simt& simt, const CachedParams& p, void* shared) {
  constexpr int kOfLane = kMostPlainDim / kLanes;  // elements of the head's dimension
  const auto row = static_cast<int>(simt.block() / p.heads);
  const auto head = static_cast<int>(simt.block() % p.heads);
  const int keys = p.past + row + 1;
  const int lane = simt.thread() % kLanes, warp = simt.thread() / kLanes;
  const int64_t ld = static_cast<int64_t>(p.kv_heads) * p.head_dim;
  const int64_t at_key = static_cast<int64_t>(head / (p.heads / p.kv_heads)) * p.head_dim;
  const T* q = static_cast<const T*>(p.q) + simt.block() * p.head_dim;
  const T* k = static_cast<const T*>(p.k) + at_key;
  const T* v = static_cast<const T*>(p.v) + at_key;

  float query[kOfLane], sums[kOfLane];
  ZS_UNROLL_ALL
  for (int i = 0; i < kOfLane; ++i) {
    const int d = lane + i * kLanes;
    query[i] = d < p.head_dim ? Element<T>::Widen(q[d]) * p.scale : 0.0f;
    sums[i] = 0;
  }
  const float infinity = FromBits(0x7F800000u);
  float most = -infinity, sum = 0;
  for (int first = warp * kKeysAtOnce; first < keys; first += kWarps * kKeysAtOnce) {
    float weights[kKeysAtOnce];
    float highest = most;
    ZS_UNROLL_ALL
    for (int j = 0; j < kKeysAtOnce; ++j) {
      const T* key = k + (first + j) * ld;
      float dot = 0;
      ZS_UNROLL_ALL
      for (int i = 0; i < kOfLane; ++i) {
        const int d = lane + i * kLanes;
        if (d < p.head_dim && first + j < keys) {
          dot = fmaf(query[i], Element<T>::Widen(key[d]), dot);
        }
      }
      dot = SumOfLanes(simt, dot);
      weights[j] = first + j < keys ? dot : -infinity;
      highest = fmaxf(highest, weights[j]);
    }
    const float shrink = expf(most - highest);
    most = highest;
    sum *= shrink;
    ZS_UNROLL_ALL
    for (int j = 0; j < kKeysAtOnce; ++j) {
      weights[j] = expf(weights[j] - highest);
      sum += weights[j];
    }
    ZS_UNROLL_ALL
    for (int i = 0; i < kOfLane; ++i) {
      const int d = lane + i * kLanes;
      if (d >= p.head_dim) continue;
      float value = sums[i] * shrink;
      ZS_UNROLL_ALL
      for (int j = 0; j < kKeysAtOnce; ++j) {
        if (first + j < keys) {
          value = fmaf(weights[j], Element<T>::Widen(v[(first + j) * ld + d]), value);
        }
      }
      sums[i] = value;
    }
  }

  auto* all_sums = static_cast<float*>(shared);  // [warps, head_dim]
  float* statistics = all_sums + kWarps * p.head_dim;
  ZS_UNROLL_ALL
  for (int i = 0; i < kOfLane; ++i) {
    const int d = lane + i * kLanes;
    if (d < p.head_dim) all_sums[warp * p.head_dim + d] = sums[i];
  }
  if (lane == 0) {
    statistics[warp] = most;
    statistics[kWarps + warp] = sum;
  }
  simt.SyncBlock();
  float highest = statistics[0];  // of warp 0, which has a key
  for (int w = 1; w < kWarps; ++w) highest = fmaxf(highest, statistics[w]);
  float total = 0, factors[kWarps];
  for (int w = 0; w < kWarps; ++w) {
    factors[w] = expf(statistics[w] - highest);
    total += factors[w] * statistics[kWarps + w];
  }
  T* out = static_cast<T*>(p.out) + simt.block() * p.head_dim;
  for (int d = simt.thread(); d < p.head_dim; d += kThreads) {
    float value = 0;
    for (int w = 0; w < kWarps; ++w) value = fmaf(factors[w], all_sums[w * p.head_dim + d], value);
    out[d] = Element<T>::Narrow(value / total);
  }
}

}  // namespace zeroshard::cuda::attention
