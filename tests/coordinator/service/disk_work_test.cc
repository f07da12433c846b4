#include "coordinator/service/disk_work.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <memory>

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(60);
constexpr absl::Duration kLong = absl::Seconds(60);

// A piece of work that hangs until it is let go.
struct Hanging {
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  std::function<absl::Status()> Work() const {
    return [released = released] {
      return released.wait_for(kPatience) == std::future_status::ready
                 ? absl::OkStatus()
                 : absl::DeadlineExceededError("the test never released it");
    };
  }
};

// Where an answer comes, once; a second would throw.
struct Answer {
  std::promise<absl::Status> promise;
  std::future<absl::Status> future = promise.get_future();
  std::function<void(const absl::Status&)> Done() {
    return [this](const absl::Status& status) { promise.set_value(status); };
  }
  absl::Status Get() {
    if (future.wait_for(kPatience) != std::future_status::ready) {
      return absl::UnknownError("no answer came");
    }
    return future.get();
  }
};

TEST(DiskWork, TellsWhatTheWorkReturned) {
  DiskWork disk(4);
  Answer fine, bad;
  disk.Run(
      "a", kLong, [] { return absl::OkStatus(); }, fine.Done());
  disk.Run(
      "b", kLong, [] { return absl::NotFoundError("nothing there"); }, bad.Done());
  EXPECT_TRUE(fine.Get().ok());
  EXPECT_EQ(bad.Get(), absl::NotFoundError("nothing there"));
}

TEST(DiskWork, WhatHangsIsAnsweredInTimeAndItsLateEndIsNot) {
  Hanging hanging;
  Answer answer;
  DiskWork disk(4);
  disk.Run("job demo", absl::Milliseconds(20), hanging.Work(), answer.Done());
  const absl::Status status = answer.Get();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("job demo"), HasSubstr("20ms")));
  hanging.release.set_value();
}

TEST(DiskWork, HowMuchHangsIsBounded) {
  Hanging hanging;
  Answer first, second, third;
  DiskWork disk(1);
  disk.Run("first", kLong, hanging.Work(), first.Done());
  disk.Run(
      "second", kLong, [] { return absl::OkStatus(); }, second.Done());
  const absl::Status status = second.Get();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("second: 1 requests wait"));
  hanging.release.set_value();
  EXPECT_TRUE(first.Get().ok());
  disk.Run(
      "third", kLong, [] { return absl::OkStatus(); }, third.Done());
  EXPECT_TRUE(third.Get().ok());
}

TEST(DiskWork, ItsEndAnswersWhatStillHangs) {
  Hanging hanging;
  Answer answer;
  auto disk = std::make_unique<DiskWork>(4);
  disk->Run("job demo", kLong, hanging.Work(), [&](const absl::Status& status) {
    answer.promise.set_value(status);
    hanging.release.set_value();
  });
  disk.reset();
  EXPECT_EQ(answer.Get().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace zeroshard::coordinator
