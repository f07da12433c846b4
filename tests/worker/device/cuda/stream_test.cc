#include <cstring>
#include <thread>

#include "tests/worker/device/cuda/device_fixture.h"

namespace zeroshard::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kBytes = 64;

class CudaStreamTest : public CudaDeviceFixture {
 protected:
  // Copies that nobody waited for run before what they read goes.
  void TearDown() override {
    memory_ = Buffer();
    device_.reset();
  }

  // Bytes of the host; a value of its own in each test.
  std::vector<uint8_t> in_ = std::vector<uint8_t>(kBytes, 7);
  std::vector<uint8_t> other_ = std::vector<uint8_t>(kBytes, 9);
  std::vector<uint8_t> out_ = std::vector<uint8_t>(kBytes, 1);
  Buffer memory_ = Memory(kBytes);

  Event In(Stream* stream, const Event& after = {}) {
    return stream->Copy(memory_.data(), in_.data(), kBytes, after);
  }
  Event Out(Stream* stream, const Event& after = {}) {
    return stream->Copy(out_.data(), memory_.data(), kBytes, after);
  }
};

TEST_F(CudaStreamTest, ACopyIsDoneOnceItRanAndNotBefore) {
  const Event event = In(device_->compute());
  EXPECT_FALSE(event.Done());
  EXPECT_NE(memory_.as<uint8_t>()[0], 7);
  EXPECT_TRUE(event.Wait().ok());
  EXPECT_TRUE(event.Done());
  EXPECT_EQ(std::memcmp(memory_.data(), in_.data(), kBytes), 0);
}

TEST_F(CudaStreamTest, ACopyFollowsAnotherStreamsEventWithoutTheHost) {
  const auto side = device_->NewStream("side"), last = device_->NewStream("last");
  const Event there = In(side.get());
  const Event back = Out(last.get(), there);
  EXPECT_EQ(runtime_.Calls("SynchronizeEvent"), 0);
  EXPECT_FALSE(there.Done());
  ASSERT_TRUE(back.Wait().ok());
  EXPECT_EQ(out_, in_);
}

TEST_F(CudaStreamTest, WaitForOrdersWhatFollowsWithoutTheHost) {
  const auto side = device_->NewStream("side");
  const Event there = In(device_->compute());
  EXPECT_TRUE(side->WaitFor(there).ok());
  const Event back = Out(side.get());
  EXPECT_EQ(runtime_.Calls("SynchronizeEvent"), 0);
  ASSERT_TRUE(back.Wait().ok());
  EXPECT_EQ(out_, in_);
}

TEST_F(CudaStreamTest, TheComputeStreamWaitsForOthersOnTheGpuToo) {
  const auto side = device_->NewStream("side");
  EXPECT_TRUE(device_->compute()->WaitFor(In(side.get())).ok());
  const Event back = Out(device_->compute());
  EXPECT_EQ(runtime_.Calls("SynchronizeEvent"), 0);
  ASSERT_TRUE(back.Wait().ok());
  EXPECT_EQ(out_, in_);
}

TEST_F(CudaStreamTest, WhatFollowsTheHostWaitsInOrderAndHoldsNoCaller) {
  HostGate gate;
  const auto side = device_->NewStream("side");
  const Event there = In(side.get(), gate.event());
  const Event back = Out(side.get());  // behind it, though nothing holds it back itself
  const Event all = side->Record();
  EXPECT_FALSE(there.Done());
  EXPECT_FALSE(back.Done());
  EXPECT_EQ(runtime_.Calls("CopyAsync"), 0);
  gate.Open();
  EXPECT_TRUE(all.Wait().ok());
  EXPECT_TRUE(back.Wait().ok());
  EXPECT_EQ(out_, in_);
}

TEST_F(CudaStreamTest, AWaitForTheHostHoldsBackOnlyWhatFollows) {
  HostGate gate;
  const auto side = device_->NewStream("side");
  const Event before = In(side.get());
  EXPECT_TRUE(side->WaitFor(gate.event()).ok()) << "it is under way";
  const Event after = Out(side.get());
  EXPECT_TRUE(before.Wait().ok());
  EXPECT_FALSE(after.Done());
  gate.Open(absl::AbortedError("failed or not"));
  EXPECT_TRUE(after.Wait().ok());
  EXPECT_EQ(out_, in_);
  EXPECT_EQ(side->WaitFor(gate.event()), absl::AbortedError("failed or not"));
  EXPECT_TRUE(side->Record().Wait().ok()) << "a wait is no work of this stream";
}

TEST_F(CudaStreamTest, WhereTheHostFailedNothingIsCopied) {
  HostGate gate;
  const auto side = device_->NewStream("side"), last = device_->NewStream("last");
  const Event there = In(side.get(), gate.event());
  const Event next = side->Copy(out_.data(), other_.data(), kBytes);
  const Event behind = Out(last.get(), there);
  gate.Open(absl::UnavailableError("store 2 is gone"));
  EXPECT_EQ(there.Wait(), absl::UnavailableError("store 2 is gone"));
  EXPECT_EQ(behind.Wait(), absl::UnavailableError("store 2 is gone"));
  EXPECT_TRUE(next.Wait().ok());
  EXPECT_EQ(out_, other_);
  EXPECT_EQ(side->Record().Wait(), absl::UnavailableError("store 2 is gone"));
  EXPECT_TRUE(side->Record().Wait().ok());
  EXPECT_EQ(runtime_.Calls("CopyAsync"), 1);
}

TEST_F(CudaStreamTest, TheComputeStreamBlocksItsCallerForTheHost) {
  HostGate gate;
  std::atomic<bool> opened = false;
  std::thread opener([&] {
    opened = true;
    gate.Open();
  });
  const Event there = In(device_->compute(), gate.event());
  EXPECT_TRUE(opened);
  EXPECT_EQ(runtime_.Calls("CopyAsync"), 1) << "it is enqueued before anyone can launch a kernel";
  opener.join();
  EXPECT_TRUE(there.Wait().ok());
}

TEST_F(CudaStreamTest, TheComputeStreamBlocksOnlyUntilAnEventIsOnTheGpu) {
  HostGate gate;
  const auto side = device_->NewStream("side");
  const Event there = In(side.get(), gate.event());
  std::thread opener([&] { gate.Open(); });
  EXPECT_TRUE(device_->compute()->WaitFor(there).ok());
  const Event back = Out(device_->compute());
  opener.join();
  EXPECT_EQ(runtime_.Calls("SynchronizeEvent"), 0);
  ASSERT_TRUE(back.Wait().ok());
  EXPECT_EQ(out_, in_);
}

TEST_F(CudaStreamTest, ACollectiveThatFailsLaterFailsWhatFollowedIt) {
  const auto comm = device_->NewStream("comm"), side = device_->NewStream("side");
  auto state = std::make_shared<CommEvent>(In(comm.get()));
  const Event copied = Out(side.get(), Event(state));
  const Event next = Out(device_->compute(), copied);
  const Event all = side->Record();
  EXPECT_EQ(runtime_.Calls("CopyAsync"), 3) << "nobody waits for its end to enqueue";
  EXPECT_EQ(AsGpuEvent(copied)->AwaitRecorded().status(), absl::OkStatus());
  EXPECT_FALSE(copied.Done());
  ASSERT_EQ(SourcesOf(next).size(), 1u);
  EXPECT_EQ(SourcesOf(next)[0].state(), state) << "no chain of events behind it";
  state->End(absl::UnavailableError("rank 3 is gone"));
  for (const Event& event : {copied, next, all}) {
    EXPECT_EQ(event.Wait(), absl::UnavailableError("rank 3 is gone"));
    EXPECT_TRUE(event.Done());
    EXPECT_EQ(event.Wait(), absl::UnavailableError("rank 3 is gone"));
  }
  EXPECT_TRUE(side->Record().Wait().ok());
}

TEST_F(CudaStreamTest, ACollectiveThatHasFailedHoldsItsCopyBack) {
  const auto comm = device_->NewStream("comm"), side = device_->NewStream("side");
  auto state = std::make_shared<CommEvent>(In(comm.get()));
  const Event early = Out(side.get(), Event(state));
  state->End(absl::AbortedError("stopped"));
  EXPECT_EQ(comm->Record().Wait(), absl::OkStatus());
  const Event late = side->Copy(out_.data(), other_.data(), kBytes, Event(state));
  const Event behind = side->Copy(out_.data(), other_.data(), kBytes, early);
  EXPECT_EQ(late.Wait(), absl::AbortedError("stopped"));
  EXPECT_EQ(behind.Wait(), absl::AbortedError("stopped"));
  EXPECT_NE(out_, other_);
}

TEST_F(CudaStreamTest, SourcesThatEndedAreDropped) {
  const auto comm = device_->NewStream("comm"), side = device_->NewStream("side");
  std::weak_ptr<CommEvent> first;
  for (int i = 0; i < 3; ++i) {
    auto state = std::make_shared<CommEvent>(In(comm.get()));
    if (i == 0) first = state;
    state->End(absl::OkStatus());
    EXPECT_TRUE(Out(side.get(), Event(state)).Wait().ok());
  }
  EXPECT_TRUE(first.expired()) << "though nobody asked the stream for a Record";
}

TEST_F(CudaStreamTest, SubmittedWorkGetsTheStreamAndReportsItsError) {
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  StreamHandle seen = nullptr;
  const auto side = device_->NewCudaStream("side");
  const Event event = side->Submit([&seen, owned = std::move(owned)](StreamHandle stream) {
    seen = stream;
    return absl::InternalError("no such kernel");
  });
  EXPECT_EQ(event.Wait(), absl::InternalError("no such kernel"));
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(seen, *side->handle());
  EXPECT_EQ(seen, runtime_.Named("cuda:0 side"));
  EXPECT_EQ(side->Record().Wait(), absl::InternalError("no such kernel"));
}

TEST_F(CudaStreamTest, TheHandleIsGivenOnceNothingIsDeferred) {
  HostGate gate;
  const auto side = device_->NewCudaStream("side");
  const Event there = In(side.get(), gate.event());
  std::thread opener([&] { gate.Open(); });
  ASSERT_TRUE(side->handle().ok());
  EXPECT_EQ(runtime_.Calls("CopyAsync"), 1);
  opener.join();
  EXPECT_TRUE(there.Wait().ok());
}

TEST_F(CudaStreamTest, AnErrorOfWorkOnTheHandleIsTheNextRecords) {
  device_->compute()->AddError(absl::InternalError("launch"));
  device_->compute()->AddError(absl::InternalError("another"));
  EXPECT_EQ(device_->compute()->Record().Wait(), absl::InternalError("launch"));
  EXPECT_TRUE(device_->compute()->Record().Wait().ok());
}

TEST_F(CudaStreamTest, ACallThatFailsIsNamedAndTheStreamGoesOn) {
  runtime_.Fail("CopyAsync", Error::kInvalidValue);
  const absl::Status failed = In(device_->compute()).Wait();
  EXPECT_EQ(failed.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(failed.message()),
              AllOf(HasSubstr("CUDA: CopyAsync("), HasSubstr("stream.cc:")));
  EXPECT_TRUE(In(device_->compute()).Wait().ok());
  EXPECT_EQ(device_->compute()->Record().Wait(), failed);
  for (const char* const call : {"CreateEvent", "RecordEvent", "WaitEvent"}) {
    // Keeps the pooled events, so that the next one has to be made.
    std::vector<Event> held;
    while (runtime_.Calls("CreateEvent") == 0 || held.size() < 64) {
      held.push_back(In(device_->compute()));
    }
    const auto side = device_->NewStream("side");
    runtime_.Fail(call, Error::kInvalidValue);
    std::vector<Event> tried;
    absl::Status status;
    for (int i = 0; i < 64 && status.ok(); ++i) {
      tried.push_back(Out(side.get(), held.back()));
      status = tried.back().Wait();
    }
    EXPECT_THAT(std::string(status.message()), HasSubstr(call));
    EXPECT_TRUE(Out(side.get()).Wait().ok());
  }
}

TEST_F(CudaStreamTest, AStreamThatCouldNotBeMadeSaysSoInEveryEvent) {
  runtime_.Fail("CreateStream", Error::kOutOfMemory);
  const auto side = device_->NewCudaStream("side");
  for (const Event& event : {In(side.get()), side->Record()}) {
    EXPECT_TRUE(event.Done());
    EXPECT_EQ(event.Wait().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(event.Wait().message()), HasSubstr("CreateStream"));
  }
  EXPECT_EQ(side->handle().status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(CudaStreamTest, AStickyErrorMakesTheDeviceUnusableAndSaysSo) {
  const Event before = In(device_->compute());
  runtime_.Break(Error::kIllegalAddress);
  EXPECT_TRUE(before.Done());
  EXPECT_THAT(std::string(before.Wait().message()),
              AllOf(HasSubstr("cudaErrorIllegalAddress (an illegal memory access"),
                    HasSubstr("compute-sanitizer"), HasSubstr("cuda:0 is unusable")));
  const auto side = device_->NewStream("side");
  for (const absl::Status& status :
       {In(device_->compute()).Wait(), In(side.get()).Wait(), device_->compute()->Record().Wait(),
        device_->Allocate(1, MemoryKind::kBuffers).status(), device_->AllocateHost(1).status(),
        device_->MakeCurrent()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("restart the worker"), HasSubstr("cudaErrorIllegalAddress")));
  }
}

TEST_F(CudaStreamTest, DestructionRunsWhatIsDeferred) {
  HostGate gate;
  Event back;
  std::thread opener;
  {
    const auto side = device_->NewStream("side");
    In(side.get(), gate.event());
    back = Out(side.get());
    opener = std::thread([&] { gate.Open(); });
  }
  opener.join();
  EXPECT_TRUE(back.Done());
  EXPECT_TRUE(back.Wait().ok()) << "an event outlives its stream";
  EXPECT_EQ(out_, in_);
}

TEST_F(CudaStreamTest, AnEventOutlivesTheDevice) {
  const Event event = In(device_->compute());
  ASSERT_TRUE(event.Wait().ok());
  memory_ = Buffer();
  device_.reset();
  EXPECT_TRUE(event.Done());
  EXPECT_TRUE(event.Wait().ok());
}

TEST_F(CudaStreamTest, NativeEventsAreUsedAgain) {
  const auto side = device_->NewStream("side");
  for (int i = 0; i < 1000; ++i) {
    const Event there = In(device_->compute());
    ASSERT_TRUE(Out(side.get(), there).Wait().ok());
  }
  EXPECT_LE(runtime_.Calls("CreateEvent"), 8);
}

TEST_F(CudaStreamTest, TransfersGoBeforeKernels) {
  const auto side = device_->NewStream("side");
  EXPECT_TRUE(runtime_.HighPriority(runtime_.Named("cuda:0 side")));
  EXPECT_FALSE(runtime_.HighPriority(runtime_.Named("cuda:0 compute")));
}

TEST_F(CudaStreamTest, TakesWorkFromManyThreadsAlsoBehindTheHost) {
  HostGate gate;
  const auto side = device_->NewStream("side");
  EXPECT_TRUE(side->WaitFor(gate.event()).ok());
  std::vector<std::thread> threads;
  std::vector<std::vector<Event>> events(4);
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        events[t].push_back(side->Copy(&out_[t], &in_[t], 1));
        if (t == 0 && i == 50) gate.Open();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(side->Record().Wait().ok());
  for (const auto& of_thread : events) {
    for (const Event& event : of_thread) EXPECT_TRUE(event.Done());
  }
  EXPECT_EQ(runtime_.Calls("CopyAsync"), 400);
  for (size_t t = 0; t < 4; ++t) EXPECT_EQ(out_[t], 7);
}

}  // namespace
}  // namespace zeroshard::cuda
