// The sum in rank order on the GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "worker/comm/nccl/fold.h"

namespace zeroshard {

// Brings the kernels onto the current device. Otherwise the first launch does, and that may wait
// for all that runs there: a collective, for one, that waits for a peer.
cudaError_t LoadFold();

// Enqueues it on `stream`, with at most `most_blocks` blocks, so that the computation that runs
// beside it keeps its share. The error of the launch.
cudaError_t LaunchFold(const FoldArgs& args, int most_blocks, cudaStream_t stream);

}  // namespace zeroshard
