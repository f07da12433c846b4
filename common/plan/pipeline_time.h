// How long a pipeline's step takes, and what of it its ranks stand idle. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/pipeline_schedule.h"

namespace zeroshard {

// Of one virtual stage and micro-batch, in any one unit.
struct StageTime {
  double forward = 1, backward = 2;
};

struct PipelineTime {
  double total = 0;          // until the last rank is done
  std::vector<double> busy;  // by rank: of its computes
  // The idle share of all ranks' time, 0 to 1. Stages that take equally long, backward twice as
  // long as forward: (p - 1) / (v m + p - 1) where p divides m or v is 1 (Narayanan et al. 2021,
  // sections 2.2.1 and 2.2.2, with the idle time over the whole step's).
  double Bubble() const;
};

// Runs the schedule as pipeline_schedule.h says, with transfers that take no time once both ends
// have reached them. `times` by virtual stage; `schedules` of all ranks, as MakePipelineSchedule
// has them.
PipelineTime TimeOf(const std::vector<RankSchedule>& schedules,
                    const std::vector<StageTime>& times);

// The same of any number of micro-batches: past 16 p of them the rest is taken to go on at the pace
// of the last 4 p, as it does where all stages take equally long. INVALID_ARGUMENT as
// MakePipelineSchedule says of at most 16 p.
absl::StatusOr<PipelineTime> TimeOf(const PipelineShape& shape,
                                    const std::vector<StageTime>& times);

}  // namespace zeroshard
