#include <algorithm>

#include "worker/comm/nccl/cuda/fold_kernel.h"

namespace zeroshard {
namespace {

constexpr int kThreads = 256;

template <typename In, typename Out, int N>
__global__ void FoldKernel(const FoldArgs args) {
  const int64_t packs = args.count / N;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t pack = thread; pack < packs; pack += threads) {
    FoldPack<In, Out, N>(args, pack * N);
  }
  const int64_t rest = packs * N + thread;
  if (rest < args.count) FoldPack<In, Out, 1>(args, rest);
}

template <typename In, typename Out, int N>
cudaError_t Launch(const FoldArgs& args, int most_blocks, cudaStream_t stream) {
  const int64_t blocks = CeilDiv(CeilDiv(args.count, N), kThreads);
  FoldKernel<In, Out, N>
      <<<static_cast<int>(std::min<int64_t>(blocks, most_blocks)), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <typename In, typename Out>
cudaError_t Load() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, FoldKernel<In, Out, 1>);
  if (error != cudaSuccess) return error;
  return cudaFuncGetAttributes(&attributes, FoldKernel<In, Out, kFoldPack>);
}

}  // namespace

cudaError_t LoadFold() {
  for (cudaError_t error :
       {Load<float, float>(), Load<cuda::Bf16, float>(), Load<cuda::Bf16, cuda::Bf16>(),
        Load<Fp16, float>(), Load<Fp16, Fp16>()}) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t LaunchFold(const FoldArgs& args, int most_blocks, cudaStream_t stream) {
  if (args.count == 0) return cudaSuccess;
  return VisitFoldTypes(args, [&](auto in, auto out) {
    using In = decltype(in);
    using Out = decltype(out);
    return FoldWidth(args) == kFoldPack ? Launch<In, Out, kFoldPack>(args, most_blocks, stream)
                                        : Launch<In, Out, 1>(args, most_blocks, stream);
  });
}

}  // namespace zeroshard
