// Running jobs whose time is over: who is missing, who is stuck.
#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core.h"
#include "coordinator/core/text.h"

namespace zeroshard::coordinator {
namespace {

// A rank that waits for others is not the one that is stuck.
bool Waits(const v1::Progress& progress) {
  return progress.phase() == "communication" || progress.phase() == "barrier" ||
         progress.phase() == "waiting";
}

bool Saves(const RankState& rank) { return rank.progress.phase() == kSavingPhase; }

}  // namespace

void Core::CheckRuns(const Moment& moment, Decision* out) {
  for (auto& [run_id, run] : runs_) {
    if (run.offload != nullptr && !IsEnded(run.job.state)) CheckOffload(run, moment, out);
    if (run.look_again && moment.now >= *run.look_again) LookAgain(run, moment, out);
    if (!run.Live()) continue;
    const auto describe = [&](uint32_t rank) { return DescribeRank(run, rank, moment); };
    run.generation->Expire(moment.now, describe, out);
    if (run.Failing()) {
      MaybeConclude(run, moment, out);
      continue;
    }
    if (run.return_deadline && moment.now >= *run.return_deadline) {
      run.return_deadline.reset();
      for (RankState& rank : run.ranks) {
        if (rank.present || rank.record.ended) continue;
        rank.lost = absl::StrCat("it did not come back within ",
                                 Age(options_.member_timeout + options_.return_grace),
                                 " of the coordinator's start");
        rank.evidence_order = next_evidence_++;
        out->records.push_back(
            members_.FenceAbsent(rank.record.incarnation, rank.record.member, *rank.lost, moment));
        BeginFailure(
            run,
            absl::StrCat("rank ", rank.record.rank, " (", rank.record.member, "): ", *rank.lost),
            moment, out);
      }
      continue;
    }
    if (run.save_deadline && moment.now >= *run.save_deadline && run.offload == nullptr) {
      CheckSave(run, moment, out);
      continue;
    }
    if (run.steps_deadline && moment.now >= *run.steps_deadline) {
      EndJob(run, v1::JOB_STATE_FAILED,
             absl::StrCat("every rank says that it completed, but of ", run.job.spec.steps(),
                          " steps only ", run.job.committed_step, " were reported"),
             moment, out);
      continue;
    }
    if (run.offload != nullptr && Starting(run) && !run.return_deadline &&
        moment.now >= run.start_deadline && StoresAreLate(run, moment, out)) {
      continue;
    }
    if ((run.job.state == v1::JOB_STATE_PLACING || Starting(run)) && !run.return_deadline &&
        moment.now >= run.start_deadline) {
      std::vector<std::string> missing;
      bool loading = false;
      for (uint32_t rank = 0; rank < run.World(); ++rank) {
        if (run.ranks[rank].arrived) continue;
        missing.push_back(describe(rank));
        loading |= run.ranks[rank].progress.phase() == "loading";
      }
      std::string advice;
      if (loading) {
        advice = "; where loading takes longer, raise timeouts.start_seconds";
        if (run.job.spec.data().tokenizer() != "tokens") {
          absl::StrAppend(&advice, ", or turn the text into tokens once with `zeroshard tokenize`");
        }
      }
      EndJob(run, v1::JOB_STATE_FAILED,
             absl::StrCat(missing.size(), " of ", run.World(),
                          " ranks had not started when timeouts.start_seconds (",
                          Age(StartTimeout(run.job.spec)), ") was over: ", AtMostThree(missing),
                          advice),
             moment, out);
      continue;
    }
    CheckProgress(run, moment, out);
  }
}

void Core::CheckProgress(Run& run, const Moment& moment, Decision* out) {
  for (RankState& rank : run.ranks) {
    if (!rank.left_since || moment.now - *rank.left_since < options_.member_timeout) continue;
    rank.lost = "it went idle without reporting how its part ended";
    rank.evidence_order = next_evidence_++;
    BeginFailure(
        run, absl::StrCat("rank ", rank.record.rank, " (", rank.record.member, "): ", *rank.lost),
        moment, out);
    return;
  }
  if (run.job.state != v1::JOB_STATE_RUNNING || run.return_deadline) return;
  // Ranks that wait for stores are not to blame; those have deadlines of their own.
  if (run.offload != nullptr && (run.offload->pending || !StoresNotReady(run, 0).empty())) return;
  const absl::Duration limit = StepTimeout(run.job.spec);
  // Everybody stops soon after one does: the culprit is furthest behind, and not merely waiting.
  // A rank whose part of a checkpoint is written waits for those that still write.
  RankState* stuck = nullptr;
  bool expired = false;
  absl::Duration saved = -absl::InfiniteDuration();
  for (const RankState& rank : run.ranks) {
    if (!rank.record.ended && Saves(rank)) saved = std::max(saved, rank.last_advance);
  }
  const auto advanced = [saved](const RankState& rank) {
    return Saves(rank) ? saved : rank.last_advance;
  };
  const auto order = [&](const RankState& rank) {
    return std::make_tuple(rank.progress.step(), Waits(rank.progress), advanced(rank));
  };
  for (RankState& rank : run.ranks) {
    if (rank.record.ended) continue;
    if (moment.now - advanced(rank) >= limit) expired = true;
    if (stuck == nullptr || order(rank) < order(*stuck)) stuck = &rank;
  }
  if (!expired || stuck == nullptr) return;
  const std::string reason = absl::StrCat("no progress for ", Age(moment.now - advanced(*stuck)),
                                          ", more than timeouts.step_seconds allows");
  Member* member = members_.Find(stuck->record.member);
  if (member != nullptr && member->hello.incarnation() == stuck->record.incarnation) {
    const SessionId session = member->session;
    LoseMember(*member, reason, moment, out);
    if (session != 0) {
      v1::CoordinatorMessage message;
      message.mutable_refused()->set_reason(
          absl::StrCat("rank ", stuck->record.rank, " of ", run.job.run_id, ": ", reason));
      message.mutable_refused()->set_fenced(true);
      out->actions.push_back(SendToSession{session, std::move(message)});
      out->actions.push_back(CloseSession{session});
    }
    return;
  }
  stuck->lost = reason;
  stuck->evidence_order = next_evidence_++;
  BeginFailure(run, absl::StrCat("rank ", stuck->record.rank, ": ", reason), moment, out);
}

}  // namespace zeroshard::coordinator
