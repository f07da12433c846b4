// A worker with fake parts, and a coordinator that does what the test says.
#pragma once

#include <fstream>
#include <memory>
#include <string>

#include "gtest/gtest.h"
#include "tests/common/member/fake_cluster.h"
#include "tests/common/temp_folder.h"
#include "tests/worker/agent/fake_backend.h"
#include "worker/agent/worker_agent.h"

namespace zeroshard {

class WorkerAgentTest : public testing::Test {
 protected:
  WorkerAgentTest() {
    data_ = folder_ / "text";
    std::ofstream(data_) << "some text to train on";
    MemberSessionOptions options;
    options.coordinator = cluster_.address();
    options.hello.set_name("worker-0");
    options.hello.set_host("host-a");
    options.first_backoff = absl::Milliseconds(5);
    options.most_backoff = absl::Milliseconds(50);
    agent_ = std::make_unique<WorkerAgent>(options, &backend_, &metrics_);
  }
  ~WorkerAgentTest() override { agent_.reset(); }

  v1::Assign Job(const std::string& run, uint32_t rank = 0, uint32_t world = 1) const {
    v1::Assign assign;
    assign.set_run_id(run);
    assign.set_job(run.substr(0, run.find('-')));
    assign.set_generation(1);
    assign.set_rank(rank);
    assign.set_world_size(world);
    assign.set_first_step(1);
    v1::JobSpec& spec = *assign.mutable_spec();
    spec.mutable_data()->add_train(data_);
    spec.mutable_data()->set_tokenizer("bytes");
    spec.mutable_model()->set_sequence_length(4);
    spec.mutable_model()->set_vocab_size(256);
    spec.set_steps(20);
    spec.mutable_zero_optimization()->set_stage(3);
    spec.mutable_timeouts()->set_start_seconds(30);
    spec.mutable_timeouts()->set_step_seconds(30);
    spec.mutable_timeouts()->set_collective_seconds(30);
    return assign;
  }
  void Assign(const v1::Assign& assign) {
    ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.heartbeats.empty(); }));
    v1::CoordinatorMessage message;
    *message.mutable_assign() = assign;
    cluster_.Send(message);
  }
  // A job that saves.
  v1::Assign SavingJob(const std::string& run) const {
    v1::Assign assign = Job(run);
    assign.mutable_spec()->mutable_checkpoint()->set_dir("/ckpt");
    return assign;
  }
  // The trainer trains step after step, for as long as a test may take.
  void TrainSlowly(v1::Assign* assign) {
    assign->mutable_spec()->set_steps(1000000);
    training_.on_step = [this](uint64_t) {
      std::unique_lock<std::mutex> lock(training_.mutex);
      training_.changed.wait_for(lock, std::chrono::milliseconds(1));
      return training_.aborted.empty() ? absl::OkStatus() : absl::AbortedError(training_.aborted);
    };
  }
  void StopRun(const std::string& run, const std::string& reason, bool save = false) {
    v1::CoordinatorMessage message;
    message.mutable_stop()->set_save(save);
    message.mutable_stop()->set_run_id(run);
    message.mutable_stop()->set_generation(1);
    message.mutable_stop()->set_reason(reason);
    cluster_.Send(message);
  }
  v1::ReportEndRequest AwaitEnd(size_t number = 1) {
    EXPECT_TRUE(cluster_.Await([&](const auto& state) { return state.ends.size() >= number; }));
    v1::ReportEndRequest end;
    cluster_.With([&](auto& state) {
      if (state.ends.size() >= number) end = state.ends[number - 1];
    });
    return end;
  }
  // The trainer is in that step (a run that still loads has its first step already).
  bool AwaitStep(uint64_t step) {
    return cluster_.Await([step](const auto& state) {
      const v1::Progress& progress = state.heartbeats.back().progress();
      return progress.step() == step && progress.phase() == "forward";
    });
  }
  // A heartbeat says that nothing runs, and nothing does (a late one may be older than the run):
  // what the run calls is free to change.
  bool AwaitIdle() {
    size_t before = 0;
    cluster_.With([&](auto& state) { before = state.heartbeats.size(); });
    return cluster_.Await([&](const auto& state) {
      v1::Fence fence;
      v1::Progress progress;
      return state.heartbeats.size() > before && !state.heartbeats.back().has_running() &&
             !agent_->Running(&fence, &progress);
    });
  }

  const TempFolder folder_;
  std::string data_;
  FakeCluster cluster_;
  FakeTraining training_;
  WorkerBackend backend_ = MakeFakeBackend(&training_);
  WorkerMetrics metrics_;
  std::unique_ptr<WorkerAgent> agent_;
};

}  // namespace zeroshard
