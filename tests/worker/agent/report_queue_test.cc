#include "worker/agent/report_queue.h"

#include <gtest/gtest.h>

#include "tests/common/member/fake_cluster.h"

namespace zeroshard {
namespace {

v1::StepRecord Step(uint64_t step) {
  v1::StepRecord record;
  record.set_step(step);
  return record;
}

TEST(ReportQueueTest, HoldsTrainingWhileTheCoordinatorIsAwayAndLosesNothing) {
  FakeCluster cluster;
  cluster.Stop();
  ClusterClient client(cluster.address());
  Cancellation cancellation;
  ReportQueue queue(
      &client, v1::Fence(), &cancellation,
      [](const absl::Status& status) { ADD_FAILURE() << status; }, /*capacity=*/8);
  for (uint64_t step = 1; step <= 4; ++step) queue.Push(Step(step));
  EXPECT_FALSE(queue.ShouldHold());  // half full
  queue.Push(Step(5));
  EXPECT_TRUE(queue.ShouldHold());
  EXPECT_EQ(queue.Flush(absl::Milliseconds(1)).code(), absl::StatusCode::kDeadlineExceeded);
  cluster.Start();
  EXPECT_TRUE(queue.Flush(absl::Seconds(30)).ok());
  EXPECT_FALSE(queue.ShouldHold());
  cluster.With([](auto& state) {
    ASSERT_EQ(state.steps.size(), 5u);
    for (size_t i = 0; i < 5; ++i) EXPECT_EQ(state.steps[i].step(), i + 1);
  });
}

TEST(ReportQueueTest, CheckpointsAndSamplesTravelBehindTheStepsBeforeThem) {
  FakeCluster cluster;
  ClusterClient client(cluster.address());
  Cancellation cancellation;
  ReportQueue queue(&client, v1::Fence(), &cancellation,
                    [](const absl::Status& status) { ADD_FAILURE() << status; });
  v1::CheckpointRecord checkpoint;
  checkpoint.set_step(2);
  v1::SampleRecord sample;
  sample.set_text(std::string(700 << 10, 'x'));  // two do not fit into one message
  for (uint64_t step = 1; step <= 4; ++step) {
    queue.Push(Step(step));
    if (step == 2) queue.Push(checkpoint);
    sample.set_step(step);
    queue.Push(sample);
  }
  EXPECT_TRUE(queue.Flush(absl::Seconds(30)).ok());
  cluster.With([](auto& state) {
    EXPECT_EQ(state.steps.size(), 4u);
    ASSERT_EQ(state.checkpoints.size(), 1u);
    EXPECT_EQ(state.checkpoints[0].step(), 2u);
    ASSERT_EQ(state.samples.size(), 4u);
    for (size_t i = 0; i < 4; ++i) EXPECT_EQ(state.samples[i].step(), i + 1);
  });
}

TEST(ReportQueueTest, APushIntoAFullQueueEndsWithTheCancellation) {
  FakeCluster cluster;
  cluster.Stop();
  ClusterClient client(cluster.address());
  Cancellation cancellation;
  ReportQueue queue(
      &client, v1::Fence(), &cancellation, [](const absl::Status&) {}, 2);
  queue.Push(Step(1));
  queue.Push(Step(2));
  std::thread third([&] { queue.Push(Step(3)); });
  cancellation.Cancel(absl::CancelledError("told to stop"));
  third.join();
  EXPECT_EQ(queue.Flush(absl::InfiniteDuration()), absl::CancelledError("told to stop"));
}

TEST(ReportQueueTest, ARefusalIsSaidOnceAndReturnedByFlush) {
  FakeCluster cluster;
  cluster.With([](auto& state) {
    state.report_steps_status = {grpc::StatusCode::FAILED_PRECONDITION, "stale"};
  });
  ClusterClient client(cluster.address());
  Cancellation cancellation;
  std::atomic<int> errors{0};
  ReportQueue queue(&client, v1::Fence(), &cancellation, [&](const absl::Status& status) {
    EXPECT_EQ(status, absl::FailedPreconditionError("stale"));
    ++errors;
  });
  queue.Push(Step(1));
  EXPECT_EQ(queue.Flush(absl::InfiniteDuration()), absl::FailedPreconditionError("stale"));
  queue.Push(Step(2));  // does not wait and is not sent
  EXPECT_LE(errors, 1);
}

}  // namespace
}  // namespace zeroshard
