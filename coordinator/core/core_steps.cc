// Steps of offloaded jobs: what is decided when, the history, the end.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checkpoint/state_digest.h"
#include "common/plan/offload.h"
#include "common/spec/decision.h"
#include "common/spec/loss_scale.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

// A retried request parks beside the one whose caller may be gone.
constexpr size_t kMaxPendingRequests = 8;

}  // namespace

void Core::On(const CommitStep& event, const Moment& moment, Decision* out) {
  Run* run = nullptr;
  RankState* rank = nullptr;
  absl::Status status = CheckFence(event.body.fence(), &run, &rank);
  const auto refuse = [&](absl::Status why) {
    out->actions.push_back(
        Reply{event.request, std::move(why), "", run == nullptr ? 0 : run->job.committed_step});
  };
  if (!status.ok()) return refuse(std::move(status));
  if (run->Failing()) return refuse(absl::AbortedError(run->job.reason));
  const std::string& run_id = run->job.run_id;
  if (run->offload == nullptr) {
    return refuse(absl::FailedPreconditionError(absl::StrCat(
        run_id, " keeps its state on its ranks: its steps are reported, not committed")));
  }
  OffloadedRun& o = *run->offload;
  const v1::StepRecord& record = event.body.record();
  const uint64_t step = record.step();
  const uint64_t committed = run->job.committed_step;
  if (rank->record.rank != 0) {
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("steps are committed by rank 0, not by rank ", rank->record.rank)));
  }
  if (event.body.epoch() != o.epoch()) {
    return refuse(absl::FailedPreconditionError(
        absl::StrCat(run_id, " is in epoch ", o.epoch(), ", not ", event.body.epoch())));
  }
  Heard(*run, *rank, nullptr, moment, out);
  if (step == committed && o.decided) {
    out->actions.push_back(
        Reply{event.request, absl::OkStatus(), o.decided->decision.SerializeAsString(), committed});
    return;
  }
  if (step != committed + 1) {
    return refuse(absl::OutOfRangeError(absl::StrCat("step ", committed + 1, " of ", run_id,
                                                     " is to be committed next, got step ", step)));
  }
  if (step > run->job.spec.steps()) {
    return refuse(absl::InvalidArgumentError(
        absl::StrCat("step ", step, " of ", run_id, ", which has only ", run->job.spec.steps())));
  }
  if (!IsCommittable(run->job.spec, record)) {
    return refuse(absl::InvalidArgumentError(absl::StrCat(
        "step ", step, " of ", run_id,
        ": a value is not finite; such a step is not committed, the rank must fail instead")));
  }
  if (!o.pending || o.pending->record.step() != step) {
    o.pending = PendingStep();
    o.pending->since = moment.now;
    WakeBy(moment.now + StepTimeout(run->job.spec));
  }
  o.pending->record = record;
  o.pending->record.clear_eval_loss();
  o.pending->record.clear_steps_lost();
  o.pending->next_sample = event.body.next_sample();
  o.pending->samples = event.body.samples();
  if (o.pending->requests.size() >= kMaxPendingRequests) {
    out->actions.push_back(Reply{o.pending->requests.front(),
                                 absl::AbortedError("it was asked for again"), "", committed});
    o.pending->requests.erase(o.pending->requests.begin());
  }
  o.pending->requests.push_back(event.request);
  parked_[event.request] = run_id;
  TryDecide(*run, moment, out);
}

void Core::AnswerPending(Run& run, const absl::Status& status, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (!o.pending) return;
  for (const RequestId request : o.pending->requests) {
    out->actions.push_back(Reply{request, status, "", run.job.committed_step});
  }
  o.pending.reset();
}

std::vector<std::string> Core::StoresNotReady(const Run& run, uint64_t sealed_step) const {
  std::vector<std::string> missing;
  const OffloadedRun& o = *run.offload;
  for (const StoreSlot& slot : o.slots) {
    std::string what;
    if (slot.lost) {
      what = absl::StrCat("is lost: ", *slot.lost);
    } else if (!slot.heard) {
      what = "was not heard of since the coordinator started";
    } else {
      const uint64_t generation = sealed_step == 0 ? slot.report.generation() : run.job.generation;
      what = WhatLacks(slot.report, {generation, o.map.map_version, o.epoch(),
                                     run.job.committed_step, sealed_step});
    }
    if (!what.empty()) missing.push_back(absl::StrCat(NameOfStore(slot.store), " ", what));
  }
  return missing;
}

void Core::TryDecide(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (!o.pending || !run.Live() || run.Failing()) return;
  if (run.job.saving && o.decided && o.decided->decision.snapshot()) return;  // it ends with that
  const uint64_t step = o.pending->record.step();
  // What is decided while a store leaves would be lost with it. A folder that was made for this
  // step is for nothing else.
  const bool promised = o.snapshot && !o.snapshot->direct && o.snapshot->step == step;
  if (WaitsForSave(run) && !promised) return;
  if (step != run.job.committed_step + 1) return;
  const bool save = SnapshotIsDue(run, step) && o.unsaved_step != step;
  if (save && !SnapshotIsReady(run, step, moment, out)) return;
  if (!StoresNotReady(run, step).empty()) return;
  if (ReplicasDiffer(run, moment, out)) return;
  DecideStep(run, moment, out);
}

bool Core::ReplicasDiffer(Run& run, const Moment& moment, Decision* out) {
  const OffloadedRun& o = *run.offload;
  std::vector<const v1::StoreReport*> reports;
  for (const StoreSlot& slot : o.slots) reports.push_back(&slot.report);
  const std::string differs = CompareDigests(o.map.job.map(), reports);
  if (differs.empty()) return false;
  EndSaved(run,
           absl::StrCat("replicas differ after step ", run.job.committed_step, ": ", differs,
                        " (crc32c of the fp32 weights): the memory or disk of one of them is not "
                        "to be trusted"),
           moment, out);
  return true;
}

v1::LossScale Core::LossScaleOf(const Run& run) {
  const OffloadedRun& o = *run.offload;
  if (o.decided) return o.decided->decision.loss_scale();
  return ContinuedLossScale(run.job.spec, o.map.job.loss_scale());
}

void Core::DecideStep(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  PendingStep pending = *std::exchange(o.pending, std::nullopt);
  const uint64_t step = pending.record.step();
  // The first of an epoch: what tells of later losses than the checkpoint's was cut with them.
  if (o.AtBase()) {
    pending.record.set_steps_lost(run.job.steps_lost - run.job.checkpoint_steps_lost);
  }
  WriteHistory(run, out);
  StepDecisionRecord decided;
  decided.run_id = run.job.run_id;
  decided.decision =
      MakeDecision(run.job.spec, step, pending.record.grad_norm(), pending.record.tokens(),
                   LossScaleOf(run), pending.record.skipped());
  decided.decision.set_epoch(o.epoch());
  decided.decision.set_generation(run.job.generation);
  decided.decision.set_next_sample(pending.next_sample);
  const bool saves =
      o.snapshot && o.snapshot->step == step && o.snapshot->phase == SnapshotWork::Phase::kReady;
  decided.decision.set_snapshot(saves && !o.snapshot->exists);
  decided.record = pending.record;
  decided.samples = pending.samples;
  if (o.snapshot && o.snapshot->phase != SnapshotWork::Phase::kAbandoning) {
    decided.snapshot_step = o.snapshot->step;
  }
  if (run.last.step() == step - 1) decided.previous = run.last;
  o.decided = decided;
  run.job.committed_step = step;
  out->records.push_back(std::move(decided));
  o.unwritten = pending.record;
  if (run.first.step() == 0) run.first = pending.record;
  run.last = pending.record;
  if (pending.record.skipped()) {
    out->actions.push_back(Measure{MetricKind::kNonFinite, run.job.spec.name(), 1});
  }
  run.recoveries = 0;
  for (RankState& rank : run.ranks) rank.last_advance = moment.now;
  PassedStep(run, step);
  for (StoreSlot& slot : o.slots) slot.last_change = moment.now;
  if (Starting(run)) SetRunning(run, "the first step is done", moment, out);
  const std::string answer = o.decided->decision.SerializeAsString();
  for (const RequestId request : pending.requests) {
    out->actions.push_back(Reply{request, absl::OkStatus(), answer, step});
  }
  out->actions.push_back(RunChanged{run.job.run_id});
  Touch(run);
  if (saves) {
    o.snapshot->next_sample = pending.next_sample;
    o.snapshot->loss_scale = LossScaleOf(run);
    o.snapshot->samples = pending.samples;
    StartSnapshot(run, moment, out);
    if (IsEnded(run.job.state)) return;
  }
  if (!run.job.saving && CanAddReplicas(run, moment.now)) {
    Recover(run,
            absl::StrCat("after step ", step,
                         ": a shard store has room for the replicas that chunks lack"),
            moment, out, Cause::kPlanned);
    return;
  }
  if (CanGrow(run, moment)) {
    run.short_since = moment.now - options_.replacement_grace;  // who is idle is there
    Recover(run,
            absl::StrCat("after step ", step, ": a worker is idle, and the job has ", run.World(),
                         " of ", run.job.spec.resources().workers()),
            moment, out, Cause::kPlanned);
  }
}

// --- history ------------------------------------------------------------------------------------

bool Core::MissesEvaluation(const Run& run) {
  const std::optional<v1::StepRecord>& record = run.offload->unwritten;
  const uint64_t step = run.job.committed_step;
  if (!record || record->step() != step || record->has_eval_loss()) return false;
  const v1::JobSpec& spec = run.job.spec;
  const uint64_t interval = spec.eval().interval_steps();
  return spec.has_eval() && (step == spec.steps() || (interval != 0 && step % interval == 0));
}

void Core::GiveUpEvaluation(Run& run, const std::string& reason, const Moment& moment,
                            Decision* out) {
  OffloadedRun& o = *run.offload;
  o.evaluation_deadline.reset();
  run.recoveries = 0;
  if (!MissesEvaluation(run)) return;
  AddEvent(run,
           absl::StrCat("the loss on the validation set after step ", run.job.committed_step,
                        " is left out of the history: ", reason),
           moment, out);
  WriteHistory(run, out);
}

void Core::WriteHistory(Run& run, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (!o.unwritten) return;
  const v1::StepRecord record = *std::exchange(o.unwritten, std::nullopt);
  if (record.step() <= o.written) return;
  o.written = record.step();
  out->actions.push_back(AppendHistory{run.job.spec.name(), run.job.run_id, {record}});
  out->actions.push_back(RunChanged{run.job.run_id});
}

absl::Status Core::TakeFullerSteps(Run& run, const v1::ReportStepsRequest& body,
                                   const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  for (const v1::StepRecord& record : body.records()) {
    if (record.step() > run.job.committed_step) {
      return absl::OutOfRangeError(absl::StrCat("step ", record.step(), " of ", run.job.run_id,
                                                " was not committed; the last that was is ",
                                                run.job.committed_step));
    }
    if (!o.unwritten || record.step() != o.unwritten->step()) continue;  // it is written already
    // One that evaluates for a rank that is gone does not know how long the step took.
    if (std::isfinite(record.seconds()) && record.seconds() > o.unwritten->seconds()) {
      o.unwritten->set_seconds(record.seconds());
    }
    if (record.has_eval_loss()) {
      o.evaluation_deadline.reset();
      if (std::isfinite(record.eval_loss())) {
        o.unwritten->set_eval_loss(record.eval_loss());
      } else {
        AddEvent(run,
                 absl::StrCat("the loss on the validation set after step ", record.step(),
                              " is not finite; it is left out of the history"),
                 moment, out);
      }
    }
    run.last = *o.unwritten;
    if (run.first.step() == run.last.step()) run.first = run.last;
    WriteHistory(run, out);
  }
  return absl::OkStatus();
}

void Core::RestoreOffload(Run& run, LoadedJob& loaded) {
  if (!IsOffloaded(run.job.spec)) return;
  absl::StatusOr<StoreNeeds> needs = MakeStoreNeeds(run.job.spec, options_.chunk_elements);
  run.offload = std::make_unique<OffloadedRun>();
  OffloadedRun& o = *run.offload;
  if (needs.ok()) o.needs = *std::move(needs);  // it was submitted: its model can be made
  if (loaded.stores) {
    o.map = *std::move(loaded.stores);
    const auto chunks = static_cast<uint64_t>(o.map.job.map().placement_size());
    if (chunks != o.needs.chunks.size() * uint64_t{o.map.job.map().replicas()}) {
      o.needs.chunks.assign(
          o.map.job.map().replicas() == 0 ? 0 : chunks / o.map.job.map().replicas(), 0);
    }
  }
  if (loaded.decision) o.logged = {loaded.decision->previous, loaded.decision->record};
  if (loaded.decision && o.map.map_version != 0 && loaded.decision->decision.epoch() == o.epoch()) {
    o.decided = *std::move(loaded.decision);
  }
  if (run.job.state != v1::JOB_STATE_COMPLETED) {
    run.job.committed_step = o.decided                ? o.decided->decision.step()
                             : o.map.map_version != 0 ? o.map.job.base().step()
                                                      : run.job.first_step - 1;
  }
  o.written = run.last.step();
}

void Core::WriteLogged(Run& run, Decision* out) {
  OffloadedRun& o = *run.offload;
  // Also of an epoch that is over: what is before the step that it went back to stays.
  for (const v1::StepRecord& record : std::exchange(o.logged, {})) {
    if (record.step() <= o.written || record.step() > run.job.committed_step) continue;
    WriteHistory(run, out);
    o.unwritten = record;
    run.last = record;
    if (run.first.step() == 0) run.first = record;
  }
}

void Core::StartOffload(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (o.map.map_version == 0) return;
  const JobRecord& job = run.job;
  if (o.written > job.committed_step) {
    // The crash came between a new epoch's record and the cut of the history.
    out->actions.push_back(TruncateHistory{job.spec.name(), job.run_id, job.committed_step + 1});
    o.written = job.committed_step;
    if (run.last.step() > o.written) run.last.Clear();
    if (run.first.step() > o.written) run.first.Clear();
    for (auto& [prompt, step] : run.sampled) step = std::min(step, o.written);
  }
  WriteLogged(run, out);
  o.slots = MakeSlots(o, moment.now);
  for (StoreSlot& slot : o.slots) {
    if (run.Live() || !members_.fences().contains(slot.store.incarnation())) continue;
    slot.lost = "it was lost before the coordinator started again";
    slot.lost_at = moment.now;
  }
  o.return_deadline = moment.now + options_.member_timeout + options_.return_grace;
  WakeBy(*o.return_deadline);
  if (job.state == v1::JOB_STATE_RECOVERING) run.first_sign = moment.now;
  if (job.saving) {
    run.save_deadline = *o.return_deadline + SaveTimeout(job.spec);
    WakeBy(*run.save_deadline);
  }
  OpenSnapshotsOf(run, out);
  schedule_again_ = true;
}

// --- the end ------------------------------------------------------------------------------------

void Core::MaybeFinish(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  const uint64_t committed = run.job.committed_step;
  if (IsEnded(run.job.state) || run.Failing() || committed != run.job.spec.steps()) return;
  if (!run.Live() && run.job.state != v1::JOB_STATE_RECOVERING) return;
  if (!run.Live() && !run.job.saving && MissesEvaluation(run)) return;
  for (const RankState& rank : run.ranks) {
    if (!rank.record.ended || !rank.record.end.completed()) return;
  }
  if (!o.finish_deadline) {
    o.finish_deadline = moment.now + SaveTimeout(run.job.spec);
    WakeBy(*o.finish_deadline);
  }
  if (!run.job.spec.checkpoint().dir().empty() && run.job.checkpoint.step() != committed) {
    if (o.unsaved_step == committed && !o.snapshot) {
      EndSaved(run,
               absl::StrCat("all ", committed,
                            " steps are done, but the checkpoint after the last was not "
                            "completed: ",
                            o.unsaved_why),
               moment, out);
    }
    return;
  }
  WeightDigest digest;
  for (const StoreSlot& slot : o.slots) {
    if (slot.lost || !slot.heard || slot.report.digest_step() != committed ||
        slot.report.version().epoch() != o.epoch() ||
        slot.report.map_version() != o.map.map_version) {
      return;
    }
    digest.Combine(WeightDigest{slot.report.digest_low(), slot.report.digest_high()});
  }
  if (ReplicasDiffer(run, moment, out)) return;
  run.job.weights_digest = digest.Hex();
  const uint32_t world = run.World() == 0 ? run.job.spec.resources().workers() : run.World();
  EndJob(run, v1::JOB_STATE_COMPLETED,
         absl::StrCat(committed, " steps done on ", world, world == 1 ? " rank" : " ranks"), moment,
         out);
}

void Core::EndOffload(Run& run, const std::string& reason, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  WriteHistory(run, out);
  AnswerPending(run, absl::AbortedError(absl::StrCat("run ", run.job.run_id, " ended: ", reason)),
                out);
  DropSnapshot(run, reason, out);
  o.snapshot.reset();
  if (std::exchange(o.snapshots_asked, false)) {
    out->actions.push_back(CloseSnapshots{run.job.run_id});
  }
  o.snapshots_open = false;
  for (const StoreSlot& slot : o.slots) ForgetOn(run, slot, moment, out);
  o.slots.clear();
  for (const auto& [incarnation, trouble] : std::exchange(o.troubles, {})) {
    if (!trouble.aside) continue;
    StoreSlot slot;
    slot.store = trouble.store;
    slot.bytes = trouble.bytes;
    ForgetOn(run, slot, moment, out);
  }
  o.return_deadline.reset();
  o.finish_deadline.reset();
  o.evaluation_deadline.reset();
  o.no_room_since.reset();
  o.gave_way = false;
}

}  // namespace zeroshard::coordinator
