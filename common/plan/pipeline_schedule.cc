#include "common/plan/pipeline_schedule.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr int64_t kMostScheduled = int64_t{1} << 20;
constexpr int64_t kForwardTime = 1, kBackwardTime = 2;

struct Compute {
  bool backward = false;
  int virtual_stage = 0;
  int64_t micro_batch = 0;
  int64_t begin = 0;
  int64_t end() const { return begin + (backward ? kBackwardTime : kForwardTime); }
};

// The i-th forward (backward) of a rank with v > 1: p micro-batches in its first (last) virtual
// stage, the same ones in the next, and so on; then the next p micro-batches.
Compute Interleaved(const PipelineShape& s, int rank, bool backward, int64_t i) {
  const int64_t round = i / s.VirtualStages();
  const int64_t in_round = i % s.VirtualStages();
  const int turn = static_cast<int>(in_round / s.stages);
  const int run = backward ? s.virtual_stages - 1 - turn : turn;
  return {.backward = backward,
          .virtual_stage = rank + s.stages * run,
          .micro_batch = round * s.stages + in_round % s.stages};
}

Compute Nth(const PipelineShape& s, int rank, bool backward, int64_t i) {
  if (s.virtual_stages > 1) return Interleaved(s, rank, backward, i);
  return {.backward = backward, .virtual_stage = rank, .micro_batch = i};
}

// A rank's computes: some forwards to fill the pipeline, then one forward and one backward in turn,
// then the backwards that are left.
std::vector<Compute> ComputesOf(const PipelineShape& s, int rank) {
  const bool interleaved = s.virtual_stages > 1;
  const int64_t p = s.stages, v = s.virtual_stages;
  const int64_t rounded = interleaved ? (s.micro_batches + p - 1) / p * p : s.micro_batches;
  const int64_t fill = interleaved ? 2 * (p - rank - 1) + (v - 1) * p : p - rank - 1;
  const int64_t count = rounded * v;
  const int64_t ahead = std::min(fill, count);
  std::vector<Compute> computes;
  const auto add = [&](bool backward, int64_t i) {
    const Compute compute = Nth(s, rank, backward, i);
    if (compute.micro_batch < s.micro_batches) computes.push_back(compute);
  };
  for (int64_t i = 0; i < ahead; ++i) add(false, i);
  for (int64_t i = 0; i < count; ++i) {
    if (ahead + i < count) add(false, ahead + i);
    add(true, i);
  }
  return computes;
}

// Puts computes to the times at which they begin when transfers take none.
class Clock {
 public:
  explicit Clock(const PipelineShape& shape)
      : shape_(shape),
        ends_(static_cast<size_t>(2 * shape.VirtualStages() * shape.micro_batches), kUnknown) {}

  std::vector<std::vector<Compute>> Run() {
    std::vector<std::vector<Compute>> ranks;
    for (int rank = 0; rank < shape_.stages; ++rank) ranks.push_back(ComputesOf(shape_, rank));
    std::vector<size_t> next(ranks.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        std::vector<Compute>& computes = ranks[rank];
        for (size_t& i = next[rank]; i < computes.size(); ++i) {
          const int64_t before = i == 0 ? 0 : computes[i - 1].end();
          const int64_t ready = ReadyAt(computes[i]);
          if (ready == kUnknown) break;
          computes[i].begin = std::max(before, ready);
          EndOf(computes[i].backward, computes[i].virtual_stage, computes[i].micro_batch) =
              computes[i].end();
          moved = true;
        }
      }
    }
    return ranks;
  }

 private:
  static constexpr int64_t kUnknown = -1;

  int64_t& EndOf(bool backward, int virtual_stage, int64_t micro_batch) {
    const int64_t row = (backward ? shape_.VirtualStages() : 0) + virtual_stage;
    return ends_[static_cast<size_t>(row * shape_.micro_batches + micro_batch)];
  }

  int64_t ReadyAt(const Compute& c) {
    if (!c.backward)
      return c.virtual_stage == 0 ? 0 : EndOf(false, c.virtual_stage - 1, c.micro_batch);
    // Its own forward is done where the next stage's is, and on the last stage was before it.
    if (c.virtual_stage + 1 == shape_.VirtualStages())
      return EndOf(false, c.virtual_stage, c.micro_batch);
    return EndOf(true, c.virtual_stage + 1, c.micro_batch);
  }

  const PipelineShape& shape_;
  std::vector<int64_t> ends_;  // of each forward, then of each backward
};

// The computes and groups of each rank by time: groups of a time before the computes that begin
// then, behind those that began before.
class Lists {
 public:
  explicit Lists(const PipelineShape& shape) : shape_(shape) {}

  std::vector<RankSchedule> Make() {
    const std::vector<std::vector<Compute>> ranks = Clock(shape_).Run();
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
    Transfer transfer{.send = true,
                      .gradient = c.backward,
                      .peer = to_rank,
                      .virtual_stage = c.virtual_stage,
                      .micro_batch = c.micro_batch};
    groups_[static_cast<size_t>(from_rank)][c.end()].push_back(transfer);
    transfer.send = false;
    transfer.peer = from_rank;
    groups_[static_cast<size_t>(to_rank)][c.end()].push_back(transfer);
  }

  RankSchedule Merge(int rank, const std::vector<Compute>& computes) {
    RankSchedule schedule{.shape = shape_, .rank = rank, .actions = {}};
    std::map<int64_t, std::vector<Transfer>>& groups = groups_[static_cast<size_t>(rank)];
    auto group = groups.begin();
    const auto enqueue = [&](auto until) {
      for (; group != until; ++group)
        schedule.actions.push_back({.kind = ActionKind::kTransfers,
                                    .time = group->first,
                                    .transfers = std::move(group->second)});
    };
    for (const Compute& c : computes) {
      enqueue(groups.upper_bound(c.begin));
      schedule.actions.push_back({.kind = c.backward ? ActionKind::kBackward : ActionKind::kForward,
                                  .virtual_stage = c.virtual_stage,
                                  .micro_batch = c.micro_batch,
                                  .time = c.begin,
                                  .transfers = {}});
    }
    enqueue(groups.end());
    return schedule;
  }

  const PipelineShape& shape_;
  std::vector<std::map<int64_t, std::vector<Transfer>>> groups_;  // by rank and time
};

int64_t EndOf(const Action& compute) {
  return compute.time + (compute.kind == ActionKind::kBackward ? kBackwardTime : kForwardTime);
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
    for (const Transfer& t : a.transfers) {
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

}  // namespace

absl::StatusOr<std::vector<RankSchedule>> MakePipelineSchedule(const PipelineShape& shape) {
  const int64_t p = shape.stages, v = shape.virtual_stages, m = shape.micro_batches;
  if (p < 1 || v < 1 || m < 1 || p > kMostScheduled || v > kMostScheduled / p ||
      m > kMostScheduled / (p * v)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a pipeline's schedule: seen ", p, " stages (parallel.pipeline) x ", v,
        " virtual stages (parallel.virtual_stages) x ", m,
        " micro-batches of a data-parallel rank, wanted each at least 1 and their product at most ",
        kMostScheduled, "; write a larger train_micro_batch_size_per_gpu or fewer stages"));
  }
  return Lists(shape).Make();
}

int64_t MostAlive(const RankSchedule& schedule) {
  return Alive(schedule, [](int) { return true; });
}

int64_t MostAlive(const RankSchedule& schedule, int virtual_stage) {
  return Alive(schedule, [&](int k) { return k == virtual_stage; });
}

int64_t InputSlots(const RankSchedule& schedule, int virtual_stage) {
  return Slots(schedule, virtual_stage, false);
}

int64_t GradientSlots(const RankSchedule& schedule, int virtual_stage) {
  return Slots(schedule, virtual_stage, true);
}

}  // namespace zeroshard
