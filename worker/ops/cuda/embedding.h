// The token and position tables: lookup, and the token table's gradient as rows.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {

// Row = token. pos may be null.
template <class T>
struct LookupOp {
  const int32_t* tokens;
  const T* tok;
  const T* pos;
  int64_t seq, cols;
  T* y;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t row, const Cols& mine) const {
    const T* const token = tok + tokens[row] * cols;
    T* const out = y + row * cols;
    if (pos == nullptr) {
      mine.Each([&](auto width, int64_t col) {
        CopyElements<decltype(width)::value>(token + col, out + col);
      });
      return;
    }
    const T* const position = pos + row % seq * cols;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float a[N], b[N];
      Load<N>(token + col, a);
      Load<N>(position + col, b);
      for (int i = 0; i < N; ++i) a[i] += b[i];
      Store<N>(a, out + col);
    });
  }
};

// Token table rows of one tensor rank.
struct LocalIdOp {
  const int32_t* ids;
  int64_t begin, end;
  int32_t* local;

  ZS_HOST_DEVICE void At(int64_t i) const {
    const int64_t id = ids[i];
    local[i] = id >= begin && id < end ? static_cast<int32_t>(id - begin) : -1;
  }
};

// Row = token; zeros where it is -1.
template <class T>
struct LookupRowsOp {
  const int32_t* local;
  const T* table;
  int64_t cols;
  T* y;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t row, const Cols& mine) const {
    const int64_t id = local[row];
    T* const out = y + row * cols;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      if (id >= 0) {
        CopyElements<N>(table + id * cols + col, out + col);
      } else {
        const float zeros[N] = {};
        Store<N>(zeros, out + col);
      }
    });
  }
};

// The bits by which tokens are sorted: all but the sign, so that -1, which is of another rank,
// comes last.
inline constexpr int kTokenBits = 31;

// The gradient's rows. `sorted` are the tokens in rising order, -1 behind them, `places` where each
// was (rising within a token, as the sort is stable); token number d has places[starts[d]] up to
// places[starts[d + 1]].
struct NumberOp {
  int32_t* places;

  ZS_HOST_DEVICE void At(int64_t i) const { places[i] = static_cast<int32_t>(i); }
};

ZS_HOST_DEVICE bool IsFirst(const int32_t* sorted, int64_t i) {
  return sorted[i] >= 0 && (i == 0 || sorted[i] != sorted[i - 1]);
}

struct MarkFirstOp {
  const int32_t* sorted;
  int32_t* marks;

  ZS_HOST_DEVICE void At(int64_t i) const { marks[i] = IsFirst(sorted, i) ? 1 : 0; }
};

// ranks: the marks, summed up to and with each.
struct StartsOp {
  const int32_t* sorted;
  const int32_t* ranks;
  int64_t count;
  int32_t* starts;  // [count + 1]
  int32_t* ids;

  ZS_HOST_DEVICE void At(int64_t i) const {
    const int32_t distinct = ranks[count - 1];
    if (IsFirst(sorted, i)) {
      ids[ranks[i] - 1] = sorted[i];
      starts[ranks[i] - 1] = static_cast<int32_t>(i);
    }
    if (i >= distinct) ids[i] = -1;
    const bool is_last = sorted[i] >= 0 && (i == count - 1 || sorted[i + 1] < 0);
    if (is_last) starts[distinct] = static_cast<int32_t>(i + 1);
  }
};

// Row d: the sum of token number d's rows in order of position; zeros after the last token.
template <class T>
struct SumPlacesOp {
  const T* dy;
  const int32_t* places;
  const int32_t* starts;
  const int32_t* distinct;
  int64_t cols;
  T* rows;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t d, const Cols& mine) const {
    const bool any = d < *distinct;
    const int32_t begin = any ? starts[d] : 0, end = any ? starts[d + 1] : 0;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      float sums[N] = {};
      if (any) Load<N>(dy + places[begin] * cols + col, sums);
      ZS_UNROLL(4)
      for (int32_t place = begin + 1; place < end; ++place) {
        float values[N];
        Load<N>(dy + places[place] * cols + col, values);
        for (int i = 0; i < N; ++i) sums[i] += values[i];
      }
      Store<N>(sums, rows + d * cols + col);
    });
  }
};

}  // namespace zeroshard::cuda
