// Splits a range over the OpenMP threads of one call.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "common/types.h"

namespace zeroshard::cpu {

// Calls body(begin, end) on disjoint ranges that cover [0, items), each beginning at a multiple of
// `grain`, on up to `threads` threads, each with at least `min_items` of them; on the calling
// thread alone where one suffices. body must not throw.
template <class Body>
void ParallelRanges(int64_t items, int64_t grain, int64_t min_items, int threads,
                    const Body& body) {
  if (items <= 0) return;
  const int64_t wanted = std::min<int64_t>(threads, items / std::max<int64_t>(min_items, 1));
  if (wanted <= 1) {
    body(int64_t{0}, items);
    return;
  }
#pragma omp parallel num_threads(static_cast <int>(wanted))
  {
    const int64_t chunk = RoundUp(CeilDiv(items, omp_get_num_threads()), grain);
    const int64_t begin = std::min(items, omp_get_thread_num() * chunk);
    const int64_t end = std::min(items, begin + chunk);
    if (begin < end) body(begin, end);
  }
}

// Starting a team costs some microseconds: about this many elements pay for it.
inline constexpr int64_t kElementsPerThread = 1 << 14;

// Splits a vector between whole cache lines.
template <class Body>
void ParallelElements(int64_t n, int threads, const Body& body) {
  ParallelRanges(n, 64, kElementsPerThread, threads, body);
}

// Splits the rows of a matrix.
template <class Body>
void ParallelRows(int64_t rows, int64_t cols, int threads, const Body& body) {
  ParallelRanges(rows, 1, CeilDiv(kElementsPerThread, std::max<int64_t>(cols, 1)), threads, body);
}

// Splits the columns of a matrix.
template <class Body>
void ParallelColumns(int64_t rows, int64_t cols, int threads, const Body& body) {
  const int64_t fewest = CeilDiv(kElementsPerThread, std::max<int64_t>(rows, 1));
  ParallelRanges(cols, 64, std::max<int64_t>(fewest, 64), threads, body);
}

}  // namespace zeroshard::cpu
