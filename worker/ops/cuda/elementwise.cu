#include "common/status_macros.h"
#include "worker/ops/cuda/elementwise.h"
#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {
namespace {

absl::Status CheckWire(DType wire, const char* what) {
  return ForType(wire, what, [](auto) { return absl::OkStatus(); });
}

}  // namespace

absl::Status Add(cudaStream_t stream, const void* a, const void* b, int64_t n, DType dtype,
                 void* y) {
  return ForType(dtype, "Add", [&](auto type) {
    using T = typename decltype(type)::Type;
    const AddOp<T> op{static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(y)};
    return LaunchFlat(stream, "Add", op, n, {a, b, y});
  });
}

absl::Status Convert(cudaStream_t stream, const void* in, DType in_type, int64_t n, void* out,
                     DType out_type) {
  return ForType(in_type, "Convert", [&](auto from) {
    return ForType(out_type, "Convert", [&](auto to) {
      using From = typename decltype(from)::Type;
      using To = typename decltype(to)::Type;
      if constexpr (std::is_same_v<From, To>) {
        if (in == out || n <= 0) return absl::OkStatus();
        return StatusOf(cudaMemcpyAsync(out, in, static_cast<size_t>(n) * sizeof(To),
                                        cudaMemcpyDeviceToDevice, stream),
                        "Convert");
      } else {
        const ConvertOp<From, To> op{static_cast<const From*>(in), static_cast<To*>(out)};
        return LaunchFlat(stream, "Convert", op, n, {in, out});
      }
    });
  });
}

absl::Status AccumulateF32(cudaStream_t stream, const void* x, DType dtype, int64_t n,
                           bool accumulate, float* acc) {
  if (!accumulate) return Convert(stream, x, dtype, n, acc, DType::kF32);
  return ForType(dtype, "AccumulateF32", [&](auto type) {
    using T = typename decltype(type)::Type;
    return LaunchFlat(stream, "AccumulateF32", AccumulateOp<T>{static_cast<const T*>(x), acc}, n,
                      {x, acc});
  });
}

absl::Status RoundInPlace(cudaStream_t stream, float* x, int64_t n, DType wire) {
  ZS_RETURN_IF_ERROR(CheckWire(wire, "RoundInPlace"));
  if (wire == DType::kF32) return absl::OkStatus();
  return LaunchFlat(stream, "RoundInPlace", RoundOp{x, wire}, n, {x});
}

absl::Status AddRounded(cudaStream_t stream, const void* sum, DType sum_type, int64_t n, DType wire,
                        void* gradient, DType gradient_type) {
  ZS_RETURN_IF_ERROR(CheckWire(wire, "AddRounded"));
  return ForType(sum_type, "AddRounded", [&](auto from) {
    return ForType(gradient_type, "AddRounded", [&](auto to) {
      using S = typename decltype(from)::Type;
      using G = typename decltype(to)::Type;
      const AddRoundedOp<S, G> op{static_cast<const S*>(sum), wire, static_cast<G*>(gradient)};
      return LaunchFlat(stream, "AddRounded", op, n, {sum, gradient});
    });
  });
}

}  // namespace zeroshard::cuda
