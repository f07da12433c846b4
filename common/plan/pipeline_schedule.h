// What each stage of a pipeline does in a step, in which order. Pure; thread-safe.
//
// Virtual stages 0 to p * v - 1 are runs of units in the model's order (pipeline_stages.h); virtual
// stage k is on rank k mod p of its pipeline line. The computes are in the order of
// pipeline_order.h; here transfers come to them. Any m >= 1 is right, also fewer than p; what that
// costs, pipeline_time.h says.
//
// How to run a rank's list. There are two streams, one for compute and one for communication, each
// of which does its actions in the order of the list; enqueue them in that order.
//   * A group of transfers is enqueued together (ncclGroupStart/End; all posted, then all waited
//     for). It starts when the group before it is done, when the computes before it in the list
//     whose outputs it sends are done, and when the buffers that it receives into are free.
//   * A compute waits for the group that receives its input, which is before it in the list, and
//     until the buffer that it writes its output to has been sent.
// Nothing else is waited for, so what is received in a group before an earlier compute arrives
// while that runs.
//
// Buffers of a rank, for each virtual stage: InputSlots for activations and GradientSlots for
// gradients that have come and wait or are in use (micro-batch i uses slot i mod their number), and
// at least one for outputs of either kind (two, so that a compute may overlap with the sending of
// what was computed before it).
//
// Why it cannot deadlock, even where a transfer is done only when both ends have reached it: give
// forward 1 and backward 2 units of time and let transfers take none. Each transfer belongs to the
// time at which its output is ready, and is in the group of that time on both its ranks. A group
// depends on groups of earlier times alone: a compute that ends at t began before t, with inputs
// that were there by then. So groups of the least time not yet done can always finish. The same
// order on both ends of a pair also matches their sends and receives, which carry no tags in NCCL.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan/pipeline_order.h"

namespace zeroshard {

enum class ActionKind : uint8_t { kForward, kBackward, kTransfers };

// One end of a message: the output of a virtual stage, which goes to the next one (`gradient`
// false: activations) or the one before (true: the gradient of what came from there).
struct StageTransfer {
  bool send = false;
  bool gradient = false;
  int peer = 0;           // index in the pipeline line
  int virtual_stage = 0;  // whose output it is
  int64_t micro_batch = 0;
  // The virtual stage that it is an input of.
  int To() const { return gradient ? virtual_stage - 1 : virtual_stage + 1; }
  friend bool operator==(const StageTransfer&, const StageTransfer&) = default;
};

struct Action {
  ActionKind kind = ActionKind::kForward;
  int virtual_stage = 0;    // of a compute
  int64_t micro_batch = 0;  // of a compute
  int64_t time = 0;         // when it begins, in the units above; never falls in a list
  std::vector<StageTransfer> transfers;  // kTransfers: one group, at most one send and two receives
  friend bool operator==(const Action&, const Action&) = default;
};

// Of one rank. Micro-batches of a virtual stage go forward and backward in ascending order, so that
// sums of gradients have a fixed order. With p = 1 there are no transfers: outputs are handed over.
struct RankSchedule {
  PipelineShape shape;
  int rank = 0;
  std::vector<Action> actions;
};

constexpr int64_t kMostScheduled = int64_t{1} << 20;  // p * v * m

// Of all ranks of a pipeline line, by rank. INVALID_ARGUMENT where a size is below 1, or p * v * m
// is above kMostScheduled, names them. All lines of a mesh must run the same shape: where a
// data-parallel rank has a micro-batch less, it goes through the motions, since ZeRO's collectives
// want every rank.
absl::StatusOr<std::vector<RankSchedule>> MakePipelineSchedule(const PipelineShape& shape);

// The same of forwards alone, as an evaluation runs them: the last virtual stage's ends with the
// loss, and nothing is kept for a backward. Its inputs never wait: InputSlots is at most 1, so that
// it runs in the slots of a training step's schedule.
absl::StatusOr<std::vector<RankSchedule>> MakeForwardSchedule(const PipelineShape& shape);

// The most activations alive at once on the rank: forward begun, backward not ended; each of one
// virtual stage and micro-batch.
int64_t MostAlive(const RankSchedule& schedule);
// The most of one of the rank's virtual stages. Micro-batch i may keep its activations in place
// i mod that number.
int64_t MostAlive(const RankSchedule& schedule, int virtual_stage);
// What MostAlive never passes, and is where v is 1 or p divides m:
//   v = 1: min(m, p - rank)
//   v > 1: min(m v, 2 (p - rank - 1) + (v - 1) p + 1)
int64_t AliveBound(const PipelineShape& shape, int rank);

// How many inputs (gradients) of a virtual stage are there at once at most, from the group that
// receives them, or where p = 1 the compute that makes them, to the end of the compute that uses
// them. 1 with v = 1 or p = 1; else at most max(2, ceil((p + 1) / 3)), as consecutive stages of an
// interleaved pipeline run that far apart. 0: it has none.
int64_t InputSlots(const RankSchedule& schedule, int virtual_stage);
int64_t GradientSlots(const RankSchedule& schedule, int virtual_stage);

}  // namespace zeroshard
