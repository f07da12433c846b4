// The squares of a step's gradients, by unit, for the norm and for whose gradient is not finite.
// Of a tensor rank's slice they are those of what it is home of (common/plan/tensor_slices.h): what
// several ranks hold alike counts once in the sum over the group.
// They may be added in any order and in any runs of whole 64-element blocks: the sum has the same
// bits (worker/ops/norm_accumulator.h). Used by the rank's training thread; not thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/plan/tensor_slices.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"

namespace zeroshard {

class GradientSquares {
 public:
  // All outlive it; `slice` is null where the model is whole. RESOURCE_EXHAUSTED from the device.
  static absl::StatusOr<std::unique_ptr<GradientSquares>> Create(size_t units, Device* device,
                                                                 Ops* ops,
                                                                 const TensorRank* slice = nullptr);

  // Of a step; what Read began is done.
  void Begin();
  // Those of elements `range` of a unit, which begins at a multiple of 64, in the order of the
  // compute stream; between tensors there are zeros.
  void Add(int unit, ElementRange range, const void* gradient, DType type);
  // On their way to host memory; whoever asks waits for the event, on every path.
  Event Read();
  // Once that event is done.
  const NormAccumulator& Of(size_t unit) const { return read_.as<NormAccumulator>()[unit]; }

 private:
  GradientSquares(Device* device, Ops* ops, const TensorRank* slice)
      : compute_(device->compute()), ops_(ops), slice_(slice) {}

  Stream* const compute_;
  Ops* const ops_;
  const TensorRank* const slice_;
  Buffer sums_, read_;  // NormAccumulator by unit: the device's, the host's
};

}  // namespace zeroshard
