#include "coordinator/core/sqlite_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/coordinator/core/harness.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::HasSubstr;

class SqliteLogTest : public ::testing::Test {
 protected:
  SqliteLogTest() {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = absl::StrCat(::testing::TempDir(), "/sqlite_log_", getpid(), "_", info->name());
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    path_ = folder_ + "/coordinator.db";
  }
  ~SqliteLogTest() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<SqliteLog> Open() {
    auto log = SqliteLog::Open(path_);
    EXPECT_TRUE(log.ok()) << log.status();
    return *std::move(log);
  }

  std::string folder_;
  std::string path_;
};

std::string Text(const LoadedState& state) {
  std::string text = absl::StrCat("cluster ", state.cluster_id, "\n");
  for (const auto& [name, value] : state.counters) absl::StrAppend(&text, name, "=", value, "\n");
  for (const auto& [id, f] : state.fences) {
    absl::StrAppend(&text, "fence ", id, " ", f.member, " ", f.reason, " ", f.unix_ms, "\n");
  }
  for (const auto& [id, j] : state.jobs) {
    const JobRecord& job = j.job;
    absl::StrAppend(&text, id, " ", job.order, " ", job.run_id, " ", job.spec.SerializeAsString(),
                    " ", job.state, " ", job.reason, " ", job.generation, " ", job.committed_step,
                    " ", job.weights_digest, " ", job.submitted_unix_ms, " ", job.ended_unix_ms,
                    " ", job.first_step, " ", job.resume.SerializeAsString(), " ",
                    job.checkpoint.SerializeAsString(), " ", job.saving, " ", job.history_of, " ",
                    job.first_sample, " ", job.checkpoint_sample, " ", job.steps_lost, " ",
                    job.checkpoint_steps_lost);
    if (j.stores) {
      absl::StrAppend(&text, "\nmap ", j.stores->run_id, " ", j.stores->map_version, " ",
                      j.stores->job.SerializeAsString(), " ", j.stores->next_sample);
      for (const StoreMapRecord::Copy& copy : j.stores->copies) {
        absl::StrAppend(&text, " ", copy.to_store, "<", copy.chunk, "<", copy.from_store);
      }
    }
    if (j.decision) {
      absl::StrAppend(&text, "\ndecision ", j.decision->run_id, " ",
                      j.decision->decision.SerializeAsString(), " ",
                      j.decision->record.SerializeAsString(), " ",
                      j.decision->previous.SerializeAsString(), " ", j.decision->samples, " ",
                      j.decision->snapshot_step);
    }
    for (const v1::ShardPlan& plan : job.plan) absl::StrAppend(&text, plan.SerializeAsString());
    for (const auto& [rank, r] : j.ranks) {
      absl::StrAppend(&text, "\nrank ", rank, " ", r.rank, " ", r.member, " ", r.incarnation, " ",
                      r.host, " ", r.pid, " ", r.ended, " ", r.end.SerializeAsString());
    }
    for (const auto& [index, event] : j.events) {
      absl::StrAppend(&text, "\nevent ", index, " ", event.SerializeAsString());
    }
    for (const auto& [key, value] : j.keys) absl::StrAppend(&text, "\nkey ", key, "=", value);
    std::vector<std::string> barriers = j.barriers;
    std::sort(barriers.begin(), barriers.end());
    for (const std::string& name : barriers) absl::StrAppend(&text, "\nbarrier ", name);
    absl::StrAppend(&text, "\n");
  }
  return text;
}

TEST_F(SqliteLogTest, GivesBackWhatAnyMixOfRecordsAmountsTo) {
  JobRecord job;
  job.order = 7;
  job.run_id = "a-1";
  job.spec = Harness::Spec("a", 2);
  job.state = v1::JOB_STATE_RUNNING;
  job.reason = "it's \"running\"";
  job.generation = 3;
  job.plan.emplace_back().set_owned_parameters(64);
  job.first_step = 41;
  job.resume.set_checkpoint("/ckpt/step-00000040");
  job.checkpoint.set_step(60);
  job.checkpoint.set_path("/ckpt/step-00000060");
  job.saving = true;
  job.history_of = "a-0";
  job.first_sample = 1;
  job.checkpoint_sample = 2;
  job.steps_lost = 3;
  job.checkpoint_steps_lost = 2;
  StoreMapRecord map{"a-1", 4, {}, {{0, 7, 1}, {1, 8, 0}}, 163};
  map.job.mutable_base()->set_epoch(2);
  map.job.mutable_map()->set_replicas(2);
  map.job.mutable_map()->add_stores()->set_incarnation(std::string(32, 'b'));
  map.job.mutable_map()->add_placement(0);
  StepDecisionRecord decided;
  decided.run_id = "a-1";
  decided.decision.set_step(61);
  decided.decision.set_multiplier(0.25f);
  decided.record.set_loss(2.5);
  decided.record.set_steps_lost(1);
  decided.previous.set_step(60);
  decided.samples = 1000;
  decided.snapshot_step = 60;
  RankRecord rank{"a-1", 1, "worker-1", std::string(32, 'a'), "host", 99, false, {}};
  v1::JobEvent event;
  event.set_reason("submitted");
  std::vector<std::vector<LogRecord>> batches = {
      {ClusterRecord{"c1"}, CounterRecord{"term", 1}, job},
      {rank, EventRecord{"a-1", 0, event}, KeyRecord{"a-1", 3, "k", std::string("\0\xff", 2)},
       BarrierRecord{"a-1", 3, "start"}},
      {FenceRecord{"dead", "worker-9", "lost", 123}, CounterRecord{"term", UINT64_MAX >> 1}},
  };
  rank.ended = true;
  rank.end.set_message("done");
  batches.push_back({rank, BarrierRecord{"a-1", 3, "finish"}});
  batches.push_back({EventRecord{"a-1", 1, event}, EventForgottenRecord{"a-1", 0}});
  batches.push_back({map, decided});
  ++map.map_version;
  decided.decision.set_step(62);
  batches.push_back({map});
  batches.push_back({decided});
  MemoryLog model;
  {
    auto log = Open();
    for (const auto& batch : batches) {
      ASSERT_TRUE(log->Append(batch).ok());
      ASSERT_TRUE(model.Append(batch).ok());
    }
    EXPECT_EQ(Text(*log->Load()), Text(*model.Load()));
  }
  auto log = Open();
  EXPECT_EQ(Text(*log->Load()), Text(*model.Load()));
  for (const LogRecord& record :
       {LogRecord(GenerationClosedRecord{"a-1", false}),
        LogRecord(GenerationClosedRecord{"a-1", true}), LogRecord(JobForgottenRecord{"a-1"})}) {
    ASSERT_TRUE(log->Append({record}).ok());
    ASSERT_TRUE(model.Append({record}).ok());
    EXPECT_EQ(Text(*log->Load()), Text(*model.Load()));
  }
}

TEST_F(SqliteLogTest, KeepsOnlyTheLastEventsOfARun) {
  auto log = Open();
  JobRecord job;
  job.run_id = "a-1";
  ASSERT_TRUE(log->Append({job}).ok());
  std::vector<LogRecord> events;
  for (uint64_t i = 0; i < kMaxEvents + 5; ++i) events.push_back(EventRecord{"a-1", i, {}});
  ASSERT_TRUE(log->Append(events).ok());
  const LoadedState state = *log->Load();
  EXPECT_EQ(state.jobs.at("a-1").events.size(), kMaxEvents);
  EXPECT_EQ(state.jobs.at("a-1").events.begin()->first, 5u);
}

TEST_F(SqliteLogTest, ASecondCoordinatorOnTheSameFolderIsRefused) {
  auto log = Open();
  const auto second = SqliteLog::Open(path_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()),
              HasSubstr("another coordinator holds the data folder"));
  log.reset();
  EXPECT_TRUE(SqliteLog::Open(path_).ok());
}

TEST_F(SqliteLogTest, AnotherSchemaVersionIsRefusedByNumber) {
  Open();
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
  sqlite3_exec(db, "UPDATE meta SET value='99' WHERE key='schema_version'", nullptr, nullptr,
               nullptr);
  sqlite3_close(db);
  const auto log = SqliteLog::Open(path_);
  EXPECT_EQ(log.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(log.status().message()), HasSubstr("schema version 99"));
}

// The tables of version 1, with one job, as that version wrote them.
TEST_F(SqliteLogTest, AFileOfTheFirstVersionIsRaisedAndItsJobsAreFreshStarts) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db,
                         "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT "
                         "ROWID; INSERT INTO meta VALUES('schema_version','1');"
                         "CREATE TABLE jobs(run_id TEXT PRIMARY KEY, ord INTEGER NOT NULL, spec "
                         "BLOB NOT NULL, state INTEGER NOT NULL, reason TEXT NOT NULL, generation "
                         "INTEGER NOT NULL, committed_step INTEGER NOT NULL, weights_digest TEXT "
                         "NOT NULL, submitted_unix_ms INTEGER NOT NULL, ended_unix_ms INTEGER NOT "
                         "NULL, plan BLOB NOT NULL);"
                         "INSERT INTO jobs VALUES('a-1',7,x'',3,'running',2,5,'d',11,12,x'');",
                         nullptr, nullptr, nullptr),
            SQLITE_OK);
  sqlite3_close(db);
  for (int life = 0; life < 2; ++life) {
    const auto log = Open();
    const LoadedState state = *log->Load();
    const JobRecord& job = state.jobs.at("a-1").job;
    EXPECT_EQ(job.reason, "running");
    EXPECT_EQ(job.committed_step, 5u);
    EXPECT_EQ(job.first_step, 1u);
    EXPECT_EQ(job.resume.checkpoint(), "");
    EXPECT_FALSE(job.saving);
    ASSERT_TRUE(log->Append({job}).ok());
  }
}

// The table of version 2 that is another now, with one job, as that version wrote it.
TEST_F(SqliteLogTest, AFileOfTheSecondVersionIsRaisedAndTakesOffloadedJobs) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(
      sqlite3_exec(db,
                   "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT "
                   "ROWID; INSERT INTO meta VALUES('schema_version','2');"
                   "CREATE TABLE jobs(run_id TEXT PRIMARY KEY, ord INTEGER NOT NULL, spec "
                   "BLOB NOT NULL, state INTEGER NOT NULL, reason TEXT NOT NULL, generation "
                   "INTEGER NOT NULL, committed_step INTEGER NOT NULL, weights_digest TEXT "
                   "NOT NULL, submitted_unix_ms INTEGER NOT NULL, ended_unix_ms INTEGER NOT "
                   "NULL, plan BLOB NOT NULL, saving INTEGER NOT NULL DEFAULT 0, history_of "
                   "TEXT NOT NULL DEFAULT '');"
                   "INSERT INTO jobs VALUES('a-1',7,x'',3,'running',2,5,'d',11,12,x'',1,'z');",
                   nullptr, nullptr, nullptr),
      SQLITE_OK);
  sqlite3_close(db);
  for (int life = 0; life < 2; ++life) {
    const auto log = Open();
    const LoadedState state = *log->Load();
    const LoadedJob& loaded = state.jobs.at("a-1");
    EXPECT_TRUE(loaded.job.saving);
    EXPECT_EQ(loaded.job.history_of, "z");
    EXPECT_EQ(loaded.job.steps_lost, life == 0 ? 0u : 9u);
    EXPECT_EQ(loaded.stores.has_value(), life == 1);
    JobRecord job = loaded.job;
    job.steps_lost = 9;
    ASSERT_TRUE(log->Append({job, StoreMapRecord{"a-1", 1, {}, {}, 0}}).ok());
  }
}

// The same of version 3.
TEST_F(SqliteLogTest, AFileOfTheThirdVersionIsRaisedAndKeepsItsLostSteps) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(
                db,
                "CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT "
                "ROWID; INSERT INTO meta VALUES('schema_version','3');"
                "CREATE TABLE jobs(run_id TEXT PRIMARY KEY, ord INTEGER NOT NULL, spec "
                "BLOB NOT NULL, state INTEGER NOT NULL, reason TEXT NOT NULL, generation "
                "INTEGER NOT NULL, committed_step INTEGER NOT NULL, weights_digest TEXT "
                "NOT NULL, submitted_unix_ms INTEGER NOT NULL, ended_unix_ms INTEGER NOT "
                "NULL, plan BLOB NOT NULL, saving INTEGER NOT NULL DEFAULT 0, history_of "
                "TEXT NOT NULL DEFAULT '', first_sample INTEGER NOT NULL DEFAULT 0, "
                "checkpoint_sample INTEGER NOT NULL DEFAULT 0, steps_lost INTEGER NOT NULL "
                "DEFAULT 0);"
                "INSERT INTO jobs VALUES('a-1',7,x'',3,'running',2,5,'d',11,12,x'',1,'z',4,6,9);",
                nullptr, nullptr, nullptr),
            SQLITE_OK);
  sqlite3_close(db);
  for (int life = 0; life < 2; ++life) {
    const auto log = Open();
    JobRecord job = log->Load()->jobs.at("a-1").job;
    EXPECT_EQ(job.checkpoint_sample, 6u);
    EXPECT_EQ(job.steps_lost, 9u);
    EXPECT_EQ(job.checkpoint_steps_lost, life == 0 ? 0u : 8u);
    job.checkpoint_steps_lost = 8;
    ASSERT_TRUE(log->Append({job}).ok());
  }
}

TEST_F(SqliteLogTest, AFileThatIsNoLogIsRefused) {
  std::ofstream(path_) << std::string(8192, 'x');
  EXPECT_EQ(SqliteLog::Open(path_).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(SqliteLogTest, AFolderThatIsNotThereIsNamed) {
  const auto log = SqliteLog::Open(folder_ + "/absent/coordinator.db");
  EXPECT_EQ(log.status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(log.status().message()), HasSubstr("absent/coordinator.db"));
}

}  // namespace
}  // namespace zeroshard::coordinator
