// The parts of a tensor core attention kernel: tiles of T (Bf16 or Fp16) in shared memory, and the
// products of one warp over them. A warp owns 16 rows of a result a row tile; what it computed from
// a product goes into the next one from registers (the accumulator's layout is that of the left
// operand).
//
// Fragments of m16n8k16 (PTX ISA): lane l holds of an accumulator [16, 8] the elements
// (l / 4 + 8 * (i / 2), l % 4 * 2 + i % 2) in c[i].
//
// Simt: DeviceSimt (attention_simt.cuh), or the emulation that the tests have.
#pragma once

#include <cmath>
#include <cstdint>

#include "worker/ops/cuda/attention_params.h"

#ifdef __CUDACC__
#define ZS_KERNEL_CODE __device__ __forceinline__
#define ZS_UNROLL_ALL _Pragma("unroll")
#else
#define ZS_KERNEL_CODE inline
#define ZS_UNROLL_ALL
#endif

namespace zeroshard::cuda::attention {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kLanes = 32;
constexpr int kTileElement = 2;  // bytes
constexpr float kLog2E = 1.44269504f;

// Blocks of a launch.
ZS_HOST_DEVICE int64_t QueryBlocks(const Params& p, int tile) {
  return static_cast<int64_t>(Tiles(p.seq, tile)) * p.heads * p.batch;
}
ZS_HOST_DEVICE int64_t KeyBlocks(const Params& p, int tile) {
  return static_cast<int64_t>(Tiles(p.seq, tile)) * p.kv_heads * p.batch;
}
ZS_HOST_DEVICE int64_t DeltaBlocks(const Params& p) {
  return (static_cast<int64_t>(p.batch) * p.seq * p.heads + kWarps - 1) / kWarps;
}

ZS_HOST_DEVICE int RowOfElement(int lane, int i) { return lane / 4 + i / 2 * 8; }
ZS_HOST_DEVICE int ColumnOfElement(int lane, int i) { return lane % 4 * 2 + i % 2; }

// A tile [rows, D] in shared memory is cut into chunks of 8 elements (16 bytes). A chunk's place in
// its row changes with the row, so that the 8 rows that ldmatrix reads lie in different banks.
template <int D>
ZS_HOST_DEVICE int ElementOfChunk(int row, int chunk) {
  static_assert(D == 32 || D % 64 == 0);
  const int turn = D == 32 ? row / 2 % 4 : row % 8;
  return row * D + (chunk ^ turn) * 8;
}

// Rows [first, first + kRows) of a head into a tile, by all threads of the block; zeros behind the
// sequence and behind the head's dimension.
template <int kRows, int D, class T, class Simt>
ZS_KERNEL_CODE void LoadTile(const Simt& simt, const T* head, int64_t ld, int first, int seq,
                             int head_dim, T* tile) {
  constexpr int kChunks = D / 8, kStep = kThreads / kChunks;  // rows at a time
  static_assert(kRows % kStep == 0 && kStep % 8 == 0);
  const int row = simt.thread() / kChunks, chunk = simt.thread() % kChunks;
  const int rows = chunk * 8 < head_dim ? seq - first - row : 0;  // that there are from here on
  const T* from = head + (first + row) * ld + chunk * 8;
  T* to = tile + ElementOfChunk<D>(row, chunk);
  ZS_UNROLL_ALL
  for (int step = 0; step < kRows; step += kStep) {
    simt.CopyAsync16(to + step * D, step < rows ? from : head, step < rows);
    from += kStep * ld;
  }
}

// result[m][n][i] += rows * columns^T of 16 * M rows of one tile and N rows of another, along D.
template <int M, int N, int D, class T, class Simt>
ZS_KERNEL_CODE void RowsByRows(const Simt& simt, const T* rows, int first_row, const T* columns,
                               float (&result)[M][N / 8][4]) {
  const int lane = simt.thread() % kLanes;
  ZS_UNROLL_ALL
  for (int depth = 0; depth < D / 16; ++depth) {
    uint32_t left[M][4];
    ZS_UNROLL_ALL
    for (int m = 0; m < M; ++m) {
      simt.LoadMatrices(
          rows + ElementOfChunk<D>(first_row + m * 16 + lane % 16, depth * 2 + lane / 16), left[m]);
    }
    ZS_UNROLL_ALL
    for (int n = 0; n < N / 16; ++n) {
      uint32_t right[4];
      simt.LoadMatrices(
          columns + ElementOfChunk<D>(n * 16 + lane / 16 * 8 + lane % 8, depth * 2 + lane / 8 % 2),
          right);
      ZS_UNROLL_ALL
      for (int m = 0; m < M; ++m) {
        simt.template MultiplyAdd<T>(left[m], right[0], right[1], result[m][n * 2]);
        simt.template MultiplyAdd<T>(left[m], right[2], right[3], result[m][n * 2 + 1]);
      }
    }
  }
}

// Accumulators [16, N] as left operands [16, 16] of the next product, rounded to T.
template <class T, int N, class Simt>
ZS_KERNEL_CODE void PackLeft(const Simt& simt, const float (&from)[N / 8][4],
                             uint32_t (&to)[N / 16][4]) {
  ZS_UNROLL_ALL
  for (int n = 0; n < N / 16; ++n) {
    ZS_UNROLL_ALL
    for (int i = 0; i < 4; ++i) {
      const float* pair = from[n * 2 + i / 2] + i % 2 * 2;
      to[n][i] = simt.template Pack<T>(pair[0], pair[1]);
    }
  }
}

// result[m] += left[m] * tile: [16, N] by the N rows of a tile [N, D].
template <int M, int N, int D, class T, class Simt>
ZS_KERNEL_CODE void LeftByTile(const Simt& simt, const uint32_t (&left)[M][N / 16][4],
                               const T* tile, float (&result)[M][D / 8][4]) {
  const int lane = simt.thread() % kLanes;
  ZS_UNROLL_ALL
  for (int depth = 0; depth < N / 16; ++depth) {
    ZS_UNROLL_ALL
    for (int n = 0; n < D / 16; ++n) {
      uint32_t right[4];
      simt.LoadMatricesTransposed(
          tile + ElementOfChunk<D>(depth * 16 + lane % 16, n * 2 + lane / 16), right);
      ZS_UNROLL_ALL
      for (int m = 0; m < M; ++m) {
        simt.template MultiplyAdd<T>(left[m][depth], right[0], right[1], result[m][n * 2]);
        simt.template MultiplyAdd<T>(left[m][depth], right[2], right[3], result[m][n * 2 + 1]);
      }
    }
  }
}

// Writes a warp's accumulators [16, D], times a factor for each of a lane's two rows, to rows
// [first, first + 16) of a head. They pass through 16 rows of a tile that no other warp uses, so
// that memory is written in words of 16 bytes.
template <int D, class T, class Simt>
ZS_KERNEL_CODE void StoreRows(const Simt& simt, const float (&sums)[D / 8][4], float factor_low,
                              float factor_high, T* tile, int tile_row, T* head, int64_t ld,
                              int first, int seq, int head_dim) {
  const int lane = simt.thread() % kLanes;
  simt.SyncWarp();  // the tile's rows have been read
  ZS_UNROLL_ALL
  for (int n = 0; n < D / 8; ++n) {
    ZS_UNROLL_ALL
    for (int half = 0; half < 2; ++half) {
      const float factor = half == 0 ? factor_low : factor_high;
      T* to = tile + ElementOfChunk<D>(tile_row + RowOfElement(lane, half * 2), n) +
              ColumnOfElement(lane, 0);
      *reinterpret_cast<uint32_t*>(to) =
          simt.template Pack<T>(sums[n][half * 2] * factor, sums[n][half * 2 + 1] * factor);
    }
  }
  simt.SyncWarp();
  constexpr int kChunks = D / 8;
  ZS_UNROLL_ALL
  for (int step = 0; step < 16 * kChunks / kLanes; ++step) {
    const int row = (step * kLanes + lane) / kChunks, chunk = (step * kLanes + lane) % kChunks;
    if (first + row < seq && chunk * 8 < head_dim) {
      StoreWord(LoadWord(tile + ElementOfChunk<D>(tile_row + row, chunk)),
                head + (first + row) * ld + chunk * 8);
    }
  }
}

}  // namespace zeroshard::cuda::attention
