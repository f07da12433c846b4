// The mesh of a job: parallel.*, and what of the other sections depends on it.
#pragma once

#include "absl/status/status.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Fills in parallel.* and checks that workers (which are set) and model can be cut so.
// INVALID_ARGUMENT names the key, the values and what to write.
absl::Status NormaliseParallel(v1::JobSpec* spec);

// What the mesh asks of the rest, once that is filled in: sequences, micro-batches, samples. Fills
// in zero_optimization.pipeline_gradients where there is a pipeline.
absl::Status NormaliseForMesh(v1::JobSpec* spec);

}  // namespace zeroshard
