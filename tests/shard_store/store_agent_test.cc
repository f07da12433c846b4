// A store as a member: how it leaves.
#include "shard_store/store_agent.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include "tests/common/member/fake_cluster.h"
#include "tests/shard_store/state/small_job.h"

namespace zeroshard::store {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);
constexpr int64_t kChunk = 4096;

StoreHostOptions HostOptions(StoreAgent* agent) {
  StoreHostOptions options;
  options.memory_limit = uint64_t{1} << 30;
  options.threads = 1;
  options.chunk_elements = kChunk;
  options.incarnation = [agent] { return agent->incarnation(); };
  options.on_report = [agent](const v1::StoreReport& report) { agent->OnReport(report); };
  return options;
}

MemberSessionOptions SessionOptions(const FakeCluster& cluster) {
  MemberSessionOptions options;
  options.coordinator = cluster.address();
  options.hello.set_kind(v1::MEMBER_KIND_STORE);
  options.hello.set_name("store-0");
  options.first_backoff = options.most_backoff = absl::Milliseconds(20);
  return options;
}

class StoreAgentTest : public testing::Test {
 protected:
  StoreAgentTest() : host_(HostOptions(&agent_)), session_(SessionOptions(cluster_), &agent_) {
    agent_.SetHost(&host_);
    agent_.SetSession(&session_);
    EXPECT_TRUE(session_.WaitWelcome(kPatience).ok());
  }
  ~StoreAgentTest() override { agent_.SetSession(nullptr); }

  // A directive that puts every chunk of a job here, into this incarnation of the store.
  void Direct(const std::string& incarnation) {
    const v1::JobSpec spec = MakeSpec({});
    v1::StoreDirective directive;
    directive.set_term(1);
    directive.set_run_id("small-1");
    directive.set_generation(1);
    directive.set_epoch(1);
    directive.set_map_version(1);
    v1::StoreJob& job = *directive.mutable_job();
    job.set_job("small");
    *job.mutable_spec() = spec;
    job.mutable_base()->set_epoch(1);
    job.mutable_map()->set_replicas(1);
    v1::StoreMap::Store* store = job.mutable_map()->add_stores();
    store->set_member("store-0");
    store->set_incarnation(incarnation);
    const size_t chunks = ChunkTable::Make(MakeModel(spec), kChunk).chunks.size();
    for (size_t chunk = 0; chunk < chunks; ++chunk) job.mutable_map()->add_placement(0);
    v1::CoordinatorMessage message;
    *message.mutable_store() = directive;
    cluster_.Send(message);
  }
  // A job of which every chunk is here.
  void Hold() {
    Direct(session_.incarnation());
    ASSERT_TRUE(cluster_.Await([](const auto& state) {
      return !state.reports.empty() && state.reports.back().phase() == v1::STORE_PHASE_READY;
    }));
  }
  std::future<bool> Leave(absl::Duration grace) {
    return std::async(std::launch::async, [this, grace] { return agent_.AwaitLeave(grace); });
  }
  bool SaysThatItLeaves() {
    return cluster_.Await([](const auto& state) {
      return !state.heartbeats.empty() && !state.heartbeats.back().has_running() &&
             state.heartbeats.back().progress().phase() == "leaving";
    });
  }
  void LetGo(const std::string& run_id) {
    v1::CoordinatorMessage message;
    message.mutable_stop()->set_run_id(run_id);
    cluster_.Send(message);
  }

  FakeCluster cluster_;
  StoreAgent agent_;
  StoreHost host_;
  MemberSession session_;
};

TEST_F(StoreAgentTest, ADirectiveForAnotherIncarnationOfThisStoreIsRefusedAndReported) {
  Direct("the one before");
  ASSERT_TRUE(cluster_.Await([](const auto& state) { return !state.reports.empty(); }));
  const v1::StoreReport report = host_.Reports().at(0);
  EXPECT_EQ(report.phase(), v1::STORE_PHASE_UNSPECIFIED);
  EXPECT_EQ(report.map_version(), 0u);
  EXPECT_EQ(report.generation(), 0u);
  Hold();
}

TEST_F(StoreAgentTest, LeavesAtOnceWhereNothingIsHeld) {
  EXPECT_TRUE(agent_.AwaitLeave(absl::InfiniteDuration()));
  cluster_.With([](auto& state) {
    for (const v1::Heartbeat& beat : state.heartbeats) EXPECT_FALSE(beat.has_progress());
  });
}

TEST_F(StoreAgentTest, SaysThatItLeavesAndWaitsUntilItMay) {
  Hold();
  std::future<bool> left = Leave(absl::InfiniteDuration());
  ASSERT_TRUE(SaysThatItLeaves());
  LetGo("small-1");  // of a rank, and not for a store
  ASSERT_TRUE(SaysThatItLeaves());
  EXPECT_EQ(left.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  LetGo("");
  EXPECT_TRUE(left.get());
}

TEST_F(StoreAgentTest, SaysItAgainAfterAReconnection) {
  Hold();
  std::future<bool> left = Leave(absl::InfiniteDuration());
  ASSERT_TRUE(SaysThatItLeaves());
  cluster_.Stop();
  cluster_.With([](auto& state) { state.heartbeats.clear(); });
  cluster_.Start();
  ASSERT_TRUE(SaysThatItLeaves());
  LetGo("");
  EXPECT_TRUE(left.get());
}

TEST_F(StoreAgentTest, LeavesWhenTheJobIsOver) {
  Hold();
  std::future<bool> left = Leave(absl::InfiniteDuration());
  ASSERT_TRUE(SaysThatItLeaves());
  v1::CoordinatorMessage message;
  message.mutable_store()->set_term(1);
  message.mutable_store()->set_run_id("small-1");
  message.mutable_store()->set_generation(1);
  message.mutable_store()->set_epoch(1);
  message.mutable_store()->set_drop(true);
  cluster_.Send(message);
  EXPECT_TRUE(left.get());
}

TEST_F(StoreAgentTest, WaitsNoLongerThanItsGrace) {
  Hold();
  EXPECT_FALSE(agent_.AwaitLeave(absl::Milliseconds(30)));
}

TEST_F(StoreAgentTest, DoesNotWaitForACoordinatorThatIsGone) {
  Hold();
  cluster_.Stop();
  EXPECT_FALSE(agent_.AwaitLeave(absl::Minutes(10), absl::Milliseconds(30)));
}

}  // namespace
}  // namespace zeroshard::store
