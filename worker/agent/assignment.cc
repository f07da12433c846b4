#include "worker/agent/assignment.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/hf/config.h"
#include "common/log.h"
#include "common/plan/job_mesh.h"
#include "common/plan/offload.h"
#include "common/plan/tensor_slices.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

absl::Status CheckStores(const v1::Assign& assign) {
  if (assign.stores().stores().empty()) {
    return absl::InvalidArgumentError(
        "zero_optimization.offload_optimizer is on, but the assignment names no shard store");
  }
  if (assign.first_step() != assign.version().step() + 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "asked to go on at step ", assign.first_step(), " from the stores' state after step ",
        assign.version().step(), "; wanted step ", assign.version().step() + 1));
  }
  return absl::OkStatus();
}

absl::Status CheckMesh(const v1::Assign& assign) {
  const MeshShape shape = ShapeOf(assign);
  const v1::ParallelSpec& parallel = assign.spec().parallel();
  const auto wanted = [](uint32_t degree) { return static_cast<int>(std::max(1U, degree)); };
  if (int64_t{shape.pipeline} * shape.data * shape.tensor == assign.world_size() &&
      shape.pipeline == wanted(parallel.pipeline()) && shape.tensor == wanted(parallel.tensor()))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "assigned a mesh of ", shape.pipeline, " pipeline x ", shape.data, " data x ", shape.tensor,
      " tensor ranks for ", assign.world_size(), " ranks with parallel.pipeline ",
      wanted(parallel.pipeline()), " and parallel.tensor ", wanted(parallel.tensor())));
}

}  // namespace

MeshShape ShapeOf(const v1::Assign& assign) {
  if (!assign.has_mesh()) return {.data = static_cast<int>(assign.world_size())};
  const v1::Mesh& mesh = assign.mesh();
  const auto size = [](uint32_t ranks) { return static_cast<int>(std::min(ranks, 1U << 20)); };
  return {
      .pipeline = size(mesh.pipeline()), .data = size(mesh.data()), .tensor = size(mesh.tensor())};
}

int CopiesOf(const v1::Assign& assign) {
  const absl::StatusOr<ModelTable> model = MakeModelTable(assign.spec().model());
  return model.ok() ? KeyValueCopies(model->config, ShapeOf(assign).tensor) : 1;
}

std::string PlaceInMesh(const v1::Assign& assign) {
  const MeshShape shape = ShapeOf(assign);
  if (!CheckMesh(assign).ok() || shape.data == shape.Ranks()) return "";
  const MeshPosition at = PositionOf(shape, static_cast<int>(assign.rank()));
  return absl::StrCat(", pipeline ", at.pipeline, " of ", shape.pipeline, ", data ", at.data,
                      " of ", shape.data, ", tensor ", at.tensor, " of ", shape.tensor);
}

absl::Status CheckAssignment(const v1::Assign& assign) {
  if (assign.world_size() == 0 || assign.rank() >= assign.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("assigned rank ", assign.rank(), " of ", assign.world_size(), " ranks"));
  }
  ZS_RETURN_IF_ERROR(CheckMesh(assign));
  const v1::TimeoutSpec& timeouts = assign.spec().timeouts();
  if (timeouts.start_seconds() == 0 || timeouts.step_seconds() == 0 ||
      timeouts.collective_seconds() == 0) {
    return absl::InvalidArgumentError("the assigned specification has no timeouts");
  }
  if (IsOffloaded(assign.spec())) return CheckStores(assign);
  const v1::Resume& resume = assign.resume();
  const bool from_state = !resume.checkpoint().empty() && !resume.weights_only();
  if (from_state != (assign.first_step() > 1) || assign.first_step() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("asked to go on at step ", assign.first_step(), " from ",
                     resume.checkpoint().empty() ? "no checkpoint" : resume.checkpoint(),
                     resume.weights_only() ? ", of which only the weights are taken" : "",
                     "; wanted step 1 without the state of a checkpoint, and a later one with it"));
  }
  return absl::OkStatus();
}

absl::Status CheckInitFrom(const v1::Assign& assign, const std::string& host) {
  const v1::ModelSpec& model = assign.spec().model();
  if (model.init_from().empty() || !assign.resume().checkpoint().empty() ||
      IsOffloaded(assign.spec())) {
    return absl::OkStatus();
  }
  v1::JobSpec here = assign.spec();
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model.init_from: on host ", host, " ", model.init_from(),
        " is not the model that was submitted; every worker must see the same files: ", why));
  };
  const absl::StatusOr<std::vector<std::string>> warnings = ResolveInitFrom(&here);
  if (absl::IsInvalidArgument(warnings.status())) {
    return refuse(std::string(warnings.status().message()));
  }
  ZS_RETURN_IF_ERROR(warnings.status());
  const std::vector<std::string> differences = ModelDifferences(here.model(), model);
  if (!differences.empty()) return refuse(absl::StrJoin(differences, "; "));
  if (assign.rank() == 0) {
    for (const std::string& warning : *warnings) LogWarning(warning);
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
