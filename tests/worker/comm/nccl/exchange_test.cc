// Messages that belong together: one group of NCCL's.
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/nccl/nccl_ranks.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

std::vector<uint8_t> Sent(int from, int to, size_t bytes) {
  std::vector<uint8_t> values(bytes);
  std::iota(values.begin(), values.end(), static_cast<uint8_t>(17 * from + 5 * to));
  return values;
}

// The two messages of two ranks that send to each other.
std::vector<Message> Both(const std::vector<uint8_t>& out, std::vector<uint8_t>* in, int peer) {
  return {{.send = true,
           .buffer = const_cast<uint8_t*>(out.data()),
           .bytes = static_cast<int64_t>(out.size()),
           .peer = peer},
          {.buffer = in->data(), .bytes = static_cast<int64_t>(in->size()), .peer = peer}};
}

// All send to the next and to the one before, and receive from both; with two ranks both are one,
// and messages match in order.
TEST(NcclExchange, ARingThatSendsBothWaysAtOnceArrivesInOneGroup) {
  for (const int size : {2, 3, 4}) {
    NcclRanks ranks(size);
    constexpr size_t kForth = 5003, kBack = 70001;
    constexpr int kRounds = 3;
    ranks.Each([&](int rank) {
      const int next = (rank + 1) % size, last = (rank + size - 1) % size;
      const std::vector<uint8_t> forth = Sent(rank, next, kForth), back = Sent(rank, last, kBack);
      for (int round = 0; round < kRounds; ++round) {
        std::vector<uint8_t> from_last(kForth), from_next(kBack);
        std::vector<Message> messages = Both(forth, &from_last, next);
        messages[1].peer = last;
        for (Message& m : Both(back, &from_next, last)) {
          m.phase = Phase::kBackward;
          messages.push_back(m);
        }
        messages[3].peer = next;
        messages.push_back({.send = true, .bytes = 0, .peer = next});
        messages.push_back({.bytes = 0, .peer = last});
        const absl::Status status = ranks[rank].Exchange(messages, Info(), {}).Wait();
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(from_last, Sent(last, rank, kForth));
        EXPECT_EQ(from_next, Sent(next, rank, kBack));
      }
    });
    for (int rank = 0; rank < size; ++rank) {
      EXPECT_EQ(ranks.nccl().groups(rank), kRounds);
      EXPECT_EQ(ranks.nccl().calls(rank).size(), kRounds * 4u) << "an empty message is no call";
      const TrafficCounters& traffic = ranks[rank].traffic();
      EXPECT_EQ(traffic.Get(CollectiveOp::kSend, Phase::kForward), kRounds * kForth);
      EXPECT_EQ(traffic.Get(CollectiveOp::kSend, Phase::kBackward), kRounds * kBack);
    }
  }
}

// What a pipeline does at a stage: its group has a message that its peer sends in the next group.
TEST(NcclExchange, AMessageMayBeInAnotherExchangeOfTheOtherEnd) {
  NcclRanks ranks(2);
  ranks.Each([&](int rank) {
    std::vector<uint8_t> out = Sent(rank, 1 - rank, 1000), in(1000);
    const std::vector<Message> both = Both(out, &in, 1 - rank);
    std::vector<Event> events;
    if (rank == 0) {
      events.push_back(ranks[rank].Exchange(both, Info(), {}));
    } else {
      events.push_back(ranks[rank].Exchange({both[1]}, Info(), {}));
      events.push_back(ranks[rank].Exchange({both[0]}, Info(), {}));
    }
    for (const Event& event : events) EXPECT_TRUE(event.Wait().ok()) << event.Wait();
    EXPECT_EQ(in, Sent(1 - rank, rank, 1000));
  });
}

TEST(NcclExchange, OfNoMessagesIsDoneBehindWhatItStartsAfter) {
  NcclRanks ranks(1);
  const auto before = std::make_shared<FakeGpuEvent>();
  const Event exchanged = ranks[0].Exchange({}, Info(), Event(before));
  EXPECT_FALSE(exchanged.Done());
  before->Finish(absl::OkStatus());
  EXPECT_TRUE(exchanged.Wait().ok()) << exchanged.Wait();
  EXPECT_EQ(ranks.nccl().groups(0), 0);
}

TEST(NcclExchange, APeerThatDoesNotComeRunsIntoTheDeadlineAndNothingIsCounted) {
  NcclRanks ranks(2, {.operation_timeout = absl::Milliseconds(300), .line = "pipeline line 3"});
  const std::vector<uint8_t> out = Sent(0, 1, 100);
  std::vector<uint8_t> in(100, 7);
  const absl::Status status = ranks[0].Exchange(Both(out, &in, 1), Info(), {}).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(Text(status),
              AllOf(HasSubstr("pipeline line 3: exchange of blocks.3 (step 7, backward) on rank 0"),
                    HasSubstr("limit is 300ms")));
  EXPECT_THAT(in, Each(7));
  EXPECT_EQ(ranks[0].traffic().Get(CollectiveOp::kSend, Phase::kForward), 0u);
  EXPECT_EQ(ranks.nccl().aborted(), 1);
}

TEST(NcclExchange, AnAbortEndsItAndLeavesItsMemoryAlone) {
  NcclRanks ranks(2);
  const std::vector<uint8_t> out = Sent(0, 1, 100);
  std::vector<uint8_t> in(100, 7), later(100, 8);
  const Event pending = ranks[0].Exchange(Both(out, &in, 1), Info(), {});
  const Event queued = ranks[0].Exchange(Both(out, &later, 1), Info(), {});
  ranks.nccl().AwaitKernels(1);
  ranks[0].Abort("generation 8 begins");
  for (const Event& event : {pending, queued}) {
    EXPECT_EQ(event.Wait().code(), absl::StatusCode::kAborted) << event.Wait();
    EXPECT_THAT(Text(event.Wait()), HasSubstr("generation 8 begins"));
  }
  // The other end comes now: nothing reaches it, and nothing of it this rank.
  std::vector<uint8_t> others(100, 9);
  const Event late = ranks[1].Exchange(Both(out, &others, 0), Info(), {});
  ranks[1].Abort("enough");
  EXPECT_FALSE(late.Wait().ok());
  EXPECT_THAT(in, Each(7));
  EXPECT_THAT(later, Each(8));
  EXPECT_THAT(others, Each(9));
}

TEST(NcclExchange, AfterWorkThatFailedItIsNotStarted) {
  NcclRanks ranks(2);
  const std::vector<uint8_t> out = Sent(0, 1, 100);
  std::vector<uint8_t> in(100, 7);
  const auto broken = std::make_shared<HostEvent>();
  broken->Finish(absl::DataLossError("no gradient"));
  const absl::Status status = ranks[0].Exchange(Both(out, &in, 1), Info(), Event(broken)).Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("exchange of blocks.3"), HasSubstr("no gradient")));
  EXPECT_EQ(ranks.nccl().groups(0), 0);
}

// A group of which one message is refused is not begun.
TEST(NcclExchange, WrongMessagesAreRefusedByName) {
  const auto refused = [](const Message& wrong) {
    NcclRanks ranks(2);
    uint8_t byte = 0;
    const absl::Status status =
        ranks[0].Exchange({{.buffer = &byte, .bytes = 1, .peer = 1}, wrong}, Info(), {}).Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ranks.nccl().groups(0), 0);
    return Text(status);
  };
  EXPECT_THAT(refused({.bytes = 1, .peer = 0}), HasSubstr("peer is 0"));
  EXPECT_THAT(refused({.bytes = 1, .peer = 2}), HasSubstr("peer is 2"));
  EXPECT_THAT(refused({.send = true, .bytes = -5, .peer = 1}), HasSubstr("bytes is -5"));
}

}  // namespace
}  // namespace zeroshard
