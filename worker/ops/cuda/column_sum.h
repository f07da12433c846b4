// Sums over a matrix's rows: ColumnSum, PositionBackward, the gradients of norms' weights. As on
// the CPU, 64 rows are added in order, then those sums in order; no sum waits for another block.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

inline constexpr int64_t kSumRows = 64;

inline int64_t SumChunks(int64_t rows) { return CeilDiv(rows, kSumRows); }

// The terms of K sums are a functor's
//   template <int N> void Terms(int64_t row, int64_t col, float (&terms)[K][N]) const
// for N columns from col on.

// Row `chunk` of [chunks, cols]: the sums of 64 rows, into partials [K, chunks, cols].
template <int K, class F>
struct ChunkSumOp {
  F f;
  int64_t rows, cols, chunks;
  float* partials;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t chunk, const Cols& mine) const {
    const int64_t begin = chunk * kSumRows;
    const int64_t end = begin + kSumRows < rows ? begin + kSumRows : rows;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float sums[K][N] = {};
      ZS_UNROLL(4)
      for (int64_t row = begin; row < end; ++row) {
        float terms[K][N];
        f.template Terms<N>(row, col, terms);
        for (int k = 0; k < K; ++k) {
          for (int i = 0; i < N; ++i) sums[k][i] += terms[k][i];
        }
      }
      for (int k = 0; k < K; ++k) {
        Store<N>(sums[k], partials + (k * chunks + chunk) * cols + col);
      }
    });
  }
};

// Row k of [K, cols]: the chunks' sums, in order, into outs[k].
template <int K, class T>
struct FoldSumOp {
  const float* partials;
  int64_t cols, chunks;
  T* outs[K];

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t k, const Cols& mine) const {
    T* const out = K == 1 || k == 0 ? outs[0] : outs[K - 1];
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      const float* from = partials + k * chunks * cols + col;
      float sums[N] = {};
      ZS_UNROLL(8)
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        float part[N];
        Load<N>(from + chunk * cols, part);
        for (int i = 0; i < N; ++i) sums[i] += part[i];
      }
      Store<N>(sums, out + col);
    });
  }
};

template <class T>
struct ColumnTerms {
  const T* x;
  int64_t cols;

  template <int N>
  ZS_HOST_DEVICE void Terms(int64_t row, int64_t col, float (&terms)[1][N]) const {
    Load<N>(x + row * cols + col, terms[0]);
  }
};

}  // namespace zeroshard::cuda
