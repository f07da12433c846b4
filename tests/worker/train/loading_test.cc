// Ranks that wait for each other's disks.
#include "worker/train/loading.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/comm/memory_rendezvous.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr absl::Duration kDeadline = absl::Seconds(1);

// LoadTogether on every rank with the tasks that `tasks` gives it; collectives whose deadline is
// kDeadline.
std::vector<absl::Status> Load(int world, const std::function<std::vector<LoadTask>(int)>& tasks,
                               const std::atomic<bool>* stop = nullptr) {
  MemoryRendezvous rendezvous;
  std::vector<absl::Status> statuses(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      absl::Status& status = statuses[static_cast<size_t>(rank)];
      const auto device = MakeCpuDevice();
      CommunicatorOptions gloo;
      gloo.rank = rank;
      gloo.size = world;
      gloo.host = "127.0.0.1";
      gloo.operation_timeout = kDeadline;
      auto comm = MakeGlooCommunicator(gloo, &rendezvous, device.get());
      status = comm.status();
      if (comm.ok()) status = LoadTogether(comm->get(), kDeadline, stop, "loading x", tasks(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

// Reads on for `time`, unless it is stopped.
LoadTask Reads(absl::Duration time) {
  return [time](LoadSignals* signals) -> absl::Status {
    std::mutex mutex;
    std::condition_variable nobody;
    for (const absl::Time end = absl::Now() + time; absl::Now() < end;) {
      if (signals->stop) return absl::CancelledError("stopped");
      ++signals->bytes;
      std::unique_lock<std::mutex> lock(mutex);
      nobody.wait_for(lock, std::chrono::milliseconds(5));
    }
    return absl::OkStatus();
  };
}

LoadTask Gives(const absl::Status& status) {
  return [status](LoadSignals*) { return status; };
}

TEST(LoadTogetherTest, ARankMayReadForLongerThanACollectiveMayTake) {
  const absl::Time start = absl::Now();
  const auto statuses = Load(2, [&](int rank) -> std::vector<LoadTask> {
    if (rank == 0) return {Gives(absl::OkStatus())};
    return {Gives(absl::OkStatus()), Reads(2 * kDeadline)};
  });
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  EXPECT_GE(absl::Now() - start, 2 * kDeadline);
}

TEST(LoadTogetherTest, AnErrorIsEveryRanksAndEndsTheOthersTasks) {
  const absl::Time start = absl::Now();
  const auto statuses = Load(3, [&](int rank) -> std::vector<LoadTask> {
    if (rank == 1)
      return {Reads(absl::Seconds(60)), Gives(absl::DataLossError("file 7 is damaged"))};
    return {Reads(absl::Seconds(60)), Reads(absl::Seconds(60))};
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(status.message(), "rank 1: file 7 is damaged");
    EXPECT_EQ(BlamedRank(status), 1u);
  }
}

TEST(LoadTogetherTest, AnExceptionIsAnError) {
  const auto statuses = Load(2, [&](int rank) -> std::vector<LoadTask> {
    return {[rank](LoadSignals*) -> absl::Status {
      if (rank == 1) throw std::runtime_error("odd");
      return absl::OkStatus();
    }};
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr("odd"));
  }
}

TEST(LoadTogetherTest, ADiskThatGivesNothingForADeadlineIsNamedWithItsRank) {
  const auto statuses = Load(3, [&](int rank) -> std::vector<LoadTask> {
    if (rank != 2) return {Reads(kDeadline / 2)};
    return {[](LoadSignals* signals) -> absl::Status {
      std::mutex mutex;
      std::condition_variable nobody;
      std::unique_lock<std::mutex> lock(mutex);
      for (int i = 0; i < 3000 && !signals->stop; ++i)
        nobody.wait_for(lock, std::chrono::milliseconds(10));
      return absl::CancelledError("stopped");
    }};
  });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("loading x: nothing was read for 1s"), HasSubstr("on rank 2;"),
                      HasSubstr("collective_seconds")));
  }
}

TEST(LoadTogetherTest, IsStoppedFromOutside) {
  std::atomic<bool> stop{false};
  const auto statuses = Load(
      1,
      [&](int) -> std::vector<LoadTask> {
        return {Reads(absl::Seconds(60)), [&](LoadSignals*) {
                  stop = true;
                  return absl::OkStatus();
                }};
      },
      &stop);
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kCancelled);
}

// Numbers that are where they are read from.
class Counting : public ParameterSource {
 public:
  absl::Status Read(const ParameterInfo&, int64_t begin, int64_t end, float* out) const override {
    for (int64_t i = begin; i < end; ++i) *out++ = static_cast<float>(i);
    return absl::OkStatus();
  }
};

TEST(SignallingSourceTest, CountsBytesAndStops) {
  const Counting counting;
  LoadSignals signals;
  const SignallingSource source(&counting, &signals);
  float out[3];
  ASSERT_TRUE(source.Read({}, 5, 8, out).ok());
  EXPECT_EQ(out[2], 7);
  EXPECT_EQ(signals.bytes, 12u);
  signals.stop = true;
  EXPECT_TRUE(absl::IsCancelled(source.Read({}, 5, 8, out)));
}

}  // namespace
}  // namespace zeroshard
