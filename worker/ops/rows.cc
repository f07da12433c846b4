// A table's gradient as rows: ScatterRows and AccumulateRows, and the sums of what one rank owns.
#include "worker/ops/rows.h"

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstring>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "worker/ops/vector_ops.h"

namespace zeroshard::cpu {
namespace {

// How many ids come before the -1 that ends them.
int64_t Used(const int32_t* ids, int64_t n) {
  return std::find_if(ids, ids + n, [](int32_t id) { return id < 0; }) - ids;
}

// The elements of row `id` that the rank owns.
struct Part {
  int64_t begin, end;
  int64_t in_row;  // columns before it
};
Part OwnedPart(const RowSums& sums, int32_t id) {
  const int64_t row = int64_t{id} * sums.cols;
  const int64_t begin = std::max(row, sums.begin);
  return {begin, std::min(row + sums.cols, sums.end), begin - row};
}

int32_t& Slot(const RowSums& sums, int32_t id) { return sums.slots[id - sums.first_row()]; }

float* Sum(const RowSums& sums, int32_t slot) { return sums.sums + int64_t{slot} * sums.cols; }

void GiveSlots(const RowSums& sums, const int32_t* ids, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    int32_t& slot = Slot(sums, ids[i]);
    if (slot >= 0) continue;
    assert(*sums.count < sums.capacity);
    slot = (*sums.count)++;
    sums.touched[slot] = ids[i];
  }
}

}  // namespace

void ScatterRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols, DType dtype,
                 void* table, int threads) {
  AssertFloat(dtype);
  ParallelRows(Used(ids, n), cols, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(At(table, ids[i] * cols, dtype), At(rows, i * cols, dtype),
                  static_cast<size_t>(cols) * SizeOf(dtype));
    }
  });
}

void AccumulateRows(const int32_t* ids, const void* rows, int64_t n, int64_t cols, DType dtype,
                    float* table, int threads) {
  ParallelRows(Used(ids, n), cols, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      AccumulateF32(At(rows, i * cols, dtype), dtype, cols, true, table + ids[i] * cols, 1);
  });
}

void FoldRows(const RowSums& sums, const int32_t* ids, const void* rows, int64_t n, DType dtype,
              int threads) {
  if (sums.begin >= sums.end) return;
  const int32_t* last = ids + Used(ids, n);
  const int64_t first = std::lower_bound(ids, last, sums.first_row()) - ids;
  const int64_t count = std::lower_bound(ids + first, last, CeilDiv(sums.end, sums.cols)) - ids;
  const int32_t used_before = *sums.count;
  GiveSlots(sums, ids, first, count);
  ParallelRows(count - first, sums.cols, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = first + begin; i < first + end; ++i) {
      const int32_t slot = Slot(sums, ids[i]);
      const Part part = OwnedPart(sums, ids[i]);
      float* sum = Sum(sums, slot) + part.in_row;
      const int64_t size = part.end - part.begin;
      // Added to zero, not copied: -0 becomes +0 for any first contributor.
      if (slot >= used_before) std::memset(sum, 0, static_cast<size_t>(size) * sizeof(float));
      AccumulateF32(At(rows, i * sums.cols + part.in_row, dtype), dtype, size, true, sum, 1);
    }
  });
}

void JoinRows(const RowSums& sums, DType wire, void* gradient, DType gradient_type, int threads) {
  if (sums.begin >= sums.end) return;
  ParallelRows(*sums.count, sums.cols, threads, [&](int64_t begin, int64_t end) {
    for (auto slot = static_cast<int32_t>(begin); slot < end; ++slot) {
      const Part part = OwnedPart(sums, sums.touched[slot]);
      AddRounded(Sum(sums, slot) + part.in_row, DType::kF32, part.end - part.begin, wire,
                 At(gradient, part.begin - sums.begin, gradient_type), gradient_type, 1);
    }
  });
}

void ClearRows(const RowSums& sums) {
  if (sums.begin >= sums.end) return;
  for (int32_t slot = 0; slot < *sums.count; ++slot) Slot(sums, sums.touched[slot]) = -1;
  *sums.count = 0;
}

}  // namespace zeroshard::cpu
