#include "tests/worker/device/guarded_device.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

class GuardedDeviceTest : public testing::TestWithParam<uint64_t> {
 protected:
  Buffer Allocate(size_t bytes) {
    absl::StatusOr<Buffer> buffer = device_.Allocate(bytes, MemoryKind::kBuffers);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return *std::move(buffer);
  }
  GuardedDevice device_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Seeds, GuardedDeviceTest, testing::Range<uint64_t>(0, 6));

using GuardedDeviceDeathTest = GuardedDeviceTest;
INSTANTIATE_TEST_SUITE_P(Seeds, GuardedDeviceDeathTest, testing::Range<uint64_t>(0, 3));

TEST_P(GuardedDeviceDeathTest, TheHostCannotReachItsMemory) {
  const Buffer buffer = Allocate(100);
  volatile char* const byte = buffer.as<char>() + 50;
  EXPECT_DEATH(*byte = 1, "");
  EXPECT_DEATH(static_cast<void>(*byte), "");
  char host = 0;
  EXPECT_DEATH(device_.HostView(&host), "is no memory of this device");
}

TEST_P(GuardedDeviceDeathTest, MemoryThatWasFreedIsGone) {
  const char* stale = nullptr;
  {
    const Buffer buffer = Allocate(100);
    stale = buffer.as<char>();
  }
  EXPECT_DEATH(device_.HostView(stale), "is no memory of this device");
}

TEST_P(GuardedDeviceDeathTest, HostMemoryOfACopyMustOutliveIt) {
  const Buffer buffer = Allocate(100);
  EXPECT_DEATH(
      {
        const Buffer host = *device_.AllocateHost(100);
        device_.compute()->Enqueue([] {
          std::this_thread::sleep_for(std::chrono::seconds(60));
          return absl::OkStatus();
        });
        device_.compute()->Copy(host.as<char>() + 10, buffer.data(), 90);
      },
      "host memory is freed while 1 copies use it");
  const Buffer host = *device_.AllocateHost(100);
  EXPECT_TRUE(device_.compute()->Copy(host.data(), buffer.data(), 100).Wait().ok());
}

TEST_P(GuardedDeviceTest, CopiesReachItsMemoryFromBothSides) {
  const std::string text = "through the device and back";
  const Buffer first = Allocate(1000), second = Allocate(500000);
  const auto stream = device_.NewStream("copies");
  stream->Copy(first.as<char>() + 7, text.data(), text.size());
  stream->Copy(second.as<char>() + 400000, first.as<char>() + 7, text.size());
  std::string back(text.size(), '\0'), zeros(3, 'x');
  stream->Copy(back.data(), second.as<char>() + 400000, text.size());
  stream->Copy(zeros.data(), second.data(), 3);
  EXPECT_TRUE(stream->Record().Wait().ok());
  EXPECT_EQ(back, text);
  EXPECT_EQ(zeros, std::string(3, '\0'));
  EXPECT_EQ(std::memcmp(device_.HostView(first.as<char>() + 7), text.data(), text.size()), 0);
  EXPECT_EQ(device_.memory().Bytes(MemoryKind::kBuffers), 501000);
}

TEST_P(GuardedDeviceTest, ABufferMayBeFreedWhileTheComputeStreamStillReadsIt) {
  std::string back(9, '.');
  {
    const Buffer buffer = Allocate(9);
    device_.compute()->Copy(buffer.data(), "some text", 9);
    device_.compute()->Copy(back.data(), buffer.data(), 9);
  }
  EXPECT_EQ(device_.memory().Bytes(MemoryKind::kBuffers), 0);
  EXPECT_TRUE(device_.compute()->Record().Wait().ok());
  EXPECT_EQ(back, "some text");
}

TEST_P(GuardedDeviceTest, AnErrorOfWorkIsTheStreams) {
  device_.compute()->Enqueue([] { return absl::DataLossError("kernel"); });
  EXPECT_EQ(device_.compute()->Record().Wait(), absl::DataLossError("kernel"));
  EXPECT_TRUE(device_.compute()->Record().Wait().ok());
}

TEST_P(GuardedDeviceTest, WorkIsDoneAlsoWhereNobodyWaits) {
  const auto stream = device_.NewStream("polled");
  char to = '.';
  const Event event = stream->Copy(&to, "x", 1);
  while (!event.Done()) {
  }
  EXPECT_EQ(to, 'x');
}

TEST(GuardedDeviceScheduleTest, LazyWorkIsNotDoneUntilSomebodyWaits) {
  GuardedDevice device(1);
  ASSERT_EQ(device.schedule(), Schedule::kLazy);
  const auto stream = device.NewStream("lazy");
  const auto other = device.NewStream("other");
  int early = 0;
  for (int i = 0; i < 20; ++i) {
    char to = '.';
    const Event copied = stream->Copy(&to, "x", 1);
    early += copied.Done() ? 1 : 0;
    // Waiting is passed on to what an event depends on.
    EXPECT_TRUE(other->Copy(&to, "y", 1, copied).Wait().ok());
    EXPECT_TRUE(copied.Done());
    EXPECT_EQ(to, 'y');
  }
  EXPECT_LT(early, 20) << "an event that is forgotten would never show";
}

}  // namespace
}  // namespace zeroshard
