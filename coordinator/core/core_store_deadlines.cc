// Offloaded jobs whose time is over: which store is late, and what becomes of the job.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {

void Core::CheckOffload(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (o.return_deadline && moment.now >= *o.return_deadline) {
    o.return_deadline.reset();
    schedule_again_ = true;
    for (size_t store = 0; store < o.slots.size(); ++store) {
      const StoreSlot& slot = o.slots[store];
      if (slot.lost || MemberOf(slot) != nullptr) continue;
      const std::string reason = absl::StrCat("it did not come back within ",
                                              Age(options_.member_timeout + options_.return_grace),
                                              " of the coordinator's start");
      out->records.push_back(
          members_.FenceAbsent(slot.store.incarnation(), slot.store.member(), reason, moment));
      LoseSlot(run, store, reason, moment, out);
      if (IsEnded(run.job.state)) return;
    }
  }
  // It stays until the job has gone on: meanwhile no store is late.
  if (o.copy_deadline && moment.now >= *o.copy_deadline) schedule_again_ = true;
  if (o.no_room_since && !o.gave_way &&
      moment.now >= *o.no_room_since + options_.member_timeout + options_.return_grace) {
    o.gave_way = true;
    schedule_again_ = true;
  }
  if (o.evaluation_deadline && moment.now >= *o.evaluation_deadline && !run.Failing()) {
    const std::string late = absl::StrCat(
        "no rank has reported it within ",
        Age(StartTimeout(run.job.spec) + SaveTimeout(run.job.spec)), " of the loss of one");
    const bool missed = MissesEvaluation(run);
    GiveUpEvaluation(run, late, moment, out);
    if (missed && run.Live()) Recover(run, late, moment, out, Cause::kPlanned);
    if (missed) schedule_again_ = true;
  }
  CheckSnapshot(run, moment, out);
  if (IsEnded(run.job.state)) return;
  if (run.save_deadline && moment.now >= *run.save_deadline && !run.Failing()) {
    const std::vector<std::string> missing = StoresNotReady(run, 0);
    EndSaved(run,
             absl::StrCat("the checkpoint was not complete within ", Age(SaveTimeout(run.job.spec)),
                          " of the last sign that it advanced",
                          missing.empty() ? "" : absl::StrCat(": ", AtMostThree(missing))),
             moment, out);
    return;
  }
  if (o.finish_deadline && moment.now >= *o.finish_deadline) {
    std::vector<std::string> missing = StoresNotReady(run, 0);
    for (const StoreSlot& slot : o.slots) {
      if (missing.empty() && slot.report.digest_step() != run.job.committed_step) {
        missing.push_back(absl::StrCat(NameOfStore(slot.store), " lacks its digest"));
      }
    }
    EndSaved(run,
             absl::StrCat("all steps are done, but ",
                          o.snapshot ? absl::StrCat("the checkpoint of step ", o.snapshot->step,
                                                    " was not complete ")
                                     : "the shard stores had not said what they end with ",
                          Age(SaveTimeout(run.job.spec)), " after the last sign of progress",
                          missing.empty() ? "" : absl::StrCat(": ", AtMostThree(missing))),
             moment, out);
    return;
  }
  CheckSlowStores(run, moment, out);
  if (IsEnded(run.job.state) || !o.pending || !run.Live() || run.Failing() || run.job.saving ||
      run.return_deadline || o.return_deadline) {
    return;
  }
  if (moment.now - o.pending->since < StepTimeout(run.job.spec)) return;
  const uint64_t step = o.pending->record.step();
  const std::vector<std::string> missing = StoresNotReady(run, step);
  if (missing.empty()) return;  // it waits for a checkpoint, which has its own deadline
  const std::string reason =
      absl::StrCat("step ", step, " could not be decided within timeouts.step_seconds (",
                   Age(StepTimeout(run.job.spec)), "): ", AtMostThree(missing));
  AnswerPending(run, absl::DeadlineExceededError(reason), out);
  Recover(run, reason, moment, out);
}

bool Core::StoresAreLate(Run& run, const Moment& moment, Decision* out) {
  const OffloadedRun& o = *run.offload;
  const std::string limit =
      absl::StrCat("timeouts.start_seconds (", Age(StartTimeout(run.job.spec)), ")");
  std::vector<std::string> missing = StoresNotOpen(run);
  std::string text;
  if (!missing.empty()) {
    text = absl::StrCat(missing.size(), " of ", o.slots.size(),
                        " shard stores had not opened generation ", run.job.generation, " within ",
                        limit, ": ", AtMostThree(missing));
  } else if (!run.job.spec.checkpoint().dir().empty() && !o.snapshots_open) {
    text = absl::StrCat("the checkpoint folder ", run.job.spec.checkpoint().dir(),
                        " could not be opened within ", limit,
                        ": does the disk or server that it is on answer?");
  } else {
    for (const StoreSlot& slot : o.slots) {
      if (slot.report.phase() != v1::STORE_PHASE_LOADING) continue;
      const std::string& says = slot.report.problem();
      missing.push_back(absl::StrCat(NameOfStore(slot.store), says.empty() ? "" : " ", says,
                                     says.empty() ? "" : ", and", " has not got on with it for ",
                                     Age(moment.now - slot.last_change)));
    }
    if (missing.empty()) return false;
    text = absl::StrCat(missing.size(), " of ", o.slots.size(),
                        " shard stores still load their chunks, for which the ranks wait, and ",
                        limit, " is over: ", AtMostThree(missing),
                        "; where loading takes longer, raise timeouts.start_seconds");
  }
  EndSaved(run, text, moment, out);
  return true;
}

void Core::CheckSlowStores(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  // The start has its own deadline, and so have copies whose source is lost.
  if (Starting(run) || o.return_deadline || o.copy_deadline) return;
  const absl::Duration limit = StepTimeout(run.job.spec);
  // One that loads may wait for another that is lost, and is itself waited for by nobody.
  const bool loads_freely =
      !run.Live() && std::any_of(o.slots.begin(), o.slots.end(),
                                 [](const StoreSlot& slot) { return slot.lost.has_value(); });
  for (StoreSlot& slot : o.slots) {
    if (loads_freely && slot.report.phase() == v1::STORE_PHASE_LOADING) continue;
    if (slot.lost || moment.now - slot.last_change < limit) continue;
    const std::string lacks =
        slot.heard ? WhatLacks(slot.report, {slot.report.generation(), o.map.map_version, o.epoch(),
                                             run.job.committed_step, 0})
                   : "has not said anything of the job";
    if (lacks.empty()) continue;
    const Member* found = MemberOf(slot);
    if (found == nullptr) continue;  // the loss of members is judged elsewhere
    FenceMember(slot.store.member(),
                absl::StrCat("for ", Age(moment.now - slot.last_change), " it did not get on with ",
                             run.job.run_id, ": it ", lacks),
                moment, out);
    return;  // the slots may be others now
  }
}

}  // namespace zeroshard::coordinator
