#include "worker/ops/cuda/attention_kernel.cuh"
#include "worker/ops/cuda/attention_launch.h"
#include "worker/ops/cuda/attention_plain.h"

namespace zeroshard::cuda::attention {
namespace {

template <class T, bool kDrop>
struct Forward {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    PlainForwardBlock<T, kDrop>(simt, p, shared);
  }
};

template <class T, bool kDrop>
struct KeyGradient {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    PlainKeyGradientBlock<T, kDrop>(simt, p, shared);
  }
};

template <class T, bool kDrop>
struct QueryGradient {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    PlainQueryGradientBlock<T, kDrop>(simt, p, shared);
  }
};

template <class T>
struct Delta {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p, void*) {
    DeltaBlock<T>(simt, p);
  }
};

// The launch of Body<element type, with dropout>.
template <template <class, bool> class Body>
cudaError_t LaunchOf(cudaStream_t stream, const Params& p, DType dtype, bool drops, int64_t blocks,
                     int shared) {
  return WithElement(dtype, [&](auto element) {
    using T = decltype(element);
    return drops ? Launch<Body<T, true>>(stream, p, blocks, shared)
                 : Launch<Body<T, false>>(stream, p, blocks, shared);
  });
}

}  // namespace

cudaError_t LaunchDelta(cudaStream_t stream, const Params& p, DType dtype) {
  return WithElement(dtype, [&](auto element) {
    return Launch<Delta<decltype(element)>>(stream, p, DeltaBlocks(p), 0);
  });
}

cudaError_t LaunchPlainForward(cudaStream_t stream, const Params& p, DType dtype, bool drops) {
  return LaunchOf<Forward>(stream, p, dtype, drops, QueryBlocks(p, kPlainRows),
                           PlainForwardShared(p.head_dim));
}

cudaError_t LaunchPlainKeyGradient(cudaStream_t stream, const Params& p, DType dtype, bool drops) {
  return LaunchOf<KeyGradient>(stream, p, dtype, drops, KeyBlocks(p, kPlainRows),
                               PlainKeyGradientShared(p.head_dim));
}

cudaError_t LaunchPlainQueryGradient(cudaStream_t stream, const Params& p, DType dtype,
                                     bool drops) {
  return LaunchOf<QueryGradient>(stream, p, dtype, drops, QueryBlocks(p, kPlainRows),
                                 PlainQueryGradientShared(p.head_dim));
}

}  // namespace zeroshard::cuda::attention
