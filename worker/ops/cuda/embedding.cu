#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <limits>

#include "common/status_macros.h"
#include "worker/ops/cuda/embedding.h"
#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {
namespace {

// The workspace of EmbeddingBackwardRows.
struct Scratch {
  int32_t* numbers;
  int32_t* places;
  int32_t* sorted;
  int32_t* ranks;
  int32_t* starts;  // one more
  void* cub;
  size_t cub_bytes;
};

constexpr int64_t kArrays = 5;
int64_t ArrayBytes(int64_t count) {
  return RoundUp((count + 1) * static_cast<int64_t>(sizeof(int32_t)), 256);
}

Scratch ScratchIn(void* workspace, int64_t bytes, int64_t count) {
  const auto array = [&](int64_t i) {
    return reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + i * ArrayBytes(count));
  };
  return {array(0),
          array(1),
          array(2),
          array(3),
          array(4),
          array(kArrays),
          static_cast<size_t>(bytes - kArrays * ArrayBytes(count))};
}

cudaError_t Sort(cudaStream_t stream, const int32_t* tokens, int64_t count, Scratch* scratch) {
  return cub::DeviceRadixSort::SortPairs(scratch->cub, scratch->cub_bytes, tokens, scratch->sorted,
                                         scratch->numbers, scratch->places, static_cast<int>(count),
                                         0, kTokenBits, stream);
}

cudaError_t Scan(cudaStream_t stream, int64_t count, Scratch* scratch) {
  return cub::DeviceScan::InclusiveSum(scratch->cub, scratch->cub_bytes, scratch->ranks,
                                       static_cast<int>(count), stream);
}

// sorted, places and starts, and the ids.
absl::Status FindPlaces(cudaStream_t stream, const int32_t* tokens, int64_t count, Scratch* scratch,
                        int32_t* ids) {
  constexpr const char* kWhat = "EmbeddingBackwardRows";
  ZS_RETURN_IF_ERROR(LaunchOneByOne(stream, kWhat, NumberOp{scratch->numbers}, count));
  ZS_RETURN_IF_ERROR(StatusOf(Sort(stream, tokens, count, scratch), kWhat));
  ZS_RETURN_IF_ERROR(
      LaunchOneByOne(stream, kWhat, MarkFirstOp{scratch->sorted, scratch->ranks}, count));
  ZS_RETURN_IF_ERROR(StatusOf(Scan(stream, count, scratch), kWhat));
  return LaunchOneByOne(
      stream, kWhat, StartsOp{scratch->sorted, scratch->ranks, count, scratch->starts, ids}, count);
}

}  // namespace

absl::Status EmbeddingForward(cudaStream_t stream, const int32_t* tokens, const void* tok,
                              const void* pos, int64_t batch, int64_t seq, int64_t cols,
                              DType dtype, void* y) {
  return ForType(dtype, "EmbeddingForward", [&](auto type) {
    using T = typename decltype(type)::Type;
    const LookupOp<T> op{tokens, static_cast<const T*>(tok), static_cast<const T*>(pos), seq,
                         cols,   static_cast<T*>(y)};
    const bool aligned = cols % kPack == 0 && AreAligned(batch * seq, cols, {tok, pos, y});
    return LaunchEach(stream, "EmbeddingForward", op, batch * seq, cols, aligned);
  });
}

absl::Status LocalIds(cudaStream_t stream, const int32_t* ids, int64_t n, int64_t begin,
                      int64_t end, int32_t* local) {
  return LaunchOneByOne(stream, "LocalIds", LocalIdOp{ids, begin, end, local}, n);
}

absl::Status LookupRows(cudaStream_t stream, const int32_t* local, const void* table, int64_t n,
                        int64_t cols, DType dtype, void* y) {
  return ForType(dtype, "LookupRows", [&](auto type) {
    using T = typename decltype(type)::Type;
    const LookupRowsOp<T> op{local, static_cast<const T*>(table), cols, static_cast<T*>(y)};
    const bool aligned = cols % kPack == 0 && AreAligned(n, cols, {table, y});
    return LaunchEach(stream, "LookupRows", op, n, cols, aligned);
  });
}

absl::StatusOr<int64_t> EmbeddingBackwardWorkspace(int64_t count) {
  if (count < 0 || count > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("EmbeddingBackwardRows: ", count,
                     " tokens in a micro-batch; fewer than 2^31 are possible: lower "
                     "train_micro_batch_size_per_gpu"));
  }
  Scratch sizes = {}, scan = {};
  ZS_RETURN_IF_ERROR(StatusOf(Sort(nullptr, nullptr, count, &sizes), "EmbeddingBackwardRows"));
  ZS_RETURN_IF_ERROR(StatusOf(Scan(nullptr, count, &scan), "EmbeddingBackwardRows"));
  return kArrays * ArrayBytes(count) +
         RoundUp(static_cast<int64_t>(std::max(sizes.cub_bytes, scan.cub_bytes)), 256);
}

absl::Status EmbeddingBackwardRows(cudaStream_t stream, const void* dy, const int32_t* tokens,
                                   int64_t batch, int64_t seq, int64_t cols, DType dtype,
                                   int32_t* ids, void* rows, void* workspace,
                                   int64_t workspace_bytes) {
  const int64_t count = batch * seq;
  if (count <= 0) return absl::OkStatus();
  const absl::StatusOr<int64_t> wanted = EmbeddingBackwardWorkspace(count);
  if (!wanted.ok()) return wanted.status();
  if (workspace_bytes < *wanted) {
    return absl::InvalidArgumentError(absl::StrCat("EmbeddingBackwardRows: a workspace of ",
                                                   workspace_bytes, " bytes for ", count,
                                                   " tokens; wanted ", *wanted));
  }
  Scratch scratch = ScratchIn(workspace, workspace_bytes, count);
  ZS_RETURN_IF_ERROR(FindPlaces(stream, tokens, count, &scratch, ids));
  return ForType(dtype, "EmbeddingBackwardRows", [&](auto type) {
    using T = typename decltype(type)::Type;
    const SumPlacesOp<T> op{static_cast<const T*>(dy),   scratch.places, scratch.starts,
                            scratch.ranks + (count - 1), cols,           static_cast<T*>(rows)};
    return LaunchEach(stream, "EmbeddingBackwardRows", op, count, cols,
                      cols % kPack == 0 && AreAligned(count, cols, {dy, rows}));
  });
}

}  // namespace zeroshard::cuda
