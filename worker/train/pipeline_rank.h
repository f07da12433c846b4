// What a rank of a pipeline is made of before anything is allocated: its units, its schedule, its
// policy. Pure; thread-safe.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/stage_model.h"
#include "common/plan/zero_policy.h"
#include "worker/model/unit.h"
#include "worker/train/trainer.h"

namespace zeroshard {

struct PipelineRank {
  StageModel stage;
  RankSchedule schedule;
  ZeroPolicy policy;
};

// Whether TrainerOptions::mesh asks for more than a data line.
bool IsPipelined(const TrainerMesh& mesh);

// Units are cut by declared costs (UnitCosts). INVALID_ARGUMENT: a shape that does not fit the
// communicators or asks for tensor parallelism, too few units, and what a pipeline does not do
// yet: evaluation, samples.
absl::StatusOr<PipelineRank> MakePipelineRank(const TrainerOptions& options,
                                              const ModelTable& model);

// The unit objects of what runs here; the others are null.
Model MakeStageUnits(const StageModel& stage, bool checkpointing);

}  // namespace zeroshard
