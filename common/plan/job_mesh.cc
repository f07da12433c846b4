#include "common/plan/job_mesh.h"

#include <algorithm>
#include <string>

#include "common/plan/pipeline_stages.h"
#include "common/plan/tensor_slices.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

int64_t AtLeastOne(uint32_t degree) { return std::max<int64_t>(1, degree); }

}  // namespace

int64_t RanksOfReplica(const v1::JobSpec& spec) {
  return AtLeastOne(spec.parallel().tensor()) * AtLeastOne(spec.parallel().pipeline());
}

absl::StatusOr<MeshShape> MeshOf(const v1::JobSpec& spec, int64_t ranks) {
  return MakeMeshShape(AtLeastOne(spec.parallel().tensor()), AtLeastOne(spec.parallel().pipeline()),
                       ranks);
}

absl::StatusOr<StageModel> PartOf(const v1::JobSpec& spec, const ModelTable& model,
                                  const MeshPosition& position) {
  const int tensor = static_cast<int>(AtLeastOne(spec.parallel().tensor()));
  if (const std::string problem = TensorProblem(model, tensor); !problem.empty())
    return absl::InvalidArgumentError(problem);
  ZS_ASSIGN_OR_RETURN(const PipelineStages stages,
                      CutStages(UnitCosts(model.config, spec.activation_checkpointing()),
                                static_cast<int>(AtLeastOne(spec.parallel().pipeline())),
                                static_cast<int>(AtLeastOne(spec.parallel().virtual_stages()))));
  return MakeStageModel(MakeTensorRank(model, tensor, position.tensor).model, stages,
                        position.pipeline);
}

}  // namespace zeroshard
