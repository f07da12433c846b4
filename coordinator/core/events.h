// What goes into the coordinator's state machine and what comes out. Plain data: no sockets, no
// threads, no clock.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/core/durable_log.h"
#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard::coordinator {

using SessionId = uint64_t;  // one Session stream; never 0, never reused by a process
using RequestId = uint64_t;  // one call that waits for an answer; likewise

// When something happened: `now` is monotonic and alone decides; `unix_ms` is for people.
struct Moment {
  absl::Duration now;
  int64_t unix_ms = 0;
};

// --- events -------------------------------------------------------------------------------------

struct MemberSaid {
  SessionId session = 0;
  v1::MemberMessage message;
};
struct SessionClosed {
  SessionId session = 0;
};
struct PutKey {
  RequestId request = 0;
  v1::PutKeyRequest body;
};
struct GetKey {
  RequestId request = 0;
  v1::GetKeyRequest body;
};
struct ArriveAtBarrier {
  RequestId request = 0;
  v1::BarrierRequest body;
};
struct ReportSteps {
  RequestId request = 0;
  v1::ReportStepsRequest body;
};
struct ReportEnd {
  RequestId request = 0;
  v1::ReportEndRequest body;
};
struct ReportExit {
  RequestId request = 0;
  v1::ReportExitRequest body;
};
// A complete checkpoint that fits the job, found by whoever reads files.
struct Checkpoint {
  v1::Resume resume;
  uint64_t step = 0;  // of the last update in it
  // The run that wrote it, and the folder of checkpoints in that run's specification.
  std::string run_id;
  std::string dir;
  // Position in the run's sample order of the next step's first sample, as its manifest says.
  uint64_t next_sample = 0;
  std::vector<std::string> skipped;  // newer ones that are not complete, each with its reason
  // In what its specification differs from the job's, as "seed: 1 -> 2".
  std::vector<std::string> changes;
};
struct Submit {
  RequestId request = 0;
  v1::JobSpec spec;  // normalised and valid
  std::vector<v1::ShardPlan> plan;
  std::optional<Checkpoint> from = std::nullopt;  // none: a fresh start
  bool force = false;  // queued although nobody who is here could hold it
};
struct Cancel {
  RequestId request = 0;
  std::string job;
  bool save = false;  // write a checkpoint first
};
// Rank 0 of an offloaded job asks for a step's decision.
struct CommitStep {
  RequestId request = 0;
  v1::CommitStepRequest body;
};
// What became of OpenSnapshots, BeginSnapshot and CompleteSnapshot.
struct SnapshotsOpened {
  std::string run_id;
  absl::Status status;
};
struct SnapshotBegun {
  std::string run_id;
  uint64_t step = 0;
  absl::StatusOr<std::string> folder;  // that the stores write into
};
struct SnapshotCompleted {
  std::string run_id;
  uint64_t step = 0;
  v1::CheckpointRecord record;  // complete, or abandoned and why
};
// What became of FindNewest: the newest checkpoint that the run has written and that is complete;
// none: it wrote none that is there.
struct NewestFound {
  std::string run_id;
  absl::StatusOr<std::optional<Checkpoint>> checkpoint;
  std::vector<std::string> skipped = {};  // where there is none: what is there instead, and why not
};
// TruncateHistory was carried out.
struct HistoryTruncated {
  std::string run_id;
};
// The caller went away: no answer is wanted any more.
struct RequestDropped {
  RequestId request = 0;
};
// Time has passed. Sent at the latest when Core::NextDeadline says so.
struct Tick {};

using Event =
    std::variant<MemberSaid, SessionClosed, PutKey, GetKey, ArriveAtBarrier, ReportSteps, ReportEnd,
                 ReportExit, Submit, Cancel, CommitStep, SnapshotsOpened, SnapshotBegun,
                 SnapshotCompleted, NewestFound, HistoryTruncated, RequestDropped, Tick>;

// --- actions ------------------------------------------------------------------------------------

struct SendToSession {
  SessionId session = 0;
  v1::CoordinatorMessage message;
};
struct CloseSession {
  SessionId session = 0;
};
// Answers a call. `text` is a key's value, a run id or (of CommitStep) a serialised
// v1::StepDecision; `number` is the committed step.
struct Reply {
  RequestId request = 0;
  absl::Status status;
  std::string text;
  uint64_t number = 0;
};
// Makes the job's folder this run's; what an older run of the name left there is moved aside.
struct PrepareFolder {
  std::string job;
  std::string run_id;
  // The new history and samples begin with what this run's say of the steps before `first_step`.
  std::string history_of;  // empty: nothing
  uint64_t first_step = 1;
};
struct AppendHistory {
  std::string job;
  std::string run_id;
  std::vector<v1::StepRecord> records;
};
struct AppendSamples {
  std::string job;
  std::string run_id;
  std::vector<v1::SampleRecord> samples;
};
struct AppendLog {
  std::string job;
  std::string run_id;
  uint32_t rank = 0;
  std::vector<std::string> lines;
};
// The history and samples of this run from `first_step` on are of a future that was given up.
// Answered by HistoryTruncated.
struct TruncateHistory {
  std::string job;
  std::string run_id;
  uint64_t first_step = 1;
};
// Looks in the run's folder of checkpoints for the newest one that it wrote itself; answered by
// NewestFound. One of `committed_step` or before is preferred: of later ones the history does not
// tell. Ids of runs may be alike on other coordinators: what was written before `since_unix_ms` is
// another one's.
struct FindNewest {
  std::string run_id;
  std::string dir;
  uint64_t committed_step = 0;
  int64_t since_unix_ms = 0;
};
// The coordinator owns the checkpoint folder of an offloaded job: takes its lock; answered by
// SnapshotsOpened. Once a run and coordinator.
struct OpenSnapshots {
  std::string run_id;
  std::string job;
  v1::JobSpec spec;
  std::string resumed_from;  // as CheckpointStoreOptions has it
  // The checkpoint whose weights the run began with or goes on from: what travels with the model is
  // there. Empty: none.
  std::string assets_from;
  // A coordinator before may have completed this step's checkpoint without having logged that;
  // where it is there and complete, it is what the run goes on from. 0: none.
  uint64_t under_way = 0;
};
// An empty folder for this step's files; answered by SnapshotBegun.
struct BeginSnapshot {
  std::string run_id;
  uint64_t step = 0;
};
// Every store has written its file: assets, 16-bit weights where asked for, manifest, rename;
// answered by SnapshotCompleted.
struct CompleteSnapshot {
  std::string run_id;
  uint64_t step = 0;
  uint64_t next_sample = 0;
  v1::LossScale loss_scale;  // Manifest's
  uint64_t samples = 0;
  std::vector<v1::SnapshotReport> files;  // by store
  double seconds = 0;                     // since the decision
};
// A store could not write its part, or is gone: answered by SnapshotCompleted too.
struct AbandonSnapshot {
  std::string run_id;
  uint64_t step = 0;
  std::string reason;
};
// The run has ended: lets go of the folder.
struct CloseSnapshots {
  std::string run_id;
};
// Something that a watcher of the run should see: state, step or event.
struct RunChanged {
  std::string run_id;
};
// The job's series appear, counters at 0.
struct JobAppears {
  std::string job;
  v1::JobSpec spec;
};
// In a state that ends the job its series disappear.
struct JobChanges {
  std::string job;
  v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
  uint32_t ranks = 0;  // of its open generation
};
enum class MetricKind {
  kGeneration,       // +1: one was opened
  kNonFinite,        // +1: a step ended the job, or an fp16 job skipped it
  kStepsLost,        // + value
  kSaved,            // +1: a checkpoint is complete
  kNotSaved,         // +1: one was abandoned
  kRecoverySeconds,  // observes value
  kBarrierSeconds,   // observes value
};
struct Measure {
  MetricKind kind;
  std::string job;
  double value = 0;
};

using Action = std::variant<SendToSession, CloseSession, Reply, PrepareFolder, AppendHistory,
                            AppendSamples, AppendLog, TruncateHistory, FindNewest, OpenSnapshots,
                            BeginSnapshot, CompleteSnapshot, AbandonSnapshot, CloseSnapshots,
                            RunChanged, JobAppears, JobChanges, Measure>;

// Records are made durable first, all or none; then the actions are carried out in order.
struct Decision {
  std::vector<LogRecord> records;
  std::vector<Action> actions;
  // Why, a line each, for the coordinator's own log; empty for routine.
  std::vector<std::string> reasons;
};

}  // namespace zeroshard::coordinator
