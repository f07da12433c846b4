// Rows of a table by id: ScatterRows, AccumulateRows, and the sums of RowSums (ops.h). Ids are
// distinct and end with -1, so no two threads meet in a row.
#pragma once

#include <cstdint>

#include "worker/ops/cuda/elementwise.h"
#include "worker/ops/cuda/host_device.h"
#include "worker/ops/ops.h"

namespace zeroshard::cuda {

// table[ids[i]] = rows[i].
template <class T>
struct ScatterRowsOp {
  const int32_t* ids;
  const T* rows;
  int64_t cols;
  T* table;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t i, const Cols& mine) const {
    const int64_t id = ids[i];
    if (id < 0) return;
    mine.Each([&](auto width, int64_t col) {
      CopyElements<decltype(width)::value>(rows + i * cols + col, table + id * cols + col);
    });
  }
};

// sums += row, of N elements.
template <int N, class T>
ZS_HOST_DEVICE void AddElements(const T* row, float* sums) {
  float values[N], totals[N];
  Load<N>(row, values);
  Load<N>(sums, totals);
  for (int k = 0; k < N; ++k) totals[k] += values[k];
  Store<N>(totals, sums);
}

// table[ids[i]] += rows[i].
template <class T>
struct AccumulateRowsOp {
  const int32_t* ids;
  const T* rows;
  int64_t cols;
  float* table;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t i, const Cols& mine) const {
    const int64_t id = ids[i];
    if (id < 0) return;
    mine.Each([&](auto width, int64_t col) {
      AddElements<decltype(width)::value>(rows + i * cols + col, table + id * cols + col);
    });
  }
};

// Element `col` of row `id` is element id * cols + col of the table; the rank owns [begin, end).
ZS_HOST_DEVICE bool Owns(const RowSums& sums, int64_t element) {
  return element >= sums.begin && element < sums.end;
}
ZS_HOST_DEVICE bool OwnsSome(const RowSums& sums, int64_t id) {
  return id * sums.cols < sums.end && (id + 1) * sums.cols > sums.begin;
}
ZS_HOST_DEVICE int32_t& SlotOf(const RowSums& sums, int64_t id) {
  return sums.slots[id - sums.begin / sums.cols];
}

// First kernel of FoldRows: gives a slot to each row that has none. Past the capacity it stops the
// program on the device, rather than write where other memory lies.
struct AssignSlotsOp {
  RowSums sums;
  const int32_t* ids;

  ZS_HOST_DEVICE void At(int64_t i) const {
    const int32_t id = ids[i];
    if (id < 0 || !OwnsSome(sums, id) || SlotOf(sums, id) >= 0) return;
    const int32_t slot = FetchAdd(sums.count, int32_t{1});
    if (slot >= sums.capacity) {
#ifdef __CUDA_ARCH__
      __trap();
#else
      __builtin_trap();
#endif
    }
    SlotOf(sums, id) = slot;
    sums.touched[slot] = id;
  }
};

// The second: the slots' sums += rows. A free slot's sum is zero.
template <class T>
struct FoldRowsOp {
  RowSums sums;
  const int32_t* ids;
  const T* rows;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t i, const Cols& mine) const {
    const int64_t id = ids[i];
    if (id < 0 || !OwnsSome(sums, id)) return;
    float* const total = sums.sums + SlotOf(sums, id) * sums.cols;
    mine.Each([&](auto width, int64_t col) {
      if (!Owns(sums, id * sums.cols + col)) return;
      AddElements<decltype(width)::value>(rows + i * sums.cols + col, total + col);
    });
  }
};

// Row = slot; those after the last in use have nothing to do.
template <class G>
struct JoinRowsOp {
  RowSums sums;
  DType wire;
  G* gradient;  // from element sums.begin of the table on

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t slot, const Cols& mine) const {
    if (slot >= *sums.count) return;
    const int64_t begin = sums.touched[slot] * sums.cols;
    mine.Each([&](auto width, int64_t col) {
      if (!Owns(sums, begin + col)) return;
      AddRoundedElements<decltype(width)::value>(sums.sums + slot * sums.cols + col, wire,
                                                 gradient + (begin + col - sums.begin));
    });
  }
};

// The count itself is set to zero after it.
struct ClearRowsOp {
  RowSums sums;

  template <class Cols>
  ZS_HOST_DEVICE void Row(int64_t slot, const Cols& mine) const {
    if (slot >= *sums.count) return;
    if (mine.first()) SlotOf(sums, sums.touched[slot]) = -1;
    mine.Each([&](auto width, int64_t col) {
      constexpr int N = decltype(width)::value;
      const float zeros[N] = {};
      Store<N>(zeros, sums.sums + slot * sums.cols + col);
    });
  }
};

}  // namespace zeroshard::cuda
