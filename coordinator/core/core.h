// The coordinator's state machine: every input is an event with its time, every output a decision.
// It opens no socket, starts no thread and reads no clock; the same events give the same decisions.
//
// Whoever drives it (coordinator/service) makes a decision's records durable before it carries out
// any of its actions, and carries out decisions in order. If the records cannot be made durable the
// process must end: what is in memory is then ahead of the log.
//
// Not thread-safe.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/core/events.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/options.h"
#include "coordinator/core/run.h"

namespace zeroshard::coordinator {

class Core {
 public:
  // `state` is what the log gave, with each live run's first and last step from its history file.
  // `new_cluster_id` is taken when the log is empty.
  Core(const CoreOptions& options, LoadedState state, const std::string& new_cluster_id);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Once, before anything else: raises the term and takes up the jobs that were under way.
  Decision Start(const Moment& moment);

  // Possible answers to a request:
  //   PutKey, GetKey, ArriveAtBarrier, ReportSteps, ReportEnd: FAILED_PRECONDITION: the fence is
  //     stale (unknown or ended run, another generation or member). ABORTED: the generation ended.
  //   PutKey: ALREADY_EXISTS, INVALID_ARGUMENT, RESOURCE_EXHAUSTED.
  //   GetKey, ArriveAtBarrier: DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, INVALID_ARGUMENT.
  //   ReportSteps: OUT_OF_RANGE: a gap; the message says which step is wanted.
  //     INVALID_ARGUMENT: not rank 0, a step beyond the last, a value that is not finite.
  //     Of checkpoints and samples: INVALID_ARGUMENT: a step that the job does not have, a value
  //     that is not finite.
  //   Submit: ALREADY_EXISTS: a job of that name has not ended. RESOURCE_EXHAUSTED: too many jobs.
  //   Cancel: NOT_FOUND lists what there is. FAILED_PRECONDITION: it ended otherwise; with `save`
  //     also: it has no checkpoint section, or is failing.
  Decision Decide(const Event& event, const Moment& moment);

  // When a Tick is due at the latest, on the clock of Moment::now.
  absl::Duration NextDeadline() const;

  // --- views ---
  uint64_t term() const { return term_; }
  const std::string& cluster_id() const { return cluster_id_; }
  // By name (its newest run) or run id. NOT_FOUND lists what there is.
  absl::StatusOr<v1::JobStatus> Status(const std::string& job, const Moment& moment) const;
  // Oldest first; without events, ranks and plan.
  std::vector<v1::JobStatus> List() const;
  std::vector<v1::Node> Nodes(const Moment& moment) const;
  // Every run that is not ended, with the members that hold its ranks: for invariants in tests.
  const std::map<std::string, Run>& runs() const { return runs_; }
  const Membership& members() const { return members_; }

 private:
  // core.cc
  absl::Duration Discount(absl::Duration now);
  void WakeBy(absl::Duration when);

  // core_members.cc
  void On(const MemberSaid& event, const Moment& moment, Decision* out);
  void On(const SessionClosed& event, const Moment& moment, Decision* out);
  void On(const ReportExit& event, const Moment& moment, Decision* out);
  void OnHello(SessionId session, const v1::Hello& hello, const Moment& moment, Decision* out);
  void OnState(Member& member, bool running, const v1::Fence& fence, const v1::Progress& progress,
               const Moment& moment, Decision* out);
  void OnLog(const Member& member, const v1::LogLines& lines, Decision* out);
  void OnUnreachable(const v1::Unreachable& report, const Moment& moment, Decision* out);
  void OnGoodbye(Member& member, const std::string& reason, const Moment& moment, Decision* out);
  void LoseMember(Member& member, const std::string& reason, const Moment& moment, Decision* out);
  void CheckMembers(const Moment& moment, Decision* out);

  // core_jobs.cc
  void On(const Submit& event, const Moment& moment, Decision* out);
  void On(const Cancel& event, const Moment& moment, Decision* out);
  void GoOnFrom(const Checkpoint& checkpoint, Run* run) const;
  void Schedule(const Moment& moment, Decision* out);
  std::vector<Member*> Choose(const v1::JobSpec& spec, std::string* why_not);
  // RESOURCE_EXHAUSTED when the planned bytes of the ranks on a host, with those that checkpoints
  // take, are more than it has.
  absl::Status FitsMemory(const Run& run, const std::vector<Member*>& members) const;
  void OpenGeneration(Run& run, const std::vector<Member*>& members, const Moment& moment,
                      Decision* out);
  void SetState(Run& run, v1::JobState state, const std::string& reason, const Moment& moment,
                Decision* out);
  void AddEvent(Run& run, const std::string& reason, const Moment& moment, Decision* out);
  void EndJob(Run& run, v1::JobState state, const std::string& reason, const Moment& moment,
              Decision* out);
  void ForgetOldest(Decision* out);
  Run* FindRun(const std::string& job);
  absl::Status NoSuchJob(const std::string& job) const;

  // core_runs.cc
  void On(const PutKey& event, const Moment& moment, Decision* out);
  void On(const GetKey& event, const Moment& moment, Decision* out);
  void On(const ArriveAtBarrier& event, const Moment& moment, Decision* out);
  void On(const ReportSteps& event, const Moment& moment, Decision* out);
  void On(const ReportEnd& event, const Moment& moment, Decision* out);
  void On(const RequestDropped& event, const Moment& moment, Decision* out);
  void On(const Tick& event, const Moment& moment, Decision* out);
  void On(const CommitStep& event, const Moment& moment, Decision* out);
  void On(const SnapshotsOpened& event, const Moment& moment, Decision* out);
  void On(const SnapshotBegun& event, const Moment& moment, Decision* out);
  void On(const SnapshotCompleted& event, const Moment& moment, Decision* out);
  absl::Status CheckFence(const v1::Fence& fence, Run** run, RankState** rank);
  void Heard(Run& run, RankState& rank, const v1::Progress* progress, const Moment& moment,
             Decision* out);
  void MarkPresent(Run& run, RankState& rank, const Moment& moment, Decision* out);
  void SendAssign(const Run& run, const RankState& rank, SessionId session, Decision* out) const;
  void SendStop(const std::string& run_id, uint64_t generation, const std::string& reason,
                SessionId session, Decision* out, bool save = false) const;
  void StopOthers(Run& run, const std::string& reason, Decision* out, bool save = false);
  void BeginFailure(Run& run, const std::string& first_sign, const Moment& moment, Decision* out);
  void MaybeConclude(Run& run, const Moment& moment, Decision* out);
  void MaybeComplete(Run& run, const Moment& moment, Decision* out);
  std::vector<RankEvidence> Evidence(const Run& run, const Moment& moment) const;
  std::string DescribeRank(const Run& run, uint32_t rank, const Moment& moment) const;

  // core_deadlines.cc
  void CheckRuns(const Moment& moment, Decision* out);
  void CheckProgress(Run& run, const Moment& moment, Decision* out);

  // core_saves.cc
  absl::Status TakeCheckpoints(Run& run, const v1::ReportStepsRequest& body, const Moment& moment,
                               Decision* out);
  absl::Status TakeSamples(Run& run, const v1::ReportStepsRequest& body, Decision* out);
  void AddCheckpointEvent(Run& run, const std::string& text, const Moment& moment, Decision* out);
  absl::Status SaveAndCancel(Run& run, const Moment& moment, Decision* out);
  void MaybeSaved(Run& run, const Moment& moment, Decision* out);
  void CheckSave(Run& run, const Moment& moment, Decision* out);
  // Ends a run that was saving or whose ranks were; `trouble`: what kept them from it.
  void EndSaved(Run& run, const std::string& trouble, const Moment& moment, Decision* out);

  // views.cc
  v1::JobStatus Brief(const Run& run) const;

  const CoreOptions options_;
  std::string cluster_id_;
  uint64_t term_ = 0;
  std::map<std::string, uint64_t> counters_;
  Membership members_;
  std::map<std::string, Run> runs_;            // by run id
  std::map<uint64_t, std::string> by_order_;   // run ids, oldest first
  std::set<uint64_t> queue_;                   // orders of the QUEUED
  std::map<std::string, std::string> newest_;  // run id by name
  std::map<RequestId, std::string> parked_;    // run id of a call that may still wait
  uint64_t next_order_ = 1;
  uint64_t next_evidence_ = 1;
  bool schedule_again_ = false;
  std::vector<std::string> forgotten_;  // to be erased when nobody holds them any more

  // On the clock of Moment::now, before the discount.
  absl::Duration last_now_ = -absl::InfiniteDuration();
  absl::Duration first_now_ = -absl::InfiniteDuration();
  absl::Duration last_tick_ = -absl::InfiniteDuration();
  absl::Duration discount_ = absl::ZeroDuration();
  std::set<absl::Duration> wakes_;
};

}  // namespace zeroshard::coordinator
