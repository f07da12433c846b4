// Vector loops over blocks of a matrix, for products and attention. Single-threaded and reentrant.
// Blocks are row-major; `ld` is a leading dimension in elements. Results do not depend on
// alignment.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace zeroshard::cpu {

// to[rows, cols] (dense, of to_type) = from. Floating-point; one type, or widened to
// fp32.
void PackBlock(const void* from, int64_t ld, DType from_type, int64_t rows, int64_t cols, void* to,
               DType to_type);

// to[rows, cols] = from (+ bias) (+ to), rounded once. from is dense fp32; bias [cols] of
// bias_type, or null.
void StoreBlock(const float* from, int64_t rows, int64_t cols, const void* bias, DType bias_type,
                bool accumulate, void* to, int64_t ld, DType to_type);

// out[r] = sum over [0, cols) of a[r] * b[r], fp32.
void RowDots(const void* a, int64_t ld_a, const void* b, int64_t ld_b, DType dtype, int64_t rows,
             int64_t cols, float* out);

// A tile of attention scores: rows of queries, columns of keys. Row r sees columns up to
// r + diagonal (as many as there are), and with `document_start` only from
// document_start[r] - first_key on. With `factors` [rows, cols] (dropout) the weights are
// multiplied by them, but not the sums that normalise them.
struct ScoreTile {
  int64_t rows = 0, cols = 0;
  int64_t diagonal = 0;
  float scale = 1;
  const int32_t* document_start = nullptr;
  int64_t first_key = 0;
  const float* factors = nullptr;
};

// One step of the online softmax (Milakov & Gimelshein 2018, algorithm 3): scores [rows, cols] of
// one more key tile become weights exp(scale * score - max) of weight_type (0 where masked), and
// max [rows] and sum [rows] (running, over all tiles so far; -infinity and 0 before the first) are
// updated; earlier sums and outputs shrink by shrink [rows], which is returned (1 for a row that
// sees nothing of the tile). weights may be scores where fp32. A row with a NaN gets NaN weights.
void SoftmaxStep(const ScoreTile& tile, const float* scores, float* max, float* sum, float* shrink,
                 void* weights, DType weight_type);

// x[r] *= factor[r]; x [rows, cols] dense.
void ScaleRows(const float* factor, int64_t rows, int64_t cols, float* x);

// to[r] = x[r] / sum[r] of to_type, lse[r] = max[r] + log(sum[r]).
void FinishSoftmax(const float* x, const float* max, const float* sum, int64_t rows, int64_t cols,
                   void* to, int64_t ld, DType to_type, float* lse);

// Backward (Dao et al. 2022, "FlashAttention", algorithm 4), with p = exp(scale * score - lse) and
// f the factor, or 1: weights = f * p, d_scores = scale * p * (f * d_weights - delta), both 0 where
// masked and of out_type. weights may be scores and d_scores may be d_weights where fp32.
void SoftmaxGradient(const ScoreTile& tile, const float* scores, const float* d_weights,
                     const float* lse, const float* delta, void* weights, void* d_scores,
                     DType out_type);

}  // namespace zeroshard::cpu
