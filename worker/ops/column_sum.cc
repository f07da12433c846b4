// ColumnSum and PositionBackward.
#include <cstdint>
#include <vector>

#include "common/kernels/parallel.h"
#include "common/kernels/pointers.h"
#include "common/kernels/simd_targets.h"
#include "worker/ops/vector_ops.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/column_sum.cc"
#include "hwy/foreach_target.h"  // first of the Highway headers
// After it:
#include "common/kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace zeroshard::cpu::HWY_NAMESPACE {

template <class T>
HWY_INLINE void SumTyped(const T* x, int64_t rows, int64_t cols, int64_t begin, int64_t end,
                         float* totals) {
  float* const outputs[1] = {totals};
  FoldRows<1>(
      rows, begin, end,
      [=](int64_t row, int64_t col, int64_t n, V* term)
          ZEROSHARD_KERNEL { term[0] = LoadN(x + row * cols + col, n); },
      outputs);
}

// The sums of columns [begin, end).
void SumColumns(const void* x, int64_t rows, int64_t cols, DType dtype, int64_t begin, int64_t end,
                float* totals) {
  WithFloat(dtype, [&]<class T>(T)
                       ZEROSHARD_KERNEL { SumTyped(As<T>(x), rows, cols, begin, end, totals); });
}

}  // namespace zeroshard::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace zeroshard::cpu {

HWY_EXPORT(SumColumns);

void ColumnSum(const void* x, int64_t rows, int64_t cols, DType dtype, void* out, DType out_type,
               int threads) {
  AssertFloat(dtype);
  AssertFloat(out_type);
  ParallelColumns(rows, cols, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> totals(static_cast<size_t>(RoundUp(end - begin, 64)));
    HWY_DYNAMIC_DISPATCH(SumColumns)(x, rows, cols, dtype, begin, end, totals.data());
    Convert(totals.data(), DType::kF32, end - begin, At(out, begin, out_type), out_type, 1);
  });
}

void PositionBackward(const void* dy, int64_t batch, int64_t seq, int64_t cols, DType dtype,
                      void* d_pos, int threads) {
  ColumnSum(dy, batch, seq * cols, dtype, d_pos, dtype, threads);
}

}  // namespace zeroshard::cpu
#endif  // HWY_ONCE
