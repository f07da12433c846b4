#include "worker/train/pipeline_rank.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/plan/pipeline_stages.h"
#include "common/plan/pipeline_time.h"
#include "common/status_macros.h"
#include "worker/model/block.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"

namespace zeroshard {
namespace {

MeshPosition PlaceOf(const TrainerMesh& mesh) {
  return PositionOf(mesh.shape, mesh.job == nullptr ? 0 : mesh.job->rank());
}

absl::Status CheckLine(const char* what, const Communicator* comm, int size, int rank) {
  const int seen_size = comm == nullptr ? 1 : comm->size();
  const int seen_rank = comm == nullptr ? 0 : comm->rank();
  if (seen_size == size && (rank < 0 || seen_rank == rank)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "TrainerOptions::mesh: the %s communicator has rank %d of %d ranks, wanted rank %d of %d",
      what, seen_rank, seen_size, rank, size));
}

// The communicators must be this rank's lines of the shape.
absl::Status CheckMesh(const TrainerOptions& options) {
  const TrainerMesh& mesh = options.mesh;
  const MeshShape& shape = mesh.shape;
  if (shape.pipeline < 1 || shape.data < 1 || shape.tensor < 1 || mesh.virtual_stages < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "TrainerOptions::mesh: seen %d pipeline x %d data x %d tensor ranks with %d virtual "
        "stages, wanted each at least 1",
        shape.pipeline, shape.data, shape.tensor, mesh.virtual_stages));
  }
  ZS_RETURN_IF_ERROR(CheckLine("job's", mesh.job, shape.Ranks(), -1));
  const MeshPosition at = PlaceOf(mesh);
  ZS_RETURN_IF_ERROR(CheckLine("data", options.comm, shape.data, at.data));
  ZS_RETURN_IF_ERROR(CheckLine("pipeline", mesh.pipeline, shape.pipeline, at.pipeline));
  return CheckLine("tensor", mesh.tensor, shape.tensor, at.tensor);
}

absl::Status CheckJob(const TrainerOptions& options) {
  if (options.spec.sample().prompts_size() == 0) return absl::OkStatus();
  const MeshShape& shape = options.mesh.shape;
  return absl::InvalidArgumentError(absl::StrFormat(
      "sample.prompts: ranks of a mesh (parallel.pipeline %d x parallel.tensor %d, %d virtual "
      "stages) do not continue texts while they train; leave it out and ask `zeroshard generate` "
      "of a checkpoint, or train with one of each",
      shape.pipeline, shape.tensor, options.mesh.virtual_stages));
}

// A frozen table is rounded as the unit it is in, of which the last rank has the table alone.
absl::Status CheckTable(const TrainerOptions& options, const ModelTable& model) {
  const UnitTable& embedding = model.units.front();
  const bool apart = model.config.tied && options.mesh.shape.pipeline > 1;
  if (!apart || !MakeRounding(options.spec).stochastic || !embedding.AnyTrainable() ||
      embedding.parameters.front().trainable) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "model.trainable: ", embedding.parameters.front().name,
      " is tied to the head and frozen, and other tensors of the embedding are not; with "
      "bf16.stochastic_rounding and several pipeline stages its copies would differ. Train or "
      "freeze the embedding as a whole, or leave out bf16.stochastic_rounding"));
}

// Of the slice what the stage has.
void KeepStage(const StageModel& stage, TensorRank* slice) {
  slice->model = stage.model;
  for (size_t u = 0; u < slice->slices.size(); ++u)
    slice->slices[u].resize(stage.model.units[u].parameters.size());
}

}  // namespace

bool IsMesh(const TrainerMesh& mesh) {
  return mesh.shape.pipeline != 1 || mesh.shape.tensor != 1 || mesh.virtual_stages != 1;
}

absl::StatusOr<PipelineRank> MakePipelineRank(const TrainerOptions& options,
                                              const ModelTable& model) {
  ZS_RETURN_IF_ERROR(CheckMesh(options));
  ZS_RETURN_IF_ERROR(CheckJob(options));
  ZS_RETURN_IF_ERROR(CheckTable(options, model));
  const v1::JobSpec& spec = options.spec;
  const TrainerMesh& mesh = options.mesh;
  const ZeroOptions zero = MakeZeroOptions(spec, options.comm->size());
  const MeshPosition at = PlaceOf(mesh);
  if (std::string problem = TensorProblem(model, mesh.shape.tensor); !problem.empty())
    return absl::InvalidArgumentError(problem);
  PipelineRank made;
  made.slice = MakeTensorRank(model, mesh.shape.tensor, at.tensor);
  made.part = PartOf(made.slice, nullptr);
  const int copies = KeyValueCopies(model.config, mesh.shape.tensor);
  ZS_RETURN_IF_ERROR(CheckLine("copies'", mesh.copies, copies, at.tensor % copies));
  ZS_ASSIGN_OR_RETURN(const PipelineStages stages,
                      CutStages(UnitCosts(model.config, zero.checkpointing), mesh.shape.pipeline,
                                mesh.virtual_stages));
  ZS_ASSIGN_OR_RETURN(std::vector<RankSchedule> schedules,
                      MakePipelineSchedule({.stages = mesh.shape.pipeline,
                                            .virtual_stages = mesh.virtual_stages,
                                            .micro_batches = RoundsOf(zero)}));
  made.stage = MakeStageModel(made.slice.model, stages, at.pipeline);
  KeepStage(made.stage, &made.slice);
  made.schedule = std::move(schedules[static_cast<size_t>(at.pipeline)]);
  made.policy = MakeStagePolicy(made.stage, zero, made.schedule);
  return made;
}

BubbleShares BubbleOf(const PipelineRank& rank, const ModelConfig& config, bool checkpointing) {
  const PipelineShape& shape = rank.schedule.shape;
  return {.predicted = PredictedBubble(shape),
          .counted = TimeOf(shape, StageTimes(rank.stage.stages, config, checkpointing)).Bubble()};
}

Model MakeStageUnits(const PipelineRank& rank, bool checkpointing, TensorGroup* group) {
  Model model;
  const ModelTable& table = rank.stage.model;
  const ModelConfig& config = table.config;
  TensorPart part = rank.part;
  part.group = group;
  const int units = static_cast<int>(table.units.size());
  model.blocks.resize(static_cast<size_t>(units) - 2);
  for (int u = 0; u < units; ++u) {
    if (!rank.stage.Runs(u)) continue;
    const UnitTable& unit = table.units[static_cast<size_t>(u)];
    switch (unit.kind) {
      case UnitKind::kEmbedding:
        model.embedding = MakeEmbedding(config, unit, part);
        break;
      case UnitKind::kBlock:
        model.blocks[static_cast<size_t>(u) - 1] = MakeBlock(config, unit, u, checkpointing, part);
        break;
      case UnitKind::kHead: {
        const ParameterInfo& matrix =
            config.tied ? table.units.front().parameters.front() : *unit.Find("lm_head.weight");
        model.head = MakeHead(config, unit, matrix.trainable, part);
        break;
      }
    }
  }
  model.table = table;
  return model;
}

}  // namespace zeroshard
