#include "common/plan/pipeline_schedule.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr StageTime kTime = {.forward = 1, .backward = 2};
// Sums of whole numbers are whole.
int64_t At(double time) { return static_cast<int64_t>(time); }

// The computes and groups of each rank by time: groups of a time before the computes that begin
// then, behind those that began before.
class Lists {
 public:
  explicit Lists(const PipelineShape& shape) : shape_(shape) {}

  using Order = std::vector<std::vector<Compute>> (*)(const PipelineShape&,
                                                      const std::vector<StageTime>&);
  std::vector<RankSchedule> Make(Order order) {
    const std::vector<std::vector<Compute>> ranks =
        order(shape_, std::vector<StageTime>(static_cast<size_t>(shape_.VirtualStages()), kTime));
    groups_.resize(ranks.size());
    for (const std::vector<Compute>& computes : ranks) {
      for (const Compute& compute : computes) Send(compute);
    }
    std::vector<RankSchedule> schedules;
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      schedules.push_back(Merge(static_cast<int>(rank), ranks[rank]));
    return schedules;
  }

 private:
  void Send(const Compute& c) {
    const int to = c.backward ? c.virtual_stage - 1 : c.virtual_stage + 1;
    if (shape_.stages == 1 || to < 0 || to == shape_.VirtualStages()) return;
    const int from_rank = c.virtual_stage % shape_.stages, to_rank = to % shape_.stages;
    StageTransfer transfer{.send = true,
                           .gradient = c.backward,
                           .peer = to_rank,
                           .virtual_stage = c.virtual_stage,
                           .micro_batch = c.micro_batch};
    groups_[static_cast<size_t>(from_rank)][At(c.end)].push_back(transfer);
    transfer.send = false;
    transfer.peer = from_rank;
    groups_[static_cast<size_t>(to_rank)][At(c.end)].push_back(transfer);
  }

  RankSchedule Merge(int rank, const std::vector<Compute>& computes) {
    RankSchedule schedule{.shape = shape_, .rank = rank, .actions = {}};
    std::map<int64_t, std::vector<StageTransfer>>& groups = groups_[static_cast<size_t>(rank)];
    auto group = groups.begin();
    const auto enqueue = [&](auto until) {
      for (; group != until; ++group)
        schedule.actions.push_back({.kind = ActionKind::kTransfers,
                                    .time = group->first,
                                    .transfers = std::move(group->second)});
    };
    for (const Compute& c : computes) {
      enqueue(groups.upper_bound(At(c.begin)));
      schedule.actions.push_back({.kind = c.backward ? ActionKind::kBackward : ActionKind::kForward,
                                  .virtual_stage = c.virtual_stage,
                                  .micro_batch = c.micro_batch,
                                  .time = At(c.begin),
                                  .transfers = {}});
    }
    enqueue(groups.end());
    return schedule;
  }

  const PipelineShape& shape_;
  std::vector<std::map<int64_t, std::vector<StageTransfer>>> groups_;  // by rank and time
};

int64_t EndOf(const Action& compute) {
  return compute.time + At(compute.kind == ActionKind::kBackward ? kTime.backward : kTime.forward);
}

// The most alive of the virtual stages that `counts` says; an activation dies before the next
// compute begins.
template <typename Counts>
int64_t Alive(const RankSchedule& schedule, const Counts& counts) {
  int64_t alive = 0, most = 0;
  for (const Action& a : schedule.actions) {
    if (!counts(a.virtual_stage)) continue;
    alive += (a.kind == ActionKind::kForward) - (a.kind == ActionKind::kBackward);
    most = std::max(most, alive);
  }
  return most;
}

int64_t Slots(const RankSchedule& schedule, int virtual_stage, bool gradient) {
  const ActionKind use = gradient ? ActionKind::kBackward : ActionKind::kForward;
  const int source = gradient ? virtual_stage + 1 : virtual_stage - 1;
  std::vector<std::pair<int64_t, int>> changes;  // a place that gets free is free at once
  for (const Action& a : schedule.actions) {
    for (const StageTransfer& t : a.transfers) {
      if (!t.send && t.gradient == gradient && t.To() == virtual_stage)
        changes.emplace_back(a.time, 1);
    }
    if (a.kind != use || source < 0 || source == schedule.shape.VirtualStages()) continue;
    if (a.virtual_stage == virtual_stage) changes.emplace_back(EndOf(a), -1);
    if (a.virtual_stage == source) changes.emplace_back(EndOf(a), 1);  // on this rank: p = 1
  }
  std::sort(changes.begin(), changes.end());
  int64_t count = 0, most = 0;
  for (const auto& [time, change] : changes) most = std::max(most, count += change);
  return most;
}

absl::Status CheckShape(const PipelineShape& shape) {
  const int64_t p = shape.stages, v = shape.virtual_stages, m = shape.micro_batches;
  if (p < 1 || v < 1 || m < 1 || p > kMostScheduled || v > kMostScheduled / p ||
      m > kMostScheduled / (p * v)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a pipeline's schedule: seen ", p, " stages (parallel.pipeline) x ", v,
        " virtual stages (parallel.virtual_stages) x ", m,
        " micro-batches of a data-parallel rank, wanted each at least 1 and their product at most ",
        kMostScheduled, "; write a larger train_micro_batch_size_per_gpu or fewer stages"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<RankSchedule>> MakePipelineSchedule(const PipelineShape& shape) {
  if (const absl::Status status = CheckShape(shape); !status.ok()) return status;
  return Lists(shape).Make(&RunOrder);
}

absl::StatusOr<std::vector<RankSchedule>> MakeForwardSchedule(const PipelineShape& shape) {
  if (const absl::Status status = CheckShape(shape); !status.ok()) return status;
  return Lists(shape).Make(&RunForwards);
}

int64_t MostAlive(const RankSchedule& schedule) {
  return Alive(schedule, [](int) { return true; });
}

int64_t MostAlive(const RankSchedule& schedule, int virtual_stage) {
  return Alive(schedule, [&](int k) { return k == virtual_stage; });
}

int64_t AliveBound(const PipelineShape& shape, int rank) {
  const int64_t p = shape.stages, v = shape.virtual_stages;
  const int64_t fill = v == 1 ? p - rank - 1 : 2 * (p - rank - 1) + (v - 1) * p;
  return std::min(shape.micro_batches * v, fill + 1);
}

int64_t InputSlots(const RankSchedule& schedule, int virtual_stage) {
  return Slots(schedule, virtual_stage, false);
}

int64_t GradientSlots(const RankSchedule& schedule, int virtual_stage) {
  return Slots(schedule, virtual_stage, true);
}

}  // namespace zeroshard
