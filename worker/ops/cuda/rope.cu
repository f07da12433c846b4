#include "worker/ops/cuda/launch.cuh"
#include "worker/ops/cuda/rope.h"
#include "worker/ops/cuda/vector_ops.h"

namespace zeroshard::cuda {

absl::Status RopeTables(cudaStream_t stream, const float* frequencies, int64_t half,
                        int64_t positions, float* cosines, float* sines) {
  const RopeTableOp op{frequencies, half, cosines, sines};
  return LaunchEach(stream, "RopeTables", op, positions, half, false);
}

absl::Status Rope(cudaStream_t stream, void* x, int64_t ld, int64_t batch, int64_t seq,
                  int64_t heads, int64_t head_dim, const float* cosines, const float* sines,
                  int64_t first_position, bool inverse, DType dtype) {
  return ForType(dtype, "Rope", [&](auto type) {
    using T = typename decltype(type)::Type;
    const int64_t half = head_dim / 2;
    const RopeOp<T> op{static_cast<T*>(x),
                       ld,
                       seq,
                       static_cast<uint32_t>(half),
                       cosines + first_position * half,
                       sines + first_position * half,
                       inverse ? -1.0f : 1.0f};
    const bool aligned =
        half % kPack == 0 && ld % kPack == 0 && AreAligned(1, half, {x, cosines, sines});
    return LaunchEach(stream, "Rope", op, batch * seq, heads * half, aligned);
  });
}

}  // namespace zeroshard::cuda
