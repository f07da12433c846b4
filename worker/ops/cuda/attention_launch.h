// The attention kernels' launches. Each enqueues one kernel and returns the launch's error. Nothing
// here checks arguments or allocates: attention.h does.
#pragma once

#include <cuda_runtime_api.h>

#include "common/types.h"
#include "worker/ops/cuda/attention_params.h"
#include "worker/ops/cuda/cached_attention_block.h"

namespace zeroshard::cuda::attention {

// bf16 or fp16, for heads up to `padded_dim`: 32, 64 or 128.
cudaError_t LaunchForward(cudaStream_t stream, const Params& p, DType dtype, int padded_dim,
                          bool drops);
cudaError_t LaunchKeyGradient(cudaStream_t stream, const Params& p, DType dtype, int padded_dim,
                              bool drops);
cudaError_t LaunchQueryGradient(cudaStream_t stream, const Params& p, DType dtype, int padded_dim,
                                bool drops);

// fp32, bf16 or fp16.
cudaError_t LaunchDelta(cudaStream_t stream, const Params& p, DType dtype);
cudaError_t LaunchPlainForward(cudaStream_t stream, const Params& p, DType dtype, bool drops);
cudaError_t LaunchPlainKeyGradient(cudaStream_t stream, const Params& p, DType dtype, bool drops);
cudaError_t LaunchPlainQueryGradient(cudaStream_t stream, const Params& p, DType dtype, bool drops);

cudaError_t LaunchCached(cudaStream_t stream, const CachedParams& p, DType dtype);

}  // namespace zeroshard::cuda::attention
