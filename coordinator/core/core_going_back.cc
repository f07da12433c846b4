// Jobs whose state is on their ranks, some of which are lost: which checkpoint they go on from, and
// how their next generation is opened.
#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/plan/offload.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

constexpr absl::Duration kLongestPause = absl::Minutes(1);
constexpr int64_t kClocksDiffer = 3600 * 1000;  // ms, at the most, a worker's and this host's

std::string Reported(const v1::CheckpointRecord& checkpoint) {
  return absl::StrCat("the checkpoint of step ", checkpoint.step(), ", ", checkpoint.path(),
                      ", was reported complete");
}

}  // namespace

bool Core::GoesBack(const Run& run) {
  return run.offload == nullptr && !run.job.saving && !run.job.spec.checkpoint().dir().empty();
}

std::string Core::HolderOfFolder(const Run& run) {
  if (!Starting(run) || run.job.generation == 1) return "";
  const std::string holder = absl::StrCat("(run ", run.job.run_id, ", ");  // as the lock names it
  for (const RankState& rank : run.ranks) {
    const v1::ReportEndRequest& end = rank.record.end;
    if (rank.record.ended && end.error_code() == "FAILED_PRECONDITION" &&
        absl::StrContains(end.message(), holder) &&
        absl::StrContains(end.message(), "writes there")) {
      return end.message();
    }
  }
  return "";
}

bool Core::FolderIsNotLeftYet(const Run& run) {
  if (!HolderOfFolder(run).empty()) return true;
  if (!Starting(run) || run.job.generation == 1 || run.job.resume.checkpoint().empty()) {
    return false;
  }
  return std::any_of(run.ranks.begin(), run.ranks.end(), [&](const RankState& rank) {
    const v1::ReportEndRequest& end = rank.record.end;
    return rank.record.ended && end.error_code() == "NOT_FOUND" &&
           absl::StrContains(end.message(), run.job.resume.checkpoint());
  });
}

void Core::GoBack(Run& run, const std::string& reason, const Moment& moment, Decision* out) {
  // Says nothing of the job, however often.
  run.folder_holder = HolderOfFolder(run);
  if (run.folder_holder.empty()) {
    run.held_since.reset();
  } else if (!run.held_since) {
    run.held_since = moment.now;
  } else if (moment.now - *run.held_since >= options_.folder_patience) {
    EndSaved(run,
             absl::StrCat("a process of this run that was given up has not left its folder of "
                          "checkpoints for ",
                          Age(moment.now - *run.held_since),
                          "; kill that process, which hangs or is stopped: ", run.folder_holder),
             moment, out);
    return;
  }
  if (run.folder_holder.empty() && ++run.recoveries > kMaxRecoveries) {
    EndSaved(run,
             absl::StrCat(kMaxRecoveries, " recoveries in a row did not get beyond step ",
                          run.furthest, "; now ", reason),
             moment, out);
    return;
  }
  if (!run.first_sign) run.first_sign = moment.now;
  const std::string why = reason;  // it may be the job's own
  if (FolderIsNotLeftYet(run)) {
    // Twice as long each time: every try costs a generation.
    const absl::Duration waited = moment.now - run.held_since.value_or(moment.now);
    run.look_again = moment.now + std::clamp(waited, options_.member_timeout,
                                             std::max(options_.member_timeout, kLongestPause));
  }
  CloseGeneration(run, why, /*forget_ranks=*/true, moment, out);
  run.save_deadline.reset();
  run.save_advanced = false;
  run.short_since.reset();
  SetState(run, v1::JOB_STATE_RECOVERING, why, moment, out);
  run.going_back = Run::GoingBack::kStopping;
  schedule_again_ = true;
}

void Core::Look(Run& run, const Moment& moment, Decision* out) {
  run.look_again.reset();
  if (run.going_back != Run::GoingBack::kLooking) {
    run.look_deadline = moment.now + StartTimeout(run.job.spec);
    run.look_trouble.clear();
  }
  run.going_back = Run::GoingBack::kLooking;
  // Its ranks train in a folder that they have made theirs; before that others may write there.
  const bool its_own = Trained(run) || run.job.checkpoint.step() != 0;
  out->actions.push_back(FindNewest{run.job.run_id, run.job.spec.checkpoint().dir(),
                                    run.job.committed_step,
                                    its_own ? 0 : run.job.submitted_unix_ms - kClocksDiffer});
}

void Core::LookAgain(Run& run, const Moment& moment, Decision* out) {
  if (run.going_back == Run::GoingBack::kLooking) return Look(run, moment, out);
  run.look_again.reset();  // only now it may look for the first time
  schedule_again_ = true;
}

void Core::On(const NewestFound& event, const Moment& moment, Decision* out) {
  const auto entry = runs_.find(event.run_id);
  if (entry == runs_.end()) return;
  Run& run = entry->second;
  if (run.job.state != v1::JOB_STATE_RECOVERING || run.Live() ||
      run.going_back != Run::GoingBack::kLooking || run.look_again) {
    return;
  }
  // Not there any more is no reason to begin again: it may be there for everybody but this host.
  const bool gone = event.checkpoint.ok() && !*event.checkpoint && run.job.checkpoint.step() != 0;
  if (event.checkpoint.ok() && !gone) {
    GoBackTo(run, event, moment, out);
    return;
  }
  const std::string& dir = run.job.spec.checkpoint().dir();
  run.look_trouble =
      gone ? absl::StrCat(
                 Reported(run.job.checkpoint), ", but the coordinator finds no complete one in ",
                 dir,
                 event.skipped.empty() ? "" : absl::StrCat(" (", AtMostThree(event.skipped), ")"),
                 ": checkpoint.dir must be one folder for all hosts, the coordinator's too")
           : absl::StrCat("its newest checkpoint in ", dir,
                          " cannot be looked for: ", event.checkpoint.status().message());
  if (moment.now >= *run.look_deadline) {
    EndSaved(run,
             absl::StrCat(run.look_trouble, " (for longer than timeouts.start_seconds, ",
                          Age(StartTimeout(run.job.spec)), ")"),
             moment, out);
    return;
  }
  run.look_again = moment.now + options_.heartbeat_interval;
  WakeBy(*run.look_again);
  schedule_again_ = true;  // its reason is to say so
}

void Core::GoBackTo(Run& run, const NewestFound& event, const Moment& moment, Decision* out) {
  const std::optional<Checkpoint>& found = *event.checkpoint;
  JobRecord& job = run.job;
  const uint64_t before = job.committed_step;
  const v1::CheckpointRecord reported = job.checkpoint;
  // None, or the one that it went on from: it begins again where this generation has begun. An
  // older one only where that one is gone.
  const bool older = found && found->step + 1 < job.first_step && reported.step() != 0;
  const bool saved = older || (found && found->step >= job.first_step);
  const uint64_t target = saved ? found->step : job.first_step - 1;
  const bool told = Trained(run);  // of earlier losses, by the first step of the generation
  if (saved) {
    job.resume = found->resume;
    job.first_step = target + 1;
    // Whoever wrote it was lost before it could say so.
    if (told && target > job.checkpoint.step()) job.checkpoint_steps_lost = job.steps_lost;
  }
  if (saved ? target != job.checkpoint.step() : target < job.checkpoint.step()) {
    job.checkpoint.Clear();  // what was reported is not there any more
    if (saved) {
      job.checkpoint.set_step(target);
      job.checkpoint.set_complete(true);
      job.checkpoint.set_path(found->resume.checkpoint());
    }
  }
  const uint64_t steps = before - std::min(before, target);
  job.committed_step = target;
  job.steps_lost += steps;
  out->records.push_back(job);
  CutHistory(run, out);
  out->actions.push_back(
      Measure{MetricKind::kStepsLost, job.spec.name(), static_cast<double>(steps)});
  std::string text = absl::StrCat(
      "the job goes back to ",
      !job.resume.checkpoint().empty() && !job.resume.weights_only()
          ? absl::StrCat("the checkpoint of step ", target, ", ", job.resume.checkpoint())
          : absl::StrCat("step ", target, ", where it began: it has completed no checkpoint"),
      "; ", steps, steps == 1 ? " step is" : " steps are", " lost and done again");
  if (target > before) {
    absl::StrAppend(&text, "; the history lacks steps ", before + 1, " to ", target,
                    ", which nobody reported before the loss");
  }
  if (reported.step() > target) {
    absl::StrAppend(&text, "; ", Reported(reported), ", and is not complete any more");
  }
  for (const std::string& skipped : found ? found->skipped : event.skipped) {
    absl::StrAppend(&text, "; not used: ", skipped);
  }
  AddEvent(run, text.substr(0, 4096), moment, out);
}

void Core::CutHistory(Run& run, Decision* out) {
  const uint64_t kept = run.job.first_step - 1;
  if (run.last.step() > kept) run.last.Clear();
  if (run.first.step() > kept) run.first.Clear();
  for (auto& [prompt, step] : run.sampled) step = std::min(step, kept);
  run.going_back = Run::GoingBack::kCutting;
  out->actions.push_back(TruncateHistory{run.job.spec.name(), run.job.run_id, kept + 1});
}

void Core::On(const HistoryTruncated& event, const Moment& moment, Decision* out) {
  const auto entry = runs_.find(event.run_id);
  if (entry == runs_.end() || entry->second.going_back != Run::GoingBack::kCutting) return;
  // Where this generation had reported no step, its row looks the same before the choice and after.
  entry->second.going_back = std::exchange(entry->second.cut_of_restart, false)
                                 ? Run::GoingBack::kStopping
                                 : Run::GoingBack::kDone;
  schedule_again_ = true;
}

bool Core::ReopenRanks(Run& run, const std::string& ahead, const Moment& moment, Decision* out,
                       std::string* why) {
  if (run.going_back == Run::GoingBack::kStopping) {
    // It may still complete one and delete what is found now; if it does not stop it is fenced.
    if (const Member* member = StillHas(run, /*rank_zero=*/true)) {
      *why = absl::StrCat("waits for rank 0 (", member->hello.name(), " on ", member->hello.host(),
                          ") to stop");
      return false;
    }
    if (run.look_again) {
      WakeBy(*run.look_again);
      *why = absl::StrCat(
          "waits for a process that was given up to leave its folder of checkpoints",
          run.folder_holder.empty() ? "" : "; if that hangs, kill it: ", run.folder_holder);
      return false;
    }
    Look(run, moment, out);
  }
  if (run.going_back == Run::GoingBack::kLooking) {
    *why = absl::StrCat("looks for its newest complete checkpoint in ",
                        run.job.spec.checkpoint().dir(), run.look_trouble.empty() ? "" : "; ",
                        run.look_trouble);
    return false;
  }
  // A step of the next generation must not be cut with those that were given up.
  if (run.going_back == Run::GoingBack::kCutting) {
    *why = "its history is being cut";
    return false;
  }
  if (!ahead.empty()) {
    *why = absl::StrCat("behind ", ahead);
    return false;
  }
  const std::vector<Member*> chosen = Choose(run, moment, why);
  if (chosen.empty()) return false;
  OpenGeneration(run, chosen, moment, out);
  return true;
}

// Its row says that it goes back, and its history may not have been cut before the crash. A row
// that does not say so yet tells of the step where it stood.
void Core::RestoreGoingBack(Run& run, const LoadedJob& loaded) {
  if (IsOffloaded(run.job.spec) || run.job.state != v1::JOB_STATE_RECOVERING ||
      !loaded.ranks.empty()) {
    return;
  }
  run.going_back = Run::GoingBack::kStopping;
  if (run.job.committed_step != run.job.first_step - 1) return;
  run.going_back = Run::GoingBack::kCutting;
  run.cut_of_restart = true;
  run.last.Clear();
  if (run.first.step() >= run.job.first_step) run.first.Clear();
}

void Core::StartGoingBack(Run& run, const Moment& moment, Decision* out) {
  if (run.job.state != v1::JOB_STATE_RECOVERING) return;
  run.first_sign = moment.now;
  schedule_again_ = true;
  if (run.going_back == Run::GoingBack::kCutting) CutHistory(run, out);
}

}  // namespace zeroshard::coordinator
