#include "worker/train/phase_clock.h"

#include <thread>

#include "tests/worker/device/cuda/device_fixture.h"

namespace zeroshard {
namespace {

using cuda::FakeRuntime;

double Milliseconds(const TrainCounters& counters, StepPhase phase) {
  return 1e-6 * static_cast<double>(counters.phase_nanoseconds[static_cast<size_t>(phase)].load());
}

// The training thread only enqueues; how long the work takes is the script's.
class GpuPhases : public cuda::CudaDeviceFixture {
 protected:
  void Compute(double milliseconds) { runtime_.TakeTime(compute_, milliseconds); }
  void Finish() { ASSERT_TRUE(device_->compute()->Record().Wait().ok()); }
  double Of(StepPhase phase) const { return Milliseconds(counters_, phase); }

  const cuda::StreamHandle compute_ = runtime_.Named("cuda:0 compute");
  TrainCounters counters_;
};

TEST_F(GpuPhases, APhaseIsWhatTheGpuDidForItHoweverFarAheadTheHostIs) {
  PhaseClock clock(&counters_, device_.get());
  clock.BeginStep(1);
  clock.Enter(StepPhase::kForward, "blocks.0");
  Compute(3);
  clock.Enter(StepPhase::kForward, "blocks.1");
  Compute(4);
  clock.Enter(StepPhase::kBackward, "blocks.1");
  Compute(8.5);
  clock.Enter(StepPhase::kOptimizer, "");
  Compute(2);
  for (int phase = 0; phase < kStepPhases; ++phase)  // nothing has run, and nobody waits for it
    EXPECT_EQ(Of(static_cast<StepPhase>(phase)), 0);
  EXPECT_EQ(runtime_.Calls("SynchronizeEvent") + runtime_.Calls("SynchronizeStream"), 0);
  Finish();
  clock.Enter(StepPhase::kBarrier, "");
  EXPECT_NEAR(Of(StepPhase::kForward), 7, 1e-4);
  EXPECT_NEAR(Of(StepPhase::kBackward), 8.5, 1e-4);
  Compute(1);
  clock.Enter(StepPhase::kData, "");
  Finish();
  clock.Enter(StepPhase::kData, "");
  EXPECT_NEAR(Of(StepPhase::kOptimizer), 2, 1e-4);
  EXPECT_NEAR(Of(StepPhase::kBarrier), 1, 1e-4);
  EXPECT_NEAR(Of(StepPhase::kForward), 7, 1e-4);
}

TEST_F(GpuPhases, WhatComputeStandsStillForIsCommunicationAndTheRestOfATransferIsHidden) {
  const std::unique_ptr<Stream> comm = device_->NewStream("comm");
  {
    PhaseClock clock(&counters_, device_.get());
    clock.Enter(StepPhase::kForward, "blocks.0");
    runtime_.TakeTime(runtime_.Named("cuda:0 comm"), 10);
    const Event gathered = comm->Record();
    Compute(6);
    clock.BeginWait(WaitKind::kRanks);
    ASSERT_TRUE(device_->compute()->WaitFor(gathered).ok());
    clock.EndWait();
    Compute(3);
    clock.BeginWait(WaitKind::kStores);
    Compute(5);  // as long as compute waits for a pull
    clock.EndWait();
    Compute(1);
    clock.Enter(StepPhase::kBackward, "blocks.0");
    Finish();
  }
  EXPECT_NEAR(Of(StepPhase::kForward), 6 + 3 + 1, 1e-4);
  EXPECT_NEAR(Of(StepPhase::kCommunication), 10 - 6, 1e-4);
  EXPECT_NEAR(Of(StepPhase::kOffload), 5, 1e-4);
}

TEST_F(GpuPhases, WaitingForOtherStagesIsCommunicationAndCountedApart) {
  {
    PhaseClock clock(&counters_, device_.get());
    clock.Enter(StepPhase::kForward, "blocks.0");
    Compute(6);
    clock.BeginWait(WaitKind::kStages);
    Compute(4);  // as long as compute waits for a stage's output
    clock.EndWait();
    clock.BeginWait(WaitKind::kRanks);
    Compute(1);
    clock.EndWait();
    clock.Enter(StepPhase::kBackward, "blocks.0");
    Finish();
  }
  EXPECT_NEAR(Of(StepPhase::kForward), 6, 1e-4);
  EXPECT_NEAR(Of(StepPhase::kCommunication), 4 + 1, 1e-4);
  EXPECT_NEAR(1e-6 * static_cast<double>(counters_.pipeline_wait_nanoseconds.load()), 4, 1e-4);
}

TEST_F(GpuPhases, EventsAreUsedAgain) {
  PhaseClock clock(&counters_, device_.get());
  for (int i = 0; i < 100; ++i) {
    clock.Enter(StepPhase::kForward, "blocks.0");
    Compute(1);
    Finish();
  }
  EXPECT_LE(runtime_.Calls("CreateEvent"), 8);
  // The last but one ends behind what nobody has waited for yet.
  EXPECT_NEAR(Of(StepPhase::kForward), 98, 1e-3);
}

TEST_F(GpuPhases, ADeviceThatFailedIsMeasuredNoMoreAndNothingElseHappens) {
  PhaseClock clock(&counters_, device_.get());
  clock.Enter(StepPhase::kForward, "blocks.0");
  Compute(1);
  runtime_.Fail("ElapsedTime", cuda::Error::kLaunchFailure);
  Finish();
  clock.Enter(StepPhase::kBackward, "blocks.0");
  clock.Enter(StepPhase::kOptimizer, "");
  clock.Enter(StepPhase::kBarrier, "");
  EXPECT_EQ(Of(StepPhase::kForward), 0);
  EXPECT_FALSE(device_->MakeCurrent().ok());
  runtime_.Break(cuda::Error::kLaunchFailure);
}

TEST(HostPhases, AreTheTrainingThreadsTimeAndWaitsAreCountedApart) {
  const std::unique_ptr<Device> device = MakeCpuDevice();
  TrainCounters counters;
  const auto begin = std::chrono::steady_clock::now();
  {
    PhaseClock clock(&counters, device.get());
    clock.Enter(StepPhase::kForward, "blocks.0");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    clock.BeginWait(WaitKind::kRanks);
    std::this_thread::sleep_for(std::chrono::milliseconds(7));
    clock.EndWait();
    clock.BeginWait(WaitKind::kStores);
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    clock.EndWait();
  }
  const double all =
      1e-6 * static_cast<double>(
                 std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count());
  const double forward = Milliseconds(counters, StepPhase::kForward);
  const double ranks = Milliseconds(counters, StepPhase::kCommunication);
  const double stores = Milliseconds(counters, StepPhase::kOffload);
  EXPECT_GE(forward, 5);
  EXPECT_GE(ranks, 7);
  EXPECT_GE(stores, 3);
  EXPECT_LE(forward + ranks + stores, all);
}

}  // namespace
}  // namespace zeroshard
