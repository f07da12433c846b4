// Backward (Dao 2023, "FlashAttention-2", algorithm 2), as two kernels so that no sum needs atomics
// and all have a fixed order. With P the weights, f the factors of dropout, S the scores:
//   dV = (P f)^T dO,  dS = P (f (dO V^T) - delta),  dQ = scale dS K,  dK = scale dS^T Q,
// delta = rowsum(dO O). P f and dS are rounded to T before the last products. The first kernel
// keeps a tile of keys and walks over the tiles of queries that see it, query head after query head
// of its group; it computes S^T, whose accumulators are the left operands of both its sums. The
// second keeps a tile of queries and walks over their keys.
#pragma once

#include "worker/ops/cuda/attention_forward.h"
#include "worker/ops/cuda/attention_tile.h"

namespace zeroshard::cuda::attention {

constexpr int kBackwardTile = 64;  // what a block keeps
// What it walks over: two sums of 128 columns leave no registers for scores of 64.
template <int D>
constexpr int kWalkTile = D == 128 ? 32 : 64;

// lse, then delta, of a tile of queries into shared memory; zeros behind the sequence, whose
// queries and gradients are zeros as well and add nothing to a sum.
template <int kQueries, class Simt>
ZS_KERNEL_CODE void LoadStatistics(const Simt& simt, const float* lse, const float* delta,
                                   int first, int seq, float* to) {
  static_assert(kThreads >= 2 * kQueries);
  if (simt.thread() >= 2 * kQueries) return;
  const int index = simt.thread() % kQueries;
  const bool valid = first + index < seq;
  const float* from = simt.thread() < kQueries ? lse : delta;
  simt.CopyAsync4(to + simt.thread(), from + (valid ? first + index : 0), valid);
}

template <int D>
struct KeyGradientShape {
  static constexpr int kQueries = kWalkTile<D>;
  static constexpr int kStatistics = 2 * kQueries;  // floats of a stage
  static constexpr int kShared = (2 * kBackwardTile + 4 * kQueries) * D * kTileElement +
                                 2 * kStatistics * static_cast<int>(sizeof(float));
};

template <class T, int D, bool kDrop, class Simt>
ZS_KERNEL_CODE void KeyGradientBlock(const Simt& simt, const Params& p, void* shared) {
  constexpr int kKeys = kBackwardTile, kQueries = KeyGradientShape<D>::kQueries;
  constexpr int kStatistics = KeyGradientShape<D>::kStatistics;
  const Task task = KeyTask(simt.block(), p.kv_heads, p.batch);
  const int lane = simt.thread() % kLanes;
  const int tile_row = simt.thread() / kLanes * 16;
  const int first_key = task.tile * kKeys;
  const int end_key = first_key + kKeys < p.seq ? first_key + kKeys : p.seq;
  const int32_t* starts = p.Starts(task.sample);
  const DropoutOfSample mask(p, task.sample);
  const int group = p.heads / p.kv_heads;
  const float scale_log2 = p.scale * kLog2E;
  auto* k_tile = static_cast<T*>(shared);
  T* v_tile = k_tile + kKeys * D;
  T* q_tiles = v_tile + kKeys * D;
  T* d_out_tiles = q_tiles + 2 * kQueries * D;
  auto* statistics = reinterpret_cast<float*>(d_out_tiles + 2 * kQueries * D);

  const TileRange tiles = QueryTiles(starts, p.seq, first_key, end_key, kQueries);
  const int per_head = tiles.end - tiles.begin, steps = per_head * group;
  const auto load_queries = [&](int step) {
    const int head = task.head * group + step / per_head;
    const int first = (tiles.begin + step % per_head) * kQueries, stage = step % 2;
    const auto* q = static_cast<const T*>(p.q) + p.Start(task.sample, head, p.ld_q);
    const auto* d_out = static_cast<const T*>(p.d_out) + p.Start(task.sample, head, p.ld_out());
    LoadTile<kQueries, D>(simt, q, p.ld_q, first, p.seq, p.head_dim,
                          q_tiles + stage * kQueries * D);
    LoadTile<kQueries, D>(simt, d_out, p.ld_out(), first, p.seq, p.head_dim,
                          d_out_tiles + stage * kQueries * D);
    const int64_t at = p.Rows(task.sample, head);
    LoadStatistics<kQueries>(simt, p.lse + at, p.delta + at, first, p.seq,
                             statistics + stage * kStatistics);
  };

  float d_k[1][D / 8][4] = {}, d_v[1][D / 8][4] = {};
  LoadTile<kKeys, D>(simt, static_cast<const T*>(p.k) + p.Start(task.sample, task.head, p.ld_k),
                     p.ld_k, first_key, p.seq, p.head_dim, k_tile);
  LoadTile<kKeys, D>(simt, static_cast<const T*>(p.v) + p.Start(task.sample, task.head, p.ld_v),
                     p.ld_v, first_key, p.seq, p.head_dim, v_tile);
  if (steps > 0) load_queries(0);
  simt.CommitCopies();
  for (int step = 0; step < steps; ++step) {
    if (step + 1 < steps) load_queries(step + 1);
    simt.CommitCopies();
    simt.template WaitCopies<1>();
    simt.SyncBlock();
    const T* q_tile = q_tiles + step % 2 * kQueries * D;
    const T* d_out_tile = d_out_tiles + step % 2 * kQueries * D;
    const float* lse = statistics + step % 2 * kStatistics;
    const float* delta = lse + kQueries;
    const int head = task.head * group + step / per_head;
    const int first = (tiles.begin + step % per_head) * kQueries;
    const int end = first + kQueries < p.seq ? first + kQueries : p.seq;
    const bool hides = HasHiddenPair(starts, first, end, first_key, first_key + kKeys);

    // Both [keys, queries].
    float weights[1][kQueries / 8][4] = {}, d_scores[1][kQueries / 8][4] = {};
    RowsByRows<1, kQueries, D>(simt, k_tile, tile_row, q_tile, weights);
    RowsByRows<1, kQueries, D>(simt, v_tile, tile_row, d_out_tile, d_scores);
    ZS_UNROLL_ALL
    for (int n = 0; n < kQueries / 8; ++n) {
      ZS_UNROLL_ALL
      for (int column = 0; column < 2; ++column) {
        const int in_tile = n * 8 + ColumnOfElement(lane, column), query = first + in_tile;
        const float base = lse[in_tile] * kLog2E, shift = delta[in_tile];
        const int start = hides && query < p.seq ? StartOf(starts, query) : 0;
        ZS_UNROLL_ALL
        for (int i = column; i < 4; i += 2) {
          const int key = first_key + tile_row + RowOfElement(lane, i);
          float weight = simt.Exp2(fmaf(weights[0][n][i], scale_log2, -base));
          if (hides && !Visible(query, start, key)) weight = 0;
          const float factor = kDrop ? mask.Factor(DropoutElement(head, p.seq, query, key)) : 1.0f;
          weights[0][n][i] = kDrop ? weight * factor : weight;
          d_scores[0][n][i] = weight * (kDrop ? fmaf(d_scores[0][n][i], factor, -shift)
                                              : d_scores[0][n][i] - shift);
        }
      }
    }
    uint32_t left[1][kQueries / 16][4];
    PackLeft<T, kQueries>(simt, weights[0], left[0]);
    LeftByTile<1, kQueries, D>(simt, left, d_out_tile, d_v);
    PackLeft<T, kQueries>(simt, d_scores[0], left[0]);
    LeftByTile<1, kQueries, D>(simt, left, q_tile, d_k);
    simt.SyncBlock();  // before the next copies write here
  }

  StoreRows<D>(simt, d_k[0], p.scale, p.scale, k_tile, tile_row,
               static_cast<T*>(p.d_k) + p.Start(task.sample, task.head, p.ld_k), p.ld_k,
               first_key + tile_row, p.seq, p.head_dim);
  StoreRows<D>(simt, d_v[0], 1, 1, v_tile, tile_row,
               static_cast<T*>(p.d_v) + p.Start(task.sample, task.head, p.ld_v), p.ld_v,
               first_key + tile_row, p.seq, p.head_dim);
}

template <int D>
struct QueryGradientShape {
  static constexpr int kKeys = kWalkTile<D>;
  static constexpr int kShared = (2 * kBackwardTile + 4 * kKeys) * D * kTileElement;
};

template <class T, int D, bool kDrop, class Simt>
ZS_KERNEL_CODE void QueryGradientBlock(const Simt& simt, const Params& p, void* shared) {
  constexpr int kQueries = kBackwardTile, kKeys = QueryGradientShape<D>::kKeys;
  const Task task = QueryTask(simt.block(), Tiles(p.seq, kQueries), p.heads, p.batch);
  const int lane = simt.thread() % kLanes;
  const int tile_row = simt.thread() / kLanes * 16;
  const int first_query = task.tile * kQueries;
  const int end_query = first_query + kQueries < p.seq ? first_query + kQueries : p.seq;
  const int32_t* starts = p.Starts(task.sample);
  const DropoutOfSample mask(p, task.sample);
  const float scale_log2 = p.scale * kLog2E;
  const int kv_head = p.kv_head(task.head);
  const auto* k = static_cast<const T*>(p.k) + p.Start(task.sample, kv_head, p.ld_k);
  const auto* v = static_cast<const T*>(p.v) + p.Start(task.sample, kv_head, p.ld_v);
  auto* q_tile = static_cast<T*>(shared);
  T* d_out_tile = q_tile + kQueries * D;
  T* k_tiles = d_out_tile + kQueries * D;
  T* v_tiles = k_tiles + 2 * kKeys * D;
  const auto load_keys = [&](int tile) {
    const int stage = tile % 2 * kKeys * D;
    LoadTile<kKeys, D>(simt, k, p.ld_k, tile * kKeys, p.seq, p.head_dim, k_tiles + stage);
    LoadTile<kKeys, D>(simt, v, p.ld_v, tile * kKeys, p.seq, p.head_dim, v_tiles + stage);
  };

  float base[2], shift[2];  // of this lane's rows: lse in powers of two, delta
  int row[2], start[2];
  ZS_UNROLL_ALL
  for (int half = 0; half < 2; ++half) {
    row[half] = first_query + tile_row + RowOfElement(lane, half * 2);
    const bool valid = row[half] < p.seq;
    const int64_t at = p.Rows(task.sample, task.head) + (valid ? row[half] : 0);
    base[half] = valid ? p.lse[at] * kLog2E : 0;
    shift[half] = valid ? p.delta[at] : 0;
    start[half] = valid ? StartOf(starts, row[half]) : 0;
  }

  float d_q[1][D / 8][4] = {};
  const TileRange tiles = KeyTiles(starts, first_query, end_query, kKeys);
  LoadTile<kQueries, D>(simt, static_cast<const T*>(p.q) + p.Start(task.sample, task.head, p.ld_q),
                        p.ld_q, first_query, p.seq, p.head_dim, q_tile);
  LoadTile<kQueries, D>(
      simt, static_cast<const T*>(p.d_out) + p.Start(task.sample, task.head, p.ld_out()),
      p.ld_out(), first_query, p.seq, p.head_dim, d_out_tile);
  load_keys(tiles.begin);
  simt.CommitCopies();
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    if (tile + 1 < tiles.end) load_keys(tile + 1);
    simt.CommitCopies();
    simt.template WaitCopies<1>();
    simt.SyncBlock();
    const int stage = tile % 2 * kKeys * D, first_key = tile * kKeys;
    const bool hides = HasHiddenPair(starts, first_query, end_query, first_key, first_key + kKeys);
    float scores[1][kKeys / 8][4] = {}, d_scores[1][kKeys / 8][4] = {};
    RowsByRows<1, kKeys, D>(simt, q_tile, tile_row, k_tiles + stage, scores);
    RowsByRows<1, kKeys, D>(simt, d_out_tile, tile_row, v_tiles + stage, d_scores);
    if (kDrop) {
      DropWeights<kKeys>(mask, task.head, p.seq, first_query + tile_row, first_key, lane,
                         d_scores[0]);
    }
    ZS_UNROLL_ALL
    for (int n = 0; n < kKeys / 8; ++n) {
      ZS_UNROLL_ALL
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * 8 + ColumnOfElement(lane, i);
        float weight = simt.Exp2(fmaf(scores[0][n][i], scale_log2, -base[i / 2]));
        if (hides && !Visible(row[i / 2], start[i / 2], key)) weight = 0;
        d_scores[0][n][i] = weight * (d_scores[0][n][i] - shift[i / 2]);
      }
    }
    uint32_t left[1][kKeys / 16][4];
    PackLeft<T, kKeys>(simt, d_scores[0], left[0]);
    LeftByTile<1, kKeys, D>(simt, left, k_tiles + stage, d_q);
    simt.SyncBlock();  // before the next copies write here
  }
  StoreRows<D>(simt, d_q[0], p.scale, p.scale, q_tile, tile_row,
               static_cast<T*>(p.d_q) + p.Start(task.sample, task.head, p.ld_q), p.ld_q,
               first_query + tile_row, p.seq, p.head_dim);
}

}  // namespace zeroshard::cuda::attention
