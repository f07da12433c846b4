// Which units run on which stage of a pipeline. Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/model_table.h"
#include "common/plan/pipeline_order.h"

namespace zeroshard {

// The units of a model in p x v contiguous runs, the virtual stages, none of them empty. Virtual
// stage k is on pipeline rank k mod p: with v > 1 each rank has v runs that lie p apart, as
// interleaved schedules want them (Narayanan et al. 2021, section 2.2.2). The first unit is always
// on the first rank, the last on the last.
struct PipelineStages {
  int pipeline = 1;                 // p
  std::vector<int> begin = {0, 0};  // by virtual stage: its first unit; then the number of units

  int Count() const { return static_cast<int>(begin.size()) - 1; }  // p * v
  int Begin(int virtual_stage) const { return begin[static_cast<size_t>(virtual_stage)]; }
  int End(int virtual_stage) const { return begin[static_cast<size_t>(virtual_stage) + 1]; }
  int RankOf(int virtual_stage) const { return virtual_stage % pipeline; }
  // The virtual stage of a unit, which must be one of the model's.
  int StageOf(int unit) const;
};

// Cuts so that the costliest virtual stage costs as little as any cut allows; of such cuts one with
// the least sum of squared costs (the most even one); of those the one whose first run is
// shortest, then the second, and so on, since earlier stages keep more micro-batches alive. `costs`
// are by unit, of any one measure, at least 0 and together below 2^62.
// INVALID_ARGUMENT names the keys parallel.pipeline and parallel.virtual_stages where there are
// fewer units than runs, and a cost that is out of range.
absl::StatusOr<PipelineStages> CutStages(const std::vector<int64_t>& costs, int pipeline,
                                         int virtual_stages);

// Declared costs: operations (two a multiply-add) of a unit's forward and backward for one token,
// products with its matrices and causal attention over half of the sequence; once more forward
// where `checkpointing` computes a block again; of the embedding one an element and pass. Products
// dominate, so tensor parallelism divides all but the embedding's alike. Units in the model's
// order.
std::vector<int64_t> UnitCosts(const ModelConfig& config, bool checkpointing);

// How long each virtual stage's forward and backward take by these costs, in their unit; a backward
// twice as long as a forward, and once more where it computes that again. By virtual stage.
std::vector<StageTime> StageTimes(const PipelineStages& stages, const ModelConfig& config,
                                  bool checkpointing);

}  // namespace zeroshard
