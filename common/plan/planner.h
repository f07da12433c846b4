// Predicts, to the byte, what a rank holds and sends, from the schedule (zero_policy.h) and the
// layout. A running job's metrics must agree. Pure arithmetic; thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/collective_bytes.h"
#include "common/plan/stage_model.h"
#include "common/plan/tensor_slices.h"
#include "common/plan/tensor_traffic.h"
#include "common/plan/zero_policy.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard {

struct RankPlan {
  // Bytes by kind, as zeroshard_worker_memory_bytes counts them. Transient buffers are not
  // predicted.
  uint64_t parameters = 0, gradients = 0, optimizer = 0, activations = 0;
  uint64_t owned_parameters = 0;  // elements of the flat vectors that this rank owns
  TrafficTable step{};            // bytes this rank sends in one step, by operation and phase
  TrafficTable tensor{};          // those of `step` that go to its tensor group
  // Bytes to the stores, every replica counted, and from them, in one step. At the start of a
  // generation a rank also pulls what it keeps, once.
  uint64_t push = 0, pull = 0;
  uint64_t StepBytes() const;
};

RankPlan PlanRank(const ModelTable& model, const ZeroPolicy& policy, int rank);
// Of the rank at `data` of its data line, in a job of `ranks` ranks: a rank of a mesh. `stage` is
// of its slice (tensor_slices.h), `policy` MakeStagePolicy's; `step` is what it sends on all its
// lines. A schedule of fewer micro-batches than the policy has rounds counts the transfers, gathers
// and sums of those alone (mesh_rank.h).
// `stored`: where the state is offloaded and the model is split over tensor ranks, what its ranges
// are in the stores (of the stage: units have the tensors that they have there); null: all of them
// is pushed and pulled.
RankPlan PlanRank(const StageModel& stage, const ZeroPolicy& policy, const RankSchedule& schedule,
                  int data, int ranks, const TensorShare& share = {},
                  const TensorRank* stored = nullptr);

// Every rank of the job, for the coordinator and the client. INVALID_ARGUMENT from MakeModelTable,
// and where its mesh or its schedule cannot be.
absl::StatusOr<std::vector<v1::ShardPlan>> PlanShards(const v1::JobSpec& spec);

// What one copy of the job's state is in the stores: together they hold `replicas` times the bytes.
// Nothing for a job without offload. INVALID_ARGUMENT from MakeModelTable.
absl::StatusOr<v1::StorePlan> PlanStore(const v1::JobSpec& spec);

// What a user should know of a valid job's stage3_max_live_parameters: with offload_param it bounds
// what is gathered, but never below the widest single use. Empty: nothing, or no valid model.
std::string NoteOnLiveParameters(const v1::JobSpec& spec);

// What a rank of a job with a checkpoint section sets aside beside its plan: one fp32 copy of the
// state that it owns (12 bytes an element of a unit that is trained, 4 of a frozen one), from which
// a checkpoint is written while training goes on. 0 where the stores write it.
uint64_t CheckpointCopyBytes(const ModelTable& model, const ZeroPolicy& policy, int rank);

// The whole-model formula of the ZeRO paper (Rajbhandari et al. 2020, figure 1): bytes of 16-bit
// parameters and gradients and 12 bytes of optimizer state a parameter on one of `ranks` ranks.
double ModelStateBytes(double parameters, int ranks, int stage);

// Bytes that a rank sends while the loss of `micro_batches` micro-batches is measured without
// training on them. Beside this, `step` holds for every step after which nothing is evaluated,
// sampled or saved.
TrafficTable PlanEvaluation(const ModelTable& model, const ZeroPolicy& policy,
                            int64_t micro_batches);
// Bytes that a rank pulls from the stores meanwhile.
uint64_t PlanEvaluationPull(const ZeroPolicy& policy, int rank, int64_t micro_batches);

// What each rank contributes to the exchange that ends a step: a fixed part and one entry a round.
constexpr int64_t kStatsFixedBytes = 64;
constexpr int64_t kStatsRoundBytes = 16;
constexpr int64_t StatsBytes(int64_t rounds) {
  return kStatsFixedBytes + kStatsRoundBytes * rounds;
}

// Rows of the token table that touch `owned`, a part of `table` with `columns` columns.
int64_t RowsTouched(ElementRange table, ElementRange owned, int64_t columns);
// fp32 row accumulators a rank keeps where rows travel sparsely.
int64_t RowCapacity(const ModelTable& model, const ZeroPolicy& policy, int rank);

}  // namespace zeroshard
