// Runs of jobs whose state is in the shard stores.
#include <gmock/gmock.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/worker/agent/worker_agent_fixture.h"
#include "tests/worker/device/guarded_device.h"
#include "worker/agent/assignment.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

class OffloadRunTest : public WorkerAgentTest {
 protected:
  // Goes on after step 4 of epoch 2, on one store.
  v1::Assign OffloadedJob(const std::string& run) const {
    v1::Assign assign = Job(run);
    v1::JobSpec& spec = *assign.mutable_spec();
    spec.mutable_model()->set_architecture("gpt2");
    spec.mutable_model()->set_hidden_size(16);
    spec.mutable_model()->set_layers(1);
    spec.mutable_model()->set_heads(2);
    v1::ZeroSpec& zero = *spec.mutable_zero_optimization();
    zero.set_stage(2);
    zero.mutable_offload_optimizer()->set_device("cpu");
    zero.mutable_offload_optimizer()->set_buffer_count(4);
    zero.mutable_offload_optimizer()->set_buffer_size(100);
    spec.mutable_store()->set_replicas(1);
    spec.mutable_checkpoint()->set_dir("/ckpt");
    v1::StoreMap& map = *assign.mutable_stores();
    v1::StoreMap::Store& store = *map.add_stores();
    store.set_member("store-0");
    store.set_incarnation("abc");
    store.set_host("host-s");
    store.set_address("host-s:7");
    map.set_replicas(1);
    for (int chunk = 0; chunk < 3; ++chunk) map.add_placement(0);  // embedding, block, head
    assign.mutable_version()->set_epoch(2);
    assign.mutable_version()->set_step(4);
    assign.set_first_step(5);
    assign.set_next_sample(24);
    return assign;
  }
};

TEST_F(OffloadRunTest, TheTrainerGetsTheStoresAndWhereToGoOn) {
  std::string seen;
  training_.on_create = [&](const TrainerOptions& options) {
    ASSERT_NE(options.store, nullptr);
    seen = absl::StrCat(options.store->base().epoch(), ".", options.store->base().step(), " ",
                        options.first_step, " ", options.next_sample);
  };
  std::string opened;
  training_.on_open_store = [&](const StoreClientOptions& options) {
    opened = absl::StrCat(options.map.stores(0).address(), " ", options.fence.run_id(), " ",
                          options.fence.incarnation() == agent_->session()->incarnation(), " ",
                          options.client != nullptr, " ", options.cancellation != nullptr);
    return absl::OkStatus();
  };
  Assign(OffloadedJob("a-1"));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_TRUE(end.completed()) << end.message();
  EXPECT_EQ(end.weights_digest(), "") << "the stores have the weights";
  EXPECT_EQ(opened, "host-s:7 a-1 1 1 1");
  EXPECT_EQ(seen, "2.4 5 24");
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(OffloadRunTest, ADeviceThatTheHostCannotReachGetsItsDataThroughTheHostsMemory) {
  constexpr int64_t kElements = 64;
  backend_.make_device = []() -> absl::StatusOr<std::unique_ptr<Device>> {
    return std::make_unique<GuardedDevice>(1);
  };
  size_t bytes = 0;
  training_.on_open_store = [&](const StoreClientOptions& options) {
    bytes = static_cast<size_t>(kElements) * SizeOf(options.dtype);
    return absl::OkStatus();
  };
  // The process would end here, were it the device's.
  training_.on_pull = [&](void* out, int64_t) { std::memset(out, 7, bytes); };
  std::vector<uint8_t> seen;
  training_.on_create = [&](const TrainerOptions& options) {
    const Buffer memory = *options.device->Allocate(bytes, MemoryKind::kParameters);
    EXPECT_TRUE(options.store->Pull(4, 0, 0, kElements, memory.data(), {}).Wait().ok());
    seen.resize(bytes);
    EXPECT_TRUE(CopyAndWait(options.device, seen.data(), memory.data(), bytes).ok());
  };
  Assign(OffloadedJob("a-1"));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_TRUE(end.completed()) << end.message();
  EXPECT_GT(bytes, 0u);
  EXPECT_EQ(seen, std::vector<uint8_t>(bytes, 7));
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

class BrokenDevice : public GuardedDevice {
 public:
  explicit BrokenDevice(absl::Status broken) : GuardedDevice(1), broken_(std::move(broken)) {}
  absl::Status Broken() const override { return broken_; }

 private:
  const absl::Status broken_;
};

// Hardware that fails looks to the cluster as the death of its process does; whose kernel broke the
// device says so first. Neither process is of any further use.
TEST_F(OffloadRunTest, AProcessWhoseDeviceIsBrokenEnds) {
  const absl::Status hardware = absl::DataLossError("cuda:0: uncorrectable ECC error");
  const absl::Status kernel = absl::InternalError("cuda:0: illegal address");
  size_t runs = 0;
  for (const absl::Status& broken : {hardware, kernel}) {
    backend_.make_device = [broken]() -> absl::StatusOr<std::unique_ptr<Device>> {
      return std::make_unique<BrokenDevice>(broken);
    };
    std::vector<std::pair<std::string, size_t>> ended;  // what it said, reports before
    backend_.exit_process = [&](const std::string& message) {
      size_t reports = 0;
      cluster_.With([&](auto& state) { reports = state.ends.size(); });
      ended.emplace_back(message, reports - runs);
    };
    training_.on_step = [broken](uint64_t) { return broken; };
    Assign(OffloadedJob(absl::StrCat("a-", runs + 1)));
    EXPECT_FALSE(AwaitEnd(static_cast<int>(runs) + 1).completed());
    EXPECT_TRUE(AwaitIdle());
    ASSERT_FALSE(ended.empty());
    EXPECT_THAT(ended[0].first, HasSubstr(std::string(broken.message())));
    EXPECT_EQ(ended[0].second, broken == hardware ? 0u : 1u);
    ++runs;
  }
}

TEST_F(OffloadRunTest, AProcessWhoseDeviceIsSoundGoesOnAfterAnError) {
  bool ended = false;
  backend_.exit_process = [&](const std::string&) { ended = true; };
  training_.on_step = [](uint64_t) { return absl::InternalError("no kernel for it"); };
  Assign(OffloadedJob("a-1"));
  EXPECT_FALSE(AwaitEnd().completed());
  EXPECT_TRUE(AwaitIdle());
  EXPECT_FALSE(ended);
}

TEST_F(OffloadRunTest, ItsWaitsCountNoTimeInWhichTheCoordinatorIsAway) {
  std::shared_ptr<const Presence> ranks, stores;
  training_.on_connect = [&](const CommunicatorOptions& options) { ranks = options.presence; };
  training_.on_open_store = [&](const StoreClientOptions& options) {
    stores = options.presence;
    return absl::OkStatus();
  };
  training_.on_step = [this](uint64_t) { return training_.WaitForStoreAbort(); };
  Assign(OffloadedJob("a-1"));
  ASSERT_TRUE(AwaitStep(5));
  ASSERT_NE(stores, nullptr);
  EXPECT_EQ(ranks, stores);
  const auto beats = [this](size_t more) {
    size_t before = 0;
    cluster_.With([&](auto& state) { before = state.heartbeats.size(); });
    return cluster_.Await(
        [&](const auto& state) { return state.heartbeats.size() >= before + more; });
  };
  const auto start = Presence::Clock::now();
  ASSERT_TRUE(beats(5));
  EXPECT_LE(stores->Counted(start), Presence::Clock::now() - start);
  // Another process answers at once, but the others have to find it too.
  cluster_.Stop();
  cluster_.Start();
  ASSERT_TRUE(beats(5));
  EXPECT_EQ(stores->Counted(start), Presence::Clock::duration::zero());
  StopRun("a-1", "enough");
  AwaitEnd();
  EXPECT_TRUE(AwaitIdle());

  // Ranks of other jobs wait for nobody but each other.
  training_.on_step = [](uint64_t) { return absl::OkStatus(); };
  Assign(Job("b-1"));
  AwaitEnd(2);
  EXPECT_EQ(ranks, nullptr);
}

TEST_F(OffloadRunTest, TheEvaluationThatIsOwedIsAskedFor) {
  std::vector<bool> seen;
  training_.on_create = [&](const TrainerOptions& options) { seen.push_back(options.evaluate); };
  v1::Assign job = OffloadedJob("a-1");
  Assign(job);
  AwaitEnd(1);
  job.set_run_id("a-2");
  job.set_evaluate(true);
  Assign(job);
  AwaitEnd(2);
  EXPECT_EQ(seen, (std::vector<bool>{false, true}));
}

TEST_F(OffloadRunTest, ALossOnTheValidationSetIsDeliveredBeforeTheNextCommit) {
  constexpr uint64_t kSteps = 200;
  uint64_t late = 0;
  training_.after_step = [&](TrainObserver* observer, uint64_t step) {
    v1::StepRecord record;
    record.set_step(1000 + step);  // not one that the trainer reports itself
    record.set_eval_loss(2.5);
    observer->OnStep(record);
    EXPECT_TRUE(observer->BeforeCommit().ok());
    cluster_.With([&](auto& state) {
      late += state.steps.empty() || state.steps.back().step() != 1000 + step;
    });
  };
  v1::Assign job = OffloadedJob("a-1");
  job.mutable_spec()->set_steps(kSteps);
  Assign(job);
  EXPECT_TRUE(AwaitEnd().completed());
  EXPECT_EQ(late, 0u);
}

TEST_F(OffloadRunTest, AStopEndsTheWaitForTheStores) {
  training_.on_step = [this](uint64_t) { return training_.WaitForStoreAbort(); };
  Assign(OffloadedJob("a-1"));
  ASSERT_TRUE(AwaitStep(5));
  StopRun("a-1", "a worker is gone");
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "CANCELLED");
  EXPECT_EQ(end.message(), "a worker is gone");
  EXPECT_TRUE(AwaitIdle());
  EXPECT_EQ(training_.alive, 0);
}

TEST_F(OffloadRunTest, AStopEndsOpeningTheStores) {
  training_.on_open_store = [](const StoreClientOptions& options) {
    EXPECT_TRUE(options.cancellation->Wait(absl::Seconds(30)));
    return absl::CancelledError("opening ended");
  };
  Assign(OffloadedJob("a-1"));
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return state.keys.count("address/0") > 0; }));
  StopRun("a-1", "cancelled by the user");
  EXPECT_EQ(AwaitEnd().message(), "cancelled by the user");
  EXPECT_TRUE(AwaitIdle());
}

TEST_F(OffloadRunTest, AStoreThatIsGoneIsReportedByItsCodeAndName) {
  training_.on_step = [](uint64_t step) {
    return step < 7 ? absl::OkStatus() : absl::UnavailableError("store-0 is gone: chunk 1, step 6");
  };
  Assign(OffloadedJob("a-1"));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "UNAVAILABLE");
  EXPECT_THAT(end.message(), HasSubstr("store-0 is gone"));
  EXPECT_FALSE(end.has_blamed_rank());
  EXPECT_TRUE(AwaitIdle());
  EXPECT_THAT(training_.store_aborted, HasSubstr("store-0 is gone"));
}

TEST_F(OffloadRunTest, AWorkerThatIsToldToLeaveGoesAtOnceForNothingOfItsIsLost) {
  v1::Assign job = OffloadedJob("a-1");
  TrainSlowly(&job);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  EXPECT_TRUE(agent_->Shutdown("told to leave (SIGTERM)", absl::Seconds(30), absl::Seconds(30)));
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "CANCELLED");
  EXPECT_EQ(end.message(), "told to leave (SIGTERM)");
  ASSERT_TRUE(end.has_blamed_rank());
  EXPECT_EQ(end.blamed_rank(), 0u);
  cluster_.With([](auto& state) { EXPECT_TRUE(state.checkpoints.empty()); });
}

TEST_F(OffloadRunTest, AStopThatSavesEndsTheRunForTheStoresSave) {
  v1::Assign job = OffloadedJob("a-1");
  TrainSlowly(&job);
  Assign(job);
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.steps.empty(); }));
  StopRun("a-1", "cancelled by the user", true);
  const v1::ReportEndRequest end = AwaitEnd();
  EXPECT_EQ(end.error_code(), "CANCELLED");
  EXPECT_EQ(end.message(), "cancelled by the user");
  cluster_.With([](auto& state) { EXPECT_TRUE(state.checkpoints.empty()); });
}

TEST_F(OffloadRunTest, BytesToAndFromTheStoresAreMetrics) {
  training_.on_step = [this](uint64_t step) {
    return step < 6 ? absl::OkStatus() : training_.WaitForAbort();
  };
  Assign(OffloadedJob("a-1"));
  ASSERT_TRUE(AwaitStep(6));
  std::map<std::string, double> bytes;
  for (const prometheus::MetricFamily& family : metrics_.Collect()) {
    if (family.name != "zeroshard_worker_offload_bytes_total") continue;
    for (const prometheus::ClientMetric& metric : family.metric)
      bytes[metric.label.back().value] = metric.counter.value;
  }
  const std::map<std::string, double> wanted = {{"push", 300}, {"pull", 500}};
  EXPECT_EQ(bytes, wanted);
  StopRun("a-1", "enough");
  AwaitEnd();
  EXPECT_TRUE(AwaitIdle());
  EXPECT_TRUE(metrics_.Collect().empty());
}

TEST_F(OffloadRunTest, AnAssignmentThatDoesNotFitItsStoresIsRefused) {
  v1::Assign job = OffloadedJob("a-1");
  EXPECT_TRUE(CheckAssignment(job).ok()) << CheckAssignment(job);
  job.set_first_step(6);
  EXPECT_THAT(std::string(CheckAssignment(job).message()), HasSubstr("wanted step 5"));
  job.set_first_step(5);
  job.clear_stores();
  EXPECT_THAT(std::string(CheckAssignment(job).message()), HasSubstr("names no shard store"));
  Assign(job);
  EXPECT_EQ(AwaitEnd().error_code(), "INVALID_ARGUMENT");
}

}  // namespace
}  // namespace zeroshard
