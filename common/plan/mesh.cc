#include "common/plan/mesh.h"

#include <algorithm>

#include "common/plan/pipeline_stages.h"
#include "common/plan/pipeline_time.h"
#include "common/plan/tensor_slices.h"

namespace zeroshard {
namespace {

absl::StatusOr<PipelineStages> StagesOf(const ModelConfig& config, int pipeline,
                                        bool checkpointing) {
  return CutStages(UnitCosts(config, checkpointing), pipeline, /*virtual_stages=*/1);
}

// The embedding and the head, which are the first and the last unit, are no blocks.
int MostBlocks(const PipelineStages& stages) {
  const int head = stages.begin.back() - 1;
  int most = 0;
  for (int k = 0; k < stages.Count(); ++k)
    most = std::max(most, std::min(stages.End(k), head) - std::max(stages.Begin(k), 1));
  return most;
}

}  // namespace

std::string MeshProblem(const ModelTable& model, int tensor, int pipeline) {
  if (std::string problem = TensorProblem(model, tensor); !problem.empty()) return problem;
  return std::string(StagesOf(model.config, pipeline, false).status().message());
}

ModelTable SliceModel(const ModelTable& model, int tensor, int pipeline, bool checkpointing) {
  if (tensor == 1 && pipeline == 1) return model;
  ModelTable slice = MakeTensorRank(model, tensor, 0).model;
  const int blocks = MostBlocks(*StagesOf(model.config, pipeline, checkpointing));
  slice.config.layers = blocks;
  slice.units.erase(slice.units.begin() + 1 + blocks, slice.units.end() - 1);
  return slice;
}

double IdleShare(const ModelConfig& config, int pipeline, bool checkpointing,
                 int64_t micro_batches) {
  if (pipeline == 1) return 0;
  const PipelineStages stages = *StagesOf(config, pipeline, checkpointing);
  const std::vector<int64_t> costs = UnitCosts(config, checkpointing);
  const std::vector<int64_t> without = UnitCosts(config, false);
  std::vector<StageTime> times;
  for (int k = 0; k < stages.Count(); ++k) {
    StageTime& time = times.emplace_back(StageTime{.forward = 0, .backward = 0});
    for (auto u = static_cast<size_t>(stages.Begin(k)); u < static_cast<size_t>(stages.End(k));
         ++u) {
      const double forward = static_cast<double>(without[u]) / 3;  // backward is twice the forward
      time.forward += forward;
      time.backward += static_cast<double>(costs[u]) - forward;
    }
  }
  const PipelineTime time =
      TimeOf({.stages = pipeline, .virtual_stages = 1, .micro_batches = micro_batches}, times);
  const double busiest = *std::max_element(time.busy.begin(), time.busy.end());
  return (time.total - busiest) / busiest;
}

MeshTraffic TrafficOfMesh(const ModelConfig& sliced, int tensor, int pipeline, int64_t micro_batch,
                          uint64_t element, bool checkpointing) {
  const uint64_t boundary =
      static_cast<uint64_t>(micro_batch * sliced.sequence * sliced.hidden) * element;
  MeshTraffic traffic;
  if (tensor > 1) {
    const auto t = static_cast<uint64_t>(tensor);
    const uint64_t once = static_cast<uint64_t>(sliced.layers) * 2 * (2 * (t - 1) * boundary / t);
    traffic.all_reduce_forward = once;
    traffic.all_reduce_backward = checkpointing ? once + once / 2 : once;
  }
  if (pipeline > 1) traffic.send_forward = traffic.send_backward = boundary;
  return traffic;
}

}  // namespace zeroshard
