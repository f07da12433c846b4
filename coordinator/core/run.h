// A job in memory: its durable row, and while it lives what its ranks are doing.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/spec/timeouts.h"
#include "coordinator/core/admission.h"
#include "coordinator/core/attribution.h"
#include "coordinator/core/durable_log.h"
#include "coordinator/core/generation.h"
#include "coordinator/core/offloaded_run.h"
#include "zeroshard/v1/jobs.pb.h"

namespace zeroshard::coordinator {

struct RankState {
  RankRecord record;
  // Heard of in this generation since this coordinator started.
  bool present = false;
  // Known to have begun; saying "idle" afterwards without a report means that it gave up.
  bool began = false;
  bool arrived = false;  // at any barrier of the generation
  v1::Progress progress;
  absl::Duration last_advance;               // when progress last changed
  std::optional<absl::Duration> left_since;  // says it is idle but never reported its end

  // Evidence for a verdict.
  std::optional<RankEvidence::Exit> exit;
  std::optional<std::string> lost;
  std::map<uint32_t, std::string> accusers;
  uint64_t evidence_order = 0;
};

struct Run {
  JobRecord job;
  std::map<uint64_t, v1::JobEvent> events;
  v1::StepRecord first;
  v1::StepRecord last;
  std::map<std::string, uint64_t> sampled;  // by prompt, the last step of which there is a sample

  std::vector<RankState> ranks;                    // of the current or last generation
  std::unique_ptr<Generation> generation;          // while PLACING, RUNNING; RECOVERING at times
  absl::Duration start_deadline;                   // while PLACING, or RECOVERING with a generation
  std::optional<absl::Duration> return_deadline;   // after a start: absent ranks are lost then
  std::optional<absl::Duration> steps_deadline;    // all ranks completed, steps are missing
  std::optional<absl::Duration> verdict_deadline;  // failing: the verdict falls then
  std::optional<absl::Duration> save_deadline;     // its ranks save and stop; by then they have
  bool save_advanced = false;                      // which moved that deadline
  bool nonfinite = false;
  // Of memory, by number of ranks and rank; from Core::Needs.
  std::map<uint32_t, std::vector<RankNeed>> needs;
  absl::Duration opened;                      // its generation
  std::optional<absl::Duration> short_since;  // there are too few workers for all of its ranks

  std::optional<absl::Duration> first_sign;  // of what it recovers from
  int recoveries = 0;                        // in a row that led no further

  // Of a job whose state is on its ranks, while it is RECOVERING.
  enum class GoingBack {
    kDone,      // its next generation may be opened
    kStopping,  // until the rank that completes checkpoints has stopped
    kLooking,   // for the checkpoint that it goes on from
    kCutting,   // its history after that
  };
  GoingBack going_back = GoingBack::kDone;
  std::optional<absl::Duration> look_again;     // looking failed; it is tried again then
  std::optional<absl::Duration> look_deadline;  // after which it is not
  std::string look_trouble;                     // with the last look
  std::optional<absl::Duration> held_since;     // its folder, by a process that was given up
  std::string folder_holder;                    // as the last start said
  bool cut_of_restart = false;                  // it looks once more after it
  uint64_t furthest = 0;                        // step that was ever committed

  std::unique_ptr<OffloadedRun> offload;  // of a job whose state is in the shard stores; else null

  // The generation is open.
  bool Live() const { return generation != nullptr; }
  bool Failing() const { return verdict_deadline.has_value(); }
  uint32_t World() const { return static_cast<uint32_t>(ranks.size()); }
};

// Why a run that is cancelled with a checkpoint is still there.
constexpr char kSavingReason[] = "writing a checkpoint before it is cancelled";

// The phase of a rank whose checkpoint is being written; `advances` grows with what is written.
constexpr char kSavingPhase[] = "saving";

// The phase in the heartbeats of a store that was asked to leave. It stays until a Stop of no run
// says that it may go, or for as long as it was given.
constexpr char kLeavingPhase[] = "leaving";

// There are committed steps of this run to save.
inline bool Trained(const Run& run) { return run.job.committed_step >= run.job.first_step; }

// How long a run whose ranks save and stop may show no sign of it.
inline absl::Duration SaveLimit(const Run& run) {
  return run.job.saving ? SaveTimeout(run.job.spec) : CollectiveTimeout(run.job.spec);
}

// It ended as a rank does that saved and stopped, rather than by an error. Before the run trains
// there is nothing to save; ranks of an offloaded job never save.
inline bool MayHaveSaved(const Run& run, const RankState& rank) {
  return run.job.state == v1::JOB_STATE_RUNNING && rank.record.ended &&
         !rank.record.end.completed() && rank.record.end.error_code() == "CANCELLED" &&
         !run.job.spec.checkpoint().dir().empty() && run.offload == nullptr;
}

}  // namespace zeroshard::coordinator
