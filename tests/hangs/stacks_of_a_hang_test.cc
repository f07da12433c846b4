#include "tests/hangs/stacks_of_a_hang.h"

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {

// Not in an unnamed namespace, so that the symbol has a plain name.
__attribute__((noinline)) void WaitHereForTheTest(std::mutex* mutex, std::condition_variable* done,
                                                  bool* ended) {
  std::unique_lock<std::mutex> lock(*mutex);
  done->wait(lock, [&] { return *ended; });
}

namespace {

TEST(StacksOfAHang, NameWhereEachThreadWaits) {
  std::mutex mutex;
  std::condition_variable done;
  bool ended = false;
  std::thread waiting([&] { WaitHereForTheTest(&mutex, &done, &ended); });
  testing::internal::CaptureStderr();
  // The other threads' stacks: the test's own thread asks.
  for (int tried = 0; tried < 100; ++tried) {
    WriteStacks();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const std::string stacks = testing::internal::GetCapturedStderr();
  {
    std::lock_guard<std::mutex> lock(mutex);
    ended = true;
  }
  done.notify_all();
  waiting.join();
  EXPECT_THAT(stacks, testing::HasSubstr("WaitHereForTheTest"));
}

}  // namespace
}  // namespace zeroshard
