#include "common/spec/parallel_section.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "common/plan/job_mesh.h"
#include "common/plan/pipeline_schedule.h"
#include "common/plan/pipeline_stages.h"
#include "common/plan/tensor_slices.h"
#include "common/spec/checks.h"
#include "common/spec/job_spec.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMostRanks = 65536;             // as resources.workers
constexpr uint64_t kMostVirtualStages = 4096;      // far above any model's units
constexpr uint64_t kMostUses = uint64_t{1} << 22;  // of units by a rank in a step: 400 MB of lists

absl::Status CheckLeastWorkers(const v1::JobSpec& spec) {
  const int64_t replica = RanksOfReplica(spec), least = spec.resources().min_workers();
  if (least % replica == 0) return absl::OkStatus();
  const int64_t below = least / replica * replica;
  return Bad("resources.min_workers: seen ", least, ", wanted a multiple of parallel.tensor ",
             spec.parallel().tensor(), " x parallel.pipeline ", spec.parallel().pipeline(), " = ",
             replica, ", as each data-parallel replica of the model takes so many; write ",
             below > 0 ? absl::StrCat(below, " or ") : "", below + replica);
}

absl::Status CheckStages(const v1::JobSpec& spec, const ModelConfig& config) {
  const v1::ParallelSpec& parallel = spec.parallel();
  return CutStages(UnitCosts(config, spec.activation_checkpointing()),
                   static_cast<int>(parallel.pipeline()),
                   static_cast<int>(std::max(1U, parallel.virtual_stages())))
      .status();
}

absl::Status CheckSequence(const v1::JobSpec& spec) {
  const v1::ParallelSpec& parallel = spec.parallel();
  if (!parallel.sequence_parallel()) return absl::OkStatus();
  if (parallel.tensor() == 1) {
    return Bad(
        "parallel.sequence_parallel: true, but parallel.tensor is 1: a sequence is divided among "
        "the ranks of a tensor group; write a larger parallel.tensor, or remove it");
  }
  const uint64_t sequence = spec.model().sequence_length();
  if (sequence % parallel.tensor() == 0) return absl::OkStatus();
  const uint64_t below = sequence / parallel.tensor() * parallel.tensor();
  return Bad("parallel.sequence_parallel: true with model.sequence_length ", sequence,
             ", which is no multiple of parallel.tensor ", parallel.tensor(),
             ": each of its ranks has equally many positions; write ",
             below > 0 ? absl::StrCat(below, " or ") : "", below + parallel.tensor(),
             " for model.sequence_length, or sequence_parallel: false");
}

absl::Status NormaliseGradients(v1::JobSpec* spec) {
  v1::ZeroSpec* zero = spec->mutable_zero_optimization();
  constexpr absl::string_view kKey = "zero_optimization.pipeline_gradients";
  const std::string& seen = zero->pipeline_gradients();
  if (!seen.empty()) ZS_RETURN_IF_ERROR(CheckChoice(kKey, seen, {"sharded", "full"}));
  if (spec->parallel().pipeline() == 1) {
    if (seen.empty()) return absl::OkStatus();
    return Bad(kKey, ": seen ", seen,
               ", but parallel.pipeline is 1, and it is about pipelines alone; remove it");
  }
  if (seen.empty()) zero->set_pipeline_gradients("sharded");
  if (seen != "full") return absl::OkStatus();
  if (zero->stage() < 2) {
    return Bad(kKey, ": full at stage ", zero->stage(),
               ", where every rank adds up its gradients in full anyway; remove it");
  }
  if (spec->deterministic()) {
    return Bad(
        kKey,
        ": full beside deterministic: true, which adds micro-batches in their order over all "
        "ranks and so reduces each; write sharded, or deterministic: false");
  }
  return absl::OkStatus();
}

absl::Status CheckSchedule(const v1::JobSpec& spec) {
  const v1::ParallelSpec& parallel = spec.parallel();
  if (RanksOfReplica(spec) == 1) return absl::OkStatus();
  // With the fewest data-parallel ranks each has most micro-batches.
  const uint64_t ranks = std::max<uint64_t>(
      1, spec.resources().min_workers() / static_cast<uint64_t>(RanksOfReplica(spec)));
  const uint64_t rounds = (MicroBatchesPerStep(spec) + ranks - 1) / ranks;
  const uint64_t stages = uint64_t{parallel.pipeline()} * std::max(1u, parallel.virtual_stages());
  const uint64_t computes = rounds * stages;
  // A rank lists all its uses of units in a step, forward and backward.
  const uint64_t uses = rounds * 2 * (spec.model().layers() + 2) / parallel.pipeline();
  if (uses > kMostUses) {
    return Bad("train_batch_size: ", rounds, " micro-batches of a rank over ",
               spec.model().layers() + 2, " units make ", uses,
               " uses of units a step on each of parallel.pipeline ", parallel.pipeline(),
               " stages, wanted at most ", kMostUses,
               "; write a larger train_micro_batch_size_per_gpu");
  }
  if (computes <= static_cast<uint64_t>(kMostScheduled)) return absl::OkStatus();
  return Bad("train_batch_size: ", rounds, " micro-batches of a rank over parallel.pipeline ",
             parallel.pipeline(), " x parallel.virtual_stages ", parallel.virtual_stages(),
             " stages make ", computes, " computes a step, wanted at most ", kMostScheduled,
             "; write a larger train_micro_batch_size_per_gpu");
}

}  // namespace

absl::Status NormaliseParallel(v1::JobSpec* spec) {
  v1::ParallelSpec* parallel = spec->mutable_parallel();
  if (!parallel->has_tensor()) parallel->set_tensor(1);
  if (!parallel->has_pipeline()) parallel->set_pipeline(1);
  for (const auto& [key, seen] : {std::pair<std::string, uint32_t>{"tensor", parallel->tensor()},
                                  {"pipeline", parallel->pipeline()}})
    ZS_RETURN_IF_ERROR(CheckCount(absl::StrCat("parallel.", key), seen, 1, kMostRanks));
  if (parallel->pipeline() == 1 && parallel->has_virtual_stages()) {
    if (parallel->virtual_stages() != 1) {
      return Bad("parallel.virtual_stages: seen ", parallel->virtual_stages(),
                 ", but parallel.pipeline is 1: it is how many runs of units each rank of a "
                 "pipeline has; write a larger parallel.pipeline, or remove it");
    }
  } else if (parallel->pipeline() > 1) {
    if (!parallel->has_virtual_stages()) parallel->set_virtual_stages(1);
    ZS_RETURN_IF_ERROR(
        CheckCount("parallel.virtual_stages", parallel->virtual_stages(), 1, kMostVirtualStages));
  }
  ZS_RETURN_IF_ERROR(MeshOf(*spec, spec->resources().workers()).status());
  ZS_RETURN_IF_ERROR(CheckLeastWorkers(*spec));
  ZS_RETURN_IF_ERROR(CheckSequence(*spec));
  if (RanksOfReplica(*spec) == 1) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const ModelTable model, MakeModelTable(spec->model()));
  if (const std::string problem = TensorProblem(model, static_cast<int>(parallel->tensor()));
      !problem.empty())
    return Bad(problem);
  return CheckStages(*spec, model.config);
}

absl::Status NormaliseForMesh(v1::JobSpec* spec) {
  ZS_RETURN_IF_ERROR(NormaliseGradients(spec));
  if (RanksOfReplica(*spec) > 1 && !spec->sample().prompts().empty()) {
    return Bad("sample.prompts: a model that is split over parallel.tensor ",
               spec->parallel().tensor(), " x parallel.pipeline ", spec->parallel().pipeline(),
               " ranks writes no samples while it trains; remove the section, and use zeroshard "
               "generate on its checkpoints");
  }
  return CheckSchedule(*spec);
}

}  // namespace zeroshard
