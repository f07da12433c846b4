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
#include "worker/device/host_event.h"
#include "worker/device/host_stream.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

absl::Status Ok() { return absl::OkStatus(); }

TEST(HostStreamTest, RunsWorkInOrderOnAThreadOfItsOwn) {
  const auto stream = MakeHostStream("order");
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
  const auto stream = MakeHostStream("record");
  stream->Enqueue([] { return absl::DataLossError("first"); });
  stream->Enqueue([] { return absl::UnknownError("second"); });
  stream->Enqueue(Ok);
  EXPECT_EQ(stream->Record().Wait(), absl::DataLossError("first"));
  EXPECT_TRUE(stream->Record().Wait().ok());
}

TEST(HostStreamTest, ExceptionsBecomeStatusesThatNameTheStream) {
  const auto stream = MakeHostStream("thrower");
  const absl::Status thrown =
      stream->Enqueue([]() -> absl::Status { throw std::runtime_error("peer gone"); }).Wait();
  EXPECT_EQ(thrown.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(thrown.message()),
              testing::AllOf(HasSubstr("peer gone"), HasSubstr("thrower")));
  EXPECT_EQ(stream->Enqueue([]() -> absl::Status { throw 3; }).Wait().code(),
            absl::StatusCode::kInternal);
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
  EXPECT_TRUE(second->WaitFor(gate).ok()) << "its error is not known yet";
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
  EXPECT_EQ(second->WaitFor(gate), absl::AbortedError("even a failed event only orders"));
  EXPECT_TRUE(second->Record().Wait().ok()) << "nor is it an error of the work behind it";
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

// The compute stream of the CPU, and one that is a thread.
class CopyTest : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<Device> device_ = MakeCpuDevice();
  std::unique_ptr<Stream> own_ = device_->NewStream("copies");
  Stream* stream() { return GetParam() ? device_->compute() : own_.get(); }
};
INSTANTIATE_TEST_SUITE_P(Streams, CopyTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "compute" : "thread"; });

TEST_P(CopyTest, CopiesInOrder) {
  const std::string text = "sixteen letters!";
  std::string first(16, '.'), second(16, '.');
  stream()->Copy(first.data(), text.data(), 16);
  stream()->Copy(second.data(), first.data(), 16);
  EXPECT_TRUE(stream()->Record().Wait().ok());
  EXPECT_EQ(second, text);
  EXPECT_TRUE(stream()->Copy(nullptr, nullptr, 0).Wait().ok());
  EXPECT_TRUE(CopyAndWait(device_.get(), first.data(), "other", 5).ok());
  EXPECT_EQ(first, "other" + text.substr(5));
}

TEST_P(CopyTest, StartsAfterItsEvent) {
  const auto before = MakeHostStream("before");
  std::string from(4, '.'), to(4, '.');
  const Event filled = before->Enqueue([&] {
    std::this_thread::yield();
    from = "done";
    return Ok();
  });
  EXPECT_TRUE(stream()->Copy(to.data(), from.data(), 4, filled).Wait().ok());
  EXPECT_EQ(to, "done");
}

TEST_P(CopyTest, CopiesNothingAfterAFailedEventAndHasItsError) {
  std::string to = "kept";
  const Event failed = DoneEvent(absl::DataLossError("bucket 3"));
  const Event copied = stream()->Copy(to.data(), "lost", 4, failed);
  EXPECT_EQ(copied.Wait(), absl::DataLossError("bucket 3"));
  EXPECT_EQ(to, "kept");
  EXPECT_EQ(stream()->Record().Wait(), absl::DataLossError("bucket 3"));
  EXPECT_TRUE(stream()->Record().Wait().ok());
}

TEST_P(CopyTest, WaitForTellsAnErrorThatIsKnown) {
  EXPECT_TRUE(stream()->WaitFor({}).ok());
  const Event failed = DoneEvent(absl::DataLossError("bucket 3"));
  EXPECT_EQ(stream()->WaitFor(failed), absl::DataLossError("bucket 3"));
}

TEST(InlineStreamTest, CopiesOnTheCallersThreadAtOnce) {
  const auto stream = MakeInlineStream();
  std::string to = "....";
  EXPECT_TRUE(stream->Copy(to.data(), "done", 4).Done());
  EXPECT_EQ(to, "done");
  EXPECT_TRUE(stream->Record().Done());
}

TEST(EventTest, AllOfIsDoneWithTheLastAndHasTheFirstErrorOfTheList) {
  auto first = std::make_shared<HostEvent>(), second = std::make_shared<HostEvent>();
  const Event all = AllOf({Event(first), Event(), Event(second)});
  second->Finish(absl::UnknownError("second"));
  EXPECT_FALSE(all.Done());
  first->Finish(absl::DataLossError("first"));
  EXPECT_TRUE(all.Done());
  EXPECT_EQ(all.Wait(), absl::DataLossError("first"));
  EXPECT_EQ(AllOf({Event(), Event(second)}).state(), second) << "one alone stays what it is";
  EXPECT_TRUE(AllOf({}).Done());
  EXPECT_TRUE(DoneEvent(Ok()).Wait().ok());
}

}  // namespace
}  // namespace zeroshard
