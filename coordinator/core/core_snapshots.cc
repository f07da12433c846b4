// Checkpoints of offloaded jobs: the stores write them while training goes on, the service owns
// their folder, and the core says when.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/spec/loss_scale.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

using Phase = SnapshotWork::Phase;

// By store of the map: the chunks that it writes, those whose first replica it is.
std::vector<std::vector<uint32_t>> Writers(const v1::StoreMap& map) {
  std::vector<std::vector<uint32_t>> chunks(static_cast<size_t>(map.stores_size()));
  const int replicas = static_cast<int>(map.replicas());
  for (int place = 0; replicas > 0 && place < map.placement_size(); place += replicas) {
    const uint32_t store = map.placement(place);
    if (store < chunks.size()) chunks[store].push_back(static_cast<uint32_t>(place / replicas));
  }
  return chunks;
}

}  // namespace

void Core::OpenSnapshotsOf(Run& run, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (run.job.spec.checkpoint().dir().empty() || std::exchange(o.snapshots_asked, true)) return;
  OpenSnapshots open{run.job.run_id, run.job.spec.name(), run.job.spec, "", "", 0};
  open.assets_from = run.job.resume.checkpoint();
  if (run.job.checkpoint.step() != 0) {
    open.assets_from = open.resumed_from = run.job.checkpoint.path();
  } else if (!run.job.resume.weights_only()) {
    open.resumed_from = run.job.resume.checkpoint();
  }
  if (o.decided && o.decided->snapshot_step > run.job.checkpoint.step()) {
    open.under_way = o.decided->snapshot_step;
  }
  out->actions.push_back(std::move(open));
}

void Core::On(const SnapshotsOpened& event, const Moment& moment, Decision* out) {
  const auto found = runs_.find(event.run_id);
  if (found == runs_.end() || found->second.offload == nullptr) return;
  Run& run = found->second;
  if (IsEnded(run.job.state) || !run.offload->snapshots_asked) return;
  if (!event.status.ok()) {
    EndSaved(run,
             absl::StrCat("cannot use the checkpoint folder ", run.job.spec.checkpoint().dir(),
                          ": ", event.status.message()),
             moment, out);
    return;
  }
  run.offload->snapshots_open = true;
  MaybeAssign(run, moment, out);
  MaybeSnapshotNow(run, moment, out);
}

bool Core::SnapshotIsDue(const Run& run, uint64_t step) {
  const v1::CheckpointSpec& spec = run.job.spec.checkpoint();
  if (spec.dir().empty()) return false;
  return run.job.saving || step == run.job.spec.steps() ||
         (spec.interval_steps() != 0 && step % spec.interval_steps() == 0);
}

bool Core::SnapshotIsReady(Run& run, uint64_t step, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (o.snapshot) return o.snapshot->step == step && o.snapshot->phase == Phase::kReady;
  BeginSnapshotOf(run, step, /*direct=*/false, moment, out);
  return false;
}

bool Core::BeginSnapshotOf(Run& run, uint64_t step, bool direct, const Moment& moment,
                           Decision* out) {
  OffloadedRun& o = *run.offload;
  if (!o.snapshots_open) return false;
  // A report of an earlier try at this step: it is taken back as soon as the store hears that the
  // try is over.
  for (const StoreSlot& slot : o.slots) {
    if (slot.report.has_snapshot() && slot.report.snapshot().step() == step) return false;
  }
  o.snapshot = SnapshotWork();
  o.snapshot->step = step;
  o.snapshot->direct = direct;
  o.snapshot->last_progress = moment.now;
  out->actions.push_back(BeginSnapshot{run.job.run_id, step});
  return true;
}

void Core::MaybeSnapshotNow(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  const uint64_t committed = run.job.committed_step;
  if (IsEnded(run.job.state) || run.Failing() || o.snapshot || !Trained(run)) return;
  if (run.job.spec.checkpoint().dir().empty() || run.job.checkpoint.step() == committed) return;
  const bool last = committed == run.job.spec.steps();
  const bool parting = WaitsForSave(run);
  if ((!run.job.saving && !last && !parting) || o.unsaved_step == committed) return;
  // Where ranks train, the next decision brings it, unless none is to fall.
  const bool decided = o.decided && o.decided->decision.snapshot();
  if (run.Live() && !last && !decided && !parting) return;
  if (!StoresNotReady(run, 0).empty()) return;
  if (!BeginSnapshotOf(run, committed, /*direct=*/true, moment, out)) return;
  o.snapshot->next_sample = o.decided ? o.decided->decision.next_sample() : o.map.next_sample;
  o.snapshot->loss_scale = LossScaleOf(run);
  o.snapshot->samples = o.decided ? o.decided->samples : 0;
}

void Core::On(const SnapshotBegun& event, const Moment& moment, Decision* out) {
  const auto found = runs_.find(event.run_id);
  if (found == runs_.end() || found->second.offload == nullptr) return;
  Run& run = found->second;
  OffloadedRun& o = *run.offload;
  if (!o.snapshot || o.snapshot->step != event.step || o.snapshot->phase != Phase::kBeginning) {
    return;
  }
  o.snapshot->last_progress = moment.now;
  // A coordinator that died had completed it, and could not say so any more.
  o.snapshot->exists = absl::IsAlreadyExists(event.folder.status());
  if (!event.folder.ok() && !o.snapshot->exists) {
    v1::CheckpointRecord record;
    record.set_step(event.step);
    record.set_message(std::string(event.folder.status().message()));
    EndSnapshot(run, record, moment, out);
    return;
  }
  if (!o.snapshot->exists) o.snapshot->folder = *event.folder;
  o.snapshot->phase = Phase::kReady;
  if (o.snapshot->direct) {
    StartSnapshot(run, moment, out);
  } else {
    TryDecide(run, moment, out);
  }
}

void Core::StartSnapshot(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (o.snapshot->exists) {
    v1::CheckpointRecord record;
    record.set_step(o.snapshot->step);
    record.set_complete(true);
    record.set_path(
        absl::StrFormat("%s/step-%08d", run.job.spec.checkpoint().dir(), o.snapshot->step));
    EndSnapshot(run, record, moment, out);
    return;
  }
  o.snapshot->phase = Phase::kWriting;
  o.snapshot->since = moment.now;
  o.snapshot->last_progress = moment.now;
  Touch(run);
}

void Core::FillSnapshotOrder(const Run& run, size_t store, v1::StoreDirective* directive) {
  const OffloadedRun& o = *run.offload;
  if (!o.snapshot || o.snapshot->phase != Phase::kWriting) return;
  const std::vector<std::vector<uint32_t>> writers = Writers(o.map.job.map());
  if (writers[store].empty()) return;
  v1::SnapshotOrder& order = *directive->mutable_snapshot();
  order.set_step(o.snapshot->step);
  order.set_folder(o.snapshot->folder);
  for (const uint32_t chunk : writers[store]) order.add_chunks(chunk);
  const auto writes = [](const std::vector<uint32_t>& chunks) { return !chunks.empty(); };
  order.set_index(static_cast<uint32_t>(
      std::count_if(writers.begin(), writers.begin() + static_cast<ptrdiff_t>(store), writes)));
  order.set_count(static_cast<uint32_t>(std::count_if(writers.begin(), writers.end(), writes)));
}

void Core::OnSnapshotReport(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (!o.snapshot || o.snapshot->phase != Phase::kWriting) return;
  o.snapshot->last_progress = moment.now;
  if (run.job.saving && run.save_deadline) {
    run.save_deadline = std::max(*run.save_deadline, moment.now + SaveLimit(run));
  }
  const std::vector<std::vector<uint32_t>> writers = Writers(o.map.job.map());
  CompleteSnapshot complete;
  bool all = true;
  for (size_t store = 0; store < o.slots.size(); ++store) {
    if (writers[store].empty()) continue;
    const v1::StoreReport& report = o.slots[store].report;
    if (!report.has_snapshot() || report.snapshot().step() != o.snapshot->step ||
        !report.snapshot().done()) {
      all = false;
      continue;
    }
    if (!report.snapshot().problem().empty()) {
      AbandonSnapshotOf(
          run,
          absl::StrCat(o.slots[store].store.member(), " on ", o.slots[store].store.host(), ": ",
                       report.snapshot().problem()),
          out);
      return;
    }
    complete.files.push_back(report.snapshot());
  }
  if (!all) return;
  complete.run_id = run.job.run_id;
  complete.step = o.snapshot->step;
  complete.next_sample = o.snapshot->next_sample;
  complete.loss_scale = o.snapshot->loss_scale;
  complete.samples = o.snapshot->samples;
  complete.seconds = absl::ToDoubleSeconds(moment.now - o.snapshot->since);
  o.snapshot->phase = Phase::kCompleting;
  out->actions.push_back(std::move(complete));
  Touch(run);
}

void Core::AbandonSnapshotOf(Run& run, const std::string& reason, Decision* out) {
  OffloadedRun& o = *run.offload;
  o.snapshot->phase = Phase::kAbandoning;
  out->actions.push_back(AbandonSnapshot{run.job.run_id, o.snapshot->step, reason});
  Touch(run);
}

void Core::DropSnapshot(Run& run, const std::string& reason, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (!o.snapshot || o.snapshot->phase == Phase::kCompleting ||
      o.snapshot->phase == Phase::kAbandoning) {
    return;
  }
  o.snapshot->again = true;
  AbandonSnapshotOf(run, reason, out);
}

void Core::On(const SnapshotCompleted& event, const Moment& moment, Decision* out) {
  const auto found = runs_.find(event.run_id);
  if (found == runs_.end() || found->second.offload == nullptr) return;
  Run& run = found->second;
  OffloadedRun& o = *run.offload;
  const bool expected =
      o.snapshot && o.snapshot->step == event.step &&
      (o.snapshot->phase == Phase::kCompleting || o.snapshot->phase == Phase::kAbandoning);
  if (!expected && !(IsEnded(run.job.state) && event.record.complete())) return;
  EndSnapshot(run, event.record, moment, out);
}

void Core::EndSnapshot(Run& run, const v1::CheckpointRecord& record, const Moment& moment,
                       Decision* out) {
  OffloadedRun& o = *run.offload;
  const std::optional<SnapshotWork> work = std::exchange(o.snapshot, std::nullopt);
  if (record.complete() && work && record.step() > run.job.checkpoint.step()) {
    run.job.checkpoint_sample = work->next_sample;
    // Of the step that the epoch began with, the history says as much as before.
    if (record.step() > o.map.job.base().step()) {
      run.job.checkpoint_steps_lost = run.job.steps_lost;
    }
  }
  v1::ReportStepsRequest body;
  *body.add_checkpoints() = record;
  if (work && UsesLossScale(run.job.spec))
    *body.mutable_checkpoints(0)->mutable_loss_scale() = work->loss_scale;
  if (const absl::Status taken = TakeCheckpoints(run, body, moment, out); !taken.ok()) {
    out->reasons.push_back(absl::StrCat(run.job.run_id, ": ", taken.message()));
  }
  if (IsEnded(run.job.state)) return;
  if (record.complete()) o.parting_failed = false;
  if (!record.complete() && !(work && work->again)) {
    bool being_copied = false;
    o.parting_failed |= IsHeldByLeavingAlone(run, &being_copied);
    o.unsaved_step = record.step();
    o.unsaved_why = record.message();
  }
  Touch(run);
  schedule_again_ = true;
  if (run.job.saving) {
    if (run.job.checkpoint.step() == run.job.committed_step) return EndSaved(run, "", moment, out);
    if (o.unsaved_step >= run.job.committed_step) {
      return EndSaved(run, o.unsaved_why, moment, out);
    }
  }
  MaybeFinish(run, moment, out);
  if (IsEnded(run.job.state)) return;
  TryDecide(run, moment, out);
  MaybeSnapshotNow(run, moment, out);
}

void Core::CheckSnapshot(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (!o.snapshot) return;
  const absl::Duration limit = SnapshotTimeout(run.job.spec);
  const absl::Duration silent = moment.now - o.snapshot->last_progress;
  if (silent < limit) return;
  const std::string text = absl::StrCat("no progress with it for ", Age(silent));
  switch (o.snapshot->phase) {
    case Phase::kReady:  // waits for its decision
      return;
    case Phase::kBeginning:
    case Phase::kWriting:
      o.snapshot->last_progress = moment.now;
      o.unsaved_step = o.snapshot->step;
      o.unsaved_why = text;
      AbandonSnapshotOf(run, text, out);
      TryDecide(run, moment, out);
      return;
    case Phase::kCompleting:
    case Phase::kAbandoning:
      break;
  }
  if (!o.pending || !SnapshotIsDue(run, o.pending->record.step()) ||
      o.unsaved_step == o.pending->record.step()) {
    return;
  }
  o.unsaved_step = o.pending->record.step();
  o.unsaved_why =
      absl::StrCat("the checkpoint of step ", o.snapshot->step, " is still under way: ", text);
  v1::ReportStepsRequest body;
  v1::CheckpointRecord& record = *body.add_checkpoints();
  record.set_step(o.unsaved_step);
  record.set_message(o.unsaved_why);
  if (const absl::Status taken = TakeCheckpoints(run, body, moment, out); !taken.ok()) {
    out->reasons.push_back(absl::StrCat(run.job.run_id, ": ", taken.message()));
  }
  if (run.job.saving) {
    EndSaved(run, o.unsaved_why, moment, out);
    return;
  }
  TryDecide(run, moment, out);
}

absl::Status Core::SaveOffloaded(Run& run, const Moment& moment, Decision* out) {
  if (!Trained(run) && run.job.state != v1::JOB_STATE_RUNNING) {
    EndJob(run, v1::JOB_STATE_CANCELLED,
           "cancelled by a client; it had not started, so that there was nothing to save", moment,
           out);
    return absl::OkStatus();
  }
  run.job.saving = true;
  if (Trained(run) && run.job.checkpoint.step() == run.job.committed_step) {
    EndSaved(run, "", moment, out);
    return absl::OkStatus();
  }
  run.job.reason =
      run.Failing() ? absl::StrCat(kSavingReason, "; ", run.job.reason) : kSavingReason;
  out->records.push_back(run.job);
  run.save_deadline = moment.now + SaveLimit(run);
  WakeBy(*run.save_deadline);
  AddEvent(run, kSavingReason, moment, out);
  MaybeSnapshotNow(run, moment, out);
  TryDecide(run, moment, out);
  schedule_again_ = true;
  return absl::OkStatus();
}

}  // namespace zeroshard::coordinator
