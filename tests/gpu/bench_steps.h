// One job of one rank on the GPU, timed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/planner.h"
#include "worker/train/trainer.h"

namespace zeroshard::gpu_bench {

struct StepTimes {
  double seconds = 0;                      // median of the steps after the first two
  std::array<double, kStepPhases> phases;  // on the GPU, means of those steps
  std::array<int64_t, kMemoryKinds> held;  // at the end
  std::array<int64_t, kMemoryKinds> peak;
};

// A normalised job of this model: "architecture: gpt2, hidden_size: 768, ...". Stage 0, bf16.
absl::StatusOr<v1::JobSpec> MakeJob(const std::string& model, int micro_batch, int steps,
                                    const std::vector<std::string>& more = {});

// What the planner says one rank holds.
absl::StatusOr<RankPlan> PlanOf(const v1::JobSpec& spec);

// `store`: of an offloaded job, over host memory; it is put behind a StagedStore. Errors as of
// Trainer.
absl::StatusOr<StepTimes> RunJob(const v1::JobSpec& spec, std::unique_ptr<StateStore> store);

}  // namespace zeroshard::gpu_bench
