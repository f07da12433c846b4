#include "coordinator/core/core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {

Core::Core(const CoreOptions& options, LoadedState state, const std::string& new_cluster_id)
    : options_(options),
      cluster_id_(state.cluster_id.empty() ? new_cluster_id : state.cluster_id),
      counters_(std::move(state.counters)),
      members_(options_, std::move(state.fences)) {
  term_ = counters_["term"];
  for (auto& [run_id, loaded] : state.jobs) {
    Run& run = runs_[run_id];
    run.job = std::move(loaded.job);
    run.events = std::move(loaded.events);
    run.first = loaded.first;
    run.last = loaded.last;
    run.sampled = std::move(loaded.sampled);
    // The log is written before the history: a crash between them leaves the row ahead of it.
    RestoreGoingBack(run, loaded);
    if (run.job.state != v1::JOB_STATE_COMPLETED) {
      run.job.committed_step = std::max(run.job.first_step - 1, run.last.step());
    }
    run.furthest = run.job.committed_step;
    for (auto& [rank, record] : loaded.ranks) {
      if (rank != run.ranks.size()) break;
      run.ranks.emplace_back().record = std::move(record);
    }
    by_order_[run.job.order] = run_id;
    RestoreOffload(run, loaded);
    if (run.job.state == v1::JOB_STATE_QUEUED) queue_.insert(run.job.order);
    if (run.job.state == v1::JOB_STATE_RECOVERING) recovering_.insert(run.job.order);
    next_order_ = std::max(next_order_, run.job.order + 1);
    const bool placed = run.job.state == v1::JOB_STATE_PLACING ||
                        run.job.state == v1::JOB_STATE_RUNNING ||
                        run.job.state == v1::JOB_STATE_RECOVERING;
    if (placed && !run.ranks.empty()) {
      run.generation =
          std::make_unique<Generation>(options_, run_id, run.job.generation, run.World());
      run.generation->Restore(std::move(loaded.keys), loaded.barriers);
    }
  }
  for (const auto& [order, run_id] : by_order_) newest_[runs_[run_id].job.spec.name()] = run_id;
}

Decision Core::Start(const Moment& given) {
  Decision out;
  const Moment moment{Discount(given.now), given.unix_ms};
  counters_["term"] = ++term_;
  out.records.push_back(ClusterRecord{cluster_id_});
  out.records.push_back(CounterRecord{"term", term_});
  members_back_ = moment.now + options_.member_timeout + options_.return_grace;
  out.reasons.push_back(absl::StrCat("term ", term_, " of cluster ", cluster_id_));
  for (auto& [run_id, run] : runs_) {
    if (IsEnded(run.job.state)) {
      if (run.offload != nullptr && newest_[run.job.spec.name()] == run_id) {
        WriteLogged(run, &out);
        WriteHistory(run, &out);
      }
      continue;
    }
    out.actions.push_back(
        PrepareFolder{run.job.spec.name(), run_id, run.job.history_of, run.job.first_step});
    out.actions.push_back(JobAppears{run.job.spec.name(), run.job.spec});
    ShowChange(run, &out);
    if (run.offload != nullptr) StartOffload(run, moment, &out);
    if (!run.Live() && run.offload == nullptr) StartGoingBack(run, moment, &out);
    if (!run.Live()) continue;
    run.return_deadline = moment.now + options_.member_timeout + options_.return_grace;
    run.opened = moment.now;
    run.start_deadline = *run.return_deadline + StartTimeout(run.job.spec);
    WakeBy(*run.return_deadline);
    WakeBy(run.start_deadline);
    for (RankState& rank : run.ranks) {
      rank.last_advance = moment.now;
      rank.began = run.job.state != v1::JOB_STATE_PLACING;
    }
    AddEvent(run,
             absl::StrCat("the coordinator started again (term ", term_, ") at step ",
                          run.job.committed_step, "; waiting for ", run.World(), " ranks"),
             moment, &out);
    if (run.job.saving) {
      run.save_deadline = *run.return_deadline + SaveTimeout(run.job.spec);
      WakeBy(*run.save_deadline);
    }
    for (RankState& rank : run.ranks) {
      if (!rank.record.ended || rank.record.end.completed()) continue;
      rank.evidence_order = next_evidence_++;
      if (!MayHaveSaved(run, rank)) {
        BeginFailure(run, rank.record.end.message(), moment, &out);
      } else if (!run.save_deadline) {
        run.save_deadline = *run.return_deadline + CollectiveTimeout(run.job.spec);
        WakeBy(*run.save_deadline);
      }
    }
    MaybeComplete(run, moment, &out);
    MaybeSaved(run, moment, &out);
  }
  Finish(moment, &out);
  return out;
}

Decision Core::Decide(const Event& event, const Moment& given) {
  Decision out;
  const Moment moment{Discount(given.now), given.unix_ms};
  std::visit([&](const auto& specific) { On(specific, moment, &out); }, event);
  Finish(moment, &out);
  return out;
}

void Core::Finish(const Moment& moment, Decision* out) {
  if (schedule_again_) {
    schedule_again_ = false;
    Schedule(moment, out);
  }
  for (const std::string& run_id : std::exchange(touched_, {})) {
    const auto run = runs_.find(run_id);
    if (run != runs_.end() && !IsEnded(run->second.job.state)) SyncStores(run->second, out);
  }
  for (const Action& action : out->actions) {
    if (const Reply* reply = std::get_if<Reply>(&action)) parked_.erase(reply->request);
  }
  for (const std::string& run_id : forgotten_) runs_.erase(run_id);
  forgotten_.clear();
}

absl::Duration Core::Discount(absl::Duration now) {
  // Ticks come every heartbeat interval at least. A longer silence means that this process did not
  // run: nobody could have been heard in that time, so it does not count against anybody.
  if (last_now_ == -absl::InfiniteDuration()) first_now_ = now;
  const absl::Duration gap = now - last_now_;
  if (last_now_ != -absl::InfiniteDuration() && gap > 2 * options_.heartbeat_interval) {
    discount_ += gap - options_.heartbeat_interval;
  }
  last_now_ = std::max(last_now_, now);
  return last_now_ - discount_;
}

void Core::On(const Tick& event, const Moment& moment, Decision* out) {
  wakes_.erase(wakes_.begin(), wakes_.upper_bound(moment.now));
  last_tick_ = last_now_;
  CheckMembers(moment, out);
  CheckRuns(moment, out);
  CheckLeftovers(moment, out);
  if (!schedule_by_ || moment.now < *schedule_by_) return;
  schedule_by_.reset();
  schedule_again_ = true;
}

void Core::ScheduleBy(absl::Duration when) {
  schedule_by_ = std::min(when, schedule_by_.value_or(when));
  WakeBy(when);
}

// In steps of 10 ms: a thousand ranks that wait with nearly one deadline make one tick.
void Core::WakeBy(absl::Duration when) { wakes_.insert(absl::Ceil(when, absl::Milliseconds(10))); }

absl::Duration Core::NextDeadline() const {
  // From the last tick: other events come often enough to put it off for ever.
  absl::Duration next = std::max(last_tick_, first_now_) + options_.heartbeat_interval;
  if (!wakes_.empty()) next = std::min(next, *wakes_.begin() + discount_);
  return next;
}

}  // namespace zeroshard::coordinator
