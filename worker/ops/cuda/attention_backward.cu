#include "worker/ops/cuda/attention_backward.h"
#include "worker/ops/cuda/attention_kernel.cuh"
#include "worker/ops/cuda/attention_launch.h"

namespace zeroshard::cuda::attention {
namespace {

template <class T, int D, bool kDrop>
struct KeyGradient {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    KeyGradientBlock<T, D, kDrop>(simt, p, shared);
  }
};

template <class T, int D, bool kDrop>
struct QueryGradient {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    QueryGradientBlock<T, D, kDrop>(simt, p, shared);
  }
};

template <class T, int D>
cudaError_t LaunchKeys(cudaStream_t stream, const Params& p, bool drops) {
  const int64_t blocks = KeyBlocks(p, kBackwardTile);
  constexpr int kShared = KeyGradientShape<D>::kShared;
  return drops ? Launch<KeyGradient<T, D, true>>(stream, p, blocks, kShared)
               : Launch<KeyGradient<T, D, false>>(stream, p, blocks, kShared);
}

template <class T, int D>
cudaError_t LaunchQueries(cudaStream_t stream, const Params& p, bool drops) {
  const int64_t blocks = QueryBlocks(p, kBackwardTile);
  constexpr int kShared = QueryGradientShape<D>::kShared;
  return drops ? Launch<QueryGradient<T, D, true>>(stream, p, blocks, kShared)
               : Launch<QueryGradient<T, D, false>>(stream, p, blocks, kShared);
}

}  // namespace

cudaError_t LaunchKeyGradient(cudaStream_t stream, const Params& p, DType dtype, int padded_dim,
                              bool drops) {
  return WithTile(dtype, padded_dim, [&](auto element, auto dim) {
    return LaunchKeys<decltype(element), decltype(dim)::value>(stream, p, drops);
  });
}

cudaError_t LaunchQueryGradient(cudaStream_t stream, const Params& p, DType dtype, int padded_dim,
                                bool drops) {
  return WithTile(dtype, padded_dim, [&](auto element, auto dim) {
    return LaunchQueries<decltype(element), decltype(dim)::value>(stream, p, drops);
  });
}

}  // namespace zeroshard::cuda::attention
