// The unary calls ride out a coordinator that is away, and end when they are told to.
#include "common/member/cluster_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/common/member/fake_cluster.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

v1::Fence Rank(uint32_t rank) {
  v1::Fence fence;
  fence.set_run_id("a-1");
  fence.set_rank(rank);
  return fence;
}

v1::ReportStepsRequest OneStep() {
  v1::ReportStepsRequest request;
  *request.mutable_fence() = Rank(0);
  request.add_records()->set_step(1);
  return request;
}

TEST(ClusterClientTest, AKeyReachesWhoeverWaitsForIt) {
  FakeCluster cluster;
  ClusterClient client(cluster.address());
  absl::StatusOr<std::string> got;
  std::thread reader([&] { got = client.GetKey(Rank(1), "addr/0", absl::Seconds(30), nullptr); });
  EXPECT_TRUE(
      client.PutKey(Rank(0), "addr/0", std::string("a\0b", 3), absl::Seconds(30), nullptr).ok());
  reader.join();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(*got, std::string("a\0b", 3));
  EXPECT_EQ(client.PutKey(Rank(0), "addr/0", "other", absl::Seconds(30), nullptr).code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(ClusterClientTest, ACallWaitsForACoordinatorThatComesBack) {
  FakeCluster cluster;
  cluster.Stop();
  ClusterClient client(cluster.address());
  absl::Status status;
  std::thread reporter(
      [&] { status = client.ReportSteps(OneStep(), absl::InfiniteDuration(), nullptr); });
  cluster.Start();
  reporter.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(cluster.Await([](const auto& state) { return state.steps.size() == 1; }));
}

TEST(ClusterClientTest, ABarrierSurvivesARestartOfTheCoordinator) {
  FakeCluster cluster;
  cluster.With([](auto& state) { state.world = 2; });
  ClusterClient client(cluster.address());
  absl::Status first;
  std::thread arrival(
      [&] { first = client.Barrier(Rank(0), "start", absl::Seconds(30), nullptr); });
  ASSERT_TRUE(cluster.Await([](const auto& state) { return state.barriers.count("start") > 0; }));
  cluster.Stop();
  cluster.With([](auto& state) { state.barriers.clear(); });  // it remembers nothing
  cluster.Start();
  EXPECT_TRUE(client.Barrier(Rank(1), "start", absl::Seconds(30), nullptr).ok());
  arrival.join();
  EXPECT_TRUE(first.ok()) << first;
}

TEST(ClusterClientTest, ABarriersTimeDoesNotPassWhileTheCoordinatorIsAway) {
  FakeCluster cluster;
  cluster.Stop();
  ClusterClient client(cluster.address());
  absl::Status status;
  std::thread arrival(
      [&] { status = client.Barrier(Rank(0), "start", absl::Milliseconds(100), nullptr); });
  // A call whose time does pass.
  EXPECT_FALSE(client.GetKey(Rank(0), "addr/0", absl::Milliseconds(500), nullptr).ok());
  cluster.Start();
  arrival.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ClusterClientTest, CancellationEndsABarrierWhileTheCoordinatorIsAway) {
  FakeCluster cluster;
  cluster.Stop();
  ClusterClient client(cluster.address());
  Cancellation cancellation;
  absl::Status status;
  std::thread arrival(
      [&] { status = client.Barrier(Rank(0), "start", absl::Seconds(1), &cancellation); });
  cancellation.Cancel(absl::CancelledError("told to stop"));
  arrival.join();
  EXPECT_EQ(status, absl::CancelledError("told to stop"));
}

TEST(ClusterClientTest, TheDeadlineHoldsWhileNobodyAnswersAndTheMessageSaysWho) {
  FakeCluster cluster;
  cluster.Stop();
  ClusterClient client(cluster.address());
  const absl::Status status =
      client.GetKey(Rank(0), "addr/0", absl::Milliseconds(200), nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("key addr/0"), HasSubstr(cluster.address())));
}

TEST(ClusterClientTest, TheCoordinatorsOwnDeadlineMessageIsPassedOn) {
  FakeCluster cluster;
  cluster.With([](auto& state) { state.world = 2; });
  ClusterClient client(cluster.address());
  const absl::Status status = client.Barrier(Rank(0), "start", absl::Milliseconds(50), nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), "barrier start: missing rank 1");
}

TEST(ClusterClientTest, AStaleFenceIsNotTriedAgain) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.report_steps_status = {grpc::StatusCode::FAILED_PRECONDITION, "generation 2 is current"};
  });
  ClusterClient client(cluster.address());
  const absl::Status status = client.ReportSteps(OneStep(), absl::InfiniteDuration(), nullptr);
  EXPECT_EQ(status, absl::FailedPreconditionError("generation 2 is current"));
}

TEST(ClusterClientTest, CancellationEndsACallAtTheCoordinator) {
  FakeCluster cluster;
  ClusterClient client(cluster.address());
  Cancellation cancellation;
  absl::StatusOr<std::string> got;
  std::thread reader(
      [&] { got = client.GetKey(Rank(0), "never", absl::InfiniteDuration(), &cancellation); });
  cancellation.Cancel(absl::CancelledError("told to stop"));
  reader.join();
  EXPECT_EQ(got.status(), absl::CancelledError("told to stop"));
}

TEST(ClusterClientTest, CancellationEndsTheWaitForACoordinatorThatIsAway) {
  FakeCluster cluster;
  cluster.Stop();
  ClusterClient client(cluster.address());
  Cancellation cancellation;
  absl::Status status;
  std::thread reporter(
      [&] { status = client.ReportSteps(OneStep(), absl::InfiniteDuration(), &cancellation); });
  cancellation.Cancel(absl::CancelledError("told to stop"));
  reporter.join();
  EXPECT_EQ(status, absl::CancelledError("told to stop"));
}

TEST(ClusterClientTest, ACommitWaitsForACoordinatorThatComesBack) {
  FakeCluster cluster;
  cluster.Stop();
  cluster.With([](auto& state) {
    state.commit = [](const v1::CommitStepRequest& request) {
      v1::StepDecision decision;
      decision.set_step(request.record().step());
      return decision;
    };
  });
  ClusterClient client(cluster.address());
  v1::CommitStepRequest request;
  request.mutable_record()->set_step(4);
  absl::StatusOr<v1::StepDecision> decision;
  std::thread rank(
      [&] { decision = client.CommitStep(request, absl::InfiniteDuration(), nullptr); });
  cluster.Start();
  rank.join();
  ASSERT_TRUE(decision.ok()) << decision.status();
  EXPECT_EQ(decision->step(), 4u);
}

TEST(ClusterClientTest, TheDecisionOfAnotherStepIsNotTaken) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.commit = [](const v1::CommitStepRequest&) {
      v1::StepDecision decision;
      decision.set_step(5);
      return decision;
    };
  });
  ClusterClient client(cluster.address());
  v1::CommitStepRequest request;
  request.mutable_record()->set_step(4);
  const auto decision = client.CommitStep(request, absl::InfiniteDuration(), nullptr);
  EXPECT_EQ(decision.status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace zeroshard
