// The squares of a step's gradients, by unit, for the norm and for whose gradient is not finite.
// They may be added in any order and in any runs of whole 64-element blocks: the sum has the same
// bits (worker/ops/norm_accumulator.h). Used by the rank's training thread; not thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/device/device.h"
#include "worker/ops/ops.h"

namespace zeroshard {

class GradientSquares {
 public:
  // Both outlive it. RESOURCE_EXHAUSTED from the device.
  static absl::StatusOr<std::unique_ptr<GradientSquares>> Create(size_t units, Device* device,
                                                                 Ops* ops);

  // Of a step; what Read began is done.
  void Begin();
  // Those of `n` elements of a unit from a multiple of 64 on, in the order of the compute stream.
  void Add(int unit, const void* gradient, int64_t n, DType type);
  // On their way to host memory; whoever asks waits for the event, on every path.
  Event Read();
  // Once that event is done.
  const NormAccumulator& Of(size_t unit) const { return read_.as<NormAccumulator>()[unit]; }

 private:
  GradientSquares(Device* device, Ops* ops) : compute_(device->compute()), ops_(ops) {}

  Stream* const compute_;
  Ops* const ops_;
  Buffer sums_, read_;  // NormAccumulator by unit: the device's, the host's
};

}  // namespace zeroshard
