#include "worker/ops/cuda/attention_backward.h"
#include "worker/ops/cuda/attention_kernel.cuh"
#include "worker/ops/cuda/attention_launch.h"

namespace zeroshard::cuda::attention {
namespace {

template <int D, bool kDrop>
struct KeyGradient {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    KeyGradientBlock<D, kDrop>(simt, p, shared);
  }
};

template <int D, bool kDrop>
struct QueryGradient {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    QueryGradientBlock<D, kDrop>(simt, p, shared);
  }
};

template <int D>
cudaError_t LaunchKeys(cudaStream_t stream, const Params& p, bool drops) {
  const int64_t blocks = KeyBlocks(p, kBackwardTile);
  constexpr int kShared = KeyGradientShape<D>::kShared;
  return drops ? Launch<KeyGradient<D, true>>(stream, p, blocks, kShared)
               : Launch<KeyGradient<D, false>>(stream, p, blocks, kShared);
}

template <int D>
cudaError_t LaunchQueries(cudaStream_t stream, const Params& p, bool drops) {
  const int64_t blocks = QueryBlocks(p, kBackwardTile);
  constexpr int kShared = QueryGradientShape<D>::kShared;
  return drops ? Launch<QueryGradient<D, true>>(stream, p, blocks, kShared)
               : Launch<QueryGradient<D, false>>(stream, p, blocks, kShared);
}

}  // namespace

cudaError_t LaunchKeyGradient(cudaStream_t stream, const Params& p, int padded_dim, bool drops) {
  switch (padded_dim) {
    case 32:
      return LaunchKeys<32>(stream, p, drops);
    case 64:
      return LaunchKeys<64>(stream, p, drops);
    case 128:
      return LaunchKeys<128>(stream, p, drops);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t LaunchQueryGradient(cudaStream_t stream, const Params& p, int padded_dim, bool drops) {
  switch (padded_dim) {
    case 32:
      return LaunchQueries<32>(stream, p, drops);
    case 64:
      return LaunchQueries<64>(stream, p, drops);
    case 128:
      return LaunchQueries<128>(stream, p, drops);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace zeroshard::cuda::attention
