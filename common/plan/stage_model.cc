#include "common/plan/stage_model.h"

#include <algorithm>

#include "common/plan/activation_table.h"
#include "common/plan/saturating.h"

namespace zeroshard {
namespace {

bool IsHead(const ModelTable& model, int unit) {
  return model.units[static_cast<size_t>(unit)].kind == UnitKind::kHead;
}

// The uses of one compute. The embedding's backward needs no parameters.
void AddUses(const StageModel& stage, const Action& compute, std::vector<UnitUse>* uses) {
  const int begin = stage.stages.Begin(compute.virtual_stage);
  const int end = stage.stages.End(compute.virtual_stage);
  if (compute.kind == ActionKind::kForward) {
    for (int u = begin; u < end; ++u)
      if (!IsHead(stage.model, u)) uses->push_back({.unit = u});
    return;
  }
  for (int u = end - 1; u >= begin; --u) {
    if (IsHead(stage.model, u)) {
      if (stage.model.config.tied) uses->push_back({.unit = 0});
      uses->push_back({.unit = u});
    } else if (u > 0) {
      uses->push_back({.unit = u, .backward = true});
    }
  }
}

}  // namespace

StageModel MakeStageModel(const ModelTable& model, const PipelineStages& stages, int rank) {
  StageModel stage{.model = model, .stages = stages, .rank = rank};
  const bool tied = model.config.tied && stages.pipeline > 1;
  stage.copy = tied && stage.HasHead();
  if (tied && stage.HasEmbedding()) stage.tied_peer = stages.pipeline - 1;
  if (stage.copy) stage.tied_peer = 0;
  for (int u = 0; u < static_cast<int>(model.units.size()); ++u) {
    UnitTable& unit = stage.model.units[static_cast<size_t>(u)];
    if (stage.Runs(u)) continue;
    if (u == 0 && stage.copy) {
      unit.parameters.resize(1);
      continue;
    }
    unit.parameters.clear();
    unit.length = 0;
  }
  return stage;
}

std::vector<UnitUse> EvaluationUses(const StageModel& stage, const ZeroPolicy& policy,
                                    const RankSchedule& schedule) {
  std::vector<UnitUse> uses;
  for (const Action& action : schedule.actions) {
    if (action.kind == ActionKind::kTransfers) continue;
    const int k = action.virtual_stage;
    for (int u = stage.stages.Begin(k); u < stage.stages.End(k); ++u) {
      if (IsHead(stage.model, u) && policy.tied) uses.push_back({.unit = 0});
      uses.push_back({.unit = u});
    }
  }
  PlanGathers(policy, &uses);
  return uses;
}

int64_t RoundsOf(const ZeroOptions& options) {
  return CeilDiv(options.micro_batches, options.world);
}

ZeroPolicy MakeStagePolicy(const StageModel& stage, const ZeroOptions& options,
                           const RankSchedule& schedule) {
  ZeroPolicy policy = MakeZeroPolicy(stage.model, options);
  policy.has_rows = stage.HasEmbedding();
  policy.copies_table = stage.copy;
  // Where head and embedding are apart each has one of the table's two gradients.
  policy.tied = stage.model.config.tied && stage.HasHead();
  policy.uses_span_step = true;
  policy.uses.clear();
  policy.eval_uses.clear();
  for (const Action& action : schedule.actions)
    if (action.kind != ActionKind::kTransfers) AddUses(stage, action, &policy.uses);
  PlanGathers(policy, &policy.uses);
  return policy;
}

int64_t BoundaryElements(const ModelConfig& config, const ZeroOptions& options) {
  return SaturatingProduct({StreamRows(config, options.micro_batch), config.hidden});
}

int64_t BoundaryBytes(const ModelConfig& config, const ZeroOptions& options) {
  return AlignedBytes(BoundaryElements(config, options), options.dtype);
}

int OutputSlots(const PipelineShape& shape) { return shape.stages > 1 ? 2 : 0; }

int64_t StageActivationBytes(const StageModel& stage, const ZeroOptions& options,
                             const RankSchedule& schedule) {
  const ModelConfig& config = stage.model.config;
  int64_t kept = 0, scratch = 0, boundaries = 2 + OutputSlots(schedule.shape);
  for (int k = stage.rank; k < stage.stages.Count(); k += stage.stages.pipeline) {
    int64_t of_stage = 0;
    for (int u = stage.stages.Begin(k); u < stage.stages.End(k); ++u) {
      const ActivationTable table =
          MakeActivationTable(config, stage.model.units[static_cast<size_t>(u)].kind,
                              options.micro_batch, options.dtype, options.checkpointing);
      of_stage = SaturatingAdd(of_stage, table.kept_bytes);
      scratch = std::max(scratch, table.scratch_bytes);
    }
    kept = SaturatingAdd(kept, SaturatingProduct({MostAlive(schedule, k), of_stage}));
    boundaries += InputSlots(schedule, k) + GradientSlots(schedule, k);
  }
  return SaturatingAdd(SaturatingAdd(kept, scratch),
                       SaturatingProduct({boundaries, BoundaryBytes(config, options)}));
}

int64_t OpenMicroBatches(const RankSchedule& schedule) {
  std::vector<int64_t> last(static_cast<size_t>(schedule.shape.micro_batches), 0);
  const auto n = static_cast<int64_t>(schedule.actions.size());
  for (int64_t at = 0; at < n; ++at) {
    const Action& a = schedule.actions[static_cast<size_t>(at)];
    if (a.kind != ActionKind::kTransfers) last[static_cast<size_t>(a.micro_batch)] = at;
  }
  // Micro-batches are opened in ascending order.
  int64_t opened = 0, most = 0, oldest = 0;
  for (int64_t at = 0; at < n; ++at) {
    const Action& a = schedule.actions[static_cast<size_t>(at)];
    if (a.kind == ActionKind::kTransfers) continue;
    opened = std::max(opened, a.micro_batch + 1);
    while (last[static_cast<size_t>(oldest)] < at) ++oldest;
    most = std::max(most, opened - oldest);
  }
  return most;
}

}  // namespace zeroshard
