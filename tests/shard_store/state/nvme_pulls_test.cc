#include "shard_store/state/nvme_pulls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <system_error>
#include <thread>

#include "shard_store/state/memory_budget.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

class NvmePullsTest : public testing::Test {
 protected:
  std::vector<std::shared_ptr<Buffer>> Buffers(int count) {
    std::vector<std::shared_ptr<Buffer>> buffers;
    for (int i = 0; i < count; ++i) {
      EXPECT_TRUE(budget_.Take(4096, "a test").ok());
      auto buffer = Buffer::Allocate(4096, &budget_);
      EXPECT_TRUE(buffer.ok()) << buffer.status();
      buffers.push_back(*std::move(buffer));
    }
    return buffers;
  }
  static absl::StatusOr<PinnedParameters> Get(NvmePulls* pulls, char value) {
    std::promise<absl::StatusOr<PinnedParameters>> answer;
    pulls->Add(
        100,
        [value](char* to) {
          std::memset(to, value, 100);
          return absl::OkStatus();
        },
        [&answer](absl::StatusOr<PinnedParameters> got) { answer.set_value(std::move(got)); });
    return answer.get_future().get();
  }

  MemoryBudget budget_{1 << 20};
};

TEST_F(NvmePullsTest, WhoDoesNotReadHoldsOthersBackForATimeAndHarmsNothing) {
  const auto made = NvmePulls::Make(Buffers(1), absl::Milliseconds(50));
  ASSERT_TRUE(made.ok()) << made.status();
  NvmePulls& pulls = **made;
  absl::StatusOr<PinnedParameters> first = Get(&pulls, 'a');
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = Get(&pulls, 'b');
  // Of the pull, not of the state: IsOfTheState would fail the job on this store.
  EXPECT_FALSE(IsOfTheState(second.status())) << second.status();
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("workers do not read"));
  EXPECT_EQ(first->bytes, absl::MakeConstSpan(std::string(100, 'a')));
  first = absl::CancelledError("let go");
  const auto third = Get(&pulls, 'c');
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_EQ(third->bytes, absl::MakeConstSpan(std::string(100, 'c')));
}

TEST_F(NvmePullsTest, BuffersThatAreOutGoBackToTheBudgetWhenTheyAreLetGo) {
  absl::StatusOr<PinnedParameters> pinned;
  {
    const auto made = NvmePulls::Make(Buffers(2));
    ASSERT_TRUE(made.ok()) << made.status();
    NvmePulls& pulls = **made;
    pinned = Get(&pulls, 'a');
    ASSERT_TRUE(pinned.ok()) << pinned.status();
  }
  EXPECT_EQ(pinned->bytes, absl::MakeConstSpan(std::string(100, 'a')));
  EXPECT_EQ(budget_.used(), 4096u);
  pinned = absl::CancelledError("let go");
  EXPECT_EQ(budget_.used(), 0u);
}

TEST_F(NvmePullsTest, WithoutAThreadMoreThereAreNoneAndNothingIsLeftOfThem) {
  int started = 0;
  const auto made =
      NvmePulls::Make(Buffers(1), absl::Seconds(1), [&](std::function<void()> run) -> std::thread {
        if (++started == 2) throw std::system_error(EAGAIN, std::generic_category());
        return std::thread(std::move(run));
      });
  EXPECT_TRUE(absl::IsResourceExhausted(made.status())) << made.status();
  EXPECT_EQ(started, 2);
  EXPECT_EQ(budget_.used(), 0u);
}

TEST_F(NvmePullsTest, WhatComesAfterTheEndIsCancelled) {
  const auto made = NvmePulls::Make(Buffers(1));
  ASSERT_TRUE(made.ok()) << made.status();
  NvmePulls& pulls = **made;
  pulls.End();
  EXPECT_TRUE(absl::IsCancelled(Get(&pulls, 'a').status()));
  EXPECT_EQ(budget_.used(), 0u);
}

}  // namespace
}  // namespace zeroshard::store
