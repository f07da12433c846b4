// Which meshes of a number of devices train a model, and which of them best. Pure arithmetic;
// thread-safe.
#pragma once

#include <string>
#include <vector>

#include "common/plan/capacity.h"

namespace zeroshard {

// What takes most of a step beside computing.
enum class StepLimit : uint8_t { kComputing, kBubble, kTensor, kData, kStores };
StepLimit LimitOf(const StepTime& time);
const char* NameOf(StepLimit limit);

// A mesh that has no way to fit at some stages.
struct Misfit {
  int tensor = 1, pipeline = 1, data = 1;
  std::string impossible;  // not empty: the model cannot be cut like that, at any stage
  // Of each stage that does not fit, what comes nearest: its `lacks` say what is missing.
  std::vector<Evaluation> nearest;
};

struct MeshSearch {
  // Of every mesh and stage that fits, the best way to do it: best first.
  std::vector<Evaluation> fits;
  std::vector<Misfit> misfits;
  int64_t tried = 0;  // configurations
};

constexpr int kMostSearchedStages = 64;

// Every factorisation of cluster.devices into tensor x pipeline x data with a tensor group within a
// host and a pipeline of at most kMostSearchedStages; of each all stages, offloads, recomputation,
// sequence parallelism, one, two and four virtual stages, and both ways of pipeline_gradients.
// Ordered by predicted tokens a second; where that is equal, by fewer bytes on the fullest rank.
MeshSearch SearchMeshes(const Workload& workload, const ClusterSize& cluster);

// Why one stands where it does: what its fullest rank holds, what a step is made of, what limits
// it.
std::string ReasonOf(const Evaluation& evaluation);

}  // namespace zeroshard
