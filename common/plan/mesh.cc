#include "common/plan/mesh.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/plan/rank_mesh.h"
#include "common/plan/tensor_slices.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

ModelTable WithRows(const ModelTable& model, bool sequence_parallel) {
  ModelTable with = model;
  with.config.sequence_parallel = sequence_parallel;
  return with;
}

absl::StatusOr<PipelineStages> StagesOf(const ModelConfig& config, const MeshCut& cut,
                                        bool checkpointing) {
  return CutStages(UnitCosts(config, checkpointing), cut.pipeline, cut.virtual_stages);
}

int AtLeastOne(uint32_t degree) { return static_cast<int>(std::max<uint32_t>(1, degree)); }

}  // namespace

MeshCut CutOf(const v1::JobSpec& spec) {
  const v1::ParallelSpec& parallel = spec.parallel();
  return {.tensor = AtLeastOne(parallel.tensor()),
          .pipeline = AtLeastOne(parallel.pipeline()),
          .virtual_stages = AtLeastOne(parallel.virtual_stages()),
          .sequence_parallel = parallel.sequence_parallel()};
}

std::string MeshProblem(const ModelTable& model, const MeshCut& cut) {
  std::string problem = TensorProblem(
      cut.sequence_parallel ? WithRows(model, cut.sequence_parallel) : model, cut.tensor);
  if (!problem.empty()) return problem;
  return std::string(StagesOf(model.config, cut, false).status().message());
}

CutModel::CutModel(const ModelTable* model, const MeshCut& cut, bool checkpointing)
    : model_(model),
      cut_(cut),
      slice_(MakeTensorRank(WithRows(*model, cut.sequence_parallel), cut.tensor, 0).model),
      stages_(*StagesOf(model->config, cut, checkpointing)),
      operations_(StageTimes(stages_, model->config, checkpointing)) {
  for (StageTime& time : operations_) {
    time.forward /= cut.tensor;
    time.backward /= cut.tensor;
  }
}

TensorRank CutModel::Slice(const StageModel& part, int tensor) const {
  TensorRank slice = MakeTensorRank(*model_, cut_.tensor, tensor);
  slice.model = part.model;
  for (size_t u = 0; u < slice.slices.size(); ++u)
    slice.slices[u].resize(part.model.units[u].parameters.size());
  return slice;
}

int CutModel::BlocksOf(int pipeline) const {
  int blocks = 0;
  for (int k = pipeline; k < stages_.Count(); k += stages_.pipeline)
    blocks += stages_.End(k) - stages_.Begin(k);
  return blocks;
}

std::vector<int> CutModel::Positions() const {
  std::vector<int> positions = {0};
  std::set<int> seen;
  for (int rank = 1; rank + 1 < cut_.pipeline; ++rank)
    if (seen.insert(BlocksOf(rank)).second) positions.push_back(rank);
  if (cut_.pipeline > 1) positions.push_back(cut_.pipeline - 1);
  return positions;
}

std::string PositionName(int pipeline, int stages) {
  if (stages == 1) return "every rank";
  if (pipeline == 0) return "the first stage";
  if (pipeline == stages - 1) return "the last stage";
  return absl::StrCat("stage ", pipeline + 1, " of ", stages);
}

absl::StatusOr<std::vector<RankPlan>> PlanRanks(const v1::JobSpec& spec, const ModelTable& model,
                                                int ranks) {
  const MeshCut cut = CutOf(spec);
  std::vector<RankPlan> plans;
  if (cut.IsWhole()) {
    const ZeroPolicy policy = MakeZeroPolicy(model, MakeZeroOptions(spec, ranks));
    for (int rank = 0; rank < ranks; ++rank) plans.push_back(PlanRank(model, policy, rank));
    return plans;
  }
  ZS_ASSIGN_OR_RETURN(const MeshShape shape, MakeMeshShape(cut.tensor, cut.pipeline, ranks));
  if (std::string problem = MeshProblem(model, cut); !problem.empty())
    return absl::InvalidArgumentError(std::move(problem));
  const ZeroOptions options = MakeZeroOptions(spec, shape.data);
  ZS_ASSIGN_OR_RETURN(const std::vector<RankSchedule> schedules,
                      MakePipelineSchedule({.stages = cut.pipeline,
                                            .virtual_stages = cut.virtual_stages,
                                            .micro_batches = RoundsOf(options)}));
  const CutModel cut_model(&model, cut, options.checkpointing);
  for (const RankSchedule& schedule : schedules) {
    const StageModel stage = cut_model.Part(schedule.rank);
    const ZeroPolicy policy = MakeStagePolicy(stage, options, schedule);
    std::vector<TensorRank> slices;
    for (int tensor = 0; tensor < shape.tensor; ++tensor)
      slices.push_back(cut_model.Slice(stage, tensor));
    for (int data = 0; data < shape.data; ++data) {
      for (int tensor = 0; tensor < shape.tensor; ++tensor) {
        const TensorRank* const stored =
            shape.tensor > 1 ? &slices[static_cast<size_t>(tensor)] : nullptr;
        plans.push_back(PlanRank(stage, policy, schedule, data, shape.Ranks(),
                                 cut_model.Share(tensor), stored));
      }
    }
  }
  return plans;
}

}  // namespace zeroshard
