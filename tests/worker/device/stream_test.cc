#include <atomic>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/device.h"
#include "worker/device/host_stream.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

absl::Status Ok() { return absl::OkStatus(); }

TEST(HostStreamTest, RunsWorkInOrderOnAThreadOfItsOwn) {
  const auto device = MakeCpuDevice();
  const auto stream = device->NewStream("order");
  std::vector<int> seen;
  std::thread::id ran_on;
  for (int i = 0; i < 100; ++i) {
    stream->Enqueue([&, i] {
      seen.push_back(i);
      ran_on = std::this_thread::get_id();
      return Ok();
    });
  }
  ASSERT_TRUE(stream->Record().Wait().ok());
  ASSERT_EQ(seen.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[static_cast<size_t>(i)], i);
  EXPECT_NE(ran_on, std::this_thread::get_id());
}

TEST(HostStreamTest, AnEventIsDoneOnlyAfterItsWork) {
  const auto stream = MakeHostStream("done");
  std::promise<void> go;
  const Event event = stream->Enqueue([&] {
    go.get_future().wait();
    return Ok();
  });
  EXPECT_FALSE(event.Done());
  go.set_value();
  EXPECT_TRUE(event.Wait().ok());
  EXPECT_TRUE(event.Done());
}

TEST(HostStreamTest, AnEmptyEventIsCompleteAndFine) {
  EXPECT_TRUE(Event().Done());
  EXPECT_TRUE(Event().Wait().ok());
}

TEST(HostStreamTest, AnEventCarriesItsErrorAndLaterWorkStillRuns) {
  const auto stream = MakeHostStream("errors");
  const Event failed = stream->Enqueue([] { return absl::DataLossError("bucket 3"); });
  bool ran = false;
  const Event after = stream->Enqueue([&] {
    ran = true;
    return Ok();
  });
  EXPECT_TRUE(after.Wait().ok());
  EXPECT_TRUE(ran);
  EXPECT_EQ(failed.Wait(), absl::DataLossError("bucket 3"));
  EXPECT_EQ(failed.Wait(), absl::DataLossError("bucket 3")) << "a second wait sees the same";
}

TEST(HostStreamTest, RecordCarriesTheFirstErrorSinceTheLastRecord) {
  for (const bool inlined : {false, true}) {
    const auto stream = inlined ? MakeInlineStream() : MakeHostStream("record");
    stream->Enqueue([] { return absl::DataLossError("first"); });
    stream->Enqueue([] { return absl::UnknownError("second"); });
    stream->Enqueue(Ok);
    EXPECT_EQ(stream->Record().Wait(), absl::DataLossError("first"));
    EXPECT_TRUE(stream->Record().Wait().ok());
  }
}

TEST(HostStreamTest, ExceptionsBecomeStatusesThatNameTheStream) {
  for (const bool inlined : {false, true}) {
    const auto stream = inlined ? MakeInlineStream() : MakeHostStream("inline-or-not");
    const absl::Status thrown =
        stream->Enqueue([]() -> absl::Status { throw std::runtime_error("peer gone"); }).Wait();
    EXPECT_EQ(thrown.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(thrown.message()),
                testing::AllOf(HasSubstr("peer gone"), HasSubstr("inline")));
    EXPECT_EQ(stream->Enqueue([]() -> absl::Status { throw 3; }).Wait().code(),
              absl::StatusCode::kInternal);
  }
}

TEST(HostStreamTest, WaitForHoldsBackOnlyWhatIsEnqueuedAfterIt) {
  const auto first = MakeHostStream("first"), second = MakeHostStream("second");
  std::promise<void> go;
  std::atomic<bool> opened = false;
  const Event gate = first->Enqueue([&] {
    go.get_future().wait();
    opened = true;
    return absl::AbortedError("even a failed event only orders");
  });
  const Event before = second->Enqueue(Ok);
  second->WaitFor(gate);
  bool seen = false;
  const Event after = second->Enqueue([&] {
    seen = opened;
    return Ok();
  });
  EXPECT_TRUE(before.Wait().ok());
  EXPECT_FALSE(after.Done());
  go.set_value();
  EXPECT_TRUE(after.Wait().ok());
  EXPECT_TRUE(seen);
}

TEST(HostStreamTest, DestructionRunsWhatWasEnqueued) {
  int ran = 0;
  Event last;
  {
    const auto stream = MakeHostStream("drain");
    for (int i = 0; i < 50; ++i) {
      last = stream->Enqueue([&ran] {
        ++ran;
        return Ok();
      });
    }
  }
  EXPECT_EQ(ran, 50);
  EXPECT_TRUE(last.Done()) << "an event outlives its stream";
}

TEST(HostStreamTest, WorkIsDestroyedBeforeItsEventIsDone) {
  const auto stream = MakeHostStream("owned");
  auto owned = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = owned;
  const Event event = stream->Enqueue([owned = std::move(owned)] { return Ok(); });
  ASSERT_TRUE(event.Wait().ok());
  EXPECT_TRUE(watch.expired());
}

TEST(HostStreamTest, TakesWorkFromManyThreads) {
  const auto stream = MakeHostStream("many");
  int ran = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        stream->Enqueue([&ran] {
          ++ran;
          return Ok();
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(stream->Record().Wait().ok());
  EXPECT_EQ(ran, 800);
}

TEST(InlineStreamTest, RunsOnTheCallersThreadAtOnce) {
  const auto stream = MakeInlineStream();
  std::thread::id ran_on;
  const Event event = stream->Enqueue([&] {
    ran_on = std::this_thread::get_id();
    return Ok();
  });
  EXPECT_TRUE(event.Done());
  EXPECT_EQ(ran_on, std::this_thread::get_id());
}

}  // namespace
}  // namespace zeroshard
