// The sum in rank order on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "worker/comm/nccl/fold.h"

namespace zeroshard {

// Enqueues it on `stream`, with at most `most_blocks` blocks, so that the computation that runs
// beside it keeps its share. The error of the launch.
cudaError_t LaunchFold(const FoldArgs& args, int most_blocks, cudaStream_t stream);

}  // namespace zeroshard
