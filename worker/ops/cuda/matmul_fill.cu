#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "worker/ops/cuda/host_device.h"

namespace zeroshard::cuda {
namespace {

constexpr int kThreads = 256;

template <class Bias, class C>
__global__ void __launch_bounds__(kThreads)
    Fill(const Bias* bias, int64_t count, int64_t columns, bool accumulate, C* c) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += stride) {
    const float before = accumulate ? Element<C>::Widen(c[i]) : 0.0f;
    const float added = bias == nullptr ? 0.0f : Element<Bias>::Widen(bias[i % columns]);
    c[i] = Element<C>::Narrow(before + added);
  }
}

template <class Bias, class C>
cudaError_t Launch(cudaStream_t stream, const void* bias, int64_t count, int64_t columns,
                   bool accumulate, void* c) {
  const int64_t blocks = std::min<int64_t>((count + kThreads - 1) / kThreads, 4096);
  Fill<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const Bias*>(bias), count, columns, accumulate, static_cast<C*>(c));
  return cudaGetLastError();
}

}  // namespace

cudaError_t FillRows(cudaStream_t stream, const void* bias, DType bias_type, int64_t rows,
                     int64_t columns, bool accumulate, DType c_type, void* c) {
  const int64_t count = rows * columns;
  if (count == 0) return cudaSuccess;
  return WithElement(bias_type, [&](auto element) {
    using Bias = decltype(element);
    return c_type == DType::kF32 ? Launch<Bias, float>(stream, bias, count, columns, accumulate, c)
                                 : Launch<Bias, Bias>(stream, bias, count, columns, accumulate, c);
  });
}

}  // namespace zeroshard::cuda
