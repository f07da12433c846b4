// Offloaded jobs that lost a rank or a store: what is left of their state, where it goes, and how
// their next generation is opened.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/spec/loss_scale.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {

bool Core::Starting(const Run& run) {
  return run.Live() &&
         (run.job.state == v1::JOB_STATE_PLACING || run.job.state == v1::JOB_STATE_RECOVERING);
}

void Core::Recover(Run& run, const std::string& reason, const Moment& moment, Decision* out,
                   Cause cause) {
  OffloadedRun& o = *run.offload;
  // Ranks that wait for longer than they may for a step which is not to be decided.
  const bool held_up = WaitsForSave(run);
  if (cause != Cause::kPlanned && !held_up && !run.first_sign) run.first_sign = moment.now;
  if (cause != Cause::kPlanned) run.short_since.reset();
  if (cause == Cause::kFailure && !held_up) {
    if (++run.recoveries > kMaxRecoveries && run.job.committed_step == run.job.spec.steps() &&
        MissesEvaluation(run)) {
      GiveUpEvaluation(run, reason, moment, out);
    } else if (run.recoveries > kMaxRecoveries) {
      EndSaved(
          run,
          absl::StrCat(kMaxRecoveries,
                       " recoveries in a row ended without a step being committed; now ", reason),
          moment, out);
      return;
    }
  }
  if (!MissesEvaluation(run)) WriteHistory(run, out);  // else the next rank 0 makes it fuller
  if (run.Live()) CloseGeneration(run, reason, /*forget_ranks=*/true, moment, out);
  AnswerPending(run,
                absl::AbortedError(absl::StrCat("generation ", run.job.generation, " of ",
                                                run.job.run_id, " ended: ", reason)),
                out);
  if (o.snapshot && !o.snapshot->direct &&
      (o.snapshot->phase == SnapshotWork::Phase::kBeginning ||
       o.snapshot->phase == SnapshotWork::Phase::kReady)) {
    DropSnapshot(run, "its step was not decided", out);
  }
  o.assigned = false;
  SetState(run, v1::JOB_STATE_RECOVERING, reason, moment, out);
  schedule_again_ = true;
  Touch(run);
}

bool Core::Reopen(Run& run, const std::string& ahead, const Moment& moment, Decision* out,
                  std::string* why) {
  OffloadedRun& o = *run.offload;
  if (o.return_deadline && moment.now < *o.return_deadline &&
      std::any_of(o.slots.begin(), o.slots.end(),
                  [](const StoreSlot& slot) { return !slot.lost && !slot.heard; })) {
    *why = "waits for its shard stores after the coordinator's start";
    return false;
  }
  const bool there = PrepareMap(run, moment, out, why);
  if (there || !o.no_room_since) o.gave_way = false;
  // Also without any store: what it went back to is all that there is.
  if (run.job.saving && (!Trained(run) || run.job.checkpoint.step() == run.job.committed_step)) {
    EndSaved(run, Trained(run) ? "" : "what it had trained was lost before it could be saved",
             moment, out);
    return true;
  }
  if (!there) return false;
  const bool all_decided = run.job.committed_step == run.job.spec.steps();
  const bool evaluates = all_decided && !run.job.saving && MissesEvaluation(run);
  if (evaluates) {
    OpenSnapshotsOf(run, out);
    MaybeSnapshotNow(run, moment, out);
    if (ahead.empty() && !o.evaluation_deadline) {
      o.evaluation_deadline = moment.now + StartTimeout(run.job.spec) + SaveTimeout(run.job.spec);
      WakeBy(*o.evaluation_deadline);
    }
  } else if (run.job.saving || all_decided) {
    // No rank is needed to write or to add up what the stores have.
    OpenSnapshotsOf(run, out);
    MaybeSnapshotNow(run, moment, out);
    MaybeFinish(run, moment, out);
    return true;
  }
  if (!ahead.empty()) {
    *why = absl::StrCat("behind ", ahead);
    return false;
  }
  if (WaitsForSave(run)) {
    *why = "waits until the shard stores that were asked to leave are gone";
    return false;
  }
  const std::vector<Member*> chosen = Choose(run, moment, why);
  if (chosen.empty()) return false;
  OpenGeneration(run, chosen, moment, out);
  return true;
}

bool Core::PrepareMap(Run& run, const Moment& moment, Decision* out, std::string* why) {
  OffloadedRun& o = *run.offload;
  const auto lost = [&o] {
    return std::any_of(o.slots.begin(), o.slots.end(),
                       [](const StoreSlot& slot) { return slot.lost.has_value(); });
  };
  const uint32_t have = o.map.job.map().replicas();
  const std::optional<absl::Duration> no_room_since = std::exchange(o.no_room_since, std::nullopt);
  if (!lost() && have >= o.needs.replicas) return true;

  // Chunks that stores have, or with `copying` have been told to copy.
  const auto survives = [&o](bool copying) {
    std::vector<bool> held(o.needs.chunks.size(), false);
    for (size_t store = 0; store < o.slots.size(); ++store) {
      if (o.slots[store].lost) continue;
      for (const uint32_t chunk : copying ? o.slots[store].chunks : o.Held(store)) {
        held[chunk] = true;
      }
    }
    return std::all_of(held.begin(), held.end(), [](bool one) { return one; });
  };
  o.copy_deadline.reset();
  if (!o.AtBase() && !survives(false)) {
    if (o.snapshot && o.snapshot->phase == SnapshotWork::Phase::kCompleting) {
      *why = absl::StrCat("waits for the checkpoint of step ", o.snapshot->step,
                          ", which is being completed");
      return false;
    }
    if (survives(true) && !CopiesAreLate(run, moment, why)) return false;
    RollBack(run, moment, out);
    if (!lost() && have >= o.needs.replicas) return true;
  }

  std::string no_room;
  const uint32_t least = lost() ? 1 : have + 1;
  std::vector<std::pair<uint32_t, Stores>> tries;
  for (uint32_t replicas = o.needs.replicas; replicas >= least; --replicas) {
    tries.insert(tries.end(), {{replicas, Stores::kWell}, {replicas, Stores::kRested}});
  }
  // Fewer copies are better than one on a store that has just failed at it.
  for (uint32_t replicas = o.needs.replicas; lost() && replicas >= least; --replicas) {
    tries.emplace_back(replicas, Stores::kAny);
  }
  for (const auto& [replicas, stores] : tries) {
    const absl::StatusOr<MapPlan> plan = PlanMap(run, replicas, stores, moment.now);
    if (!plan.ok()) {
      if (no_room.empty()) no_room = std::string(plan.status().message());
      continue;
    }
    if (!o.AtBase() && !AllAtCommitted(run, why)) return false;
    const uint64_t copied_before = o.map.map_version;
    DropSnapshot(run, "the chunks of the job move between the stores", out);
    SetMap(run, plan->candidates, plan->placement, replicas, plan->holders, moment, out);
    std::string text =
        absl::StrCat("map ", o.map.map_version, " of the chunks (after ", copied_before, "): ");
    std::vector<std::string> names;
    for (const StoreSlot& slot : o.slots) names.push_back(slot.store.member());
    absl::StrAppend(&text, absl::StrJoin(names, ", "));
    if (!o.map.copies.empty()) {
      absl::StrAppend(&text, "; ", o.map.copies.size(),
                      o.map.copies.size() == 1 ? " copy is filled" : " copies are filled");
    }
    if (replicas < o.needs.replicas) {
      absl::StrAppend(&text, "; the job goes on with ", replicas, " of ", o.needs.replicas,
                      " replicas of each chunk: ", no_room);
    }
    std::vector<std::string> aside;
    for (const auto& [incarnation, trouble] : o.troubles) {
      if (trouble.aside) aside.push_back(trouble.what);
    }
    if (!aside.empty()) absl::StrAppend(&text, "; without ", AtMostThree(aside));
    AddEvent(run, text, moment, out);
    return true;
  }
  if (!lost()) return true;
  *why = absl::StrCat("waits for room on the shard stores: ", no_room);
  o.no_room_since = no_room_since.value_or(moment.now);
  if (!no_room_since) WakeBy(moment.now + options_.member_timeout + options_.return_grace);
  return false;
}

bool Core::AllAtCommitted(const Run& run, std::string* why) {
  const OffloadedRun& o = *run.offload;
  for (const StoreSlot& slot : o.slots) {
    if (slot.lost) continue;
    const WantedOfStore wanted{slot.report.generation(), o.map.map_version, o.epoch(),
                               run.job.committed_step, 0};
    const std::string lacks = slot.heard ? WhatLacks(slot.report, wanted) : "was not heard of yet";
    // What one that loads has kept is at that version; the rest is copied anew.
    if (lacks.empty() || (slot.heard && IsLoading(slot.report, wanted))) continue;
    *why = absl::StrCat("waits for ", NameOfStore(slot.store), ", which ", lacks);
    return false;
  }
  return true;
}

absl::StatusOr<Core::MapPlan> Core::PlanMap(const Run& run, uint32_t replicas, Stores stores,
                                            absl::Duration now) const {
  const OffloadedRun& o = *run.offload;
  MapPlan plan;
  plan.candidates = Candidates(run, stores, now);
  plan.holders.resize(o.needs.chunks.size());
  for (size_t store = 0; store < o.slots.size(); ++store) {
    if (o.slots[store].lost) continue;
    for (uint32_t c = 0; c < plan.candidates.size(); ++c) {
      if (plan.candidates[c].store.incarnation() != o.slots[store].store.incarnation()) continue;
      for (const uint32_t chunk : o.Held(store)) plan.holders[chunk].push_back(c);
    }
  }
  auto placement = RepairPlacement(o.needs, replicas, RoomsOf(plan.candidates), plan.holders);
  if (!placement.ok()) return placement.status();
  plan.placement = *std::move(placement);
  return plan;
}

bool Core::HasRoom(const Run& run, Stores stores, absl::Duration now) const {
  return PlanMap(run, 1, stores, now).ok();
}

bool Core::CopiesAreLate(Run& run, const Moment& moment, std::string* why) {
  // A store is not asked whether it has just got the last of a copy: it says so, or is lost itself,
  // within the time in which members are heard of.
  OffloadedRun& o = *run.offload;
  absl::Duration lost_at = -absl::InfiniteDuration();
  std::vector<std::string> lost, copying;
  for (size_t store = 0; store < o.slots.size(); ++store) {
    const StoreSlot& slot = o.slots[store];
    if (slot.lost) {
      lost_at = std::max(lost_at, slot.lost_at);
      lost.push_back(NameOfStore(slot.store));
    } else if (o.Held(store).size() != slot.chunks.size()) {
      copying.push_back(NameOfStore(slot.store));
    }
  }
  const absl::Duration deadline = lost_at + options_.member_timeout;
  if (moment.now >= deadline) return true;
  o.copy_deadline = deadline;
  WakeBy(deadline);
  *why = absl::StrCat("waits to hear whether ", AtMostThree(copying),
                      copying.size() == 1 ? " has" : " have", " all that was copied from ",
                      AtMostThree(lost), " before the loss; else the job goes back to an earlier ",
                      "state");
  return false;
}

void Core::RollBack(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  JobRecord& job = run.job;
  std::vector<std::string> lost;
  for (const StoreSlot& slot : o.slots) {
    if (slot.lost) lost.push_back(absl::StrCat(NameOfStore(slot.store), ": ", *slot.lost));
  }
  DropSnapshot(run, "the job goes back to an earlier step", out);
  const bool saved = job.checkpoint.step() != 0;
  const uint64_t target = saved ? job.checkpoint.step() : job.first_step - 1;
  const uint64_t steps = job.committed_step - target;
  o.map.job.mutable_base()->set_epoch(o.epoch() + 1);
  o.map.job.mutable_base()->set_step(target);
  o.map.job.set_checkpoint(saved ? job.checkpoint.path() : job.resume.checkpoint());
  o.map.job.set_weights_only(!saved && job.resume.weights_only());
  o.map.job.clear_copy();
  o.map.copies.clear();
  o.map.next_sample = saved ? job.checkpoint_sample : job.first_sample;
  if (UsesLossScale(job.spec)) {
    *o.map.job.mutable_loss_scale() = saved ? job.checkpoint.loss_scale() : job.resume.loss_scale();
  }
  ++o.map.map_version;
  out->records.push_back(o.map);
  o.decided.reset();
  o.finish_deadline.reset();
  o.evaluation_deadline.reset();
  if (o.unwritten && o.unwritten->step() > target) o.unwritten.reset();
  if (!MissesEvaluation(run)) WriteHistory(run, out);
  o.written = std::min(o.written, target);
  for (StoreSlot& slot : o.slots) {
    slot.was_ready = false;
    slot.last_change = moment.now;
  }
  // All is read again from the beginning, on others as easily as where it was of no use.
  if (!HasRoom(run, Stores::kWell, moment.now)) {
    for (StoreSlot& slot : o.slots) {
      if (std::exchange(slot.failed, false)) slot.lost.reset();
    }
  }
  job.committed_step = target;
  job.steps_lost += steps;
  out->records.push_back(job);
  if (run.last.step() > target) run.last.Clear();
  if (run.first.step() > target) run.first.Clear();
  for (auto& [prompt, step] : run.sampled) step = std::min(step, target);
  out->actions.push_back(TruncateHistory{job.spec.name(), job.run_id, target + 1});
  out->actions.push_back(
      Measure{MetricKind::kStepsLost, job.spec.name(), static_cast<double>(steps)});
  AddEvent(run,
           absl::StrCat(
               "epoch ", o.epoch(), ": chunks were held by lost stores alone (", AtMostThree(lost),
               "); the job goes back to ",
               saved ? absl::StrCat("the checkpoint of step ", target, ", ", job.checkpoint.path())
                     : absl::StrCat("step ", target, ", where it began"),
               "; ", steps, steps == 1 ? " step is" : " steps are", " lost and done again"),
           moment, out);
  Touch(run);
}

bool Core::CanAddReplicas(const Run& run, absl::Duration now) const {
  const OffloadedRun& o = *run.offload;
  const uint32_t have = o.map.job.map().replicas();
  if (have >= o.needs.replicas || run.job.committed_step >= run.job.spec.steps()) return false;
  return PlanMap(run, have + 1, Stores::kRested, now).ok();
}

// --- opening ------------------------------------------------------------------------------------

std::vector<std::string> Core::StoresNotOpen(const Run& run) const {
  std::vector<std::string> missing;
  const OffloadedRun& o = *run.offload;
  for (const StoreSlot& slot : o.slots) {
    const Member* member = MemberOf(slot);
    std::string what;
    if (slot.lost) {
      what = absl::StrCat("is lost: ", *slot.lost);
    } else if (member == nullptr || member->session == 0) {
      what = "is not connected";
    } else if (!slot.heard) {
      what = "has not answered";
    } else if (slot.report.generation() != run.job.generation ||
               slot.report.map_version() != o.map.map_version ||
               slot.report.version().epoch() != o.epoch() ||
               slot.report.phase() == v1::STORE_PHASE_UNSPECIFIED ||
               slot.report.phase() == v1::STORE_PHASE_FAILED) {
      what = WhatLacks(slot.report, {run.job.generation, o.map.map_version, o.epoch(),
                                     run.job.committed_step, 0});
    } else {
      continue;
    }
    missing.push_back(absl::StrCat(NameOfStore(slot.store), " ", what));
  }
  return missing;
}

void Core::MaybeAssign(Run& run, const Moment& moment, Decision* out) {
  OffloadedRun& o = *run.offload;
  if (o.assigned || !run.Live() || run.Failing()) return;
  if (!run.job.spec.checkpoint().dir().empty() && !o.snapshots_open) return;
  if (!StoresNotOpen(run).empty()) return;
  o.assigned = true;
  if (Starting(run) && !run.return_deadline) {
    run.start_deadline = std::max(run.start_deadline, moment.now + StartTimeout(run.job.spec));
    WakeBy(run.start_deadline);
  }
  for (RankState& rank : run.ranks) {
    rank.last_advance = moment.now;
    if (rank.began || rank.record.ended || rank.lost) continue;
    const Member* member = members_.Find(rank.record.member);
    if (member == nullptr || member->hello.incarnation() != rank.record.incarnation ||
        member->session == 0) {
      continue;
    }
    SendAssign(run, rank, member->session, out);
  }
}

}  // namespace zeroshard::coordinator
