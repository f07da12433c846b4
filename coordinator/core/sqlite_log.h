// The durable log in an SQLite file.
#pragma once

#include <memory>
#include <string>

#include "coordinator/core/durable_log.h"

struct sqlite3;

namespace zeroshard::coordinator {

// One writer: the file is locked while this lives (also against other processes), and the lock goes
// with the process, however it ends. Write-ahead log, synced on every Append. Schema version 4 (a
// file of version 1, which lacks the last six columns of jobs, of version 2, which lacks the last
// four, or of version 3, which lacks the last one, is raised to it when it is opened):
//   meta(key, value)               schema_version, cluster_id
//   counters(name, value)
//   jobs(run_id, ord, spec, state, reason, generation, committed_step, weights_digest,
//        submitted_unix_ms, ended_unix_ms, plan, saving, history_of, first_sample,
//        checkpoint_sample, steps_lost, checkpoint_steps_lost)
//        spec: a zeroshard.v1.JobSpec; plan: a zeroshard.v1.JobStatus of which `plan`, first_step,
//        resume and checkpoint are set
//   ranks(run_id, rank, member, incarnation, host, pid, ended, end)
//        end: a zeroshard.v1.ReportEndRequest without its fence
//   events(run_id, idx, unix_ms, state, reason)
//   fences(incarnation, member, reason, unix_ms)
//   keys(run_id, generation, key, value)
//   barriers(run_id, generation, name)
//   store_maps(run_id, map_version, job, copies, next_sample)
//        job: a zeroshard.v1.StoreJob; copies: a zeroshard.v1.StoreMap whose placement has three
//        numbers a copy: to_store, chunk, from_store
//   step_decisions(run_id, decision, record, previous, samples, snapshot_step)
//        a zeroshard.v1.StepDecision and two zeroshard.v1.StepRecord
// Not thread-safe.
class SqliteLog : public DurableLog {
 public:
  // Creates the file when it is not there. FAILED_PRECONDITION: another process holds it, or it was
  // written by another version. DATA_LOSS: it is damaged or no such file. Otherwise what the system
  // says about the path.
  static absl::StatusOr<std::unique_ptr<SqliteLog>> Open(const std::string& path);
  ~SqliteLog() override;

  absl::StatusOr<LoadedState> Load() override;
  absl::Status Append(const std::vector<LogRecord>& records) override;

 private:
  explicit SqliteLog(std::string path) : path_(std::move(path)) {}
  absl::Status Prepare();
  absl::Status Execute(const char* sql);
  absl::Status Error(int code, const char* doing) const;

  const std::string path_;
  sqlite3* db_ = nullptr;
};

}  // namespace zeroshard::coordinator
