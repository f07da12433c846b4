// Jobs: submission, the queue, placement, the end.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/offload.h"
#include "common/plan/planner.h"
#include "coordinator/core/admission.h"
#include "coordinator/core/core.h"
#include "coordinator/core/placement.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

constexpr ptrdiff_t kMaxSkippedShown = 10;
constexpr size_t kMaxSkippedBytes = 1024;

std::string DescribeStart(const Checkpoint& from) {
  return absl::StrCat("goes on from ", from.resume.weights_only() ? "the weights of " : "",
                      "the checkpoint of step ", from.step, ", ", from.resume.checkpoint());
}

}  // namespace

void Core::On(const Submit& event, const Moment& moment, Decision* out) {
  const auto refuse = [&](absl::Status status) {
    out->actions.push_back(Reply{event.request, std::move(status), "", 0});
  };
  const std::string& name = event.spec.name();
  if (!IsName(name)) {
    return refuse(
        absl::InvalidArgumentError(absl::StrCat("name: ", Quoted(name), " is not ", kNameRule)));
  }
  if (event.spec.resources().workers() == 0) {
    return refuse(absl::InvalidArgumentError("resources.workers: 0; wanted at least 1"));
  }
  if (const auto found = newest_.find(name); found != newest_.end()) {
    const Run& other = runs_[found->second];
    if (!IsEnded(other.job.state)) {
      return refuse(NameIsTaken(name, other.job.state, other.job.run_id));
    }
  }
  const size_t live = std::count_if(runs_.begin(), runs_.end(), [](const auto& entry) {
    return !IsEnded(entry.second.job.state);
  });
  if (live >= options_.max_live_jobs) {
    return refuse(absl::ResourceExhaustedError(
        absl::StrCat(live,
                     " jobs are queued or running, the most that are taken; wait for some "
                     "to end or cancel them")));
  }
  if (!event.force) {
    absl::Status fits = WorkersCanHold(event.spec, event.plan);
    if (fits.ok() && IsOffloaded(event.spec)) fits = CanEverFit(event.spec);
    if (!fits.ok()) return refuse(std::move(fits));
  }
  uint64_t& number = counters_[absl::StrCat("run:", name)];
  ++number;
  const std::string run_id = absl::StrCat(name, "-", number);
  out->records.push_back(CounterRecord{absl::StrCat("run:", name), number});
  Run& run = runs_[run_id];
  run.job.order = next_order_++;
  run.job.run_id = run_id;
  run.job.spec = event.spec;
  run.job.plan = event.plan;
  run.job.submitted_unix_ms = moment.unix_ms;
  if (event.from) GoOnFrom(*event.from, &run);
  run.furthest = run.job.committed_step;
  if (IsOffloaded(event.spec)) {
    run.offload = std::make_unique<OffloadedRun>();
    run.offload->needs = *MakeStoreNeeds(event.spec, options_.chunk_elements);
    run.offload->written = run.job.first_step - 1;
  }
  by_order_[run.job.order] = run_id;
  newest_[name] = run_id;
  out->actions.push_back(JobAppears{name, event.spec});
  SetState(run, v1::JOB_STATE_QUEUED, "submitted", moment, out);
  if (const std::string note = NoteOnLiveParameters(event.spec); !note.empty()) {
    AddEvent(run, note, moment, out);
  }
  if (event.from) {
    AddEvent(run, DescribeStart(*event.from), moment, out);
    for (const std::string& skipped : event.from->skipped) {
      if (&skipped - event.from->skipped.data() == kMaxSkippedShown) break;
      AddEvent(run, absl::StrCat("not used: ", skipped.substr(0, kMaxSkippedBytes)), moment, out);
    }
    if (!event.from->changes.empty()) {
      AddEvent(run,
               absl::StrCat("other than the checkpoint's job: ",
                            absl::StrJoin(event.from->changes, ", ").substr(0, kMaxSkippedBytes)),
               moment, out);
    }
  }
  out->actions.push_back(PrepareFolder{name, run_id, run.job.history_of, run.job.first_step});
  Schedule(moment, out);
  out->actions.push_back(Reply{event.request, absl::OkStatus(), run_id, 0});
}

void Core::GoOnFrom(const Checkpoint& checkpoint, Run* run) const {
  run->job.resume = checkpoint.resume;
  if (checkpoint.resume.weights_only()) return;
  run->job.first_step = checkpoint.step + 1;
  run->job.committed_step = checkpoint.step;
  run->job.first_sample = checkpoint.next_sample;
  // Another coordinator may have given out the same run id: its checkpoints are elsewhere.
  const auto writer = runs_.find(checkpoint.run_id);
  if (writer != runs_.end() && writer->second.job.spec.name() == run->job.spec.name() &&
      writer->second.job.spec.checkpoint().dir() == checkpoint.dir) {
    run->job.history_of = checkpoint.run_id;
  }
}

void Core::On(const Cancel& event, const Moment& moment, Decision* out) {
  Run* run = FindRun(event.job);
  absl::Status status;
  if (run == nullptr) {
    status = NoSuchJob(event.job);
  } else if (run->job.state == v1::JOB_STATE_CANCELLED) {
    status = absl::OkStatus();
  } else if (IsEnded(run->job.state)) {
    status = absl::FailedPreconditionError(
        absl::StrCat("job ", run->job.spec.name(), " (run ", run->job.run_id, ") is ",
                     NameOfState(run->job.state), " already: ", run->job.reason));
  } else if (event.save) {
    status = SaveAndCancel(*run, moment, out);
  } else {
    EndJob(*run, v1::JOB_STATE_CANCELLED,
           absl::StrCat("cancelled by a client",
                        run->job.saving ? " before its checkpoint was complete" : ""),
           moment, out);
  }
  out->actions.push_back(
      Reply{event.request, std::move(status), run == nullptr ? "" : run->job.run_id, 0});
}

void Core::Schedule(const Moment& moment, Decision* out) {
  std::string ahead;
  const std::set<uint64_t> recovering = recovering_;  // going on takes jobs out of it
  for (const uint64_t order : recovering) {
    const auto entry = by_order_.find(order);
    if (entry == by_order_.end()) continue;
    Run& run = runs_.at(entry->second);
    if (run.Live() || run.job.state != v1::JOB_STATE_RECOVERING) continue;
    std::string reason;
    if (run.offload == nullptr ? ReopenRanks(run, ahead, moment, out, &reason)
                               : Reopen(run, ahead, moment, out, &reason)) {
      if (run.job.saving && !IsEnded(run.job.state) && run.job.reason != kSavingReason) {
        run.job.reason = kSavingReason;
        out->actions.push_back(RunChanged{run.job.run_id});
      }
      continue;
    }
    const bool needs_ranks = run.offload == nullptr ||
                             (!run.job.saving && (run.job.committed_step != run.job.spec.steps() ||
                                                  MissesEvaluation(run)));
    // Stores that were there come back soon or not at all.
    const bool gives_way =
        (run.offload != nullptr && run.offload->gave_way) || WantsMoreThanThereAre(run, moment);
    if (ahead.empty() && needs_ranks && !gives_way) ahead = run.job.run_id;
    reason = absl::StrCat(run.job.saving ? kSavingReason : "recovering", ": ", reason);
    if (run.job.reason == reason) continue;
    run.job.reason = reason;
    out->actions.push_back(RunChanged{run.job.run_id});
    out->reasons.push_back(absl::StrCat(run.job.run_id, " is RECOVERING: ", reason));
  }
  const std::set<uint64_t> queue = queue_;  // placing takes jobs out of it
  for (const uint64_t order : queue) {
    const std::string& run_id = by_order_.at(order);
    Run& run = runs_.at(run_id);
    std::string reason;
    if (ahead.empty()) {
      std::vector<StoreCandidate> stores;
      std::vector<uint32_t> placement;
      std::vector<Member*> chosen;
      if (run.offload == nullptr || PlaceNew(run, moment.now, &stores, &placement, &reason)) {
        chosen = Choose(run, moment, &reason);
      }
      if (!chosen.empty()) {
        if (run.offload != nullptr) {
          SetMap(run, stores, placement, run.offload->needs.replicas, {}, moment, out);
        }
        OpenGeneration(run, chosen, moment, out);
        continue;
      }
      // Who waits for more or larger workers than there are does not hold up those whom these can
      // hold. Once there are enough it is first.
      if (!NoneCanHold(run) && !WantsMoreThanThereAre(run, moment)) ahead = run_id;
    } else {
      reason = absl::StrCat("behind ", ahead, " in the queue");
    }
    if (run.job.reason != reason) {
      run.job.reason = reason;
      out->actions.push_back(RunChanged{run_id});
      out->reasons.push_back(absl::StrCat(run_id, " is QUEUED: ", reason));
    }
  }
}

void Core::OpenGeneration(Run& run, const std::vector<Member*>& members, const Moment& moment,
                          Decision* out) {
  const std::string& run_id = run.job.run_id;
  ++run.job.generation;
  out->records.push_back(GenerationClosedRecord{run_id, true});
  run.ranks.clear();
  run.ranks.resize(members.size());
  std::vector<std::string> names;
  for (uint32_t rank = 0; rank < members.size(); ++rank) {
    Member& member = *members[rank];
    member.assignment = Assignment{run_id, run.job.generation, rank};
    RankState& state = run.ranks[rank];
    state.record.run_id = run_id;
    state.record.rank = rank;
    state.record.member = member.hello.name();
    state.record.incarnation = member.hello.incarnation();
    state.record.host = member.hello.host();
    state.record.pid = member.hello.pid();
    state.last_advance = moment.now;
    names.push_back(member.hello.name());
  }
  if (run.World() == run.job.spec.resources().workers()) run.short_since.reset();
  if (!run.job.plan.empty() && run.job.plan.size() != members.size()) {
    run.job.plan.clear();
    for (const RankNeed& need : Needs(run, run.World())) run.job.plan.push_back(need.plan);
  }
  run.generation = std::make_unique<Generation>(options_, run_id, run.job.generation, run.World());
  out->actions.push_back(Measure{MetricKind::kGeneration, run.job.spec.name(), 1});
  run.opened = moment.now;
  run.start_deadline = moment.now + StartTimeout(run.job.spec);
  WakeBy(run.start_deadline);
  const std::string placement = PlacementOf(run);
  // A run that recovers is RECOVERING until it runs again.
  SetState(
      run,
      run.job.state == v1::JOB_STATE_RECOVERING ? v1::JOB_STATE_RECOVERING : v1::JOB_STATE_PLACING,
      absl::StrCat("generation ", run.job.generation, " on ",
                   names.size() <= 8 ? absl::StrJoin(names, ", ")
                                     : absl::StrCat(names.size(), " workers, ", names.front(),
                                                    " to ", names.back()),
                   run.World() < run.job.spec.resources().workers()
                       ? absl::StrCat("; ", run.World(), " of ", run.job.spec.resources().workers(),
                                      " workers, as resources.min_workers allows")
                       : "",
                   placement.empty() ? "" : "; ", placement),
      moment, out);
  for (const RankState& rank : run.ranks) out->records.push_back(rank.record);
  if (run.offload != nullptr) {
    // The ranks are told when every store has this generation open.
    run.offload->assigned = false;
    for (StoreSlot& slot : run.offload->slots) slot.last_change = moment.now;
    OpenSnapshotsOf(run, out);
    Touch(run);
    return;
  }
  for (uint32_t rank = 0; rank < members.size(); ++rank) {
    SendAssign(run, run.ranks[rank], members[rank]->session, out);
  }
}

std::string Core::PlacementOf(const Run& run) {
  const uint32_t tensor = run.job.spec.parallel().tensor();
  if (tensor <= 1) return "";
  std::vector<std::string> hosts;
  for (const RankState& rank : run.ranks) hosts.push_back(rank.record.host);
  return DescribePlacement(hosts, tensor);
}

void Core::SetState(Run& run, v1::JobState state, const std::string& reason, const Moment& moment,
                    Decision* out) {
  run.job.state = state;
  if (state == v1::JOB_STATE_QUEUED) {
    queue_.insert(run.job.order);
  } else {
    queue_.erase(run.job.order);
  }
  if (state == v1::JOB_STATE_RECOVERING) {
    recovering_.insert(run.job.order);
  } else {
    recovering_.erase(run.job.order);
  }
  run.job.reason = reason;
  out->records.push_back(run.job);
  // Before watchers are told: whoever heard of the end finds no series of the job any more.
  ShowChange(run, out);
  AddEvent(run, reason, moment, out);
}

void Core::ShowChange(const Run& run, Decision* out) {
  out->actions.push_back(
      JobChanges{run.job.spec.name(), run.job.state, run.Live() ? run.World() : 0});
}

void Core::AddEvent(Run& run, const std::string& reason, const Moment& moment, Decision* out) {
  const uint64_t index = run.events.empty() ? 0 : run.events.rbegin()->first + 1;
  v1::JobEvent& event = run.events[index];
  event.set_unix_ms(moment.unix_ms);
  event.set_state(run.job.state);
  event.set_reason(reason);
  while (run.events.size() > kMaxEvents) run.events.erase(run.events.begin());
  out->records.push_back(EventRecord{run.job.run_id, index, event});
  out->actions.push_back(RunChanged{run.job.run_id});
  out->reasons.push_back(
      absl::StrCat(run.job.run_id, " is ", NameOfState(run.job.state), ": ", reason));
}

void Core::EndJob(Run& run, v1::JobState state, const std::string& reason, const Moment& moment,
                  Decision* out) {
  if (run.Live()) CloseGeneration(run, reason, /*forget_ranks=*/false, moment, out);
  if (run.offload != nullptr) EndOffload(run, reason, moment, out);
  run.save_deadline.reset();
  run.save_advanced = false;
  run.first_sign.reset();
  run.look_again.reset();
  run.job.saving = false;
  run.job.ended_unix_ms = moment.unix_ms;
  SetState(run, state, reason, moment, out);
  schedule_again_ = true;
  ForgetOldest(out);
}

void Core::CloseGeneration(Run& run, const std::string& reason, bool forget_ranks,
                           const Moment& moment, Decision* out) {
  const std::string& run_id = run.job.run_id;
  run.generation->Close(absl::AbortedError(absl::StrCat("generation ", run.job.generation, " of ",
                                                        run_id, " ended: ", reason)),
                        out);
  if (!run.Failing()) StopOthers(run, reason, out);  // else they were told already
  for (auto& [name, member] : members_.all()) {
    if (member.assignment && member.assignment->run_id == run_id) {
      member.stop_deadline = moment.now + options_.stop_grace;
    }
  }
  WakeBy(moment.now + options_.stop_grace);
  out->records.push_back(GenerationClosedRecord{run_id, forget_ranks});
  run.generation.reset();
  ShowChange(run, out);
  if (forget_ranks) run.ranks.clear();
  run.verdict_deadline.reset();
  run.return_deadline.reset();
  run.steps_deadline.reset();
}

void Core::SetRunning(Run& run, const std::string& reason, const Moment& moment, Decision* out) {
  SetState(run, v1::JOB_STATE_RUNNING, reason, moment, out);
  if (!run.first_sign) return;
  const absl::Duration took = moment.now - *std::exchange(run.first_sign, std::nullopt);
  out->actions.push_back(
      Measure{MetricKind::kRecoverySeconds, run.job.spec.name(), absl::ToDoubleSeconds(took)});
}

void Core::ForgetOldest(Decision* out) {
  size_t ended = std::count_if(runs_.begin(), runs_.end(),
                               [](const auto& entry) { return IsEnded(entry.second.job.state); });
  // The run that just ended is the last to go: callers may still hold it.
  for (auto it = by_order_.begin(); it != by_order_.end() && ended > options_.max_ended_jobs;) {
    const std::string run_id = it->second;
    const Run& run = runs_[run_id];
    if (!IsEnded(run.job.state)) {
      ++it;
      continue;
    }
    out->records.push_back(JobForgottenRecord{run_id});
    if (newest_[run.job.spec.name()] == run_id) newest_.erase(run.job.spec.name());
    forgotten_.push_back(run_id);
    it = by_order_.erase(it);
    --ended;
  }
}

Run* Core::FindRun(const std::string& job) {
  const auto by_name = newest_.find(job);
  const auto found = runs_.find(by_name == newest_.end() ? job : by_name->second);
  return found == runs_.end() ? nullptr : &found->second;
}

absl::Status Core::NoSuchJob(const std::string& job) const {
  std::vector<std::string> names;
  for (auto it = by_order_.rbegin(); it != by_order_.rend() && names.size() < 10; ++it) {
    const std::string& name = runs_.at(it->second).job.spec.name();
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return absl::NotFoundError(
      absl::StrCat("no job ", Quoted(job), "; there ",
                   names.empty() ? "are none yet" : absl::StrCat("is ", absl::StrJoin(names, ", ")),
                   by_order_.size() > 10 ? " (the newest)" : ""));
}

}  // namespace zeroshard::coordinator
