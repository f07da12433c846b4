#include "worker/ops/cuda/attention_kernel.cuh"
#include "worker/ops/cuda/attention_launch.h"
#include "worker/ops/cuda/cached_attention_block.h"

namespace zeroshard::cuda::attention {
namespace {

template <class T>
struct Cached {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const CachedParams& p,
                                             void* shared) {
    CachedBlock<T>(simt, p, shared);
  }
};

}  // namespace

cudaError_t LaunchCached(cudaStream_t stream, const CachedParams& p, DType dtype) {
  const int64_t blocks = CachedBlocks(p);
  const int shared = CachedShared(p.head_dim);
  return WithElement(dtype, [&](auto element) {
    return Launch<Cached<decltype(element)>>(stream, p, blocks, shared);
  });
}

}  // namespace zeroshard::cuda::attention
