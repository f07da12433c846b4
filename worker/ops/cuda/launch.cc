#include "worker/ops/cuda/launch.h"

#include <string>

namespace zeroshard::cuda {

absl::Status StatusOf(cudaError_t error, const char* what, std::source_location where) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text =
      absl::StrCat(what, " (", where.file_name(), ":", where.line(), "): ", cudaGetErrorName(error),
                   " (", cudaGetErrorString(error), ")");
  if (error == cudaErrorMemoryAllocation) {
    return absl::ResourceExhaustedError(
        absl::StrCat(text, "; use a smaller micro-batch or a higher ZeRO stage"));
  }
  return absl::InternalError(absl::StrCat(
      text,
      "; it may belong to a kernel that was enqueued earlier: run with CUDA_LAUNCH_BLOCKING=1 or "
      "under compute-sanitizer to see which"));
}

}  // namespace zeroshard::cuda
