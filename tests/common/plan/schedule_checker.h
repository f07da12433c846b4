// Runs a pipeline's schedule under the strictest rules that any backend may have: streams in order,
// a transfer is done only when both ends have reached it, sends and receives of a pair match by
// their order alone, a group ends when all of it has, outgoing buffers are one.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/pipeline_schedule.h"

namespace zeroshard {

class ScheduleChecker {
 public:
  // Units of time of a forward and a backward.
  explicit ScheduleChecker(std::vector<RankSchedule> schedules, int64_t forward = 1,
                           int64_t backward = 2)
      : schedules_(std::move(schedules)), takes_{forward, backward} {}
  // There are to be forwards alone.
  ScheduleChecker& WithoutBackwards() {
    backwards_ = false;
    return *this;
  }

  // Empty where everything holds, else the first thing that does not.
  std::string Check() {
    for (size_t r = 0; r < schedules_.size() && wrong_.empty(); ++r) Read(static_cast<int>(r));
    if (wrong_.empty()) Complete();
    if (wrong_.empty()) Match();
    if (wrong_.empty()) Simulate();
    return wrong_;
  }
  int64_t makespan() const { return makespan_; }

 private:
  // (backward, virtual stage, micro-batch): of a compute, its output and the transfer of that.
  using Key = std::tuple<bool, int, int64_t>;
  struct Place {
    int rank = 0;
    size_t action = 0;
  };

  static std::string Text(const Key& k) {
    return absl::StrCat(std::get<0>(k) ? "backward " : "forward ", std::get<1>(k), " of ",
                        std::get<2>(k));
  }
  void Fail(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }
  const PipelineShape& shape() const { return schedules_.front().shape; }
  int RankOf(int virtual_stage) const { return virtual_stage % shape().stages; }

  // Each action in the right place, once.
  void Read(int r) {
    const std::vector<Action>& actions = schedules_[static_cast<size_t>(r)].actions;
    std::map<std::pair<bool, int>, int64_t> next;  // micro-batch of each virtual stage
    for (size_t a = 0; a < actions.size(); ++a) {
      if (actions[a].kind != ActionKind::kTransfers) {
        ReadCompute(r, a, &next);
        continue;
      }
      if (actions[a].transfers.empty()) Fail("an empty group");
      for (const StageTransfer& t : actions[a].transfers) ReadTransfer(r, a, t);
    }
  }

  void ReadCompute(int r, size_t a, std::map<std::pair<bool, int>, int64_t>* next) {
    const Action& action = schedules_[static_cast<size_t>(r)].actions[a];
    const bool backward = action.kind == ActionKind::kBackward;
    const Key key{backward, action.virtual_stage, action.micro_batch};
    if (RankOf(action.virtual_stage) != r) Fail(absl::StrCat(Text(key), " on rank ", r));
    if ((*next)[{backward, action.virtual_stage}]++ != action.micro_batch)
      Fail(absl::StrCat(Text(key), " out of order"));
    if (backward && !computes_.contains({false, action.virtual_stage, action.micro_batch}))
      Fail(absl::StrCat(Text(key), " before its forward"));
    if (!computes_.emplace(key, Place{r, a}).second) Fail(absl::StrCat(Text(key), " twice"));
  }

  void ReadTransfer(int r, size_t a, const StageTransfer& t) {
    const Key key{t.gradient, t.virtual_stage, t.micro_batch};
    const int ours = t.send ? t.virtual_stage : t.To(), theirs = t.send ? t.To() : t.virtual_stage;
    if (t.To() < 0 || t.To() >= shape().VirtualStages() || RankOf(ours) != r ||
        RankOf(theirs) != t.peer || t.peer == r)
      Fail(absl::StrCat("transfer of ", Text(key), " with rank ", t.peer, " on rank ", r));
    auto& ends = t.send ? sends_ : receives_;
    if (!ends.emplace(key, Place{r, a}).second)
      Fail(absl::StrCat("transfer of ", Text(key), " twice"));
    if (t.send) {
      const auto made = computes_.find(key);
      if (made == computes_.end() || made->second.rank != r)
        Fail(absl::StrCat("sends ", Text(key), " before it is computed"));
      pairs_[{r, t.peer}].first.push_back(key);
    } else {
      if (computes_.contains({t.gradient, t.To(), t.micro_batch}))
        Fail(absl::StrCat("receives ", Text(key), " after its use"));
      pairs_[{t.peer, r}].second.push_back(key);
    }
  }

  // All computes are there, and what crosses ranks is sent and received.
  void Complete() {
    const int stages = shape().VirtualStages();
    for (int k = 0; k < stages; ++k) {
      for (int64_t i = 0; i < shape().micro_batches; ++i) {
        for (const bool backward : {false, true}) {
          if (backward && !backwards_) continue;
          const Key key{backward, k, i};
          const int to = backward ? k - 1 : k + 1;
          if (!computes_.contains(key)) Fail(absl::StrCat("no ", Text(key)));
          if (to < 0 || to == stages || shape().stages == 1) continue;
          if (!sends_.contains(key)) Fail(absl::StrCat("no send of ", Text(key)));
          if (!receives_.contains(key)) Fail(absl::StrCat("no receive of ", Text(key)));
        }
      }
    }
    const int64_t passes = backwards_ ? 2 : 1;
    if (computes_.size() != static_cast<size_t>(passes * stages * shape().micro_batches))
      Fail("computes of what does not exist");
  }

  void Match() {
    for (const auto& [ranks, ends] : pairs_) {
      if (ends.first != ends.second)
        Fail(absl::StrCat("rank ", ranks.second, " receives from rank ", ranks.first,
                          " in another order than it sends"));
    }
  }

  void Simulate() {
    const size_t ranks = schedules_.size();
    compute_.assign(ranks, 0);
    group_.assign(ranks, 0);
    compute_free_.assign(ranks, 0);
    group_free_.assign(ranks, 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < ranks; ++r) moved |= StepCompute(r) | StepGroup(r);
    }
    for (size_t r = 0; r < ranks; ++r) {
      if (Skip(r, false) < schedules_[r].actions.size())
        Fail(absl::StrCat("deadlock: rank ", r, " computes no further than action ", compute_[r]));
      if (Skip(r, true) < schedules_[r].actions.size())
        Fail(
            absl::StrCat("deadlock: rank ", r, " communicates no further than action ", group_[r]));
      makespan_ = std::max(makespan_, compute_free_[r]);
    }
  }

  size_t Skip(size_t r, bool groups) {
    size_t& at = (groups ? group_ : compute_)[r];
    const std::vector<Action>& actions = schedules_[r].actions;
    while (at < actions.size() && (actions[at].kind == ActionKind::kTransfers) != groups) ++at;
    return at;
  }

  // Raises `time` to when something is done; false: it is not yet.
  template <typename Map, typename K>
  static bool After(const Map& done, const K& key, int64_t* time) {
    const auto found = done.find(key);
    if (found == done.end()) return false;
    *time = std::max(*time, found->second);
    return true;
  }

  bool StepCompute(size_t r) {
    const size_t at = Skip(r, false);
    if (at == schedules_[r].actions.size()) return false;
    const Action& a = schedules_[r].actions[at];
    const bool backward = a.kind == ActionKind::kBackward;
    const int k = a.virtual_stage, from = backward ? k + 1 : k - 1;
    int64_t begin = compute_free_[r];
    if (from >= 0 && from < shape().VirtualStages()) {
      const Key input{backward, from, a.micro_batch};
      if (!After(shape().stages == 1 ? computed_ : received_, input, &begin)) return false;
    }
    if (backward && !After(computed_, Key{false, k, a.micro_batch}, &begin)) return false;
    const Key before{backward, k, a.micro_batch - 1};
    if (sends_.contains(before) && !After(sent_, before, &begin)) return false;
    compute_free_[r] = begin + takes_[backward ? 1 : 0];
    computed_[{backward, k, a.micro_batch}] = compute_free_[r];
    ++compute_[r];
    return true;
  }

  bool StepGroup(size_t r) {
    const size_t at = Skip(r, true);
    if (at == schedules_[r].actions.size()) return false;
    const std::vector<StageTransfer>& transfers = schedules_[r].actions[at].transfers;
    const std::pair<size_t, size_t> self{r, at};
    bool moved = false;
    if (!begun_.contains(self)) {
      int64_t begin = group_free_[r];
      for (const StageTransfer& t : transfers) {
        if (!Startable(r, t, &begin)) return false;
      }
      begun_[self] = begin;
      moved = true;
    }
    int64_t end = begun_[self];
    for (const StageTransfer& t : transfers) {
      const Key key{t.gradient, t.virtual_stage, t.micro_batch};
      const Place& other = (t.send ? receives_ : sends_).at(key);
      const std::pair<size_t, size_t> there{static_cast<size_t>(other.rank), other.action};
      if (!After(begun_, there, &end)) return moved;
    }
    for (const StageTransfer& t : transfers)
      (t.send ? sent_ : received_)[{t.gradient, t.virtual_stage, t.micro_batch}] = end;
    group_free_[r] = end;
    ++group_[r];
    return true;
  }

  bool Startable(size_t r, const StageTransfer& t, int64_t* begin) {
    if (t.send) return After(computed_, Key{t.gradient, t.virtual_stage, t.micro_batch}, begin);
    const int64_t slots = SlotsOf(r, t.gradient, t.To());
    if (t.micro_batch < slots) return true;
    return After(computed_, Key{t.gradient, t.To(), t.micro_batch - slots}, begin);
  }

  int64_t SlotsOf(size_t r, bool gradient, int virtual_stage) {
    const auto [it, added] = slots_.emplace(std::pair{gradient, virtual_stage}, 0);
    if (added)
      it->second = gradient ? GradientSlots(schedules_[r], virtual_stage)
                            : InputSlots(schedules_[r], virtual_stage);
    return it->second;
  }

  std::vector<RankSchedule> schedules_;
  int64_t takes_[2];
  bool backwards_ = true;
  std::string wrong_;
  int64_t makespan_ = 0;
  std::map<Key, Place> computes_, sends_, receives_;
  std::map<std::pair<int, int>, std::pair<std::vector<Key>, std::vector<Key>>> pairs_;
  std::vector<size_t> compute_, group_;
  std::vector<int64_t> compute_free_, group_free_;
  std::map<Key, int64_t> computed_, sent_, received_;
  std::map<std::pair<size_t, size_t>, int64_t> begun_;
  std::map<std::pair<bool, int>, int64_t> slots_;
};

}  // namespace zeroshard
