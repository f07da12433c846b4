// The mesh (rank_mesh.h) of a job's ranks, and what a rank of it holds of the model. Pure
// arithmetic; thread-safe.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "common/plan/rank_mesh.h"
#include "common/plan/stage_model.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

// Ranks that hold one copy of the model between them: parallel.tensor x parallel.pipeline. A job
// has a multiple of it.
int64_t RanksOfReplica(const v1::JobSpec& spec);

// Of `ranks` ranks of the job. Errors as MakeMeshShape.
absl::StatusOr<MeshShape> MeshOf(const v1::JobSpec& spec, int64_t ranks);

// The part of `model` that the rank at `position` holds: of its slice those units that its stage
// has, cut by the declared costs of the whole. INVALID_ARGUMENT: the model cannot be cut like that.
absl::StatusOr<StageModel> PartOf(const v1::JobSpec& spec, const ModelTable& model,
                                  const MeshPosition& position);

}  // namespace zeroshard
