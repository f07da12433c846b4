// What the coordinator knows of a job whose state is in the shard stores, beside its Run.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "coordinator/core/durable_log.h"
#include "coordinator/core/events.h"
#include "coordinator/core/stores.h"

namespace zeroshard::coordinator {

// One store of the job's map.
struct StoreSlot {
  v1::StoreMap::Store store;
  std::vector<uint32_t> chunks;  // rising
  uint64_t bytes = 0;            // reserved for them

  std::optional<std::string> lost;  // why its state is of no use any more
  absl::Duration lost_at;
  bool failed = false;     // then: the process lives, and may be filled anew
  bool heard = false;      // since this coordinator started: `report` is its newest
  bool was_ready = false;  // with the chunks of this map
  v1::StoreReport report;
  absl::Duration last_change;  // of the report, or when it was last given work

  // What it was told on its stream: only what differs is said again.
  SessionId told_session = 0;
  uint64_t told_map = 0;
  std::string told;
};

// What a store has failed at for this job: to take its state, or to keep it.
struct StoreTrouble {
  v1::StoreMap::Store store;
  std::string what;  // the last, in words
  int failures = 0;
  absl::Duration rests_until;
  // The map leaves it out, and it was not told to forget the job, so that it may get it again.
  bool aside = false;
  uint64_t bytes = 0;  // that are still reserved for it then
};

// Rank 0 has asked for a step's decision.
struct PendingStep {
  std::vector<RequestId> requests;
  v1::StepRecord record;
  uint64_t next_sample = 0;
  uint64_t samples = 0;
  absl::Duration since;
};

// The checkpoint that is under way; one at a time.
struct SnapshotWork {
  enum class Phase {
    kBeginning,   // its folder is being made
    kReady,       // the decision that it belongs to may fall
    kWriting,     // the stores write
    kCompleting,  // the coordinator writes the manifest
    kAbandoning,  // what there is of it is being removed
  };
  uint64_t step = 0;
  Phase phase = Phase::kBeginning;
  bool direct = false;  // of the version that is there, without a decision
  bool exists = false;  // it turned out to be complete already
  bool again = false;   // given up for what stores do, not for a failure: it may be tried again
  std::string folder;
  absl::Duration since;          // when the stores were told
  absl::Duration last_progress;  // of whoever works on it
  uint64_t next_sample = 0;
  v1::LossScale loss_scale;
  uint64_t samples = 0;
};

struct OffloadedRun {
  StoreNeeds needs;
  StoreMapRecord map;                         // map_version 0: not placed yet
  std::optional<StepDecisionRecord> decided;  // the latest, of the map's epoch
  std::vector<StoreSlot> slots;               // by store of the map

  // Incarnations of stores that were told to forget the job: they do not take it again.
  std::set<std::string> forgot;
  // By incarnation. In memory alone: after a start of the coordinator they have failed at nothing,
  // and one that was aside is told to forget the job.
  std::map<std::string, StoreTrouble> troubles;

  // Decided, and not in the history yet: a fuller record of the step may come.
  std::optional<v1::StepRecord> unwritten;
  uint64_t written = 0;  // the last step in the history
  // Steps at the end of the log that the history may lack, after a start.
  std::vector<v1::StepRecord> logged;

  std::optional<PendingStep> pending;

  std::optional<SnapshotWork> snapshot;
  bool snapshots_asked = false;
  bool snapshots_open = false;
  uint64_t unsaved_step = 0;  // the newest step whose checkpoint was due and failed
  std::string unsaved_why;
  // What stores that leave hold alone could not be saved: it holds up nobody any more.
  bool parting_failed = false;

  bool assigned = false;                          // the ranks of the generation were told
  std::optional<absl::Duration> return_deadline;  // after a start: stores not heard of are lost
  std::optional<absl::Duration> finish_deadline;  // every step is decided; the rest is due by then
  std::optional<absl::Duration> no_room_since;    // it waits for room on the shard stores
  bool gave_way = false;                          // for so long that others need not wait for it
  // After the last step only: what its loss on the validation set is given, where a rank that was
  // lost has not said it.
  std::optional<absl::Duration> evaluation_deadline;
  // Chunks are only where they were being copied from a store that is lost: by then they are there.
  std::optional<absl::Duration> copy_deadline;

  uint64_t epoch() const { return map.job.base().epoch(); }
  // Every chunk can be read again from where the job began in this epoch.
  bool AtBase() const { return !decided; }
  // The chunks of a store of the map that are known to be there: none that it still copies.
  std::vector<uint32_t> Held(size_t store) const {
    std::vector<uint32_t> held = slots[store].chunks;
    if (slots[store].was_ready) return held;
    for (const StoreMapRecord::Copy& copy : map.copies) {
      if (copy.to_store == store) std::erase(held, copy.chunk);
    }
    return held;
  }
};

}  // namespace zeroshard::coordinator
