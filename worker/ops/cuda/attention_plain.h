// Attention for what the tensor core kernels do not take: fp32, and 16 bits with a head dimension
// or alignment of any kind. All arithmetic is fp32. A block has 16 rows, 4 a warp, and walks over
// tiles of 32 columns, one a lane: queries by keys, or keys by queries for the keys' gradients.
// Sums along the head's dimension live in shared memory.
#pragma once

#include "worker/ops/cuda/attention_tile.h"

namespace zeroshard::cuda::attention {

constexpr int kPlainRows = 16;
constexpr int kPlainColumns = kLanes;
constexpr int kRowsOfWarp = kPlainRows / kWarps;
// Backward then takes 135,680 bytes of shared memory a block: compute capability 8.0 and 9.0 have
// it, 8.6 and 8.9 (101,376) go to heads of 189.
constexpr int kMostPlainDim = 256;

// Rows of a tile lie an odd number of floats apart: lanes that read a column each meet no bank
// twice.
ZS_HOST_DEVICE int PlainStride(int head_dim) { return head_dim | 1; }

// Bytes of shared memory: tiles of rows, tiles of columns, matrices [rows, columns].
ZS_HOST_DEVICE int PlainShared(int head_dim, int rows, int columns, int matrices) {
  return static_cast<int>(sizeof(float)) *
         ((rows * kPlainRows + columns * kPlainColumns) * PlainStride(head_dim) +
          matrices * kPlainRows * kPlainColumns);
}
ZS_HOST_DEVICE int PlainForwardShared(int head_dim) { return PlainShared(head_dim, 2, 1, 1); }
ZS_HOST_DEVICE int PlainQueryGradientShared(int head_dim) { return PlainShared(head_dim, 3, 2, 1); }
ZS_HOST_DEVICE int PlainKeyGradientShared(int head_dim) { return PlainShared(head_dim, 4, 2, 2); }

// Rows [first, first + rows) of a head, zeros behind the sequence.
template <class T, class Simt>
ZS_KERNEL_CODE void LoadPlain(const Simt& simt, const T* head, int64_t ld, int first, int rows,
                              int seq, int head_dim, float* tile) {
  for (int i = simt.thread(); i < rows * head_dim; i += kThreads) {
    const int row = i / head_dim, d = i % head_dim;
    tile[row * PlainStride(head_dim) + d] =
        first + row < seq ? Element<T>::Widen(head[(first + row) * ld + d]) : 0.0f;
  }
}
template <class T, class Simt>
ZS_KERNEL_CODE void StorePlain(const Simt& simt, const float* tile, float factor, T* head,
                               int64_t ld, int first, int seq, int head_dim) {
  for (int i = simt.thread(); i < kPlainRows * head_dim; i += kThreads) {
    const int row = i / head_dim, d = i % head_dim;
    if (first + row < seq) {
      head[(first + row) * ld + d] =
          Element<T>::Narrow(tile[row * PlainStride(head_dim) + d] * factor);
    }
  }
}

ZS_KERNEL_CODE float Dot(const float* a, const float* b, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum = fmaf(a[i], b[i], sum);
  return sum;
}

// sums[row] = sums[row] * shrink[row] + matrix[row] * tile, of a warp's rows; a lane takes the
// columns lane, lane + 32, ... of the head's dimension.
ZS_KERNEL_CODE void AddWeighted(const float* matrix, const float* tile, const float* shrink,
                                int lane, int head_dim, float* sums) {
  const int stride = PlainStride(head_dim);
  for (int d = lane; d < head_dim; d += kLanes) {
    for (int r = 0; r < kRowsOfWarp; ++r) {
      float sum = sums[r * stride + d] * shrink[r];
      for (int c = 0; c < kPlainColumns; ++c) {
        sum = fmaf(matrix[r * kPlainColumns + c], tile[c * stride + d], sum);
      }
      sums[r * stride + d] = sum;
    }
  }
}

template <class Simt>
ZS_KERNEL_CODE float MaxOfLanes(const Simt& simt, float x) {
  for (int bits = kLanes / 2; bits > 0; bits /= 2) x = fmaxf(x, simt.ShuffleXor(x, bits));
  return x;
}
template <class Simt>
ZS_KERNEL_CODE float SumOfLanes(const Simt& simt, float x) {
  for (int bits = kLanes / 2; bits > 0; bits /= 2) x += simt.ShuffleXor(x, bits);
  return x;
}

template <class T, bool kDrop, class Simt>
ZS_KERNEL_CODE void PlainForwardBlock(const Simt& simt, const Params& p, void* shared) {
  const Task task = QueryTask(simt.block(), Tiles(p.seq, kPlainRows), p.heads, p.batch);
  const int lane = simt.thread() % kLanes, warp_row = simt.thread() / kLanes * kRowsOfWarp;
  const int stride = PlainStride(p.head_dim);
  const int first = task.tile * kPlainRows;
  const int end = first + kPlainRows < p.seq ? first + kPlainRows : p.seq;
  const int32_t* starts = p.Starts(task.sample);
  const DropoutOfSample mask(p, task.sample);
  const int kv_head = p.kv_head(task.head);
  const T* k = static_cast<const T*>(p.k) + p.Start(task.sample, kv_head, p.ld_k);
  const T* v = static_cast<const T*>(p.v) + p.Start(task.sample, kv_head, p.ld_v);
  auto* q = static_cast<float*>(shared);
  float* out = q + kPlainRows * stride;
  float* keys = out + kPlainRows * stride;  // then values
  float* weights = keys + kPlainColumns * stride + warp_row * kPlainColumns;

  LoadPlain(simt, static_cast<const T*>(p.q) + p.Start(task.sample, task.head, p.ld_q), p.ld_q,
            first, kPlainRows, p.seq, p.head_dim, q);
  for (int i = simt.thread(); i < kPlainRows * stride; i += kThreads) out[i] = 0;
  const float infinity = FromBits(0x7F800000u);
  float most[kRowsOfWarp], sum[kRowsOfWarp], shrink[kRowsOfWarp];
  for (int r = 0; r < kRowsOfWarp; ++r) {
    most[r] = -infinity;
    sum[r] = 0;
  }
  const TileRange tiles = KeyTiles(starts, first, end, kPlainColumns);
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    simt.SyncBlock();  // the tile's values have been read
    LoadPlain(simt, k, p.ld_k, tile * kPlainColumns, kPlainColumns, p.seq, p.head_dim, keys);
    simt.SyncBlock();
    const int key = tile * kPlainColumns + lane;
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int query = first + warp_row + r;
      const int start = query < p.seq ? StartOf(starts, query) : 0;
      float score = Dot(q + (warp_row + r) * stride, keys + lane * stride, p.head_dim) * p.scale;
      if (!Visible(query, start, key)) score = -infinity;
      const float highest = fmaxf(most[r], MaxOfLanes(simt, score));
      const float base = highest == -infinity ? 0 : highest;
      shrink[r] = expf(most[r] - base);
      most[r] = highest;
      float weight = expf(score - base);
      sum[r] = sum[r] * shrink[r] + weight;
      if (kDrop) weight *= mask.Factor(DropoutElement(task.head, p.seq, query, key));
      weights[r * kPlainColumns + lane] = weight;
    }
    simt.SyncBlock();  // the tile's keys have been read
    LoadPlain(simt, v, p.ld_v, tile * kPlainColumns, kPlainColumns, p.seq, p.head_dim, keys);
    simt.SyncBlock();
    AddWeighted(weights, keys, shrink, lane, p.head_dim, out + warp_row * stride);
  }
  simt.SyncWarp();
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const float total = SumOfLanes(simt, sum[r]);
    const int query = first + warp_row + r;
    if (lane == 0 && query < p.seq) {
      p.lse[p.Rows(task.sample, task.head) + query] = most[r] + logf(total);
    }
    for (int d = lane; d < p.head_dim; d += kLanes) out[(warp_row + r) * stride + d] /= total;
  }
  simt.SyncBlock();
  StorePlain(simt, out, 1, static_cast<T*>(p.out) + p.Start(task.sample, task.head, p.ld_out()),
             p.ld_out(), first, p.seq, p.head_dim);
}

// A warp a row of out: delta[sample, head, t] = sum(out * d_out).
template <class T, class Simt>
ZS_KERNEL_CODE void DeltaBlock(const Simt& simt, const Params& p) {
  const int64_t row = simt.block() * kWarps + simt.thread() / kLanes;  // of [batch, seq, heads]
  if (row >= static_cast<int64_t>(p.batch) * p.seq * p.heads) return;
  const int lane = simt.thread() % kLanes;
  const T* out = static_cast<const T*>(p.out) + row * p.head_dim;
  const T* d_out = static_cast<const T*>(p.d_out) + row * p.head_dim;
  float sum = 0;
  for (int d = lane; d < p.head_dim; d += kLanes) {
    sum = fmaf(Element<T>::Widen(out[d]), Element<T>::Widen(d_out[d]), sum);
  }
  sum = SumOfLanes(simt, sum);
  const auto head = static_cast<int>(row % p.heads);
  const int64_t position = row / p.heads;
  if (lane == 0) {
    p.delta[p.Rows(static_cast<int>(position / p.seq), head) + position % p.seq] = sum;
  }
}

// Of one pair: the weight with dropout's factor, and the gradient by the score without its scale.
struct PairGradient {
  float weight, d_score;
};
template <bool kDrop>
ZS_KERNEL_CODE PairGradient GradientOfPair(const Params& p, const DropoutOfSample& mask, int head,
                                           int query, int start, int key, float score,
                                           float d_weight, float lse, float delta) {
  if (query >= p.seq || !Visible(query, start, key)) return {0, 0};
  const float weight = expf(score * p.scale - lse);
  if (!kDrop) return {weight, weight * (d_weight - delta)};
  const float factor = mask.Factor(DropoutElement(head, p.seq, query, key));
  return {weight * factor, weight * (d_weight * factor - delta)};
}

template <class T, bool kDrop, class Simt>
ZS_KERNEL_CODE void PlainQueryGradientBlock(const Simt& simt, const Params& p, void* shared) {
  const Task task = QueryTask(simt.block(), Tiles(p.seq, kPlainRows), p.heads, p.batch);
  const int lane = simt.thread() % kLanes, warp_row = simt.thread() / kLanes * kRowsOfWarp;
  const int stride = PlainStride(p.head_dim);
  const int first = task.tile * kPlainRows;
  const int end = first + kPlainRows < p.seq ? first + kPlainRows : p.seq;
  const int32_t* starts = p.Starts(task.sample);
  const DropoutOfSample mask(p, task.sample);
  const int kv_head = p.kv_head(task.head);
  const T* k = static_cast<const T*>(p.k) + p.Start(task.sample, kv_head, p.ld_k);
  const T* v = static_cast<const T*>(p.v) + p.Start(task.sample, kv_head, p.ld_v);
  auto* q = static_cast<float*>(shared);
  float* d_out = q + kPlainRows * stride;
  float* d_q = d_out + kPlainRows * stride;
  float* keys = d_q + kPlainRows * stride;
  float* values = keys + kPlainColumns * stride;
  float* d_scores = values + kPlainColumns * stride + warp_row * kPlainColumns;

  LoadPlain(simt, static_cast<const T*>(p.q) + p.Start(task.sample, task.head, p.ld_q), p.ld_q,
            first, kPlainRows, p.seq, p.head_dim, q);
  LoadPlain(simt, static_cast<const T*>(p.d_out) + p.Start(task.sample, task.head, p.ld_out()),
            p.ld_out(), first, kPlainRows, p.seq, p.head_dim, d_out);
  for (int i = simt.thread(); i < kPlainRows * stride; i += kThreads) d_q[i] = 0;
  const float keep[kRowsOfWarp] = {1, 1, 1, 1};
  const TileRange tiles = KeyTiles(starts, first, end, kPlainColumns);
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    simt.SyncBlock();  // the last tile has been read
    LoadPlain(simt, k, p.ld_k, tile * kPlainColumns, kPlainColumns, p.seq, p.head_dim, keys);
    LoadPlain(simt, v, p.ld_v, tile * kPlainColumns, kPlainColumns, p.seq, p.head_dim, values);
    simt.SyncBlock();
    const int key = tile * kPlainColumns + lane;
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int query = first + warp_row + r, at = query < p.seq ? query : 0;
      const int64_t row = p.Rows(task.sample, task.head) + at;
      const float score = Dot(q + (warp_row + r) * stride, keys + lane * stride, p.head_dim);
      const float d_weight =
          Dot(d_out + (warp_row + r) * stride, values + lane * stride, p.head_dim);
      d_scores[r * kPlainColumns + lane] =
          GradientOfPair<kDrop>(p, mask, task.head, query, StartOf(starts, at), key, score,
                                d_weight, p.lse[row], p.delta[row])
              .d_score;
    }
    simt.SyncWarp();
    AddWeighted(d_scores, keys, keep, lane, p.head_dim, d_q + warp_row * stride);
  }
  simt.SyncBlock();
  StorePlain(simt, d_q, p.scale, static_cast<T*>(p.d_q) + p.Start(task.sample, task.head, p.ld_q),
             p.ld_q, first, p.seq, p.head_dim);
}

template <class T, bool kDrop, class Simt>
ZS_KERNEL_CODE void PlainKeyGradientBlock(const Simt& simt, const Params& p, void* shared) {
  const Task task = KeyTask(simt.block(), p.kv_heads, p.batch);
  const int lane = simt.thread() % kLanes, warp_row = simt.thread() / kLanes * kRowsOfWarp;
  const int stride = PlainStride(p.head_dim);
  const int first = task.tile * kPlainRows;
  const int end = first + kPlainRows < p.seq ? first + kPlainRows : p.seq;
  const int32_t* starts = p.Starts(task.sample);
  const DropoutOfSample mask(p, task.sample);
  const int group = p.heads / p.kv_heads;
  auto* k = static_cast<float*>(shared);
  float* v = k + kPlainRows * stride;
  float* d_k = v + kPlainRows * stride;
  float* d_v = d_k + kPlainRows * stride;
  float* queries = d_v + kPlainRows * stride;
  float* d_outs = queries + kPlainColumns * stride;
  float* weights = d_outs + kPlainColumns * stride + warp_row * kPlainColumns;
  float* d_scores = weights + kPlainRows * kPlainColumns;

  LoadPlain(simt, static_cast<const T*>(p.k) + p.Start(task.sample, task.head, p.ld_k), p.ld_k,
            first, kPlainRows, p.seq, p.head_dim, k);
  LoadPlain(simt, static_cast<const T*>(p.v) + p.Start(task.sample, task.head, p.ld_v), p.ld_v,
            first, kPlainRows, p.seq, p.head_dim, v);
  for (int i = simt.thread(); i < 2 * kPlainRows * stride; i += kThreads) d_k[i] = 0;
  const float keep[kRowsOfWarp] = {1, 1, 1, 1};
  const TileRange tiles = QueryTiles(starts, p.seq, first, end, kPlainColumns);
  for (int member = 0; member < group; ++member) {
    const int head = task.head * group + member;
    const T* q = static_cast<const T*>(p.q) + p.Start(task.sample, head, p.ld_q);
    const T* d_out = static_cast<const T*>(p.d_out) + p.Start(task.sample, head, p.ld_out());
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      simt.SyncBlock();  // the last tile has been read
      LoadPlain(simt, q, p.ld_q, tile * kPlainColumns, kPlainColumns, p.seq, p.head_dim, queries);
      LoadPlain(simt, d_out, p.ld_out(), tile * kPlainColumns, kPlainColumns, p.seq, p.head_dim,
                d_outs);
      simt.SyncBlock();
      const int query = tile * kPlainColumns + lane, at = query < p.seq ? query : 0;
      const int64_t row = p.Rows(task.sample, head) + at;
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const float score = Dot(k + (warp_row + r) * stride, queries + lane * stride, p.head_dim);
        const float d_weight = Dot(v + (warp_row + r) * stride, d_outs + lane * stride, p.head_dim);
        const PairGradient pair =
            GradientOfPair<kDrop>(p, mask, head, query, StartOf(starts, at), first + warp_row + r,
                                  score, d_weight, p.lse[row], p.delta[row]);
        weights[r * kPlainColumns + lane] = pair.weight;
        d_scores[r * kPlainColumns + lane] = pair.d_score;
      }
      simt.SyncWarp();
      AddWeighted(weights, d_outs, keep, lane, p.head_dim, d_v + warp_row * stride);
      AddWeighted(d_scores, queries, keep, lane, p.head_dim, d_k + warp_row * stride);
    }
  }
  simt.SyncBlock();
  StorePlain(simt, d_k, p.scale, static_cast<T*>(p.d_k) + p.Start(task.sample, task.head, p.ld_k),
             p.ld_k, first, p.seq, p.head_dim);
  StorePlain(simt, d_v, 1, static_cast<T*>(p.d_v) + p.Start(task.sample, task.head, p.ld_v), p.ld_v,
             first, p.seq, p.head_dim);
}

}  // namespace zeroshard::cuda::attention
