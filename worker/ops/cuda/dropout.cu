#include "worker/ops/cuda/dropout.h"
#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {

absl::Status Dropout(cudaStream_t stream, const DropoutArgs& args, const void* x, int64_t batch,
                     int64_t per_sample, DType dtype, void* y) {
  if (DropoutThreshold(args) == 0) return Convert(stream, x, dtype, batch * per_sample, y, dtype);
  return ForType(dtype, "Dropout", [&](auto type) {
    using T = typename decltype(type)::Type;
    const DropoutOp<T> op{DropoutRuleOf(args), args.first_sample, per_sample,
                          static_cast<const T*>(x), static_cast<T*>(y)};
    // A sample's key costs a thread half as much as a pack: drawn once for four.
    return LaunchEach(stream, "Dropout", op, batch, per_sample,
                      BeginsBlock(op.rule) && AreAligned(batch, per_sample, {x, y}),
                      /*packs_a_thread=*/4);
  });
}

}  // namespace zeroshard::cuda
