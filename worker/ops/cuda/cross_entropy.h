// Softmax cross-entropy of logits [v, rows], the vocabulary outermost: each of `rows` columns is
// one prediction. Three kernels:
//   sums      a thread adds up a chunk of the vocabulary for its columns: the largest logit and the
//             sum of exp(logit - largest) (Milakov & Gimelshein 2018, "Online normalizer
//             calculation for softmax", algorithm 3)
//   join      joins a column's chunks in a fixed order, and writes its loss
//   gradient  replaces a chunk's logits by softmax - onehot
// Where the vocabulary is split over tensor ranks, `join` writes what a rank adds to the softmax,
// and a kernel over the columns (`parts`) joins the ranks' parts and writes the losses.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/exp.h"
#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

inline constexpr int64_t kVocabularyChunk = 128;
inline constexpr int kJoinColumns = 32, kJoinParts = 8;  // threads of a block of `join`

// The sum of exp(x - max) over some x; NaN where an x is not finite, as comparisons and the
// exponential would swallow it.
struct OnlineSum {
  float max = -INFINITY;
  float sum = 0;
};

ZS_HOST_DEVICE float Larger(float a, float b) { return b > a ? b : a; }

ZS_HOST_DEVICE OnlineSum Join(const OnlineSum& a, const OnlineSum& b) {
  const float max = Larger(a.max, b.max);
  return {max, Fma(b.sum, ExpOfNegative(b.max - max), a.sum * ExpOfNegative(a.max - max))};
}

// [chunks, rows] of each.
struct ChunkSums {
  float* maxima;
  float* sums;
};

// Row = chunk.
template <class T>
struct ChunkSumsOp {
  const T* logits;
  int64_t rows, v;
  ChunkSums out;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t chunk, const Cols& mine) const {
    const int64_t begin = chunk * kVocabularyChunk;
    const int64_t end = begin + kVocabularyChunk < v ? begin + kVocabularyChunk : v;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float max[N], sum[N];
      for (int i = 0; i < N; ++i) {
        max[i] = -INFINITY;
        sum[i] = 0;
      }
      int64_t row = begin;
      for (; row + kTogether <= end; row += kTogether) Take<N, kTogether>(row, col, max, sum);
      for (; row < end; ++row) Take<N, 1>(row, col, max, sum);
      Store<N>(max, out.maxima + chunk * rows + col);
      Store<N>(sum, out.sums + chunk * rows + col);
    });
  }

 private:
  static constexpr int kTogether = 4;  // rows that share a rescaling of the sum

  template <int N, int R>
  ZS_HOST_DEVICE void Take(int64_t row, int64_t col, float (&max)[N], float (&sum)[N]) const {
    float x[R][N];
    for (int r = 0; r < R; ++r) Load<N>(logits + (row + r) * rows + col, x[r]);
    for (int i = 0; i < N; ++i) {
      float most = max[i];
      for (int r = 0; r < R; ++r) most = Larger(most, x[r][i]);
      float total = sum[i] * ExpOfNegative(max[i] - most);
      for (int r = 0; r < R; ++r) {
        // x * 0 is 0, or a NaN where x is not finite.
        total = Fma(x[r][i], 0.0f, total + ExpOfNegative(x[r][i] - most));
      }
      max[i] = most;
      sum[i] = total;
    }
  }
};

// Part `part` of kJoinParts of a column's chunks.
ZS_HOST_DEVICE OnlineSum JoinChunks(const ChunkSums& in, int64_t rows, int64_t chunks, int64_t col,
                                    int part) {
  OnlineSum total;
  for (int64_t chunk = part; chunk < chunks; chunk += kJoinParts) {
    total = Join(total, {in.maxima[chunk * rows + col], in.sums[chunk * rows + col]});
  }
  return total;
}

// What the gradient needs of each column: [rows] of each.
struct ColumnScales {
  float* maxima;
  float*
      scales;  // of exp(logit - maximum); 0 where there is no target, NaN where one is not finite
};

// The target's logit; 0 where there is none.
template <class T>
ZS_HOST_DEVICE float TargetLogit(const T* logits, int32_t target, int64_t rows, int64_t col) {
  return target < 0 ? 0.0f : Element<T>::Widen(logits[target * rows + col]);
}

// Of a column whose sum over the whole vocabulary is there.
ZS_HOST_DEVICE void FinishColumn(const OnlineSum& total, float target_logit, bool has_target,
                                 int64_t col, float* losses, const ColumnScales& out) {
  out.maxima[col] = total.max;
  if (!has_target) {
    losses[col] = 0;
    out.scales[col] = 0;
    return;
  }
  losses[col] =
      static_cast<float>(static_cast<double>(total.max) - static_cast<double>(target_logit) +
                         log(static_cast<double>(total.sum)));
  out.scales[col] = Divide(1.0f, total.sum);
}

// What `join` does with a column whose chunks are all joined: it is the whole vocabulary.
template <class T>
struct FinishLosses {
  const T* logits;
  const int32_t* targets;
  int64_t rows;
  float* losses;
  ColumnScales out;

  ZS_HOST_DEVICE void operator()(const OnlineSum& total, int64_t col) const {
    const int32_t target = targets[col];
    FinishColumn(total, TargetLogit(logits, target, rows, col), target >= 0, col, losses, out);
  }
};

// Or one rank's part of it: part [3, rows] is the maximum, the sum and the target's logit.
template <class T>
struct FinishPart {
  const T* logits;
  const int32_t* local_targets;
  int64_t rows;
  float* part;

  ZS_HOST_DEVICE void operator()(const OnlineSum& total, int64_t col) const {
    part[col] = total.max;
    part[rows + col] = total.sum;
    part[2 * rows + col] = TargetLogit(logits, local_targets[col], rows, col);
  }
};

// Of all ranks' parts [ranks, 3, rows]. Joined in fp64, as on the CPU, and in rank order: every
// rank gets the same bits.
struct JoinPartsOp {
  const float* parts;
  int ranks;
  const int32_t* targets;
  int64_t rows;
  float* losses;
  ColumnScales out;

  ZS_HOST_DEVICE void At(int64_t col) const {
    OnlineSum total;
    float target_logit = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      total.max = Larger(total.max, Of(rank, 0, col));
      target_logit += Of(rank, 2, col);
    }
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const float part = Of(rank, 1, col);
      if (part == 0) continue;  // all of its rows are padding: no maximum
      const double shrink =
          exp(static_cast<double>(Of(rank, 0, col)) - static_cast<double>(total.max));
      sum += static_cast<double>(part) * shrink;
    }
    total.sum = static_cast<float>(sum);
    FinishColumn(total, target_logit, targets[col] >= 0, col, losses, out);
  }

 private:
  ZS_HOST_DEVICE float Of(int rank, int which, int64_t col) const {
    return parts[(int64_t{rank} * 3 + which) * rows + col];
  }
};

// Row = chunk.
template <class T>
struct SoftmaxGradOp {
  T* logits;
  const int32_t* targets;  // rows of these logits, or -1
  int64_t rows, v;
  float gradient_scale;
  ColumnScales columns;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t chunk, const Cols& mine) const {
    const int64_t begin = chunk * kVocabularyChunk;
    const int64_t end = begin + kVocabularyChunk < v ? begin + kVocabularyChunk : v;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float max[N], scale[N];
      int32_t target[N];
      Load<N>(columns.maxima + col, max);
      Load<N>(columns.scales + col, scale);
      for (int i = 0; i < N; ++i) target[i] = targets[col + i];
      ZS_UNROLL(4)
      for (int64_t row = begin; row < end; ++row) {
        float x[N];
        T* const at = logits + row * rows + col;
        Load<N>(at, x);
        for (int i = 0; i < N; ++i) {
          x[i] = ExpOfNegative(x[i] - max[i]) * scale[i];
          if (row == target[i]) x[i] -= 1.0f;
          x[i] *= gradient_scale;
        }
        Store<N>(x, at);
      }
    });
  }
};

// sum += the losses of rows with a target, in order.
ZS_HOST_DEVICE double AddInOrder(const float* losses, const int32_t* targets, int64_t count,
                                 double sum) {
  ZS_UNROLL(8)
  for (int64_t i = 0; i < count; ++i) {
    if (targets[i] >= 0) sum += static_cast<double>(losses[i]);
  }
  return sum;
}

}  // namespace zeroshard::cuda
