#include "common/status_macros.h"
#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/rows.h"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {
namespace {

// Whether a pack of a row is owned wholly or not at all, and lies at a multiple of 16 bytes.
bool InPacks(const RowSums& sums, std::initializer_list<const void*> pointers) {
  return sums.cols % kPack == 0 && sums.begin % kPack == 0 && sums.end % kPack == 0 &&
         AreAligned(1, sums.cols, pointers) && AreAligned(1, sums.cols, {sums.sums});
}

bool IsEmpty(const RowSums& sums) { return sums.end <= sums.begin || sums.cols <= 0; }

}  // namespace

absl::Status ScatterRows(cudaStream_t stream, const int32_t* ids, const void* rows, int64_t n,
                         int64_t cols, DType dtype, void* table) {
  return ForType(dtype, "ScatterRows", [&](auto type) {
    using T = typename decltype(type)::Type;
    const ScatterRowsOp<T> op{ids, static_cast<const T*>(rows), cols, static_cast<T*>(table)};
    return LaunchEach(stream, "ScatterRows", op, n, cols,
                      cols % kPack == 0 && AreAligned(n, cols, {rows, table}));
  });
}

absl::Status AccumulateRows(cudaStream_t stream, const int32_t* ids, const void* rows, int64_t n,
                            int64_t cols, DType dtype, float* table) {
  return ForType(dtype, "AccumulateRows", [&](auto type) {
    using T = typename decltype(type)::Type;
    const AccumulateRowsOp<T> op{ids, static_cast<const T*>(rows), cols, table};
    return LaunchEach(stream, "AccumulateRows", op, n, cols,
                      cols % kPack == 0 && AreAligned(n, cols, {rows, table}));
  });
}

absl::Status FoldRows(cudaStream_t stream, const RowSums& sums, const int32_t* ids,
                      const void* rows, int64_t n, DType dtype) {
  if (IsEmpty(sums)) return absl::OkStatus();
  return ForType(dtype, "FoldRows", [&](auto type) {
    using T = typename decltype(type)::Type;
    ZS_RETURN_IF_ERROR(LaunchEach(stream, "FoldRows", OneByOne<AssignSlotsOp>{{sums, ids}}, 1, n,
                                  /*aligned=*/false));
    const FoldRowsOp<T> op{sums, ids, static_cast<const T*>(rows)};
    return LaunchEach(stream, "FoldRows", op, n, sums.cols, InPacks(sums, {rows}));
  });
}

absl::Status JoinRows(cudaStream_t stream, const RowSums& sums, DType wire, void* gradient,
                      DType gradient_type) {
  if (IsEmpty(sums)) return absl::OkStatus();
  return ForType(gradient_type, "JoinRows", [&](auto type) {
    using G = typename decltype(type)::Type;
    const JoinRowsOp<G> op{sums, wire, static_cast<G*>(gradient)};
    return LaunchEach(stream, "JoinRows", op, sums.capacity, sums.cols, InPacks(sums, {gradient}));
  });
}

absl::Status ClearRows(cudaStream_t stream, const RowSums& sums) {
  if (IsEmpty(sums)) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(LaunchEach(stream, "ClearRows", ClearRowsOp{sums}, sums.capacity, sums.cols,
                                InPacks(sums, {})));
  return StatusOf(cudaMemsetAsync(sums.count, 0, sizeof(*sums.count), stream), "ClearRows");
}

}  // namespace zeroshard::cuda
