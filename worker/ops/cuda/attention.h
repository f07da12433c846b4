// Attention on the GPU. bf16 and fp16 with heads of up to 128 run on tensor cores
// (attention_forward.h, attention_backward.h); everything else in fp32 arithmetic
// (attention_plain.h), heads up to 256. Every result has the same bits in every run: no sum depends
// on the order of blocks.
//
// Functions check what the host can see (document starts are in device memory: a start that cannot
// be gives numbers without meaning, but reads nothing outside the tensors), enqueue on `stream` and
// return at once. INVALID_ARGUMENT names the size or type that cannot be; launch errors as launch.h
// has them. Thread-safe.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "worker/ops/ops.h"

namespace zeroshard::cuda {

// As the methods of worker/ops/ops.h.
absl::Status AttentionForward(cudaStream_t stream, const AttentionArgs& args, void* out,
                              float* lse);
// Bytes of scratch memory, 256-byte aligned, that the backward pass needs.
int64_t AttentionBackwardWorkspace(const AttentionArgs& args);
absl::Status AttentionBackward(cudaStream_t stream, const AttentionArgs& args, const void* out,
                               const void* d_out, const float* lse, void* d_q, void* d_k, void* d_v,
                               void* workspace);
absl::Status CachedAttention(cudaStream_t stream, const CachedAttentionArgs& args, void* out);

}  // namespace zeroshard::cuda
