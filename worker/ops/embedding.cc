// The token and position tables: lookup, and the token table's gradient as rows.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/embedding.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class T>
HWY_INLINE void LookupTyped(const int32_t* tokens, const T* tok, const T* pos, int64_t begin,
                            int64_t end, int64_t seq, int64_t cols, T* y) {
  for (int64_t row = begin; row < end; ++row) {
    const T* token_row = tok + tokens[row] * cols;
    const T* position_row = pos + (row % seq) * cols;
    T* out = y + row * cols;
    ForEach(cols, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
      StoreN(hn::Add(LoadN(token_row + i, n), LoadN(position_row + i, n)), out + i, n);
    });
  }
}

// Rows [begin, end) of tok[tokens] + pos.
void LookupRows(const int32_t* tokens, const void* tok, const void* pos, int64_t begin, int64_t end,
                int64_t seq, int64_t cols, DType dtype, void* y) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    LookupTyped(tokens, As<T>(tok), As<T>(pos), begin, end, seq, cols, As<T>(y));
  });
}

template <class T>
HWY_INLINE void SumOccurrencesTyped(const T* dy, const int64_t* places, int64_t count, int64_t cols,
                                    T* out) {
  ForEach(cols, [=](int64_t i, int64_t n) ZEROSHARD_KERNEL {
    V sum = LoadN(dy + places[0] * cols + i, n);
    for (int64_t k = 1; k < count; ++k) sum = hn::Add(sum, LoadN(dy + places[k] * cols + i, n));
    StoreN(sum, out + i, n);
  });
}

// out = the sum of dy's rows at places[0..count), in that order.
void SumOccurrences(const void* dy, const int64_t* places, int64_t count, int64_t cols, DType dtype,
                    void* out) {
  WithFloat(dtype, [&]<class T>(T) ZEROSHARD_KERNEL {
    SumOccurrencesTyped(As<T>(dy), places, count, cols, As<T>(out));
  });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(LookupRows);
HWY_EXPORT(SumOccurrences);

void EmbeddingForward(const int32_t* tokens, const void* tok, const void* pos, int64_t batch,
                      int64_t seq, int64_t cols, DType dtype, void* y, int threads) {
  AssertFloat(dtype);
  ParallelRows(batch * seq, cols, threads, [&](int64_t begin, int64_t end) {
    if (pos != nullptr) {
      HWY_DYNAMIC_DISPATCH(LookupRows)(tokens, tok, pos, begin, end, seq, cols, dtype, y);
      return;
    }
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(At(y, row * cols, dtype), At(tok, tokens[row] * cols, dtype),
                  static_cast<size_t>(cols) * SizeOf(dtype));
    }
  });
}

void LocalIds(const int32_t* ids, int64_t n, int64_t begin, int64_t end, int32_t* local) {
  for (int64_t i = 0; i < n; ++i)
    local[i] = ids[i] >= begin && ids[i] < end ? static_cast<int32_t>(ids[i] - begin) : -1;
}

void LookupRows(const int32_t* local, const void* table, int64_t n, int64_t cols, DType dtype,
                void* y, int threads) {
  AssertFloat(dtype);
  const size_t bytes = static_cast<size_t>(cols) * SizeOf(dtype);
  ParallelRows(n, cols, threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      void* to = At(y, row * cols, dtype);
      if (local[row] < 0) {
        std::memset(to, 0, bytes);
      } else {
        std::memcpy(to, At(table, local[row] * cols, dtype), bytes);
      }
    }
  });
}

void EmbeddingBackwardRows(const void* dy, const int32_t* tokens, int64_t batch, int64_t seq,
                           int64_t cols, DType dtype, int32_t* ids, void* rows, int threads) {
  AssertFloat(dtype);
  const int64_t count = batch * seq;
  std::vector<std::pair<int32_t, int64_t>> sorted;
  sorted.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] >= 0) sorted.emplace_back(tokens[i], i);
  }
  std::sort(sorted.begin(), sorted.end());

  std::vector<int64_t> places, starts;  // of token number d: places[starts[d] .. starts[d + 1])
  places.reserve(sorted.size());
  for (const auto& [token, place] : sorted) {
    const int64_t distinct = static_cast<int64_t>(starts.size());
    if (distinct == 0 || ids[distinct - 1] != token) {
      ids[distinct] = token;
      starts.push_back(static_cast<int64_t>(places.size()));
    }
    places.push_back(place);
  }
  const int64_t distinct = static_cast<int64_t>(starts.size());
  starts.push_back(static_cast<int64_t>(places.size()));
  std::fill(ids + distinct, ids + count, -1);

  ParallelRows(count, cols, threads, [&](int64_t begin, int64_t end) {
    for (int64_t d = begin; d < std::min(end, distinct); ++d) {
      const int64_t start = starts[static_cast<size_t>(d)];
      HWY_DYNAMIC_DISPATCH(SumOccurrences)
      (dy, places.data() + start, starts[static_cast<size_t>(d) + 1] - start, cols, dtype,
       At(rows, d * cols, dtype));
    }
    const int64_t empty = std::max(begin, distinct);
    if (empty < end) {
      std::memset(At(rows, empty * cols, dtype), 0,
                  static_cast<size_t>((end - empty) * cols) * SizeOf(dtype));
    }
  });
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
