// What a rank of a mesh is made of before anything is allocated: its slice of its stage's units,
// its schedule, its policy. Pure; thread-safe.
#pragma once

#include "absl/status/statusor.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/stage_model.h"
#include "common/plan/tensor_slices.h"
#include "common/plan/zero_policy.h"
#include "worker/model/tensor_part.h"
#include "worker/model/unit.h"
#include "worker/train/trainer.h"

namespace zeroshard {

struct PipelineRank {
  StageModel stage;  // of the tensor rank's slice of the model
  // Which rows of the full tensors those of stage.model are; its model is that, and it has nothing
  // of the units that the stage lacks.
  TensorRank slice;
  TensorPart part;  // without its group
  RankSchedule schedule;
  ZeroPolicy policy;
};

// Whether TrainerOptions::mesh asks for more than a data line.
bool IsMesh(const TrainerMesh& mesh);

// Of the model, its tensor rank's slice, and of that what its stages have. Units are cut by the
// whole model's declared costs (UnitCosts). INVALID_ARGUMENT: a shape that does not fit the
// communicators or the model, too few units, and what a mesh does not do.
absl::StatusOr<PipelineRank> MakePipelineRank(const TrainerOptions& options,
                                              const ModelTable& model);

// Of its schedule, over the whole model's costs.
BubbleShares BubbleOf(const PipelineRank& rank, const ModelConfig& config, bool checkpointing);

// The unit objects of what runs here; the others are null. `group`, of the rank's tensor line,
// outlives them; null where it has one rank.
Model MakeStageUnits(const PipelineRank& rank, bool checkpointing, TensorGroup* group);

}  // namespace zeroshard
