// The coordinator over loopback gRPC, with workers that are stubs in this process.
#include <gmock/gmock.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "tests/coordinator/service/checkpoint_files.h"
#include "tests/coordinator/service/service_fixture.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

TEST_F(ServiceTest, AJobRunsFromSubmissionToItsEndAndIsSeenByAWatcher) {
  Coordinator coordinator(folder.path());
  StartDemo(coordinator, 3);
  EXPECT_EQ(w1.assign().rank(), 1u);
  EXPECT_EQ(w1.assign().spec().gradient_accumulation_steps(), 1u);  // normalised

  std::string value;
  std::thread put([&] { EXPECT_TRUE(w0.Put("gloo/0", "here").ok()); });
  EXPECT_TRUE(w1.GetKey("gloo/0", &value).ok());
  put.join();
  EXPECT_EQ(value, "here");

  std::pair<v1::JobStatus, std::vector<uint64_t>> seen;
  std::thread watcher([&] { seen = coordinator.WatchToTheEnd("demo"); });
  ASSERT_TRUE(w0.Steps(1, 2, &committed).ok());
  EXPECT_EQ(committed, 2u);
  EXPECT_THAT(coordinator.Metrics(),
              AllOf(HasSubstr("zeroshard_job_loss{job=\"demo\"} 4"),
                    HasSubstr("zeroshard_job_committed_step{job=\"demo\"} 2"),
                    HasSubstr("zeroshard_job_nonfinite_total{job=\"demo\"} 0")));
  ASSERT_TRUE(w0.Steps(3, 3, &committed).ok());
  EXPECT_TRUE(w0.End(true).ok());
  EXPECT_TRUE(w1.End(true).ok());
  watcher.join();
  EXPECT_EQ(seen.first.state(), v1::JOB_STATE_COMPLETED);
  EXPECT_THAT(seen.second, ElementsAre(1, 2, 3));
  EXPECT_THAT(coordinator.WatchToTheEnd("demo", 2).second, ElementsAre(3));

  const v1::JobStatus status = coordinator.Get("demo");
  EXPECT_EQ(status.plan_size(), 2);
  EXPECT_EQ(status.directory(), folder / "jobs/demo");
  EXPECT_THAT(Contents(status.directory() + "/history.jsonl"),
              HasSubstr("{\"step\":2,\"loss\":4,\"grad_norm\":0,"));
  EXPECT_THAT(coordinator.Metrics(), Not(HasSubstr("job=\"demo\"")));

  grpc::ClientContext context;
  SetDeadline(&context);
  v1::HistoryRequest request;
  request.set_job("demo-1");
  auto reader = coordinator.client->History(&context, request);
  v1::StepRecord record;
  std::vector<uint64_t> steps;
  while (reader->Read(&record)) steps.push_back(record.step());
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_THAT(steps, ElementsAre(1, 2, 3));
}

TEST_F(ServiceTest, AJobGoesOnUnderACoordinatorThatStartedAgainAtAnotherAddress) {
  auto first = std::make_unique<Coordinator>(folder.path());
  StartDemo(*first, 4);
  ASSERT_TRUE(w0.Steps(1, 2, &committed).ok());
  first.reset();
  std::ofstream(folder / "jobs/demo/history.jsonl", std::ios::app) << "{\"step\":3,";  // torn

  Coordinator second(folder.path());
  EXPECT_EQ(second.engine->term(), 2u);
  EXPECT_EQ(second.Get("demo").committed_step(), 2u);
  w0.Connect(second, true);
  w1.Connect(second, true);
  ASSERT_TRUE(w0.Steps(2, 4, &committed).ok());
  EXPECT_EQ(committed, 4u);
  BothAt("finish");
  EXPECT_TRUE(w0.End(true).ok());
  EXPECT_TRUE(w1.End(true).ok());
  const auto [status, steps] = second.WatchToTheEnd("demo");
  EXPECT_EQ(status.state(), v1::JOB_STATE_COMPLETED) << status.reason();
  EXPECT_EQ(status.generation(), 1u);
  EXPECT_THAT(steps, ElementsAre(1, 2, 3, 4));
}

// The end was logged, the steps before it had not reached the history when the process died.
TEST_F(ServiceTest, AFailedJobSaysAsManyStepsAsItsHistoryHolds) {
  auto first = std::make_unique<Coordinator>(folder.path());
  StartDemo(*first, 4);
  ASSERT_TRUE(w0.Steps(1, 3, &committed).ok());
  EXPECT_TRUE(w1.End(false, "tokens.bin is too short").ok());
  EXPECT_EQ(first->WatchToTheEnd("demo").first.committed_step(), 3u);
  first.reset();
  const std::string path = folder / "jobs/demo/history.jsonl";
  const std::string history = Contents(path);
  std::ofstream(path, std::ios::trunc) << history.substr(0, history.find("{\"step\":2,"));

  Coordinator second(folder.path());
  const v1::JobStatus status = second.Get("demo");
  EXPECT_EQ(status.state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(status.committed_step(), 1u);
  EXPECT_THAT(second.WatchToTheEnd("demo").second, ElementsAre(1));
}

// What a rank 0 says of a checkpoint that is complete.
v1::ReportStepsRequest Saved(const v1::JobSpec& spec, uint64_t step) {
  v1::ReportStepsRequest report;
  v1::CheckpointRecord& record = *report.add_checkpoints();
  record.set_step(step);
  record.set_path(absl::StrCat(spec.checkpoint().dir(), "/step-", step));
  record.set_complete(true);
  return report;
}

TEST_F(ServiceTest, ACancelledJobSavesGoesOnAndItsHistoryIsThatOfAnUninterruptedRun) {
  Coordinator coordinator(folder.path());
  v1::JobSpec spec = Spec(1, 5);
  spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  v1::SubmitResponse response;
  w0.Connect(coordinator);
  ASSERT_TRUE(coordinator.Submit(spec, &response).ok());
  w0.TakeAssignment();
  ASSERT_TRUE(w0.Barrier("start").ok());
  ASSERT_TRUE(w0.Steps(1, 3, &committed).ok());

  grpc::ClientContext context;
  SetDeadline(&context);
  v1::CancelRequest cancel;
  cancel.set_job("demo");
  cancel.set_save(true);
  v1::JobStatus status;
  ASSERT_TRUE(coordinator.client->Cancel(&context, cancel, &status).ok());
  EXPECT_EQ(status.state(), v1::JOB_STATE_RUNNING);
  const v1::CoordinatorMessage stop = w0.Read();
  ASSERT_TRUE(stop.has_stop());
  EXPECT_TRUE(stop.stop().save());
  const std::string path = WriteCheckpoint(w0.assign().spec(), "demo-1", 3);
  ASSERT_TRUE(w0.Report(Saved(spec, 3)).ok());
  ASSERT_TRUE(w0.EndSaved(3).ok());
  EXPECT_EQ(coordinator.WatchToTheEnd("demo").first.state(), v1::JOB_STATE_CANCELLED);
  w0.BeatIdle();

  grpc::ClientContext listing;
  SetDeadline(&listing);
  v1::CheckpointsRequest which;
  which.set_job("demo");
  v1::CheckpointsResponse there;
  ASSERT_TRUE(coordinator.client->Checkpoints(&listing, which, &there).ok());
  ASSERT_EQ(there.checkpoints_size(), 1);
  EXPECT_EQ(there.checkpoints(0).path(), path);
  EXPECT_TRUE(there.checkpoints(0).latest());

  ASSERT_TRUE(coordinator.Submit(spec, &response, "latest").ok());
  EXPECT_EQ(response.status().first_step(), 4u);
  w0.TakeAssignment();
  EXPECT_EQ(w0.assign().run_id(), "demo-2");
  EXPECT_EQ(w0.assign().first_step(), 4u);
  EXPECT_EQ(w0.assign().resume().checkpoint(), path);
  ASSERT_TRUE(w0.Barrier("start").ok());
  ASSERT_TRUE(w0.Steps(4, 5, &committed).ok());
  ASSERT_TRUE(w0.End(true).ok());
  const auto [last, steps] = coordinator.WatchToTheEnd("demo");
  EXPECT_EQ(last.state(), v1::JOB_STATE_COMPLETED) << last.reason();
  EXPECT_THAT(steps, ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(last.first().step(), 4u);
}

TEST_F(ServiceTest, AResumedJobGoesOnUnderACoordinatorThatStartedAgain) {
  v1::JobSpec spec = Spec(1, 5);
  spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  auto first = std::make_unique<Coordinator>(folder.path());
  w0.Connect(*first);
  v1::SubmitResponse response;
  ASSERT_TRUE(first->Submit(spec, &response).ok());
  w0.TakeAssignment();
  WriteCheckpoint(w0.assign().spec(), "elsewhere-1", 3);
  ASSERT_TRUE(w0.End(false, "broken").ok());
  w0.BeatIdle();
  ASSERT_TRUE(first->Submit(spec, &response, folder / "ckpt").ok());
  w0.TakeAssignment();
  first.reset();

  Coordinator second(folder.path());
  EXPECT_EQ(second.Get("demo").committed_step(), 3u);
  w0.Connect(second, true);
  ASSERT_TRUE(w0.Barrier("start").ok());
  ASSERT_TRUE(w0.Steps(4, 5, &committed).ok());
  ASSERT_TRUE(w0.End(true).ok());
  const auto [last, steps] = second.WatchToTheEnd("demo");
  EXPECT_EQ(last.state(), v1::JOB_STATE_COMPLETED) << last.reason();
  EXPECT_THAT(steps, ElementsAre(4, 5));
}

TEST_F(ServiceTest, SubmissionsThatCannotGoOnAreRefused) {
  Coordinator coordinator(folder.path());
  v1::JobSpec spec = Spec(1, 5);
  spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  v1::SubmitResponse response;
  const grpc::Status none = coordinator.Submit(spec, &response, "latest");
  EXPECT_EQ(none.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(none.error_message(), HasSubstr(folder / "ckpt"));
  EXPECT_EQ(coordinator.engine->List().size(), 0u);
  ASSERT_TRUE(coordinator.Submit(Spec(1, 5), &response).ok());
  // Its name is taken, whatever its folder holds.
  ASSERT_TRUE(NormaliseJobSpec(&spec).ok());
  WriteCheckpoint(spec, "demo-0", 3);
  EXPECT_EQ(coordinator.Submit(spec, &response).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  grpc::ClientContext listing;
  SetDeadline(&listing);
  v1::CheckpointsRequest which;
  which.set_job("demo");
  v1::CheckpointsResponse there;
  EXPECT_EQ(coordinator.client->Checkpoints(&listing, which, &there).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
}

TEST_F(ServiceTest, SamplesAndTheValidationLossReachWatchersFilesAndMetrics) {
  Coordinator coordinator(folder.path());
  w0.Connect(coordinator);
  v1::SubmitResponse response;
  ASSERT_TRUE(coordinator.Submit(Spec(1, 2), &response).ok());
  w0.TakeAssignment();
  ASSERT_TRUE(w0.Barrier("start").ok());
  v1::ReportStepsRequest report;
  v1::StepRecord& record = *report.add_records();
  record.set_step(1);
  record.set_loss(3);
  record.set_eval_loss(3.5);
  v1::SampleRecord& sample = *report.add_samples();
  sample.set_step(1);
  sample.set_prompt("Once");
  sample.set_text(" upon");
  ASSERT_TRUE(w0.Report(report).ok());
  EXPECT_THAT(coordinator.Metrics(), HasSubstr("zeroshard_job_eval_loss{job=\"demo\"} 3.5"));
  std::pair<v1::JobStatus, std::vector<uint64_t>> seen;
  std::thread watcher([&] { seen = coordinator.WatchToTheEnd("demo"); });
  ASSERT_TRUE(w0.Steps(2, 2, &committed).ok());
  report.clear_records();
  report.mutable_samples(0)->set_step(2);
  ASSERT_TRUE(w0.Report(report).ok());
  ASSERT_TRUE(w0.End(true).ok());
  watcher.join();
  EXPECT_THAT(coordinator.samples, ElementsAre("1:Once upon", "2:Once upon"));
  EXPECT_THAT(Contents(folder / "jobs/demo/history.jsonl"), HasSubstr("\"eval_loss\":3.5"));
  EXPECT_THAT(Contents(folder / "jobs/demo/samples.jsonl"),
              HasSubstr("{\"step\":2,\"prompt\":\"Once\",\"text\":\" upon\"}\n"));
  EXPECT_THAT(coordinator.Metrics(), Not(HasSubstr("zeroshard_job_eval_loss{")));
  coordinator.WatchToTheEnd("demo", 1);
  EXPECT_THAT(coordinator.samples, ElementsAre("2:Once upon"));
}

TEST_F(ServiceTest, WithoutItsStateACoordinatorStopsTheRunAndTakesItsWorkers) {
  auto first = std::make_unique<Coordinator>(folder.path());
  StartDemo(*first, 4);
  first.reset();
  TempFolder empty;
  Coordinator second(empty.path());
  w0.Connect(second, true);
  const v1::CoordinatorMessage stop = w0.Read();
  ASSERT_TRUE(stop.has_stop());
  EXPECT_EQ(stop.stop().run_id(), "demo-1");
  EXPECT_THAT(stop.stop().reason(), HasSubstr("has no run \"demo-1\""));
  v1::SubmitResponse response;
  ASSERT_TRUE(second.Submit(Spec(1, 1), &response).ok());
  w0.BeatIdle();
  w0.TakeAssignment();
}

TEST_F(ServiceTest, AFailedRankStopsTheOtherAndIsNamed) {
  Coordinator coordinator(folder.path());
  StartDemo(coordinator, 4);
  EXPECT_TRUE(
      w1.End(false, "step 1: the loss of rank 1 is NaN, sample 3", /*nonfinite=*/true).ok());
  const v1::CoordinatorMessage stop = w0.Read();
  ASSERT_TRUE(stop.has_stop());
  EXPECT_THAT(stop.stop().reason(), HasSubstr("the loss of rank 1 is NaN"));
  const auto [status, steps] = coordinator.WatchToTheEnd("demo");
  EXPECT_EQ(status.state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(status.reason(), HasSubstr("rank 1 (worker-1 on localhost): INTERNAL: step 1"));
  EXPECT_THAT(coordinator.Metrics(),
              AllOf(HasSubstr("zeroshard_job_nonfinite_total{job=\"demo\"} 1"),
                    Not(HasSubstr("zeroshard_job_loss{"))));
}

TEST_F(ServiceTest, LogsAreKeptByRankAndFollowed) {
  Coordinator coordinator(folder.path());
  StartDemo(coordinator, 1);
  v1::MemberMessage message;
  *message.mutable_log()->mutable_running() = w1.fence();
  message.mutable_log()->add_lines("hello");
  message.mutable_log()->add_lines("from rank 1");
  w1.Say(message);
  std::thread finish([&] {
    EXPECT_TRUE(w0.Steps(1, 1, &committed).ok());
    EXPECT_TRUE(w0.End(true).ok());
    EXPECT_TRUE(w1.End(true).ok());
  });
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::LogsRequest request;
  request.set_job("demo");
  request.set_follow(true);
  auto reader = coordinator.client->Logs(&context, request);
  v1::LogChunk chunk;
  std::string text;
  while (reader->Read(&chunk)) absl::StrAppend(&text, chunk.rank(), ":", chunk.text());
  finish.join();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(text, "1:hello\nfrom rank 1\n");
}

TEST_F(ServiceTest, WhatCannotBeDoneIsSaidWithTheRightCode) {
  Coordinator coordinator(folder.path());
  v1::SubmitResponse response;
  v1::JobSpec spec = Spec(2, 1);
  spec.set_train_batch_size(3);
  EXPECT_EQ(coordinator.Submit(spec, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  ASSERT_TRUE(coordinator.Submit(Spec(2, 1), &response).ok());
  EXPECT_EQ(response.run_id(), "demo-1");
  EXPECT_EQ(response.status().state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(coordinator.Submit(Spec(2, 1), &response).error_code(),
            grpc::StatusCode::ALREADY_EXISTS);
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::WatchRequest request;
  request.set_job("nobody");
  auto reader = coordinator.client->Watch(&context, request);
  v1::WatchUpdate update;
  EXPECT_FALSE(reader->Read(&update));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("demo"));
}

TEST_F(ServiceTest, ACallerThatGivesUpLeavesNothingBehind) {
  Coordinator coordinator(folder.path());
  StartDemo(coordinator, 1);
  std::string value;
  // More than may wait at once: each must have been taken out again.
  for (int i = 0; i < 100; ++i) {
    const grpc::Status status = w0.GetKey("never", &value, std::chrono::milliseconds(10));
    ASSERT_EQ(status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  EXPECT_TRUE(w1.Put("never", "now").ok());
  EXPECT_TRUE(w0.GetKey("never", &value).ok());
}

TEST_F(ServiceTest, AShutdownEndsWatchersAndWaitersAtOnce) {
  auto coordinator = std::make_unique<Coordinator>(folder.path());
  StartDemo(*coordinator, 1);
  grpc::Status waited;
  std::string value;
  std::thread waiter([&] { waited = w0.GetKey("never", &value); });
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::WatchRequest request;
  request.set_job("demo");
  request.set_follow(true);
  auto reader = coordinator->client->Watch(&context, request);
  v1::WatchUpdate update;
  ASSERT_TRUE(reader->Read(&update));
  coordinator->engine->Stop();
  while (reader->Read(&update)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  waiter.join();
  EXPECT_EQ(waited.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(ServiceTest, PayloadsAroundTheUsualLimitPassAndHugeOnesAreRefused) {
  Coordinator coordinator(folder.path());
  StartDemo(coordinator, 1);
  for (const size_t size : {4194303u, 4194304u}) {
    EXPECT_EQ(w0.Put("k", std::string(size, 'x')).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  }
  EXPECT_EQ(w0.Put("k", std::string(200 << 20, 'x')).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_TRUE(w0.Put("k", "still here").ok());
}

TEST_F(ServiceTest, MetricsAreCleanUnderPromtool) {
  if (std::system("promtool --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "no promtool here";
  Coordinator coordinator(folder.path());
  StartDemo(coordinator, 2);
  ASSERT_TRUE(w0.Steps(1, 1, &committed).ok());
  std::ofstream(folder / "metrics.txt") << coordinator.Metrics();
  EXPECT_EQ(std::system(absl::StrCat("promtool check metrics < ", folder / "metrics.txt", " > ",
                                     folder / "verdict.txt", " 2>&1")
                            .c_str()),
            0)
      << Contents(folder / "verdict.txt");
  EXPECT_EQ(Contents(folder / "verdict.txt"), "");
}

TEST_F(ServiceTest, NodesAndVersionAnswer) {
  Coordinator coordinator(folder.path());
  w0.Connect(coordinator);
  grpc::ClientContext context;
  SetDeadline(&context);
  v1::NodesResponse nodes;
  ASSERT_TRUE(coordinator.client->Nodes(&context, {}, &nodes).ok());
  ASSERT_EQ(nodes.nodes_size(), 1);
  EXPECT_EQ(nodes.nodes(0).hello().name(), "worker-0");
  EXPECT_EQ(nodes.nodes(0).state(), "idle");
  EXPECT_EQ(nodes.term(), 1u);
  grpc::ClientContext other;
  SetDeadline(&other);
  v1::VersionResponse version;
  ASSERT_TRUE(coordinator.client->Version(&other, {}, &version).ok());
  EXPECT_NE(version.version(), "");
}

// A log whose disk is full when a job comes.
class FullLog : public DurableLog {
 public:
  absl::StatusOr<LoadedState> Load() override { return LoadedState(); }
  absl::Status Append(const std::vector<LogRecord>& records) override {
    for (const LogRecord& record : records) {
      if (std::holds_alternative<JobRecord>(record)) {
        return absl::ResourceExhaustedError("disk full");
      }
    }
    return absl::OkStatus();
  }
};

TEST_F(ServiceTest, NothingIsToldThatCouldNotBeWritten) {
  const auto registry = MakeRegistry("coordinator");
  std::promise<absl::Status> fatal;
  Engine::Options options;
  options.data_dir = folder.path();
  options.clock = &SystemClock::Get();
  options.registry = registry.get();
  options.on_fatal = [&](const absl::Status& status) { fatal.set_value(status); };
  auto engine = Engine::Start(options, std::make_unique<FullLog>());
  ASSERT_TRUE(engine.ok());
  std::promise<absl::Status> told;
  (*engine)->Call(coordinator::Submit{0, Spec(1, 1), {}},
                  [&](const Reply& reply) { told.set_value(reply.status); });
  EXPECT_EQ(fatal.get_future().get().message(), "disk full");
  (*engine)->Stop();
  EXPECT_EQ(told.get_future().get().code(), absl::StatusCode::kUnavailable);
}

// The next write to the job's history finds the disk full.
void FillDisk(const std::string& history) {
  std::filesystem::remove(history);
  std::filesystem::create_symlink("/dev/full", history);
}

TEST_F(ServiceTest, AHistoryForWhichThereIsNoRoomIsWrittenWhenThereIs) {
  std::atomic<bool> ended{false};
  Coordinator coordinator(folder.path(), [&](Engine::Options* options) {
    options->on_fatal = [&](const absl::Status&) { ended = true; };
  });
  StartDemo(coordinator, 2);
  const std::string history = folder / "jobs/demo/history.jsonl";
  FillDisk(history);
  grpc::Status reported;
  std::thread report([&] { reported = w0.Steps(1, 2, &committed); });
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto tried_again = [&] {
    return !absl::StrContains(coordinator.Metrics(),
                              "zeroshard_coordinator_write_retries_total 0\n");
  };
  while (!tried_again() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(tried_again());
  EXPECT_NE(coordinator.engine->term(), 0u) << "what asks nothing of the disk is answered";
  std::filesystem::remove(history);
  report.join();
  EXPECT_TRUE(reported.ok()) << reported.error_message();
  EXPECT_EQ(committed, 2u);
  EXPECT_THAT(Contents(history), AllOf(HasSubstr("{\"step\":1,"), HasSubstr("{\"step\":2,")));
  EXPECT_FALSE(ended);
  EXPECT_TRUE(w0.End(true).ok());
  EXPECT_TRUE(w1.End(true).ok());
}

TEST_F(ServiceTest, AHistoryForWhichThereStaysNoRoomEndsTheCoordinatorWithItsName) {
  std::promise<absl::Status> fatal;
  Coordinator coordinator(folder.path(), [&](Engine::Options* options) {
    options->write_patience = absl::Milliseconds(50);
    options->on_fatal = [&](const absl::Status& status) { fatal.set_value(status); };
  });
  StartDemo(coordinator, 2);
  const std::string history = folder / "jobs/demo/history.jsonl";
  FillDisk(history);
  std::thread report([&] { EXPECT_FALSE(w0.Steps(1, 2, &committed).ok()); });
  const absl::Status status = fatal.get_future().get();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(history));
  coordinator.engine->Stop();
  report.join();
}

// A log whose disk hangs until it is released.
class HangingLog : public DurableLog {
 public:
  HangingLog(std::promise<void>* entered, std::shared_future<void> released)
      : entered_(entered), released_(std::move(released)) {}
  absl::StatusOr<LoadedState> Load() override { return LoadedState(); }
  absl::Status Append(const std::vector<LogRecord>&) override {
    if (entered_ != nullptr) std::exchange(entered_, nullptr)->set_value();
    const bool freed = released_.wait_for(kPatience) == std::future_status::ready;
    return freed ? absl::OkStatus() : absl::DeadlineExceededError("the test never released it");
  }

 private:
  std::promise<void>* entered_;
  const std::shared_future<void> released_;
};

class QuietWatcher : public Watcher {
 public:
  void Notify() override {}
  void Close() override {}
};

// `add` adds a decision to those that wait for the disk.
void ExpectBounded(const std::string& data_dir, const std::function<void(Engine*)>& add) {
  const auto registry = MakeRegistry("coordinator");
  std::promise<absl::Status> fatal;  // set twice it would throw
  std::future<absl::Status> seen = fatal.get_future();
  std::promise<void> entered;
  std::promise<void> release;
  Engine::Options options;
  options.data_dir = data_dir;
  options.clock = &SystemClock::Get();
  options.registry = registry.get();
  options.max_waiting = 8;
  options.on_fatal = [&](const absl::Status& status) { fatal.set_value(status); };
  auto engine =
      Engine::Start(options, std::make_unique<HangingLog>(&entered, release.get_future().share()));
  ASSERT_TRUE(engine.ok());
  EXPECT_EQ(entered.get_future().wait_for(kPatience), std::future_status::ready);
  for (int i = 0; i < 20; ++i) add(engine->get());
  // The disk still hangs: the writer cannot be the one that notices.
  if (seen.wait_for(std::chrono::seconds(0)) == std::future_status::ready) {
    const absl::Status status = seen.get();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("8 decisions wait for the disk of"), HasSubstr(data_dir)));
  } else {
    ADD_FAILURE() << "20 decisions wait where 8 may";
  }
  release.set_value();
  (*engine)->Stop();
}

TEST_F(ServiceTest, CallsThatWaitForAHangingDiskAreBounded) {
  ExpectBounded(folder.path(), [](Engine* engine) {
    engine->Call(coordinator::Cancel{0, "demo"}, [](const Reply&) {});
  });
}

TEST_F(ServiceTest, WatchersThatWaitForAHangingDiskAreBounded) {
  ExpectBounded(folder.path(),
                [](Engine* engine) { engine->Watch("demo-1", std::make_shared<QuietWatcher>()); });
}

}  // namespace
}  // namespace zeroshard::coordinator
