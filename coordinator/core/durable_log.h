// What the coordinator must not forget, and where it is kept.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "zeroshard/v1/cluster.pb.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard::coordinator {

// --- records: each replaces what an earlier one with the same key said
// ----------------------------

// Numbers that never decrease: "term", and "run:<job>", the last run number of a name.
struct CounterRecord {
  std::string name;
  uint64_t value = 0;
};
struct ClusterRecord {
  std::string cluster_id;
};
// Key: run_id.
struct JobRecord {
  uint64_t order = 0;  // of submission
  std::string run_id;
  v1::JobSpec spec;
  v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
  std::string reason;
  uint64_t generation = 0;
  uint64_t committed_step = 0;  // unless it completed, the history file knows better
  std::string weights_digest;
  int64_t submitted_unix_ms = 0;
  int64_t ended_unix_ms = 0;
  std::vector<v1::ShardPlan> plan;
  uint64_t first_step = 1;
  v1::Resume resume;                // without a checkpoint: a fresh start
  v1::CheckpointRecord checkpoint;  // the newest complete one of this run; step 0: none
  bool saving = false;              // it is cancelled once a checkpoint is written
  std::string history_of;           // the run whose history and samples it goes on from, if any
  // Of an offloaded job. Positions in the sample order of the first sample of first_step and of the
  // step after `checkpoint`.
  uint64_t first_sample = 0;
  uint64_t checkpoint_sample = 0;
  uint64_t steps_lost = 0;  // committed steps that were given up with the state of a store
  uint64_t checkpoint_steps_lost = 0;  // of these, what the history tells up to `checkpoint`
};
// Key: run_id, rank. The member that holds the rank in the current generation, and how its part
// ended.
struct RankRecord {
  std::string run_id;
  uint32_t rank = 0;
  std::string member;
  std::string incarnation;
  std::string host;
  int64_t pid = 0;
  bool ended = false;
  v1::ReportEndRequest end;  // without its fence; when ended
};
// Key: run_id, index. Kept: the last kMaxEvents of a run.
struct EventRecord {
  std::string run_id;
  uint64_t index = 0;
  v1::JobEvent event;
};
// Key: run_id, index. The event made room for others.
struct EventForgottenRecord {
  std::string run_id;
  uint64_t index = 0;
};
// Key: incarnation. Never accepted again.
struct FenceRecord {
  std::string incarnation;
  std::string member;
  std::string reason;
  int64_t unix_ms = 0;
};
// Key: run_id, generation, key. A rendezvous key.
struct KeyRecord {
  std::string run_id;
  uint64_t generation = 0;
  std::string key;
  std::string value;
};
// Key: run_id, generation, name. Every rank has been told, or may be told, that it is complete.
struct BarrierRecord {
  std::string run_id;
  uint64_t generation = 0;
  std::string name;
};
// The generation is over: its keys, barriers and ranks' ends go.
struct GenerationClosedRecord {
  std::string run_id;
  bool forget_ranks = false;  // the next generation has others
};
// Forgets an ended run with everything of it.
struct JobForgottenRecord {
  std::string run_id;
};

// Key: run_id. Of an offloaded job: where its state is and where it comes from.
struct StoreMapRecord {
  // State that a store of the map takes over from another: both by their index in it.
  struct Copy {
    uint32_t to_store = 0;
    uint32_t chunk = 0;
    uint32_t from_store = 0;
  };
  std::string run_id;
  uint64_t map_version = 0;
  v1::StoreJob job;  // map, base, checkpoint, copy; without specification, store and copies
  std::vector<Copy> copies;
  uint64_t next_sample = 0;  // of the step after `base`
};
// Key: run_id. The latest step that was decided; of an epoch before the map's it says nothing.
struct StepDecisionRecord {
  std::string run_id;
  v1::StepDecision decision;
  v1::StepRecord record;
  v1::StepRecord previous;     // of the step before, which the history may still lack; or empty
  uint64_t samples = 0;        // of the training set, as the ranks see it
  uint64_t snapshot_step = 0;  // of the checkpoint that was under way then; 0: none
};

using LogRecord =
    std::variant<CounterRecord, ClusterRecord, JobRecord, RankRecord, EventRecord,
                 EventForgottenRecord, FenceRecord, KeyRecord, BarrierRecord,
                 GenerationClosedRecord, JobForgottenRecord, StoreMapRecord, StepDecisionRecord>;

inline constexpr uint64_t kMaxEvents = 200;  // of one run

// --- what is read back
// ----------------------------------------------------------------------------

struct LoadedJob {
  JobRecord job;
  std::map<uint32_t, RankRecord> ranks;
  std::map<uint64_t, v1::JobEvent> events;  // by index
  std::map<std::string, std::string> keys;  // of the current generation
  std::vector<std::string> barriers;        // complete, of the current generation
  std::optional<StoreMapRecord> stores;     // of an offloaded job that was placed
  std::optional<StepDecisionRecord> decision;
  // From the history and samples files, filled in by whoever holds them: this run's own steps
  // (empty records have step 0), and by prompt the last step of which there is a sample.
  v1::StepRecord first;
  v1::StepRecord last;
  std::map<std::string, uint64_t> sampled;
};

struct LoadedState {
  std::string cluster_id;  // empty: a new cluster
  std::map<std::string, uint64_t> counters;
  std::map<std::string, LoadedJob> jobs;  // by run id
  std::map<std::string, FenceRecord> fences;
};

// Applies one record to what was read so far; what every log's Load amounts to.
void Apply(const LogRecord& record, LoadedState* state);

// Not thread-safe: one writer.
class DurableLog {
 public:
  virtual ~DurableLog() = default;
  // Everything appended and acknowledged so far, in one consistent state.
  virtual absl::StatusOr<LoadedState> Load() = 0;
  // All or none, on disk when it returns OK. After an error nothing is known about the last batch:
  // the caller must stop and load again.
  virtual absl::Status Append(const std::vector<LogRecord>& records) = 0;
};

}  // namespace zeroshard::coordinator
