#include "worker/ops/cuda/adamw.h"
#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {

absl::Status AdamW(cudaStream_t stream, const AdamWArgs& args, int64_t n, const void* grad,
                   DType grad_type, float* master, float* exp_avg, float* exp_avg_sq, void* param,
                   DType param_type) {
  return ForType(grad_type, "AdamW", [&](auto from) {
    return ForType(param_type, "AdamW", [&](auto to) {
      using G = typename decltype(from)::Type;
      using P = typename decltype(to)::Type;
      const AdamWOp<G, P> op{AdamWFactorsOf(args),
                             static_cast<const G*>(grad),
                             master,
                             exp_avg,
                             exp_avg_sq,
                             static_cast<P*>(param),
                             args.rounding,
                             RoundingKey(args.rounding)};
      return LaunchFlat(stream, "AdamW", op, n, {grad, master, exp_avg, exp_avg_sq, param});
    });
  });
}

}  // namespace zeroshard::cuda
