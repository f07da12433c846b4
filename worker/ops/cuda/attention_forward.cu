#include "worker/ops/cuda/attention_forward.h"
#include "worker/ops/cuda/attention_kernel.cuh"
#include "worker/ops/cuda/attention_launch.h"

namespace zeroshard::cuda::attention {
namespace {

template <class T, int D, bool kDrop>
struct Forward {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    ForwardBlock<T, D, kDrop>(simt, p, shared);
  }
};

template <class T, int D>
cudaError_t LaunchOf(cudaStream_t stream, const Params& p, bool drops) {
  const int64_t blocks = QueryBlocks(p, ForwardShape<D>::kQueries);
  constexpr int kShared = ForwardShape<D>::kShared;
  return drops ? Launch<Forward<T, D, true>>(stream, p, blocks, kShared)
               : Launch<Forward<T, D, false>>(stream, p, blocks, kShared);
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Params& p, DType dtype, int padded_dim,
                          bool drops) {
  return WithTile(dtype, padded_dim, [&](auto element, auto dim) {
    return LaunchOf<decltype(element), decltype(dim)::value>(stream, p, drops);
  });
}

}  // namespace zeroshard::cuda::attention
