// Forward: a block computes a tile of queries of one sample and head, and walks over the tiles of
// keys that they see (Dao 2023, "FlashAttention-2", algorithm 1). Keys and values of the next tile
// are copied while this one is computed. Weights are rounded to T before they meet the values,
// their sum is of the fp32 ones.
#pragma once

#include "worker/ops/cuda/attention_tile.h"

namespace zeroshard::cuda::attention {

template <int D>
struct ForwardShape {
  static constexpr int kRowTiles = D <= 64 ? 2 : 1;  // of a warp; more do not fit into registers
  static constexpr int kQueries = 16 * kRowTiles * kWarps;
  static constexpr int kKeys = 64;
  static constexpr int kShared = (kQueries + 4 * kKeys) * D * kTileElement;
};

// The running maximum and sum of a lane's two rows of a row tile; the sum is of the lane's columns.
struct SoftmaxRows {
  float most[2], sum[2];
};

// Scores -> weights exp(scale * (score - most)) of a tile, in place. `shrink`: what the sums of
// earlier tiles are to be multiplied by.
template <int N, class Simt>
ZS_KERNEL_CODE void SoftmaxStep(const Simt& simt, float scale_log2, float (&scores)[N / 8][4],
                                SoftmaxRows* rows, float (&shrink)[2]) {
  const float infinity = FromBits(0x7F800000u);
  ZS_UNROLL_ALL
  for (int half = 0; half < 2; ++half) {
    float most = rows->most[half];
    ZS_UNROLL_ALL
    for (int n = 0; n < N / 8; ++n) {
      most = fmaxf(most, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
    }
    most = fmaxf(most, simt.ShuffleXor(most, 1));
    most = fmaxf(most, simt.ShuffleXor(most, 2));
    // A row that saw no key yet has weights of 0, not of exp(-inf + inf).
    const float base = most == -infinity ? 0 : most * scale_log2;
    shrink[half] = simt.Exp2(fmaf(rows->most[half], scale_log2, -base));
    rows->most[half] = most;
    float sum = rows->sum[half] * shrink[half];
    ZS_UNROLL_ALL
    for (int n = 0; n < N / 8; ++n) {
      ZS_UNROLL_ALL
      for (int i = half * 2; i < half * 2 + 2; ++i) {
        scores[n][i] = simt.Exp2(fmaf(scores[n][i], scale_log2, -base));
        sum += scores[n][i];
      }
    }
    rows->sum[half] = sum;
  }
}

// Sets the scores of hidden pairs to minus infinity: a warp's 16 queries from `query` on by keys
// from `key` on.
template <int N>
ZS_KERNEL_CODE void HideScores(const int32_t* starts, int query, int seq, int key, int lane,
                               float (&scores)[N / 8][4]) {
  const float infinity = FromBits(0x7F800000u);
  ZS_UNROLL_ALL
  for (int half = 0; half < 2; ++half) {
    const int row = query + RowOfElement(lane, half * 2);
    const int start = row < seq ? StartOf(starts, row) : 0;
    ZS_UNROLL_ALL
    for (int n = 0; n < N / 8; ++n) {
      ZS_UNROLL_ALL
      for (int i = half * 2; i < half * 2 + 2; ++i) {
        if (!Visible(row, start, key + n * 8 + ColumnOfElement(lane, i))) scores[n][i] = -infinity;
      }
    }
  }
}

// values[n][i] *= the mask's factor of a query (row) and key (column).
template <int N>
ZS_KERNEL_CODE void DropWeights(const DropoutOfSample& mask, int head, int seq, int query, int key,
                                int lane, float (&values)[N / 8][4]) {
  ZS_UNROLL_ALL
  for (int half = 0; half < 2; ++half) {
    const int row = query + RowOfElement(lane, half * 2);
    ZS_UNROLL_ALL
    for (int n = 0; n < N / 8; ++n) {
      float factors[2];
      mask.FactorsOfTwo(DropoutElement(head, seq, row, key + n * 8 + ColumnOfElement(lane, 0)),
                        factors);
      values[n][half * 2] *= factors[0];
      values[n][half * 2 + 1] *= factors[1];
    }
  }
}

template <class T, int D, bool kDrop, class Simt>
ZS_KERNEL_CODE void ForwardBlock(const Simt& simt, const Params& p, void* shared) {
  using Shape = ForwardShape<D>;
  constexpr int M = Shape::kRowTiles, kQueries = Shape::kQueries, kKeys = Shape::kKeys;
  const Task task = QueryTask(simt.block(), Tiles(p.seq, kQueries), p.heads, p.batch);
  const int lane = simt.thread() % kLanes;
  const int tile_row = simt.thread() / kLanes * 16 * M;  // this warp's first of the tile
  const int first_query = task.tile * kQueries;
  const int query = first_query + tile_row;
  const int end_query = first_query + kQueries < p.seq ? first_query + kQueries : p.seq;
  const int32_t* starts = p.Starts(task.sample);
  const DropoutOfSample mask(p, task.sample);
  const float scale_log2 = p.scale * kLog2E;
  const auto* q = static_cast<const T*>(p.q) + p.Start(task.sample, task.head, p.ld_q);
  const int kv_head = p.kv_head(task.head);
  const auto* k = static_cast<const T*>(p.k) + p.Start(task.sample, kv_head, p.ld_k);
  const auto* v = static_cast<const T*>(p.v) + p.Start(task.sample, kv_head, p.ld_v);
  auto* q_tile = static_cast<T*>(shared);
  T* k_tiles = q_tile + kQueries * D;
  T* v_tiles = k_tiles + 2 * kKeys * D;
  const auto load_keys = [&](int tile) {
    const int stage = tile % 2 * kKeys * D;
    LoadTile<kKeys, D>(simt, k, p.ld_k, tile * kKeys, p.seq, p.head_dim, k_tiles + stage);
    LoadTile<kKeys, D>(simt, v, p.ld_v, tile * kKeys, p.seq, p.head_dim, v_tiles + stage);
  };

  float out[M][D / 8][4] = {};
  SoftmaxRows rows[M];
  for (SoftmaxRows& each : rows) {
    each.most[0] = each.most[1] = -FromBits(0x7F800000u);
    each.sum[0] = each.sum[1] = 0;
  }
  const TileRange tiles = KeyTiles(starts, first_query, end_query, kKeys);
  LoadTile<kQueries, D>(simt, q, p.ld_q, first_query, p.seq, p.head_dim, q_tile);
  load_keys(tiles.begin);
  simt.CommitCopies();
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    if (tile + 1 < tiles.end) load_keys(tile + 1);
    simt.CommitCopies();
    simt.template WaitCopies<1>();
    simt.SyncBlock();
    const int key = tile * kKeys, stage = tile % 2 * kKeys * D;
    float scores[M][kKeys / 8][4] = {};
    RowsByRows<M, kKeys, D>(simt, q_tile, tile_row, k_tiles + stage, scores);
    const bool hides = HasHiddenPair(starts, first_query, end_query, key, key + kKeys);
    uint32_t weights[M][kKeys / 16][4];
    ZS_UNROLL_ALL
    for (int m = 0; m < M; ++m) {
      if (hides) HideScores<kKeys>(starts, query + m * 16, p.seq, key, lane, scores[m]);
      float shrink[2];
      SoftmaxStep<kKeys>(simt, scale_log2, scores[m], &rows[m], shrink);
      if (kDrop) {
        DropWeights<kKeys>(mask, task.head, p.seq, query + m * 16, key, lane, scores[m]);
      }
      PackLeft<T, kKeys>(simt, scores[m], weights[m]);
      ZS_UNROLL_ALL
      for (int n = 0; n < D / 8; ++n) {
        ZS_UNROLL_ALL
        for (int i = 0; i < 4; ++i) out[m][n][i] *= shrink[i / 2];
      }
    }
    LeftByTile<M, kKeys, D>(simt, weights, v_tiles + stage, out);
    simt.SyncBlock();  // before the next copies write here
  }

  auto* to = static_cast<T*>(p.out) + p.Start(task.sample, task.head, p.ld_out());
  float* lse = p.lse + p.Rows(task.sample, task.head);
  ZS_UNROLL_ALL
  for (int m = 0; m < M; ++m) {
    float inverse[2];
    ZS_UNROLL_ALL
    for (int half = 0; half < 2; ++half) {
      float sum = rows[m].sum[half];
      sum += simt.ShuffleXor(sum, 1);
      sum += simt.ShuffleXor(sum, 2);
      inverse[half] = 1.0f / sum;
      const int row = query + m * 16 + RowOfElement(lane, half * 2);
      if (lane % 4 == 0 && row < p.seq) lse[row] = rows[m].most[half] * p.scale + logf(sum);
    }
    StoreRows<D>(simt, out[m], inverse[0], inverse[1], q_tile, tile_row + m * 16, to, p.ld_out(),
                 query + m * 16, p.seq, p.head_dim);
  }
}

}  // namespace zeroshard::cuda::attention
