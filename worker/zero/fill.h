// Fills what a rank holds with values: fresh ones, a model folder's, a checkpoint's. A rank reads
// only what it holds (resident units whole), in pieces, and lets go of a source's pages after each
// unit: what is in memory beside the state itself is one unit at most.
#pragma once

#include <atomic>
#include <vector>

#include "absl/status/status.h"
#include "common/checkpoint/manifest.h"
#include "common/kernels/init.h"
#include "common/parameter_source.h"
#include "worker/ops/ops.h"
#include "worker/zero/unit_state.h"

namespace zeroshard {

// Parameters and master weights; `source` has the tensors that the units have, of slices those of a
// SlicedSource. The source's errors; CANCELLED once `stop` (may be null) is true.
absl::Status FillParameters(const ParameterSource& source, std::vector<UnitState>* units,
                            Device* device, const std::atomic<bool>* stop);

// exp_avg or exp_avg_sq of every trainable tensor.
absl::Status FillMoments(StateKind kind, const ParameterSource& source,
                         std::vector<UnitState>* units, Device* device,
                         const std::atomic<bool>* stop);

}  // namespace zeroshard
