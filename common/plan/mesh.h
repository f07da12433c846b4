// A job on a mesh pipeline x data x tensor (architecture, section 12): its model cut for the ranks,
// and what each of them is made of, by the functions that worker/train makes it with. Pure
// arithmetic; thread-safe.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/pipeline_order.h"
#include "common/plan/planner.h"
#include "common/plan/stage_model.h"
#include "common/plan/tensor_traffic.h"

namespace zeroshard {

// How ranks share a model; the data dimension has no part in it.
struct MeshCut {
  int tensor = 1, pipeline = 1;
  int virtual_stages = 1;  // of each pipeline rank
  bool sequence_parallel = false;
  int Ranks() const { return tensor * pipeline; }
  bool IsWhole() const { return tensor == 1 && pipeline == 1 && virtual_stages == 1; }
  friend bool operator==(const MeshCut&, const MeshCut&) = default;
};
MeshCut CutOf(const v1::JobSpec& spec);

// Why the model cannot be cut like that, as TensorProblem and CutStages say it; empty: it can.
std::string MeshProblem(const ModelTable& model, const MeshCut& cut);

class CutModel {
 public:
  // MeshProblem must be empty. `model` outlives it.
  CutModel(const ModelTable* model, const MeshCut& cut, bool checkpointing);

  const MeshCut& cut() const { return cut_; }
  const PipelineStages& stages() const { return stages_; }
  // What the ranks at a pipeline position hold: as much on each tensor rank.
  StageModel Part(int pipeline) const { return MakeStageModel(slice_, stages_, pipeline); }
  // One tensor rank's slice of a part: of its units, which lack what the part lacks.
  TensorRank Slice(const StageModel& part, int tensor) const;
  TensorShare Share(int tensor) const { return TensorShareOf(model_->config, cut_.tensor, tensor); }
  // By virtual stage, operations of one token on one of the tensor ranks.
  const std::vector<StageTime>& operations() const { return operations_; }
  // Pipeline ranks of which one holds most, whatever is counted: the first, the last, and of those
  // between, of each number of blocks, the one before the others, as it keeps most micro-batches
  // alive. Ascending.
  std::vector<int> Positions() const;

 private:
  int BlocksOf(int pipeline) const;

  const ModelTable* model_;
  MeshCut cut_;
  ModelTable slice_;
  PipelineStages stages_;
  std::vector<StageTime> operations_;
};

// "the first stage", "stage 3 of 8", "the last stage"; of one stage "every rank".
std::string PositionName(int pipeline, int stages);

// Of every rank of the job on `ranks` ranks, by rank. INVALID_ARGUMENT as MakeMeshShape,
// MeshProblem and MakePipelineSchedule.
absl::StatusOr<std::vector<RankPlan>> PlanRanks(const v1::JobSpec& spec, const ModelTable& model,
                                                int ranks);

}  // namespace zeroshard
