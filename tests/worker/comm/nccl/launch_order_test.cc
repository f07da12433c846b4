#include "worker/comm/nccl/launch_order.h"

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/nccl/nccl_ranks.h"
#include "worker/device/host_event.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(LaunchOrder, APlaceIsReachedWhenAllBeforeItAreLeftInWhateverOrder) {
  LaunchOrder order;
  const uint64_t first = order.Take(), second = order.Take(), third = order.Take();
  EXPECT_TRUE(order.Reached(first));
  EXPECT_FALSE(order.Reached(second));
  order.Leave(second);
  EXPECT_FALSE(order.Reached(third)) << "the first is still there";
  EXPECT_FALSE(order.Await(third, absl::Milliseconds(1)));
  std::thread leaves([&] { order.Leave(first); });
  EXPECT_TRUE(order.Await(third, absl::Seconds(60)));
  leaves.join();
  EXPECT_TRUE(order.Reached(first)) << "and stays so";
  order.Leave(third);
  EXPECT_TRUE(order.Reached(order.Take()));
}

// Two lines of two ranks, and what the test holds back on rank 0.
class LaunchTurns : public ::testing::Test {
 protected:
  static constexpr absl::Duration kLong = absl::Seconds(60);

  ~LaunchTurns() override {
    Each([this](int rank) {
      first_[rank] = nullptr;
      second_[rank] = nullptr;
    });
    EXPECT_THAT(nccl_.violations(), IsEmpty());
  }
  // The limit is that of rank 0.
  void Make(absl::Duration timeout_of_second) {
    Each([&](int rank) {
      const auto order = std::make_shared<LaunchOrder>();
      const auto make = [&](MemoryRendezvous* rendezvous, absl::Duration timeout) {
        CommunicatorOptions options;
        options.rank = rank;
        options.size = 2;
        options.connect_timeout = kLong;
        options.operation_timeout = rank == 0 ? timeout : kLong;
        auto made = MakeNcclCommunicator(options, NcclTuning{.order = order}, nccl_.Api(rank),
                                         rendezvous, device_.get());
        EXPECT_TRUE(made.ok()) << made.status();
        return *std::move(made);
      };
      first_[rank] = make(&first_rendezvous_, kLong);
      second_[rank] = make(&second_rendezvous_, timeout_of_second);
    });
  }
  static void Each(const std::function<void(int)>& body) {
    std::thread other([&body] { body(1); });
    body(0);
    other.join();
  }

  FakeNccl nccl_;
  std::unique_ptr<Device> device_ = MakeCpuDevice();
  MemoryRendezvous first_rendezvous_, second_rendezvous_;
  std::unique_ptr<Communicator> first_[2], second_[2];
  std::shared_ptr<HostEvent> held_ = std::make_shared<HostEvent>();
};

TEST_F(LaunchTurns, TimeThatPassesBeforeItsTurnIsNotTheOperations) {
  constexpr absl::Duration kLimit = absl::Seconds(2);
  Make(/*timeout_of_second=*/kLimit);
  float first[2][2] = {{1, 0}, {0, 2}}, second[2][2] = {{3, 0}, {0, 4}};
  std::vector<Event> events;
  for (const int rank : {1, 0}) {
    const Event after = rank == 0 ? Event(held_) : Event();
    events.push_back(first_[rank]->AllGather(first[rank], 1, DType::kF32, Info(), after));
    events.push_back(second_[rank]->AllGather(second[rank], 1, DType::kF32, Info()));
  }
  absl::SleepFor(1.5 * kLimit);
  held_->Finish(absl::OkStatus());
  for (const Event& event : events) EXPECT_TRUE(event.Wait().ok()) << event.Wait();
  EXPECT_THAT(second[0], ElementsAre(3, 4));
}

TEST_F(LaunchTurns, WorkThatFailedBeforeIsToldWithoutATurn) {
  Make(kLong);
  float data[2] = {1, 2}, more[2] = {1, 2};
  const Event held = first_[0]->AllGather(data, 1, DType::kF32, Info(), Event(held_));
  const Event failed =
      second_[0]->AllGather(more, 1, DType::kF32, Info(), DoneEvent(absl::DataLossError("bits")));
  for (const absl::Time until = absl::Now() + kLong; !failed.Done() && absl::Now() < until;)
    absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(failed.Done());
  first_[0]->Abort("the test ends");
  held_->Finish(absl::OkStatus());
  EXPECT_EQ(held.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(Text(failed.Wait()), HasSubstr("bits"));
}

TEST_F(LaunchTurns, ALineThatIsAbortedHoldsNoOtherBack) {
  Make(kLong);
  float data[2] = {1, 2}, more[2] = {1, 2};
  const Event held = first_[0]->AllGather(data, 1, DType::kF32, Info(), Event(held_));
  const Event never = first_[0]->AllGather(more, 1, DType::kF32, Info());
  const Event behind = second_[0]->Barrier(Info());
  first_[0]->Abort("the test wants it");
  EXPECT_EQ(held.Wait().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(Text(never.Wait()), AllOf(HasSubstr("not started"), HasSubstr("the test wants it")));
  EXPECT_TRUE(second_[1]->Barrier(Info()).Wait().ok());
  EXPECT_TRUE(behind.Wait().ok()) << behind.Wait();
  held_->Finish(absl::OkStatus());
}

}  // namespace
}  // namespace zeroshard
