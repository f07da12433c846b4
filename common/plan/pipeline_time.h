// How long a pipeline's step takes, and what of it its ranks stand idle. Pure; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan/pipeline_order.h"

namespace zeroshard {

// (p - 1) / (v m + p - 1): the idle share of a step whose stages take equally long, exact where p
// divides m or v is 1 (Narayanan et al. 2021, sections 2.2.1 and 2.2.2, with the idle time over the
// whole step's).
double PredictedBubble(const PipelineShape& shape);

struct PipelineTime {
  double total = 0;          // until the last rank is done
  std::vector<double> busy;  // by rank: of its computes
  // The idle share of all ranks' time, 0 to 1.
  double Bubble() const;
};

// Of the order of pipeline_order.h with transfers that take no time: what shape and uneven stages
// cost, without what communication does. `times` by virtual stage; sizes at least 1. Past 4 p
// micro-batches the rest is taken to go on at the pace of the last p, as it does where the stages
// take equally long, so that a step of any length is timed at once.
PipelineTime TimeOf(const PipelineShape& shape, const std::vector<StageTime>& times);

}  // namespace zeroshard
