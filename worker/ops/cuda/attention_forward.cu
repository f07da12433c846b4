#include "worker/ops/cuda/attention_forward.h"
#include "worker/ops/cuda/attention_kernel.cuh"
#include "worker/ops/cuda/attention_launch.h"

namespace zeroshard::cuda::attention {
namespace {

template <int D, bool kDrop>
struct Forward {
  static __device__ __forceinline__ void Run(const DeviceSimt& simt, const Params& p,
                                             void* shared) {
    ForwardBlock<D, kDrop>(simt, p, shared);
  }
};

template <int D>
cudaError_t LaunchOf(cudaStream_t stream, const Params& p, bool drops) {
  const int64_t blocks = QueryBlocks(p, ForwardShape<D>::kQueries);
  constexpr int kShared = ForwardShape<D>::kShared;
  return drops ? Launch<Forward<D, true>>(stream, p, blocks, kShared)
               : Launch<Forward<D, false>>(stream, p, blocks, kShared);
}

}  // namespace

cudaError_t LaunchForward(cudaStream_t stream, const Params& p, int padded_dim, bool drops) {
  switch (padded_dim) {
    case 32:
      return LaunchOf<32>(stream, p, drops);
    case 64:
      return LaunchOf<64>(stream, p, drops);
    case 128:
      return LaunchOf<128>(stream, p, drops);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace zeroshard::cuda::attention
