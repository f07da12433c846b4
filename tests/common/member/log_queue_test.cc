#include "common/member/log_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::shared_ptr<const v1::Fence> RunNamed(const std::string& id) {
  auto fence = std::make_shared<v1::Fence>();
  fence->set_run_id(id);
  return fence;
}

TEST(LogQueueTest, KeepsLinesOfARunOnlyAndInOrder) {
  LogQueue queue;
  queue.Add("before any job");
  queue.SetRun(RunNamed("a-1"));
  queue.Add("one");
  queue.Add("two");
  queue.SetRun(nullptr);
  queue.Add("between jobs");
  const auto lines = queue.Take();
  ASSERT_TRUE(lines.has_value());
  EXPECT_EQ(lines->running().run_id(), "a-1");
  EXPECT_THAT(lines->lines(), ElementsAre("one", "two"));
  EXPECT_FALSE(queue.Take().has_value());
}

TEST(LogQueueTest, AMessageHoldsLinesOfOneRun) {
  LogQueue queue;
  queue.SetRun(RunNamed("a-1"));
  queue.Add("of a");
  queue.SetRun(RunNamed("b-2"));
  queue.Add("of b");
  EXPECT_THAT(queue.Take()->lines(), ElementsAre("of a"));
  EXPECT_EQ(queue.Take()->running().run_id(), "b-2");
}

TEST(LogQueueTest, WhatDoesNotFitIsCountedAndSaidInItsPlace) {
  LogQueue queue(/*most_bytes=*/10);
  queue.SetRun(RunNamed("a-1"));
  queue.Add("12345");
  queue.Add("67890");
  queue.Add("x");
  queue.Add("y");
  EXPECT_THAT(queue.Take()->lines(), ElementsAre("12345", "67890"));
  queue.Add("z");  // the notice is not out yet
  EXPECT_THAT(queue.Take()->lines(), ElementsAre(HasSubstr("3 lines dropped")));
  queue.Add("after");
  EXPECT_THAT(queue.Take()->lines(), ElementsAre("after"));
}

TEST(LogQueueTest, MessagesStaySmall) {
  LogQueue queue(1 << 20);
  queue.SetRun(RunNamed("a-1"));
  for (int i = 0; i < 100; ++i) queue.Add(std::string(10000, 'x'));
  int messages = 0;
  while (auto lines = queue.Take()) {
    ++messages;
    EXPECT_LE(lines->ByteSizeLong(), 80u << 10);
  }
  EXPECT_GE(messages, 2);
}

}  // namespace
}  // namespace zeroshard
