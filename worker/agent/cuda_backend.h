// A rank on a GPU of NVIDIA's. cuda_backend.cc where the build has CUDA, else no_cuda_backend.cc.
#pragma once

#include "absl/status/statusor.h"
#include "worker/agent/backend.h"

namespace zeroshard {

enum class Collectives { kNccl, kGloo };

// `common` with the parts that GPU `ordinal` has its own of. Gloo goes through host memory, so that
// several workers may share a GPU. INVALID_ARGUMENT where the build has no CUDA, or the machine no
// GPU that can be used (cuda::ProbeDevice: nothing has touched it yet), no cuBLASLt, or no NCCL for
// Collectives::kNccl.
absl::StatusOr<WorkerBackend> CudaBackend(WorkerBackend common, int ordinal,
                                          Collectives collectives);

}  // namespace zeroshard
