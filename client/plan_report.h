// What `zeroshard plan` says, as text and as JSON.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/plan/capacity.h"
#include "common/plan/mesh_search.h"
#include "nlohmann/json.hpp"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard {

struct PlanReport {
  Workload workload;
  ClusterSize cluster;
  std::string model;                      // in words
  double asked_parameters = 0;            // of --parameters; 0: a job
  std::vector<v1::ShardPlan> ranks;       // of a job: its own plan, byte-exact
  std::optional<Evaluation> job;          // of a job: as it is written
  std::vector<Evaluation> data_parallel;  // on all devices
  std::vector<Evaluation> meshes;         // on all devices, the smallest that fits of each mesh
  std::optional<Evaluation> smallest;
  std::optional<MeshSearch> search;  // of --search, in the place of the three above
  // Of the job, or the best that was found, where it is a pipeline at stage 2 or 3: what both ways
  // of zero_optimization.pipeline_gradients cost, sharded and full.
  std::vector<Evaluation> gradients;
  bool Fits() const;
};

// Evaluates everything; `meshes`: tensor and pipeline parallelism too.
void FillReport(bool meshes, PlanReport* report);
// Looks for the meshes that fit instead.
void FillSearch(PlanReport* report);

std::string FormatReport(const PlanReport& report);
nlohmann::ordered_json ToJson(const PlanReport& report);

// The degrees of the ZeRO paper's table 1.
inline constexpr int kPaperRanks[] = {1, 4, 16, 64, 256, 1024};

}  // namespace zeroshard
