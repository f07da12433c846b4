#include "coordinator/core/sqlite_log.h"

#include <sqlite3.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard::coordinator {
namespace {

constexpr char kSchemaVersion[] = "4";
constexpr char kSchema[] = R"sql(
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs(
  run_id TEXT PRIMARY KEY, ord INTEGER NOT NULL, spec BLOB NOT NULL, state INTEGER NOT NULL,
  reason TEXT NOT NULL, generation INTEGER NOT NULL, committed_step INTEGER NOT NULL,
  weights_digest TEXT NOT NULL, submitted_unix_ms INTEGER NOT NULL,
  ended_unix_ms INTEGER NOT NULL, plan BLOB NOT NULL, saving INTEGER NOT NULL DEFAULT 0,
  history_of TEXT NOT NULL DEFAULT '', first_sample INTEGER NOT NULL DEFAULT 0,
  checkpoint_sample INTEGER NOT NULL DEFAULT 0, steps_lost INTEGER NOT NULL DEFAULT 0,
  checkpoint_steps_lost INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS ranks(
  run_id TEXT NOT NULL, rank INTEGER NOT NULL, member TEXT NOT NULL, incarnation TEXT NOT NULL,
  host TEXT NOT NULL, pid INTEGER NOT NULL, ended INTEGER NOT NULL, end BLOB NOT NULL,
  PRIMARY KEY(run_id, rank)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events(
  run_id TEXT NOT NULL, idx INTEGER NOT NULL, unix_ms INTEGER NOT NULL, state INTEGER NOT NULL,
  reason TEXT NOT NULL, PRIMARY KEY(run_id, idx)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fences(
  incarnation TEXT PRIMARY KEY, member TEXT NOT NULL, reason TEXT NOT NULL,
  unix_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys(
  run_id TEXT NOT NULL, generation INTEGER NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
  PRIMARY KEY(run_id, generation, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS barriers(
  run_id TEXT NOT NULL, generation INTEGER NOT NULL, name TEXT NOT NULL,
  PRIMARY KEY(run_id, generation, name)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS store_maps(
  run_id TEXT PRIMARY KEY, map_version INTEGER NOT NULL, job BLOB NOT NULL, copies BLOB NOT NULL,
  next_sample INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS step_decisions(
  run_id TEXT PRIMARY KEY, decision BLOB NOT NULL, record BLOB NOT NULL, previous BLOB NOT NULL,
  samples INTEGER NOT NULL, snapshot_step INTEGER NOT NULL);
)sql";

constexpr char kRaiseFrom1[] = R"sql(
BEGIN EXCLUSIVE;
ALTER TABLE jobs ADD COLUMN saving INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN history_of TEXT NOT NULL DEFAULT '';
UPDATE meta SET value='2' WHERE key='schema_version';
COMMIT;
)sql";

constexpr char kRaiseFrom2[] = R"sql(
BEGIN EXCLUSIVE;
ALTER TABLE jobs ADD COLUMN first_sample INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN checkpoint_sample INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN steps_lost INTEGER NOT NULL DEFAULT 0;
UPDATE meta SET value='3' WHERE key='schema_version';
COMMIT;
)sql";

constexpr char kRaiseFrom3[] = R"sql(
BEGIN EXCLUSIVE;
ALTER TABLE jobs ADD COLUMN checkpoint_steps_lost INTEGER NOT NULL DEFAULT 0;
UPDATE meta SET value='4' WHERE key='schema_version';
COMMIT;
)sql";

// A prepared statement; arguments are bound in the order given, columns read by index.
class Statement {
 public:
  Statement(sqlite3* db, const char* sql) {
    code_ = sqlite3_prepare_v2(db, sql, -1, &statement_, nullptr);
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Number(uint64_t value) {
    if (code_ == SQLITE_OK) {
      code_ = sqlite3_bind_int64(statement_, ++bound_, static_cast<sqlite3_int64>(value));
    }
    return *this;
  }
  Statement& Text(const std::string& value) {
    if (code_ == SQLITE_OK) {
      code_ = sqlite3_bind_text64(statement_, ++bound_, value.data(), value.size(),
                                  SQLITE_TRANSIENT, SQLITE_UTF8);
    }
    return *this;
  }
  Statement& Blob(const std::string& value) {
    if (code_ == SQLITE_OK) {
      code_ =
          sqlite3_bind_blob64(statement_, ++bound_, value.data(), value.size(), SQLITE_TRANSIENT);
    }
    return *this;
  }
  int Run() { return code_ == SQLITE_OK ? sqlite3_step(statement_) : code_; }

  uint64_t NumberAt(int column) const {
    return static_cast<uint64_t>(sqlite3_column_int64(statement_, column));
  }
  std::string BytesAt(int column) const {
    const void* data = sqlite3_column_blob(statement_, column);
    const int size = sqlite3_column_bytes(statement_, column);
    return data == nullptr ? "" : std::string(static_cast<const char*>(data), size);
  }

 private:
  sqlite3_stmt* statement_ = nullptr;
  int code_ = SQLITE_OK;
  int bound_ = 0;
};

// Each record becomes one statement (a GenerationClosed three); returns an SQLite code.
struct Writer {
  sqlite3* db;

  int operator()(const CounterRecord& r) const {
    return Statement(db, "INSERT OR REPLACE INTO counters VALUES(?,?)")
        .Text(r.name)
        .Number(r.value)
        .Run();
  }
  int operator()(const ClusterRecord& r) const {
    return Statement(db, "INSERT OR REPLACE INTO meta VALUES('cluster_id',?)")
        .Text(r.cluster_id)
        .Run();
  }
  int operator()(const JobRecord& r) const {
    v1::JobStatus plan;
    for (const v1::ShardPlan& shard : r.plan) *plan.add_plan() = shard;
    plan.set_first_step(r.first_step);
    if (!r.resume.checkpoint().empty()) *plan.mutable_resume() = r.resume;
    if (r.checkpoint.step() != 0) *plan.mutable_checkpoint() = r.checkpoint;
    return Statement(db, "INSERT OR REPLACE INTO jobs VALUES(?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)")
        .Text(r.run_id)
        .Number(r.order)
        .Blob(r.spec.SerializeAsString())
        .Number(r.state)
        .Text(r.reason)
        .Number(r.generation)
        .Number(r.committed_step)
        .Text(r.weights_digest)
        .Number(r.submitted_unix_ms)
        .Number(r.ended_unix_ms)
        .Blob(plan.SerializeAsString())
        .Number(r.saving)
        .Text(r.history_of)
        .Number(r.first_sample)
        .Number(r.checkpoint_sample)
        .Number(r.steps_lost)
        .Number(r.checkpoint_steps_lost)
        .Run();
  }
  int operator()(const RankRecord& r) const {
    return Statement(db, "INSERT OR REPLACE INTO ranks VALUES(?,?,?,?,?,?,?,?)")
        .Text(r.run_id)
        .Number(r.rank)
        .Text(r.member)
        .Text(r.incarnation)
        .Text(r.host)
        .Number(r.pid)
        .Number(r.ended)
        .Blob(r.end.SerializeAsString())
        .Run();
  }
  int operator()(const EventRecord& r) const {
    const int code = Statement(db, "INSERT OR REPLACE INTO events VALUES(?,?,?,?,?)")
                         .Text(r.run_id)
                         .Number(r.index)
                         .Number(r.event.unix_ms())
                         .Number(r.event.state())
                         .Text(r.event.reason())
                         .Run();
    if (code != SQLITE_DONE || r.index < kMaxEvents) return code;
    return Statement(db, "DELETE FROM events WHERE run_id=? AND idx<=?")
        .Text(r.run_id)
        .Number(r.index - kMaxEvents)
        .Run();
  }
  int operator()(const EventForgottenRecord& r) const {
    return Statement(db, "DELETE FROM events WHERE run_id=? AND idx=?")
        .Text(r.run_id)
        .Number(r.index)
        .Run();
  }
  int operator()(const FenceRecord& r) const {
    return Statement(db, "INSERT OR REPLACE INTO fences VALUES(?,?,?,?)")
        .Text(r.incarnation)
        .Text(r.member)
        .Text(r.reason)
        .Number(r.unix_ms)
        .Run();
  }
  int operator()(const KeyRecord& r) const {
    return Statement(db, "INSERT OR REPLACE INTO keys VALUES(?,?,?,?)")
        .Text(r.run_id)
        .Number(r.generation)
        .Text(r.key)
        .Blob(r.value)
        .Run();
  }
  int operator()(const BarrierRecord& r) const {
    return Statement(db, "INSERT OR REPLACE INTO barriers VALUES(?,?,?)")
        .Text(r.run_id)
        .Number(r.generation)
        .Text(r.name)
        .Run();
  }
  int operator()(const GenerationClosedRecord& r) const {
    return Delete(r.run_id,
                  {"DELETE FROM keys WHERE run_id=?", "DELETE FROM barriers WHERE run_id=?",
                   r.forget_ranks ? "DELETE FROM ranks WHERE run_id=?" : nullptr});
  }
  int operator()(const JobForgottenRecord& r) const {
    return Delete(r.run_id,
                  {"DELETE FROM keys WHERE run_id=?", "DELETE FROM barriers WHERE run_id=?",
                   "DELETE FROM ranks WHERE run_id=?", "DELETE FROM events WHERE run_id=?",
                   "DELETE FROM store_maps WHERE run_id=?",
                   "DELETE FROM step_decisions WHERE run_id=?", "DELETE FROM jobs WHERE run_id=?"});
  }

  int operator()(const StoreMapRecord& r) const {
    v1::StoreMap copies;
    for (const StoreMapRecord::Copy& copy : r.copies) {
      for (uint32_t number : {copy.to_store, copy.chunk, copy.from_store}) {
        copies.add_placement(number);
      }
    }
    return Statement(db, "INSERT OR REPLACE INTO store_maps VALUES(?,?,?,?,?)")
        .Text(r.run_id)
        .Number(r.map_version)
        .Blob(r.job.SerializeAsString())
        .Blob(copies.SerializeAsString())
        .Number(r.next_sample)
        .Run();
  }
  int operator()(const StepDecisionRecord& r) const {
    return Statement(db, "INSERT OR REPLACE INTO step_decisions VALUES(?,?,?,?,?,?)")
        .Text(r.run_id)
        .Blob(r.decision.SerializeAsString())
        .Blob(r.record.SerializeAsString())
        .Blob(r.previous.SerializeAsString())
        .Number(r.samples)
        .Number(r.snapshot_step)
        .Run();
  }

  int Delete(const std::string& run_id, std::initializer_list<const char*> statements) const {
    for (const char* sql : statements) {
      if (sql == nullptr) continue;
      const int code = Statement(db, sql).Text(run_id).Run();
      if (code != SQLITE_DONE) return code;
    }
    return SQLITE_DONE;
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<SqliteLog>> SqliteLog::Open(const std::string& path) {
  std::unique_ptr<SqliteLog> log(new SqliteLog(path));
  const int code =
      sqlite3_open_v2(path.c_str(), &log->db_,
                      SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  if (code != SQLITE_OK) return log->Error(code, "open");
  if (absl::Status prepared = log->Prepare(); !prepared.ok()) return prepared;
  return log;
}

SqliteLog::~SqliteLog() { sqlite3_close(db_); }

absl::Status SqliteLog::Prepare() {
  // Exclusive before the first access: no shared memory file, and the lock is never let go.
  for (const char* sql : {"PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=WAL",
                          "PRAGMA synchronous=FULL", "BEGIN EXCLUSIVE", kSchema, "COMMIT"}) {
    if (absl::Status done = Execute(sql); !done.ok()) return done;
  }
  std::string version;
  {
    Statement statement(db_, "SELECT value FROM meta WHERE key='schema_version'");
    const int code = statement.Run();
    if (code == SQLITE_DONE) {
      const int set =
          Statement(db_, "INSERT INTO meta VALUES('schema_version',?)").Text(kSchemaVersion).Run();
      return set == SQLITE_DONE ? absl::OkStatus() : Error(set, "write");
    }
    if (code != SQLITE_ROW) return Error(code, "read");
    version = statement.BytesAt(0);
  }
  const std::pair<const char*, const char*> raises[] = {
      {kRaiseFrom1, "2"}, {kRaiseFrom2, "3"}, {kRaiseFrom3, "4"}};
  for (size_t from = 0; from < std::size(raises); ++from) {
    if (version != absl::StrCat(from + 1)) continue;
    if (absl::Status raised = Execute(raises[from].first); !raised.ok()) return raised;
    version = raises[from].second;
  }
  if (version != kSchemaVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("the coordinator's log ", path_, " has schema version ", version,
                     ", this program reads version ", kSchemaVersion,
                     ". Use the version that wrote it, or another data folder"));
  }
  return absl::OkStatus();
}

absl::Status SqliteLog::Execute(const char* sql) {
  const int code = sqlite3_exec(db_, sql, nullptr, nullptr, nullptr);
  return code == SQLITE_OK ? absl::OkStatus() : Error(code, "use");
}

absl::Status SqliteLog::Error(int code, const char* doing) const {
  const std::string text =
      absl::StrCat("cannot ", doing, " the coordinator's log ", path_, ": ",
                   db_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(db_));
  switch (code & 0xff) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::FailedPreconditionError(
          absl::StrCat("another coordinator holds the data folder of ", path_,
                       ". Stop it, or give this one another --data-dir"));
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(
          absl::StrCat(text, ". Restore it from a backup, or start with another --data-dir"));
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(absl::StrCat(text, ". Make room on that disk"));
    case SQLITE_CANTOPEN:
    case SQLITE_READONLY:
    case SQLITE_PERM:
      return absl::PermissionDeniedError(
          absl::StrCat(text, ". Is the folder there, and may this user write to it?"));
    default:
      return absl::InternalError(text);
  }
}

absl::Status SqliteLog::Append(const std::vector<LogRecord>& records) {
  if (records.empty()) return absl::OkStatus();
  if (absl::Status begun = Execute("BEGIN IMMEDIATE"); !begun.ok()) return begun;
  for (const LogRecord& record : records) {
    const int code = std::visit(Writer{db_}, record);
    if (code != SQLITE_DONE) {
      absl::Status status = Error(code, "write");
      sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
      return status;
    }
  }
  return Execute("COMMIT");
}

absl::StatusOr<LoadedState> SqliteLog::Load() {
  LoadedState state;
  int code = SQLITE_DONE;
  bool damaged = false;
  // Rows in the order that Apply wants them: jobs before what belongs to them.
  const auto each = [&](const char* sql, auto row) {
    if (code != SQLITE_DONE) return;
    Statement statement(db_, sql);
    while ((code = statement.Run()) == SQLITE_ROW) Apply(row(statement), &state);
  };
  each("SELECT value FROM meta WHERE key='cluster_id'",
       [](const Statement& s) -> LogRecord { return ClusterRecord{s.BytesAt(0)}; });
  each("SELECT name, value FROM counters", [](const Statement& s) -> LogRecord {
    return CounterRecord{s.BytesAt(0), s.NumberAt(1)};
  });
  each(
      "SELECT run_id, ord, spec, state, reason, generation, committed_step, weights_digest, "
      "submitted_unix_ms, ended_unix_ms, plan, saving, history_of, first_sample, "
      "checkpoint_sample, steps_lost, checkpoint_steps_lost FROM jobs",
      [&](const Statement& s) -> LogRecord {
        JobRecord job;
        job.run_id = s.BytesAt(0);
        job.order = s.NumberAt(1);
        damaged |= !job.spec.ParseFromString(s.BytesAt(2));
        const int state_number = static_cast<int>(s.NumberAt(3));
        damaged |= !v1::JobState_IsValid(state_number);
        job.state = static_cast<v1::JobState>(state_number);
        job.reason = s.BytesAt(4);
        job.generation = s.NumberAt(5);
        job.committed_step = s.NumberAt(6);
        job.weights_digest = s.BytesAt(7);
        job.submitted_unix_ms = static_cast<int64_t>(s.NumberAt(8));
        job.ended_unix_ms = static_cast<int64_t>(s.NumberAt(9));
        v1::JobStatus plan;
        damaged |= !plan.ParseFromString(s.BytesAt(10));
        job.plan.assign(plan.plan().begin(), plan.plan().end());
        job.first_step = std::max<uint64_t>(1, plan.first_step());
        job.resume = plan.resume();
        job.checkpoint = plan.checkpoint();
        job.saving = s.NumberAt(11) != 0;
        job.history_of = s.BytesAt(12);
        job.first_sample = s.NumberAt(13);
        job.checkpoint_sample = s.NumberAt(14);
        job.steps_lost = s.NumberAt(15);
        job.checkpoint_steps_lost = s.NumberAt(16);
        return job;
      });
  each("SELECT run_id, map_version, job, copies, next_sample FROM store_maps",
       [&](const Statement& s) -> LogRecord {
         StoreMapRecord map;
         map.run_id = s.BytesAt(0);
         map.map_version = s.NumberAt(1);
         damaged |= !map.job.ParseFromString(s.BytesAt(2));
         v1::StoreMap copies;
         damaged |= !copies.ParseFromString(s.BytesAt(3)) || copies.placement_size() % 3 != 0;
         for (int i = 0; i + 2 < copies.placement_size(); i += 3) {
           map.copies.push_back(StoreMapRecord::Copy{copies.placement(i), copies.placement(i + 1),
                                                     copies.placement(i + 2)});
         }
         map.next_sample = s.NumberAt(4);
         return map;
       });
  each("SELECT run_id, decision, record, previous, samples, snapshot_step FROM step_decisions",
       [&](const Statement& s) -> LogRecord {
         StepDecisionRecord step;
         step.run_id = s.BytesAt(0);
         damaged |= !step.decision.ParseFromString(s.BytesAt(1));
         damaged |= !step.record.ParseFromString(s.BytesAt(2));
         damaged |= !step.previous.ParseFromString(s.BytesAt(3));
         step.samples = s.NumberAt(4);
         step.snapshot_step = s.NumberAt(5);
         return step;
       });
  each("SELECT run_id, rank, member, incarnation, host, pid, ended, end FROM ranks",
       [&](const Statement& s) -> LogRecord {
         RankRecord rank;
         rank.run_id = s.BytesAt(0);
         rank.rank = static_cast<uint32_t>(s.NumberAt(1));
         rank.member = s.BytesAt(2);
         rank.incarnation = s.BytesAt(3);
         rank.host = s.BytesAt(4);
         rank.pid = static_cast<int64_t>(s.NumberAt(5));
         rank.ended = s.NumberAt(6) != 0;
         damaged |= !rank.end.ParseFromString(s.BytesAt(7));
         return rank;
       });
  each("SELECT run_id, idx, unix_ms, state, reason FROM events ORDER BY run_id, idx",
       [](const Statement& s) -> LogRecord {
         EventRecord event;
         event.run_id = s.BytesAt(0);
         event.index = s.NumberAt(1);
         event.event.set_unix_ms(static_cast<int64_t>(s.NumberAt(2)));
         event.event.set_state(static_cast<v1::JobState>(s.NumberAt(3)));
         event.event.set_reason(s.BytesAt(4));
         return event;
       });
  each("SELECT incarnation, member, reason, unix_ms FROM fences",
       [](const Statement& s) -> LogRecord {
         return FenceRecord{s.BytesAt(0), s.BytesAt(1), s.BytesAt(2),
                            static_cast<int64_t>(s.NumberAt(3))};
       });
  each("SELECT run_id, generation, key, value FROM keys", [](const Statement& s) -> LogRecord {
    return KeyRecord{s.BytesAt(0), s.NumberAt(1), s.BytesAt(2), s.BytesAt(3)};
  });
  each("SELECT run_id, generation, name FROM barriers", [](const Statement& s) -> LogRecord {
    return BarrierRecord{s.BytesAt(0), s.NumberAt(1), s.BytesAt(2)};
  });
  if (code != SQLITE_DONE) return Error(code, "read");
  if (damaged) {
    return absl::DataLossError(absl::StrCat("the coordinator's log ", path_,
                                            " holds a row that cannot be read; restore it from a "
                                            "backup, or start with another --data-dir"));
  }
  return state;
}

}  // namespace zeroshard::coordinator
