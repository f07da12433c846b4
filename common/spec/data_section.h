// The sections about what goes in and what comes out: data, eval, sample, checkpoint.
#pragma once

#include "absl/status/status.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// data, eval and sample. Batch sizes are normalised already.
absl::Status NormaliseData(v1::JobSpec* spec);
absl::Status NormaliseCheckpoint(v1::JobSpec* spec);

}  // namespace zeroshard
