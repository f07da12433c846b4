#include "worker/ops/cuda/activations.h"
#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {

absl::Status GeluForward(cudaStream_t stream, const void* x, int64_t n, DType dtype, void* y) {
  return ForType(dtype, "GeluForward", [&](auto type) {
    using T = typename decltype(type)::Type;
    const GeluOp<T> op{static_cast<const T*>(x), static_cast<T*>(y)};
    return LaunchFlat(stream, "GeluForward", op, n, {x, y});
  });
}

absl::Status GeluBackward(cudaStream_t stream, const void* dy, const void* x, int64_t n,
                          DType dtype, void* dx) {
  return ForType(dtype, "GeluBackward", [&](auto type) {
    using T = typename decltype(type)::Type;
    const GeluGradOp<T> op{static_cast<const T*>(dy), static_cast<const T*>(x),
                           static_cast<T*>(dx)};
    return LaunchFlat(stream, "GeluBackward", op, n, {dy, x, dx});
  });
}

absl::Status SwiGluForward(cudaStream_t stream, const void* gate, const void* up, int64_t n,
                           DType dtype, void* y) {
  return ForType(dtype, "SwiGluForward", [&](auto type) {
    using T = typename decltype(type)::Type;
    const SwiGluOp<T> op{static_cast<const T*>(gate), static_cast<const T*>(up),
                         static_cast<T*>(y)};
    return LaunchFlat(stream, "SwiGluForward", op, n, {gate, up, y});
  });
}

absl::Status SwiGluBackward(cudaStream_t stream, const void* dy, const void* gate, const void* up,
                            int64_t n, DType dtype, void* d_gate, void* d_up) {
  return ForType(dtype, "SwiGluBackward", [&](auto type) {
    using T = typename decltype(type)::Type;
    const SwiGluGradOp<T> op{static_cast<const T*>(dy), static_cast<const T*>(gate),
                             static_cast<const T*>(up), static_cast<T*>(d_gate),
                             static_cast<T*>(d_up)};
    return LaunchFlat(stream, "SwiGluBackward", op, n, {dy, gate, up, d_gate, d_up});
  });
}

}  // namespace zeroshard::cuda
