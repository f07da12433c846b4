#include "worker/agent/cuda_backend.h"

namespace zeroshard {

absl::StatusOr<WorkerBackend> CudaBackend(WorkerBackend /*common*/, int /*ordinal*/,
                                          Collectives /*collectives*/) {
  return absl::InvalidArgumentError(
      "--device cuda: this program was built without CUDA; use --device cpu");
}

}  // namespace zeroshard
