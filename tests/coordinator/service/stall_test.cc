// Real member sessions, and a history that cannot be written for longer than members are waited
// for.
#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <optional>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "common/member/cluster_client.h"
#include "common/member/member_session.h"
#include "tests/coordinator/service/service_fixture.h"

namespace zeroshard::coordinator {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(2);

// Holds `condition` within the test's patience.
template <typename Condition>
bool Await(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

void ShortTimes(Engine::Options* options) {
  options->core.heartbeat_interval = absl::Milliseconds(100);
  options->core.member_timeout = kTimeout;
}

std::string History(const std::string& data_dir) { return data_dir + "/jobs/demo/history.jsonl"; }

// The next write to the job's history finds the disk full.
void FillDisk(const std::string& data_dir) {
  std::filesystem::remove(History(data_dir));
  std::filesystem::create_symlink("/dev/full", History(data_dir));
}

void MakeRoom(const std::string& data_dir) { std::filesystem::remove(History(data_dir)); }

void AwaitStall(Coordinator& coordinator) {
  EXPECT_TRUE(Await([&] {
    return !absl::StrContains(coordinator.Metrics(),
                              "zeroshard_coordinator_write_retries_total 0\n");
  }));
}

// A worker that says that it runs whatever it was assigned.
class Worker : public MemberHandler {
 public:
  Worker(const Coordinator& coordinator, const std::string& name)
      : client(coordinator.server->address()), session_(Options(coordinator, name), this) {}
  ~Worker() override { session_.Leave("", absl::ZeroDuration()); }

  void OnAssign(const v1::Assign& assign) override {
    std::lock_guard<std::mutex> lock(mutex_);
    fence_.emplace();
    fence_->set_member(name_);
    fence_->set_incarnation(session_.incarnation());
    fence_->set_run_id(assign.run_id());
    fence_->set_generation(assign.generation());
    fence_->set_rank(assign.rank());
    ++assigned_;
  }
  void OnWelcome() override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++welcomed_;
  }
  void OnStop(const v1::Stop& stop) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++stopped_;
  }
  void OnFenced(const std::string& reason) override {
    std::lock_guard<std::mutex> lock(mutex_);
    ++stopped_;
    fence_.reset();
  }
  bool Running(v1::Fence* fence, v1::Progress*) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (fence_) *fence = *fence_;
    return fence_.has_value();
  }

  v1::Fence fence() {
    std::lock_guard<std::mutex> lock(mutex_);
    return fence_.value_or(v1::Fence());
  }
  int assigned() { return Read(&assigned_); }
  int welcomed() { return Read(&welcomed_); }
  int stopped() { return Read(&stopped_); }

  ClusterClient client;

 private:
  MemberSessionOptions Options(const Coordinator& coordinator, const std::string& name) {
    name_ = name;
    MemberSessionOptions options;
    options.coordinator = coordinator.server->address();
    options.hello.set_kind(v1::MEMBER_KIND_WORKER);
    options.hello.set_name(name);
    options.hello.set_host("localhost");
    options.hello.set_pid(4711);
    return options;
  }
  int Read(const int* value) {
    std::lock_guard<std::mutex> lock(mutex_);
    return *value;
  }

  std::mutex mutex_;
  std::string name_;
  std::optional<v1::Fence> fence_;
  int assigned_ = 0, welcomed_ = 0, stopped_ = 0;
  MemberSession session_;
};

v1::ReportStepsRequest Step(const v1::Fence& fence, uint64_t step) {
  v1::ReportStepsRequest request;
  *request.mutable_fence() = fence;
  v1::StepRecord& record = *request.add_records();
  record.set_step(step);
  record.set_loss(1);
  record.set_tokens(64);
  return request;
}

TEST(StallTest, NobodyIsLostWhileAHistoryCannotBeWrittenForLongerThanMembersAreWaitedFor) {
  TempFolder folder;
  Coordinator coordinator(folder.path(), ShortTimes);
  Worker w0(coordinator, "worker-0"), w1(coordinator, "worker-1");
  ASSERT_TRUE(Await([&] { return w0.welcomed() > 0 && w1.welcomed() > 0; }));
  v1::SubmitResponse submitted;
  ASSERT_TRUE(coordinator.Submit(Spec(2, 3), &submitted).ok());
  ASSERT_TRUE(Await([&] { return w0.assigned() > 0 && w1.assigned() > 0; }));
  std::thread other(
      [&] { EXPECT_TRUE(w1.client.Barrier(w1.fence(), "start", absl::Minutes(1), nullptr).ok()); });
  EXPECT_TRUE(w0.client.Barrier(w0.fence(), "start", absl::Minutes(1), nullptr).ok());
  other.join();

  Worker& first = w0.fence().rank() == 0 ? w0 : w1;
  Worker& second = w0.fence().rank() == 0 ? w1 : w0;
  const v1::Fence fence = first.fence();
  FillDisk(folder.path());
  absl::Status reported;
  std::thread report([&] {
    reported = first.client.ReportSteps(Step(fence, 1), absl::InfiniteDuration(), nullptr);
  });
  AwaitStall(coordinator);
  absl::SleepFor(2.5 * kTimeout);  // everybody has hung up and said Hello again, and again
  EXPECT_EQ(coordinator.engine->Nodes().nodes_size(), 2);
  MakeRoom(folder.path());
  report.join();
  EXPECT_TRUE(reported.ok()) << reported;

  // And who has just hung up is still waited for.
  EXPECT_TRUE(Await([&] { return w0.welcomed() > 1 && w1.welcomed() > 1; }));
  absl::SleepFor(1.5 * kTimeout);
  const v1::NodesResponse nodes = coordinator.engine->Nodes();
  EXPECT_EQ(nodes.nodes_size(), 2);
  for (const v1::Node& node : nodes.nodes()) {
    EXPECT_EQ(node.state(), "running") << node.ShortDebugString();
  }
  const v1::JobStatus status = coordinator.Get("demo");
  EXPECT_EQ(status.state(), v1::JOB_STATE_RUNNING) << status.ShortDebugString();
  EXPECT_EQ(status.generation(), fence.generation());
  EXPECT_EQ(status.committed_step(), 1u);
  EXPECT_EQ(status.steps_lost(), 0u);
  for (Worker* worker : {&w0, &w1}) {
    EXPECT_EQ(worker->assigned(), 1);
    EXPECT_EQ(worker->stopped(), 0);
  }
  EXPECT_TRUE(first.client.ReportSteps(Step(fence, 2), absl::Seconds(30), nullptr).ok());
  EXPECT_EQ(second.fence().generation(), fence.generation());
}

class SilentMembersTest : public ServiceTest {};

TEST_F(SilentMembersTest, AreLostOnceTheWriterIsBack) {
  Coordinator coordinator(folder.path(), ShortTimes);
  StartDemo(coordinator, 2);
  FillDisk(folder.path());
  std::thread report([&] { w0.Steps(1, 1, &committed); });
  AwaitStall(coordinator);
  absl::SleepFor(2 * kTimeout);
  const auto count = [&](const std::string& state) {
    const v1::NodesResponse nodes = coordinator.engine->Nodes();
    return std::count_if(nodes.nodes().begin(), nodes.nodes().end(),
                         [&](const v1::Node& node) { return node.state() == state; });
  };
  EXPECT_EQ(count("running"), 2) << "who could not be answered is not judged";
  MakeRoom(folder.path());
  EXPECT_TRUE(Await([&] { return count("lost") == 2; }));
  report.join();
}

}  // namespace
}  // namespace zeroshard::coordinator
