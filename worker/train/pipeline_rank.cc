#include "worker/train/pipeline_rank.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/plan/pipeline_stages.h"
#include "common/status_macros.h"
#include "worker/model/block.h"
#include "worker/model/embedding.h"
#include "worker/model/head.h"

namespace zeroshard {
namespace {

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
  if (shape.pipeline < 1 || shape.data < 1 || shape.tensor != 1 || mesh.virtual_stages < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "TrainerOptions::mesh: seen %d pipeline x %d data x %d tensor ranks with %d virtual "
        "stages, wanted each at least 1, and 1 tensor rank",
        shape.pipeline, shape.data, shape.tensor, mesh.virtual_stages));
  }
  ZS_RETURN_IF_ERROR(CheckLine("job's", mesh.job, shape.Ranks(), -1));
  const MeshPosition at = PositionOf(shape, mesh.job == nullptr ? 0 : mesh.job->rank());
  ZS_RETURN_IF_ERROR(CheckLine("data", options.comm, shape.data, at.data));
  return CheckLine("pipeline", mesh.pipeline, shape.pipeline, at.pipeline);
}

absl::Status CheckJob(const TrainerOptions& options) {
  const char* refused = nullptr;
  if (options.spec.eval().data_size() > 0) refused = "eval.data";
  if (options.spec.sample().prompts_size() > 0) refused = "sample.prompts";
  if (refused == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      refused,
      ": a pipeline of several stages does not do that yet; leave it out, or train with "
      "one stage"));
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

}  // namespace

bool IsPipelined(const TrainerMesh& mesh) {
  return mesh.shape.pipeline != 1 || mesh.virtual_stages != 1;
}

absl::StatusOr<PipelineRank> MakePipelineRank(const TrainerOptions& options,
                                              const ModelTable& model) {
  ZS_RETURN_IF_ERROR(CheckMesh(options));
  ZS_RETURN_IF_ERROR(CheckJob(options));
  ZS_RETURN_IF_ERROR(CheckTable(options, model));
  const v1::JobSpec& spec = options.spec;
  const TrainerMesh& mesh = options.mesh;
  ZeroOptions zero = MakeZeroOptions(spec, options.comm->size());
  zero.full_gradients = mesh.full_gradients;
  const int rank = mesh.pipeline == nullptr ? 0 : mesh.pipeline->rank();
  ZS_ASSIGN_OR_RETURN(const PipelineStages stages,
                      CutStages(UnitCosts(model.config, zero.checkpointing), mesh.shape.pipeline,
                                mesh.virtual_stages));
  ZS_ASSIGN_OR_RETURN(std::vector<RankSchedule> schedules,
                      MakePipelineSchedule({.stages = mesh.shape.pipeline,
                                            .virtual_stages = mesh.virtual_stages,
                                            .micro_batches = RoundsOf(zero)}));
  PipelineRank made;
  made.stage = MakeStageModel(model, stages, rank);
  made.schedule = std::move(schedules[static_cast<size_t>(rank)]);
  made.policy = MakeStagePolicy(made.stage, zero, made.schedule);
  return made;
}

Model MakeStageUnits(const StageModel& stage, bool checkpointing) {
  Model model;
  const ModelConfig& config = stage.model.config;
  const int units = static_cast<int>(stage.model.units.size());
  model.blocks.resize(static_cast<size_t>(units) - 2);
  for (int u = 0; u < units; ++u) {
    if (!stage.Runs(u)) continue;
    const UnitTable& unit = stage.model.units[static_cast<size_t>(u)];
    switch (unit.kind) {
      case UnitKind::kEmbedding:
        model.embedding = MakeEmbedding(config, unit, {});
        break;
      case UnitKind::kBlock:
        model.blocks[static_cast<size_t>(u) - 1] = MakeBlock(config, unit, u, checkpointing, {});
        break;
      case UnitKind::kHead: {
        const ParameterInfo& matrix = config.tied ? stage.model.units.front().parameters.front()
                                                  : *unit.Find("lm_head.weight");
        model.head = MakeHead(config, unit, matrix.trainable, {});
        break;
      }
    }
  }
  model.table = stage.model;
  return model;
}

}  // namespace zeroshard
