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
#include "coordinator/core/admission.h"
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
  //   Submit: ALREADY_EXISTS: a job of that name has not ended. RESOURCE_EXHAUSTED: too many jobs,
  //     or its state can never fit the shard stores that are there.
  //   CommitStep: FAILED_PRECONDITION: also another epoch, a job without offload. OUT_OF_RANGE: not
  //     the next step. INVALID_ARGUMENT: as ReportSteps. DEADLINE_EXCEEDED names the stores that
  //     are not ready. ABORTED: the generation ended.
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
  // A run that is over on a store, which has not said so yet: its room is still taken.
  struct Leftover {
    std::string incarnation;
    uint64_t bytes = 0;
    bool nvme = false;
    uint64_t generation = 0;
    uint64_t epoch = 0;
    absl::Duration told;
  };
  struct StoreUse {
    uint64_t memory = 0, nvme = 0;
    uint32_t jobs = 0;
  };
  static constexpr int kMaxRecoveries = 5;
  // Which stores may get chunks; each also has those before it.
  enum class Stores {
    kWell,    // that have chunks of the map, or have failed at nothing lately
    kRested,  // that failed, where it is not their disk or memory, or long enough ago
    kAny,     // whose process lives
  };
  enum class Cause {
    kFailure,
    kCovered,  // a store failed that the job can do without: no sign that the job is ill
    kPlanned,  // nothing failed, members change
  };
  struct MapPlan {
    std::vector<StoreCandidate> candidates;
    std::vector<std::vector<uint32_t>> holders;  // by chunk: candidates that have it
    std::vector<uint32_t> placement;
  };

  // core.cc
  absl::Duration Discount(absl::Duration now);
  // What follows from an event once it was taken in.
  void Finish(const Moment& moment, Decision* out);
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
  // Loses a member and tells it, if it can be told.
  void FenceMember(const std::string& name, const std::string& reason, const Moment& moment,
                   Decision* out);

  // core_jobs.cc
  void On(const Submit& event, const Moment& moment, Decision* out);
  void On(const Cancel& event, const Moment& moment, Decision* out);
  void GoOnFrom(const Checkpoint& checkpoint, Run* run) const;
  void Schedule(const Moment& moment, Decision* out);
  // Idle workers that compute alike where that matters, and have the memory. Empty, and why not.
  // With too few for all of its ranks it waits for some time, and then takes what there is, down to
  // resources.min_workers.
  std::vector<Member*> Choose(Run& run, const Moment& moment, std::string* why_not);
  // `own_too`: those that have its ranks count as idle.
  std::vector<Member*> ChooseFor(Run& run, uint32_t ranks, std::string* why_not,
                                 bool own_too = false);
  // It needs more workers than there are, also among those that may be back at once: nobody has to
  // wait until more come.
  bool WantsMoreThanThereAre(const Run& run, const Moment& moment);
  // Idle workers that an offloaded job could take in, which runs with fewer than it wants, and that
  // nobody else waits for.
  bool CanGrow(Run& run, const Moment& moment);
  // For workers, and holds up those behind it as in the queue.
  bool OthersWait(const Run& run, const Moment& moment);
  // Live members that were given a rank of it: any, or rank 0, which completes checkpoints.
  const Member* StillHas(const Run& run, bool rank_zero) const;
  // The queue is to be looked at again then.
  void ScheduleBy(absl::Duration when);
  void OpenGeneration(Run& run, const std::vector<Member*>& members, const Moment& moment,
                      Decision* out);
  void SetState(Run& run, v1::JobState state, const std::string& reason, const Moment& moment,
                Decision* out);
  static std::string PlacementOf(const Run& run);         // DescribePlacement
  static void ShowChange(const Run& run, Decision* out);  // to whoever keeps its series
  void AddEvent(Run& run, const std::string& reason, const Moment& moment, Decision* out);
  void EndJob(Run& run, v1::JobState state, const std::string& reason, const Moment& moment,
              Decision* out);
  void CloseGeneration(Run& run, const std::string& reason, bool forget_ranks, const Moment& moment,
                       Decision* out);
  void SetRunning(Run& run, const std::string& reason, const Moment& moment, Decision* out);
  void ForgetOldest(Decision* out);
  Run* FindRun(const std::string& job);
  absl::Status NoSuchJob(const std::string& job) const;

  // core_admission.cc
  std::vector<WorkerRoom> WorkerRooms() const;
  // RESOURCE_EXHAUSTED: no choice of the workers that are here has the memory, with the numbers and
  // the smallest change that fits. OK where there are fewer workers than ranks.
  absl::Status WorkersCanHold(const v1::JobSpec& spec,
                              const std::vector<v1::ShardPlan>& plan) const;
  // Counted once.
  static const std::vector<RankNeed>& Needs(Run& run, uint32_t ranks);
  bool NoneCanHold(Run& run) const;
  bool HasStores() const;
  // As WorkersFor; empty, and `shortage`.
  static std::vector<Member*> WithRoom(const v1::JobSpec& spec, const std::vector<RankNeed>& needs,
                                       const std::vector<Member*>& members, std::string* shortage);

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
  void On(const NewestFound& event, const Moment& moment, Decision* out);
  void On(const HistoryTruncated& event, const Moment& moment, Decision* out);
  absl::Status CheckFence(const v1::Fence& fence, Run** run, RankState** rank);
  void Heard(Run& run, RankState& rank, const v1::Progress* progress, const Moment& moment,
             Decision* out);
  // Every rank has computed that step, whatever its last heartbeat said.
  static void PassedStep(Run& run, uint64_t step);
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

  // core_going_back.cc: jobs whose state is on their ranks, some of which are lost
  // Such a loss is no end of it: it has a folder of checkpoints, and nobody wants it to end.
  static bool GoesBack(const Run& run);
  // What a rank says whose start failed because a process that was given up lives on and still
  // holds the folder; empty: none says so.
  static std::string HolderOfFolder(const Run& run);
  // The same, or that process has completed a newer checkpoint and deleted the one that was found.
  static bool FolderIsNotLeftYet(const Run& run);
  // Ends the generation, or where that led nowhere too often the job.
  void GoBack(Run& run, const std::string& reason, const Moment& moment, Decision* out);
  void Look(Run& run, const Moment& moment, Decision* out);
  void LookAgain(Run& run, const Moment& moment, Decision* out);
  void GoBackTo(Run& run, const NewestFound& event, const Moment& moment, Decision* out);
  static void CutHistory(Run& run, Decision* out);
  // As Reopen.
  bool ReopenRanks(Run& run, const std::string& ahead, const Moment& moment, Decision* out,
                   std::string* why);
  static void RestoreGoingBack(Run& run, const LoadedJob& loaded);
  void StartGoingBack(Run& run, const Moment& moment, Decision* out);

  // core_stores.cc: the stores of offloaded jobs (`run.offload` is there)
  const Member* MemberOf(const StoreSlot& slot) const;
  // views.cc: what a store has said that it holds.
  void AddHeld(const std::string& incarnation, v1::Node* node) const;
  StoreUse ReservedOn(const std::string& member, const std::string& incarnation,
                      const Run* except) const;
  std::vector<StoreCandidate> Candidates(const Run& run, Stores stores, absl::Duration now) const;
  // RESOURCE_EXHAUSTED: never, on the stores that are there.
  absl::Status CanEverFit(const v1::JobSpec& spec) const;
  bool PlaceNew(Run& run, absl::Duration now, std::vector<StoreCandidate>* candidates,
                std::vector<uint32_t>* placement, std::string* why) const;
  void SetMap(Run& run, const std::vector<StoreCandidate>& candidates,
              const std::vector<uint32_t>& placement, uint32_t replicas,
              const std::vector<std::vector<uint32_t>>& holders, const Moment& moment,
              Decision* out);
  static std::vector<StoreSlot> MakeSlots(const OffloadedRun& o, absl::Duration now);
  // What its stores should do has changed: they are told at the end of the event.
  void Touch(const Run& run);
  void SyncStores(Run& run, Decision* out);
  void SendDrop(const Member& member, const std::string& run_id, uint64_t generation,
                uint64_t epoch, Decision* out) const;
  void ForgetOn(Run& run, const StoreSlot& slot, const Moment& moment, Decision* out);
  void CheckLeftovers(const Moment& moment, Decision* out);
  void OnStoreHello(const Member& member, const Moment& moment, Decision* out);
  void OnStoreReport(const Member& member, const v1::StoreReport& report, const Moment& moment,
                     Decision* out);
  void JudgeReport(Run& run, size_t store, bool advanced, const Moment& moment, Decision* out);
  // Remembers it, for as long as other stores are to be preferred; how often it has failed.
  int Remember(Run& run, const StoreSlot& slot, const std::string& what, const Moment& moment);
  void StoreFailed(Run& run, size_t store, const Moment& moment, Decision* out);
  void LoseStore(const std::string& name, const std::string& incarnation, const std::string& reason,
                 const Moment& moment, Decision* out);
  void LoseSlot(Run& run, size_t store, const std::string& reason, const Moment& moment,
                Decision* out, Cause cause = Cause::kFailure);

  // core_recovery.cc: likewise
  static bool Starting(const Run& run);
  void Recover(Run& run, const std::string& reason, const Moment& moment, Decision* out,
               Cause cause = Cause::kFailure);
  // Of the committed step, a loss on the validation set that was due and that nobody has reported.
  static bool MissesEvaluation(const Run& run);
  // It is left out of the history.
  void GiveUpEvaluation(Run& run, const std::string& reason, const Moment& moment, Decision* out);
  // What a run that cannot train yet is waiting for; empty: nothing that is known.
  std::string WaitsFor(const Run& run, const Moment& moment) const;
  // Goes on with a run that is RECOVERING without a generation. False: it must wait, and `why`.
  // Behind run `ahead`, unless empty, it gets no ranks; what needs none is done.
  bool Reopen(Run& run, const std::string& ahead, const Moment& moment, Decision* out,
              std::string* why);
  // RESOURCE_EXHAUSTED, with the numbers.
  absl::StatusOr<MapPlan> PlanMap(const Run& run, uint32_t replicas, Stores stores,
                                  absl::Duration now) const;
  // Whether each chunk has a place on those, with however few replicas.
  bool HasRoom(const Run& run, Stores stores, absl::Duration now) const;
  // What is copied is the state of the committed step: whoever has it must have applied that.
  static bool AllAtCommitted(const Run& run, std::string* why);
  bool PrepareMap(Run& run, const Moment& moment, Decision* out, std::string* why);
  // Chunks are nowhere but where they were being copied from a lost store. False: they may be there
  // already, and `why` says what is waited for.
  bool CopiesAreLate(Run& run, const Moment& moment, std::string* why);
  void RollBack(Run& run, const Moment& moment, Decision* out);
  bool CanAddReplicas(const Run& run, absl::Duration now) const;
  std::vector<std::string> StoresNotOpen(const Run& run) const;
  void MaybeAssign(Run& run, const Moment& moment, Decision* out);

  // core_leaving.cc: stores that were asked to leave
  void OnStoreLeaving(Member& member, const Moment& moment, Decision* out);
  // Stores that leave hold chunks of it which no other store has, and it can be saved: until they
  // are gone no step is decided.
  bool WaitsForSave(const Run& run) const;
  bool IsHeldByLeavingAlone(const Run& run, bool* being_copied) const;

  // core_steps.cc: likewise
  void AnswerPending(Run& run, const absl::Status& status, Decision* out);
  // Stores that do not have the committed version, or with `sealed_step` lack its gradients.
  std::vector<std::string> StoresNotReady(const Run& run, uint64_t sealed_step) const;
  void TryDecide(Run& run, const Moment& moment, Decision* out);
  // All stores have the committed version. Where replicas of it differ the job ends, naming them:
  // nobody knows which of the two is right.
  bool ReplicasDiffer(Run& run, const Moment& moment, Decision* out);
  void DecideStep(Run& run, const Moment& moment, Decision* out);
  // Of the step after the committed one.
  static v1::LossScale LossScaleOf(const Run& run);
  void WriteHistory(Run& run, Decision* out);
  // What the log knows of the run's last steps and its history does not.
  void WriteLogged(Run& run, Decision* out);
  absl::Status TakeFullerSteps(Run& run, const v1::ReportStepsRequest& body, const Moment& moment,
                               Decision* out);
  void RestoreOffload(Run& run, LoadedJob& loaded);
  void StartOffload(Run& run, const Moment& moment, Decision* out);
  void MaybeFinish(Run& run, const Moment& moment, Decision* out);
  void EndOffload(Run& run, const std::string& reason, const Moment& moment, Decision* out);

  // core_store_deadlines.cc: likewise
  void CheckOffload(Run& run, const Moment& moment, Decision* out);
  void CheckSlowStores(Run& run, const Moment& moment, Decision* out);
  // The start is late for its stores: ends the job, naming them.
  bool StoresAreLate(Run& run, const Moment& moment, Decision* out);

  // core_snapshots.cc: likewise
  void OpenSnapshotsOf(Run& run, Decision* out);
  static bool SnapshotIsDue(const Run& run, uint64_t step);
  bool SnapshotIsReady(Run& run, uint64_t step, const Moment& moment, Decision* out);
  bool BeginSnapshotOf(Run& run, uint64_t step, bool direct, const Moment& moment, Decision* out);
  void MaybeSnapshotNow(Run& run, const Moment& moment, Decision* out);
  void StartSnapshot(Run& run, const Moment& moment, Decision* out);
  static void FillSnapshotOrder(const Run& run, size_t store, v1::StoreDirective* directive);
  void OnSnapshotReport(Run& run, const Moment& moment, Decision* out);
  void AbandonSnapshotOf(Run& run, const std::string& reason, Decision* out);
  // Not for a failure of its own.
  void DropSnapshot(Run& run, const std::string& reason, Decision* out);
  void EndSnapshot(Run& run, const v1::CheckpointRecord& record, const Moment& moment,
                   Decision* out);
  void CheckSnapshot(Run& run, const Moment& moment, Decision* out);
  absl::Status SaveOffloaded(Run& run, const Moment& moment, Decision* out);

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
  std::set<uint64_t> recovering_;              // orders of the RECOVERING
  std::map<std::string, std::string> newest_;  // run id by name
  std::map<RequestId, std::string> parked_;    // run id of a call that may still wait
  uint64_t next_order_ = 1;
  uint64_t next_evidence_ = 1;
  bool schedule_again_ = false;
  std::optional<absl::Duration> schedule_by_;
  absl::Duration members_back_;    // after a start: by then those that live have said Hello
  std::set<std::string> touched_;  // runs whose stores are to be told something
  std::map<std::pair<std::string, std::string>, Leftover> leftovers_;  // by member and run id
  std::vector<std::string> forgotten_;  // to be erased when nobody holds them any more

  // On the clock of Moment::now, before the discount.
  absl::Duration last_now_ = -absl::InfiniteDuration();
  absl::Duration first_now_ = -absl::InfiniteDuration();
  absl::Duration last_tick_ = -absl::InfiniteDuration();
  absl::Duration discount_ = absl::ZeroDuration();
  std::set<absl::Duration> wakes_;
};

}  // namespace zeroshard::coordinator
