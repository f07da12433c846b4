// Checkpoints and samples that ranks report, and jobs that end by saving.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

constexpr size_t kMaxPathBytes = 4096;
constexpr size_t kMaxMessageBytes = 4096;
constexpr char kCheckpointEvent[] = "checkpoint of step ";

std::string Short(double seconds) {
  if (seconds < 0.1) return absl::StrFormat("%.1f ms", seconds * 1e3);
  return Age(absl::Seconds(seconds));
}

std::string Size(uint64_t bytes) {
  const double size = static_cast<double>(bytes);
  if (size >= 1e9) return absl::StrFormat("%.1f GB", size * 1e-9);
  if (size >= 1e6) return absl::StrFormat("%.1f MB", size * 1e-6);
  if (size >= 1e3) return absl::StrFormat("%.1f kB", size * 1e-3);
  return absl::StrCat(bytes, " bytes");
}

std::string Describe(const v1::CheckpointRecord& record) {
  if (!record.complete()) {
    return absl::StrCat(kCheckpointEvent, record.step(), " abandoned: ", record.message());
  }
  return absl::StrCat(kCheckpointEvent, record.step(), " complete in ", Short(record.seconds()),
                      ", ", Size(record.bytes()), ", training stood still ",
                      Short(record.pause_seconds()));
}

// What a rank says that had saved before it was told to stop, where nobody reported a checkpoint of
// that: rank 0 is gone, and this coordinator was away. Empty otherwise.
std::string UnreportedSave(const Run& run) {
  const std::string told = absl::StrCat(run.job.reason, "; ");
  for (const RankState& rank : run.ranks) {
    if (!rank.record.ended || rank.record.end.completed()) continue;
    absl::string_view said = rank.record.end.message();
    if (!absl::ConsumePrefix(&said, told)) continue;
    if (said == absl::StrCat("saved step ", run.job.checkpoint.step())) continue;
    return absl::StrCat(NameOfRank(rank.record.rank, rank.record.member, rank.record.host), ": ",
                        said);
  }
  return "";
}

// A rank could not begin for what its files are: going on from them once more would fail alike.
bool RefusedItsCheckpoint(const Run& run) {
  if (run.job.committed_step >= run.job.first_step) return false;
  return std::any_of(run.ranks.begin(), run.ranks.end(), [](const RankState& rank) {
    const std::string& code = rank.record.end.error_code();
    return rank.record.ended && (code == "DATA_LOSS" || code == "FAILED_PRECONDITION");
  });
}

// How the user goes on after the run; empty where there is nothing to go on from.
std::string Hint(const Run& run) {
  const JobRecord& job = run.job;
  if (const std::string saved = UnreportedSave(run); !saved.empty()) {
    return absl::StrCat("; ", saved,
                        "; go on with --resume-from latest, the newest complete one in ",
                        job.spec.checkpoint().dir());
  }
  if (job.checkpoint.step() != 0) {
    return absl::StrCat("; go on from the checkpoint of step ", job.checkpoint.step(),
                        " with --resume-from ", job.checkpoint.path());
  }
  if (job.resume.checkpoint().empty() || job.resume.weights_only()) return "";
  if (RefusedItsCheckpoint(run)) return "";
  return absl::StrCat("; this run completed no checkpoint, go on again from step ",
                      job.first_step - 1, " with --resume-from ", job.resume.checkpoint());
}

// What the ranks of a run say that all stopped after a save: the one that was told to leave, or
// rank 0.
std::string WhatRanksSay(const Run& run) {
  const RankState* speaker = &run.ranks.front();
  for (const RankState& rank : run.ranks) {
    if (!rank.record.ended || !AskedToLeave(rank.record.end, rank.record.rank)) continue;
    speaker = &rank;
    break;
  }
  const RankRecord& record = speaker->record;
  return absl::StrCat(NameOfRank(record.rank, record.member, record.host), ": ",
                      record.end.message().empty() ? "stopped" : record.end.message());
}

}  // namespace

absl::Status Core::TakeCheckpoints(Run& run, const v1::ReportStepsRequest& body,
                                   const Moment& moment, Decision* out) {
  for (const v1::CheckpointRecord& record : body.checkpoints()) {
    if (record.step() == 0 || record.step() > run.job.spec.steps()) {
      return absl::InvalidArgumentError(absl::StrCat("a checkpoint of step ", record.step(), " of ",
                                                     run.job.run_id, ", which has steps 1 to ",
                                                     run.job.spec.steps()));
    }
    if (!std::isfinite(record.seconds()) || !std::isfinite(record.pause_seconds())) {
      return absl::InvalidArgumentError(
          absl::StrCat("checkpoint of step ", record.step(), ": a time is not finite"));
    }
    if (record.complete()) {
      if (record.step() <= run.job.checkpoint.step()) continue;  // said again
      out->actions.push_back(Measure{MetricKind::kSaved, run.job.spec.name(), 1});
      run.job.checkpoint = record;
      run.job.checkpoint.set_path(record.path().substr(0, kMaxPathBytes));
      run.job.checkpoint.set_message(record.message().substr(0, kMaxMessageBytes));
      // The first step of this generation has told of them.
      if (Trained(run)) run.job.checkpoint_steps_lost = run.job.steps_lost;
      out->records.push_back(run.job);
    }
    const std::string text = Describe(record).substr(0, kMaxMessageBytes);
    const bool known = std::any_of(run.events.begin(), run.events.end(), [&](const auto& event) {
      return event.second.reason() == text;
    });
    if (known) continue;
    if (!record.complete()) {
      out->actions.push_back(Measure{MetricKind::kNotSaved, run.job.spec.name(), 1});
    }
    AddCheckpointEvent(run, text, moment, out);
  }
  return absl::OkStatus();
}

void Core::AddCheckpointEvent(Run& run, const std::string& text, const Moment& moment,
                              Decision* out) {
  // A job that saves often must not push out how it came to run.
  std::vector<uint64_t> older;
  for (const auto& [index, event] : run.events) {
    if (absl::StartsWith(event.reason(), kCheckpointEvent)) older.push_back(index);
  }
  if (older.size() >= options_.max_checkpoint_events) {
    run.events.erase(older.front());
    out->records.push_back(EventForgottenRecord{run.job.run_id, older.front()});
  }
  AddEvent(run, text, moment, out);
}

absl::Status Core::TakeSamples(Run& run, const v1::ReportStepsRequest& body, Decision* out) {
  AppendSamples action{run.job.spec.name(), run.job.run_id, {}};
  absl::Status status;
  for (const v1::SampleRecord& record : body.samples()) {
    if (record.step() == 0 || record.step() > run.job.spec.steps()) {
      status = absl::InvalidArgumentError(absl::StrCat("a sample of step ", record.step(), " of ",
                                                       run.job.run_id, ", which has steps 1 to ",
                                                       run.job.spec.steps()));
      break;
    }
    v1::SampleRecord kept = record;
    kept.set_prompt(CutText(record.prompt(), options_.max_sample_bytes));
    kept.set_text(CutText(record.text(), options_.max_sample_bytes));
    if (run.sampled.size() < options_.max_sample_prompts || run.sampled.contains(kept.prompt())) {
      uint64_t& last = run.sampled[kept.prompt()];
      if (kept.step() <= last) continue;  // said again
      last = kept.step();
    }
    action.samples.push_back(std::move(kept));
  }
  if (!action.samples.empty()) {
    out->actions.push_back(std::move(action));
    out->actions.push_back(RunChanged{run.job.run_id});
  }
  return status;
}

absl::Status Core::SaveAndCancel(Run& run, const Moment& moment, Decision* out) {
  const std::string& name = run.job.spec.name();
  if (run.job.spec.checkpoint().dir().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", name, " (run ", run.job.run_id,
                     ") has no checkpoint section, so that nothing can be saved; cancel it without "
                     "saving"));
  }
  if (run.job.saving) return absl::OkStatus();
  if (run.offload != nullptr && run.job.state != v1::JOB_STATE_QUEUED) {
    return SaveOffloaded(run, moment, out);
  }
  if (run.Failing()) {
    return absl::FailedPreconditionError(absl::StrCat("job ", name, " (run ", run.job.run_id,
                                                      ") is ", run.job.reason,
                                                      "; it can save nothing any more"));
  }
  if (run.job.state == v1::JOB_STATE_RECOVERING) {
    EndJob(run, v1::JOB_STATE_CANCELLED,
           absl::StrCat("cancelled by a client while its ranks were lost", Hint(run)), moment, out);
    return absl::OkStatus();
  }
  if (run.job.state != v1::JOB_STATE_RUNNING) {
    EndJob(run, v1::JOB_STATE_CANCELLED,
           "cancelled by a client; it had not started, so that there was nothing to save", moment,
           out);
    return absl::OkStatus();
  }
  run.job.saving = true;
  run.job.reason = kSavingReason;
  out->records.push_back(run.job);
  run.save_deadline = moment.now + SaveLimit(run);
  WakeBy(*run.save_deadline);
  AddEvent(run, kSavingReason, moment, out);
  StopOthers(run, kSavingReason, out, /*save=*/true);
  return absl::OkStatus();
}

void Core::MaybeSaved(Run& run, const Moment& moment, Decision* out) {
  if (!run.Live() || run.Failing() || run.offload != nullptr) return;
  bool any = false;
  for (const RankState& rank : run.ranks) {
    if (!rank.record.ended) return;
    any |= !rank.record.end.completed();
  }
  if (!any) return;  // it is complete
  if (GoesBack(run)) {
    GoBack(run, WhatRanksSay(run), moment, out);
  } else {
    EndSaved(run, "", moment, out);
  }
}

void Core::CheckSave(Run& run, const Moment& moment, Decision* out) {
  std::vector<std::string> missing;
  for (const RankState& rank : run.ranks) {
    if (!rank.record.ended) missing.push_back(DescribeRank(run, rank.record.rank, moment));
  }
  const char* since = run.save_advanced ? "the last sign that the save advanced"
                      : run.job.saving  ? "being told to save"
                                        : "the first";
  const std::string trouble =
      absl::StrCat(missing.size(), " of ", run.World(), " ranks had not stopped within ",
                   Age(SaveLimit(run)), " of ", since, ": ", AtMostThree(missing));
  if (GoesBack(run)) {
    GoBack(run, trouble, moment, out);
  } else {
    EndSaved(run, trouble, moment, out);
  }
}

void Core::EndSaved(Run& run, const std::string& trouble, const Moment& moment, Decision* out) {
  const v1::CheckpointRecord& saved = run.job.checkpoint;
  const std::string what = trouble.empty() && !run.ranks.empty() ? WhatRanksSay(run) : trouble;
  if (!run.job.saving) {
    EndJob(run, v1::JOB_STATE_FAILED, absl::StrCat(what, Hint(run)), moment, out);
  } else if (saved.step() != 0 && saved.step() == run.job.committed_step) {
    EndJob(run, v1::JOB_STATE_CANCELLED,
           absl::StrCat("cancelled by a client; the checkpoint of step ", saved.step(),
                        " is complete: ", saved.path()),
           moment, out);
  } else {
    EndJob(run, v1::JOB_STATE_FAILED,
           absl::StrCat("it was to be cancelled with a checkpoint, but none of step ",
                        run.job.committed_step, " was completed: ", what, Hint(run)),
           moment, out);
  }
}

}  // namespace zeroshard::coordinator
