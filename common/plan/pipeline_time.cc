#include "common/plan/pipeline_time.h"

#include <algorithm>

namespace zeroshard {
namespace {

constexpr double kUnknown = -1;

class Run {
 public:
  Run(const std::vector<RankSchedule>& schedules, const std::vector<StageTime>& times)
      : schedules_(schedules), times_(times), ranks_(schedules.size()) {
    const PipelineShape& shape = schedules.front().shape;
    micro_batches_ = static_cast<size_t>(shape.micro_batches);
    const size_t outputs = 2 * static_cast<size_t>(shape.VirtualStages()) * micro_batches_;
    computed_.assign(outputs, kUnknown);
    moved_.assign(outputs, kUnknown);
    reached_.assign(outputs, kUnknown);
  }

  PipelineTime Result() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        while (Compute(rank) || Communicate(rank)) moved = true;
      }
    }
    PipelineTime result;
    for (const Rank& rank : ranks_) {
      result.total = std::max({result.total, rank.computed, rank.communicated});
      result.busy.push_back(rank.busy);
    }
    return result;
  }

 private:
  // Where each stream is in the list, and until when it is busy.
  struct Rank {
    size_t compute = 0, group = 0;
    double computed = 0, communicated = 0, busy = 0;
    double reached = kUnknown;  // when the group at hand began
  };

  size_t Index(bool gradient, int virtual_stage, int64_t micro_batch) const {
    const int row = 2 * virtual_stage + (gradient ? 1 : 0);
    return static_cast<size_t>(row) * micro_batches_ + static_cast<size_t>(micro_batch);
  }

  // When the input of a compute is there.
  double Ready(const Action& a) const {
    const bool backward = a.kind == ActionKind::kBackward;
    const PipelineShape& shape = schedules_.front().shape;
    const int from = backward ? a.virtual_stage + 1 : a.virtual_stage - 1;
    if (from < 0) return 0;
    if (from == shape.VirtualStages())
      return computed_[Index(false, a.virtual_stage, a.micro_batch)];
    return (shape.stages == 1 ? computed_ : moved_)[Index(backward, from, a.micro_batch)];
  }

  bool Compute(size_t r) {
    Rank& rank = ranks_[r];
    const std::vector<Action>& actions = schedules_[r].actions;
    while (rank.compute < actions.size() && actions[rank.compute].kind == ActionKind::kTransfers)
      ++rank.compute;
    if (rank.compute == actions.size()) return false;
    const Action& a = actions[rank.compute];
    const double ready = Ready(a);
    if (ready == kUnknown) return false;
    const StageTime& time = times_[static_cast<size_t>(a.virtual_stage)];
    const bool backward = a.kind == ActionKind::kBackward;
    const double takes = backward ? time.backward : time.forward;
    rank.computed = std::max(rank.computed, ready) + takes;
    rank.busy += takes;
    computed_[Index(backward, a.virtual_stage, a.micro_batch)] = rank.computed;
    ++rank.compute;
    return true;
  }

  bool Communicate(size_t r) {
    Rank& rank = ranks_[r];
    const std::vector<Action>& actions = schedules_[r].actions;
    while (rank.group < actions.size() && actions[rank.group].kind != ActionKind::kTransfers)
      ++rank.group;
    if (rank.group == actions.size()) return false;
    const std::vector<Transfer>& transfers = actions[rank.group].transfers;
    const bool begun = rank.reached != kUnknown;
    if (!begun && !Begin(transfers, &rank)) return false;
    double end = rank.reached;
    for (const Transfer& t : transfers) {
      const double moved = moved_[Index(t.gradient, t.virtual_stage, t.micro_batch)];
      if (moved == kUnknown) return !begun;
      end = std::max(end, moved);
    }
    rank.communicated = end;
    rank.reached = kUnknown;
    ++rank.group;
    return true;
  }

  // Of each transfer the second of its ends to reach it moves it.
  bool Begin(const std::vector<Transfer>& transfers, Rank* rank) {
    double reached = rank->communicated;
    for (const Transfer& t : transfers) {
      if (!t.send) continue;
      const double ready = computed_[Index(t.gradient, t.virtual_stage, t.micro_batch)];
      if (ready == kUnknown) return false;
      reached = std::max(reached, ready);
    }
    rank->reached = reached;
    for (const Transfer& t : transfers) {
      const size_t i = Index(t.gradient, t.virtual_stage, t.micro_batch);
      if (reached_[i] == kUnknown) {
        reached_[i] = reached;
      } else {
        moved_[i] = std::max(reached_[i], reached);
      }
    }
    return true;
  }

  const std::vector<RankSchedule>& schedules_;
  const std::vector<StageTime>& times_;
  std::vector<Rank> ranks_;
  size_t micro_batches_ = 1;
  std::vector<double> computed_, moved_, reached_;  // by output; reached_: by its first end
};

}  // namespace

double PipelineTime::Bubble() const {
  const double all = total * static_cast<double>(busy.size());
  double idle = all;
  for (const double of_rank : busy) idle -= of_rank;
  return all > 0 ? idle / all : 0;
}

PipelineTime TimeOf(const std::vector<RankSchedule>& schedules,
                    const std::vector<StageTime>& times) {
  return Run(schedules, times).Result();
}

absl::StatusOr<PipelineTime> TimeOf(const PipelineShape& shape,
                                    const std::vector<StageTime>& times) {
  constexpr int64_t kWhole = 16, kPace = 4;
  const int64_t p = shape.stages;
  PipelineShape part = shape;
  if (p > 0 && shape.micro_batches > kWhole * p)  // as many less, where p divides what is left out
    part.micro_batches = kWhole * p - (p - shape.micro_batches % p) % p;
  const auto schedules = MakePipelineSchedule(part);
  if (!schedules.ok()) return schedules.status();
  PipelineTime time = TimeOf(*schedules, times);
  const int64_t rest = shape.micro_batches - part.micro_batches;
  if (rest == 0) return time;
  part.micro_batches -= kPace * p;
  const PipelineTime before = TimeOf(*MakePipelineSchedule(part), times);
  const double share = static_cast<double>(rest) / static_cast<double>(kPace * p);
  time.total += share * (time.total - before.total);
  for (size_t r = 0; r < time.busy.size(); ++r)
    time.busy[r] += share * (time.busy[r] - before.busy[r]);
  return time;
}

}  // namespace zeroshard
