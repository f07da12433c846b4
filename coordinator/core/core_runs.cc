// Running jobs: what ranks say, who failed, when it is done.
#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/spec/decision.h"
#include "common/spec/loss_scale.h"
#include "coordinator/core/core.h"
#include "coordinator/core/placement.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

constexpr size_t kMaxMessageBytes = 4096;
constexpr uint32_t kMaxWaitMs = 3600 * 1000;

absl::Duration WaitUntil(uint32_t timeout_ms, absl::Duration now) {
  return now + absl::Milliseconds(std::min(timeout_ms, kMaxWaitMs));
}

}  // namespace

absl::Status Core::CheckFence(const v1::Fence& fence, Run** run, RankState** rank) {
  const auto found = runs_.find(fence.run_id());
  if (found == runs_.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this coordinator (cluster ", cluster_id_, ", term ", term_, ") has no run ",
        Quoted(fence.run_id()), ": its data folder was lost or belongs to another cluster"));
  }
  *run = &found->second;
  if (!(*run)->Live()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "run ", fence.run_id(), " is ", NameOfState((*run)->job.state), ": ", (*run)->job.reason));
  }
  if (fence.generation() != (*run)->job.generation) {
    return absl::FailedPreconditionError(absl::StrCat("run ", fence.run_id(), " is in generation ",
                                                      (*run)->job.generation, ", not ",
                                                      fence.generation()));
  }
  if (fence.rank() >= (*run)->World()) {
    return absl::FailedPreconditionError(absl::StrCat("run ", fence.run_id(), " has ranks 0 to ",
                                                      (*run)->World() - 1, ", not ", fence.rank()));
  }
  *rank = &(*run)->ranks[fence.rank()];
  const RankRecord& record = (*rank)->record;
  if (record.member != fence.member() || record.incarnation != fence.incarnation()) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", fence.rank(), " of ", fence.run_id(), " is ", record.member,
                     " (incarnation ", record.incarnation, "), not ", Quoted(fence.member()), " (",
                     Quoted(fence.incarnation()), ")"));
  }
  if ((*rank)->lost || (*rank)->exit) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", fence.rank(), " of ", fence.run_id(),
                     " was given up: ", (*rank)->lost.value_or("its process ended")));
  }
  return absl::OkStatus();
}

void Core::Heard(Run& run, RankState& rank, const v1::Progress* progress, const Moment& moment,
                 Decision* out) {
  rank.began = true;
  if (progress != nullptr) {
    v1::Progress& old = rank.progress;
    if (progress->has_usage()) *old.mutable_usage() = progress->usage();
    if (progress->advances() != old.advances() || progress->step() != old.step() ||
        progress->phase() != old.phase()) {
      rank.last_advance = moment.now;
      old.set_advances(progress->advances());
      old.set_step(progress->step());
      old.set_phase(progress->phase().substr(0, 80));
      if (run.save_deadline && old.phase() == kSavingPhase) {
        run.save_deadline = std::max(*run.save_deadline, moment.now + SaveLimit(run));
        run.save_advanced = true;  // ticks come often enough to notice the new one
      }
    }
  }
  MarkPresent(run, rank, moment, out);
}

void Core::MarkPresent(Run& run, RankState& rank, const Moment& moment, Decision* out) {
  if (!rank.present) {
    rank.present = true;
    rank.last_advance = moment.now;
  }
  if (!run.return_deadline) return;
  const bool all = std::all_of(run.ranks.begin(), run.ranks.end(), [](const RankState& state) {
    return state.present || state.record.ended;
  });
  if (!all) return;
  run.return_deadline.reset();
  AddEvent(run,
           absl::StrCat(
               run.World() == 1 ? "the rank is" : absl::StrCat("all ", run.World(), " ranks are"),
               " back; generation ", run.job.generation, " goes on"),
           moment, out);
}

void Core::On(const PutKey& event, const Moment& moment, Decision* out) {
  Run* run = nullptr;
  RankState* rank = nullptr;
  absl::Status status = CheckFence(event.body.fence(), &run, &rank);
  if (status.ok() && run->Failing()) status = absl::AbortedError(run->job.reason);
  if (!status.ok()) {
    out->actions.push_back(Reply{event.request, std::move(status), "", 0});
    return;
  }
  Heard(*run, *rank, nullptr, moment, out);
  run->generation->Put(event.request, event.body.key(), event.body.value(), out);
}

void Core::On(const GetKey& event, const Moment& moment, Decision* out) {
  Run* run = nullptr;
  RankState* rank = nullptr;
  absl::Status status = CheckFence(event.body.fence(), &run, &rank);
  if (status.ok() && run->Failing()) status = absl::AbortedError(run->job.reason);
  if (!status.ok()) {
    out->actions.push_back(Reply{event.request, std::move(status), "", 0});
    return;
  }
  Heard(*run, *rank, nullptr, moment, out);
  const absl::Duration deadline = WaitUntil(event.body.timeout_ms(), moment.now);
  WakeBy(deadline);
  parked_[event.request] = run->job.run_id;
  run->generation->Get(event.request, rank->record.rank, event.body.key(), deadline, out);
}

void Core::On(const ArriveAtBarrier& event, const Moment& moment, Decision* out) {
  Run* run = nullptr;
  RankState* rank = nullptr;
  absl::Status status = CheckFence(event.body.fence(), &run, &rank);
  if (status.ok() && run->Failing()) status = absl::AbortedError(run->job.reason);
  if (!status.ok()) {
    out->actions.push_back(Reply{event.request, std::move(status), "", 0});
    return;
  }
  Heard(*run, *rank, nullptr, moment, out);
  rank->arrived = true;
  const absl::Duration deadline = WaitUntil(event.body.timeout_ms(), moment.now);
  WakeBy(deadline);
  parked_[event.request] = run->job.run_id;
  absl::Duration took;
  if (!run->generation->Arrive(event.request, rank->record.rank, event.body.name(), moment.now,
                               deadline, out, &took)) {
    return;
  }
  out->actions.push_back(Measure{MetricKind::kBarrierSeconds, "", absl::ToDoubleSeconds(took)});
  if (run->job.state == v1::JOB_STATE_PLACING || Starting(*run)) {
    SetRunning(*run,
               absl::StrCat(run->World() == 1 ? "the rank has"
                                              : absl::StrCat("all ", run->World(), " ranks have"),
                            " started"),
               moment, out);
  }
}

void Core::On(const ReportSteps& event, const Moment& moment, Decision* out) {
  Run* run = nullptr;
  RankState* rank = nullptr;
  absl::Status status = CheckFence(event.body.fence(), &run, &rank);
  const auto refuse = [&](absl::Status why) {
    out->actions.push_back(
        Reply{event.request, std::move(why), "", run == nullptr ? 0 : run->job.committed_step});
  };
  if (!status.ok()) return refuse(std::move(status));
  if (rank->record.rank != 0) {
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("steps are reported by rank 0, not by rank ", rank->record.rank)));
  }
  if (static_cast<size_t>(event.body.records_size()) > options_.max_records_per_report) {
    return refuse(absl::InvalidArgumentError(absl::StrCat("a report of ", event.body.records_size(),
                                                          " steps; wanted at most ",
                                                          options_.max_records_per_report)));
  }
  for (const int count : {event.body.checkpoints_size(), event.body.samples_size()}) {
    if (static_cast<size_t>(count) <= options_.max_records_per_report) continue;
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("a report of ", count, " checkpoints or samples; wanted at most ",
                     options_.max_records_per_report)));
  }
  Heard(*run, *rank, nullptr, moment, out);
  if (run->offload != nullptr) {
    status = TakeFullerSteps(*run, event.body, moment, out);
    if (status.ok()) status = TakeSamples(*run, event.body, out);
    return refuse(std::move(status));
  }
  AppendHistory action{run->job.spec.name(), run->job.run_id, {}};
  uint64_t committed = run->job.committed_step;
  uint64_t unmeasured = 0;  // the last step whose loss on the validation set is not finite
  for (const v1::StepRecord& record : event.body.records()) {
    if (record.step() <= committed) continue;
    if (record.step() != committed + 1) {
      status = absl::OutOfRangeError(absl::StrCat("step ", committed + 1, " of ", run->job.run_id,
                                                  " is wanted next, got step ", record.step()));
      break;
    }
    if (record.step() > run->job.spec.steps()) {
      status =
          absl::InvalidArgumentError(absl::StrCat("step ", record.step(), " of ", run->job.run_id,
                                                  ", which has only ", run->job.spec.steps()));
      break;
    }
    if (!IsCommittable(run->job.spec, record)) {
      status = absl::InvalidArgumentError(absl::StrCat(
          "step ", record.step(), " of ", run->job.run_id,
          ": a value is not finite; such a step is not committed, the rank must fail instead"));
      break;
    }
    committed = record.step();
    action.records.push_back(record);
    // The first after a loss: what tells of later losses than the checkpoint's was cut with them.
    action.records.back().set_steps_lost(committed == run->job.first_step
                                             ? run->job.steps_lost - run->job.checkpoint_steps_lost
                                             : 0);
    if (record.skipped()) {
      out->actions.push_back(Measure{MetricKind::kNonFinite, run->job.spec.name(), 1});
    }
    if (!record.has_eval_loss() || std::isfinite(record.eval_loss())) continue;
    action.records.back().clear_eval_loss();
    unmeasured = record.step();
  }
  if (!action.records.empty()) {
    if (run->first.step() == 0) run->first = action.records.front();
    run->last = action.records.back();
    run->job.committed_step = committed;
    if (committed > run->furthest) {
      run->furthest = committed;
      run->recoveries = 0;
    }
    PassedStep(*run, committed);
    if (Starting(*run)) SetRunning(*run, "the first step is done", moment, out);
    out->actions.push_back(std::move(action));
    out->actions.push_back(RunChanged{run->job.run_id});
  }
  if (unmeasured != 0) {
    AddEvent(*run,
             absl::StrCat("the loss on the validation set after step ", unmeasured,
                          " is not finite; it is left out of the history"),
             moment, out);
  }
  if (status.ok()) status = TakeCheckpoints(*run, event.body, moment, out);
  if (status.ok()) status = TakeSamples(*run, event.body, out);
  refuse(std::move(status));
  MaybeComplete(*run, moment, out);
}

void Core::PassedStep(Run& run, uint64_t step) {
  for (RankState& rank : run.ranks) {
    if (rank.progress.step() < step) rank.progress.set_step(step);
  }
}

void Core::On(const ReportEnd& event, const Moment& moment, Decision* out) {
  const v1::Fence& fence = event.body.fence();
  Run* run = nullptr;
  RankState* rank = nullptr;
  absl::Status status = CheckFence(fence, &run, &rank);
  if (!status.ok() && run != nullptr && fence.generation() == run->job.generation &&
      fence.rank() < run->World() &&
      run->ranks[fence.rank()].record.incarnation == fence.incarnation()) {
    status = absl::OkStatus();  // its last word about a run that is over, or said again
  }
  out->actions.push_back(Reply{event.request, status, "", 0});
  if (!status.ok() || rank == nullptr || rank->record.ended || !run->Live()) return;
  Heard(*run, *rank, nullptr, moment, out);
  rank->left_since.reset();
  rank->record.ended = true;
  rank->record.end = event.body;
  rank->record.end.clear_fence();
  if (event.body.message().size() > kMaxMessageBytes) {
    rank->record.end.set_message(event.body.message().substr(0, kMaxMessageBytes));
  }
  rank->record.end.set_error_code(event.body.error_code().substr(0, 64));
  rank->record.end.set_weights_digest(event.body.weights_digest().substr(0, 256));
  out->records.push_back(rank->record);
  const v1::ReportEndRequest& end = rank->record.end;
  if (end.completed()) {
    MaybeComplete(*run, moment, out);
    MaybeSaved(*run, moment, out);
    if (run->Live() && run->Failing()) MaybeConclude(*run, moment, out);
    return;
  }
  rank->evidence_order = rank->evidence_order == 0 ? next_evidence_++ : rank->evidence_order;
  if (!run->Failing() && MayHaveSaved(*run, *rank)) {
    // The others have stopped too: that was agreed before the checkpoint was written.
    if (!run->save_deadline) {
      run->save_deadline = moment.now + SaveLimit(*run);
      WakeBy(*run->save_deadline);
    }
    MaybeSaved(*run, moment, out);
    return;
  }
  if (end.has_blamed_rank() && end.blamed_rank() < run->World() &&
      end.blamed_rank() != fence.rank()) {
    run->ranks[end.blamed_rank()].accusers[fence.rank()] =
        absl::StrCat(end.error_code(), ": ", end.message().substr(0, 1024));
  }
  if (!run->nonfinite && end.nonfinite()) {
    run->nonfinite = true;
    out->actions.push_back(Measure{MetricKind::kNonFinite, run->job.spec.name(), 1});
  }
  BeginFailure(
      *run, absl::StrCat("rank ", fence.rank(), " reports ", end.error_code(), ": ", end.message()),
      moment, out);
  MaybeConclude(*run, moment, out);
}

void Core::On(const RequestDropped& event, const Moment& moment, Decision* out) {
  const auto found = parked_.find(event.request);
  if (found == parked_.end()) return;
  const auto run = runs_.find(found->second);
  if (run != runs_.end() && run->second.Live()) run->second.generation->Drop(event.request);
  if (run != runs_.end() && run->second.offload != nullptr && run->second.offload->pending) {
    // The step is still wanted: rank 0 asks again, or it is gone and so is the generation.
    std::erase(run->second.offload->pending->requests, event.request);
  }
  parked_.erase(found);
}

void Core::SendAssign(const Run& run, const RankState& rank, SessionId session,
                      Decision* out) const {
  v1::CoordinatorMessage message;
  v1::Assign& assign = *message.mutable_assign();
  assign.set_run_id(run.job.run_id);
  assign.set_job(run.job.spec.name());
  assign.set_generation(run.job.generation);
  assign.set_rank(rank.record.rank);
  assign.set_world_size(run.World());
  for (const RankState& peer : run.ranks) {
    v1::Peer& entry = *assign.add_peers();
    entry.set_rank(peer.record.rank);
    entry.set_member(peer.record.member);
    entry.set_host(peer.record.host);
  }
  *assign.mutable_spec() = run.job.spec;
  assign.set_first_step(run.job.first_step);
  if (run.offload != nullptr) {
    const OffloadedRun& o = *run.offload;
    assign.set_first_step(run.job.committed_step + 1);
    *assign.mutable_stores() = o.map.job.map();
    assign.mutable_version()->set_epoch(o.epoch());
    assign.mutable_version()->set_step(run.job.committed_step);
    assign.set_next_sample(o.decided ? o.decided->decision.next_sample() : o.map.next_sample);
    assign.set_evaluate(MissesEvaluation(run));
    if (UsesLossScale(run.job.spec)) *assign.mutable_loss_scale() = LossScaleOf(run);
  }
  if (!run.job.resume.checkpoint().empty()) *assign.mutable_resume() = run.job.resume;
  *assign.mutable_mesh() = MeshMessage(run.job.spec, run.World());
  out->actions.push_back(SendToSession{session, std::move(message)});
}

void Core::SendStop(const std::string& run_id, uint64_t generation, const std::string& reason,
                    SessionId session, Decision* out, bool save) const {
  if (session == 0) return;
  v1::CoordinatorMessage message;
  message.mutable_stop()->set_run_id(run_id);
  message.mutable_stop()->set_generation(generation);
  message.mutable_stop()->set_reason(reason);
  message.mutable_stop()->set_save(save);
  out->actions.push_back(SendToSession{session, std::move(message)});
}

void Core::StopOthers(Run& run, const std::string& reason, Decision* out, bool save) {
  for (const RankState& rank : run.ranks) {
    if (rank.record.ended || rank.lost || rank.exit) continue;
    const Member* member = members_.Find(rank.record.member);
    if (member == nullptr || member->hello.incarnation() != rank.record.incarnation) continue;
    SendStop(run.job.run_id, run.job.generation, reason, member->session, out, save);
  }
}

void Core::BeginFailure(Run& run, const std::string& first_sign, const Moment& moment,
                        Decision* out) {
  if (run.Failing()) return;
  run.verdict_deadline = moment.now + options_.verdict_grace;
  run.return_deadline.reset();
  run.steps_deadline.reset();
  if (!run.first_sign) run.first_sign = moment.now;
  if (run.offload == nullptr) {
    run.save_deadline.reset();
  } else {
    AnswerPending(run, absl::AbortedError(first_sign), out);
  }
  WakeBy(*run.verdict_deadline);
  run.job.reason = absl::StrCat("stopping: ", first_sign);
  run.generation->Close(absl::AbortedError(absl::StrCat("generation ", run.job.generation, " of ",
                                                        run.job.run_id, " ended: ", first_sign)),
                        out);
  AddEvent(run, run.job.reason, moment, out);
  StopOthers(run, run.job.reason, out);
}

std::vector<RankEvidence> Core::Evidence(const Run& run, const Moment& moment) const {
  std::vector<RankEvidence> ranks;
  for (const RankState& rank : run.ranks) {
    RankEvidence& evidence = ranks.emplace_back();
    evidence.rank = rank.record.rank;
    evidence.member = rank.record.member;
    evidence.host = rank.record.host;
    evidence.pid = rank.record.pid;
    evidence.progress = rank.progress;
    evidence.exit = rank.exit;
    evidence.lost = rank.lost;
    evidence.accusers = rank.accusers;
    evidence.order = rank.evidence_order;
    if (rank.record.ended && !rank.record.end.completed()) evidence.failed = rank.record.end;
    if (evidence.failed && run.offload != nullptr) {
      const auto& slots = run.offload->slots;
      evidence.names_store = std::any_of(slots.begin(), slots.end(), [&](const StoreSlot& slot) {
        return NamesStore(*evidence.failed, evidence.rank, slot.store);
      });
    }
    const Member* member = members_.Find(rank.record.member);
    if (member != nullptr && member->session == 0 && !rank.record.ended &&
        member->hello.incarnation() == rank.record.incarnation) {
      evidence.disconnected = moment.now - member->disconnected_at;
    }
  }
  return ranks;
}

void Core::MaybeConclude(Run& run, const Moment& moment, Decision* out) {
  if (!run.Live() || !run.Failing()) return;
  // Before the grace is over only when nothing more can be learnt: a process is known to have
  // ended, or every rank has spoken.
  const bool known = std::any_of(run.ranks.begin(), run.ranks.end(),
                                 [](const RankState& rank) { return rank.exit.has_value(); });
  const bool spoken = std::all_of(run.ranks.begin(), run.ranks.end(),
                                  [](const RankState& rank) { return rank.record.ended; });
  if (!known && !spoken && moment.now < *run.verdict_deadline) return;
  const Blame blame = Attribute(Evidence(run, moment));
  if (run.offload != nullptr && blame.own_error && moment.now < *run.verdict_deadline &&
      run.ranks[blame.rank].record.end.error_code() == "FAILED_PRECONDITION") {
    return;  // so speaks also a store that was started again, which is soon heard of
  }
  std::string reason = blame.message;
  for (const RankState& rank : run.ranks) {
    if (rank.record.rank == blame.rank || !rank.record.ended ||
        !AskedToLeave(rank.record.end, rank.record.rank)) {
      continue;
    }
    absl::StrAppend(&reason, "; ",
                    NameOfRank(rank.record.rank, rank.record.member, rank.record.host), ": ",
                    rank.record.end.message());
  }
  if (run.offload != nullptr && !blame.own_error) {
    Recover(run, reason, moment, out);
    return;
  }
  if (GoesBack(run) && (!blame.own_error || FolderIsNotLeftYet(run))) {
    GoBack(run, reason, moment, out);
    return;
  }
  EndSaved(run, reason, moment, out);
}

void Core::MaybeComplete(Run& run, const Moment& moment, Decision* out) {
  if (!run.Live() || run.Failing()) return;
  for (const RankState& rank : run.ranks) {
    if (!rank.record.ended || !rank.record.end.completed()) return;
  }
  if (run.job.committed_step < run.job.spec.steps()) {
    if (!run.steps_deadline) {
      run.steps_deadline = moment.now + options_.member_timeout;
      WakeBy(*run.steps_deadline);
    }
    return;
  }
  if (run.offload != nullptr) {
    MaybeFinish(run, moment, out);
    return;
  }
  const std::string digest = run.ranks.front().record.end.weights_digest();
  for (const RankState& rank : run.ranks) {
    if (rank.record.end.weights_digest() == digest) continue;
    EndJob(run, v1::JOB_STATE_FAILED,
           absl::StrCat("ranks disagree about the final weights: rank 0 says ", Quoted(digest),
                        ", ", NameOfRank(rank.record.rank, rank.record.member, rank.record.host),
                        " says ", Quoted(rank.record.end.weights_digest())),
           moment, out);
    return;
  }
  run.job.weights_digest = digest;
  EndJob(run, v1::JOB_STATE_COMPLETED,
         absl::StrCat(run.job.committed_step, " steps done on ", run.World(),
                      run.World() == 1 ? " rank" : " ranks"),
         moment, out);
}

std::string Core::DescribeRank(const Run& run, uint32_t rank, const Moment& moment) const {
  const RankState& state = run.ranks[rank];
  std::string text = absl::StrCat(NameOfRank(rank, state.record.member, state.record.host), ": ",
                                  Describe(state.progress));
  const Member* member = members_.Find(state.record.member);
  if (member == nullptr) return absl::StrCat(text, ", not connected");
  absl::StrAppend(&text, ", heard ", Age(moment.now - member->last_heard), " ago");
  return text;
}

}  // namespace zeroshard::coordinator
