// Messages that belong together: as a backend does it that posts all first, and in the order that
// serves one whose operations follow each other.
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/comm/ranks.h"
#include "worker/device/host_event.h"

namespace zeroshard {
namespace {

// Over another communicator's sends and receives alone.
class OneByOne : public Communicator {
 public:
  explicit OneByOne(Communicator* owned) : owned_(*owned) {}
  int rank() const override { return owned_.rank(); }
  int size() const override { return owned_.size(); }
  Event AllGather(void*, int64_t, DType, const CollectiveInfo&, const Event&) override {
    return {};
  }
  Event ReduceScatter(ReduceScatterArgs, const CollectiveInfo&, const Event&) override {
    return {};
  }
  Event AllReduce(void*, int64_t, DType, const CollectiveInfo&, const Event&) override {
    return {};
  }
  Event Broadcast(void*, int64_t, int, const CollectiveInfo&, const Event&) override { return {}; }
  Event Send(const void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override {
    return owned_.Send(buffer, bytes, peer, info, after);
  }
  Event Recv(void* buffer, int64_t bytes, int peer, const CollectiveInfo& info,
             const Event& after) override {
    return owned_.Recv(buffer, bytes, peer, info, after);
  }
  Event Barrier(const CollectiveInfo&) override { return {}; }
  absl::Status AllGatherHost(void*, int64_t, const CollectiveInfo&) override {
    return absl::UnimplementedError("not here");
  }
  void Abort(const std::string& reason) override { owned_.Abort(reason); }
  const TrafficCounters& traffic() const override { return owned_.traffic(); }
  double BusySeconds() const override { return owned_.BusySeconds(); }

 private:
  Communicator& owned_;
};

constexpr int64_t kBytes = int64_t{3} << 20;  // more than a connection holds by itself

std::vector<uint8_t> Sent(int from, int to) {
  std::vector<uint8_t> values(static_cast<size_t>(kBytes));
  std::iota(values.begin(), values.end(), static_cast<uint8_t>(17 * from + to));
  return values;
}

class ExchangeTest : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Backends, ExchangeTest, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "OneByOne" : "Together");
});

// All send to the next and to the one before, and receive from both, again and again.
TEST_P(ExchangeTest, ARingThatSendsBothWaysAtOnceArrives) {
  for (const int size : {2, 3, 4}) {
    Ranks ranks(size);
    ranks.Each([&](int rank) {
      std::unique_ptr<Communicator> one_by_one = std::make_unique<OneByOne>(&ranks[rank]);
      Communicator& comm = GetParam() ? *one_by_one : ranks[rank];
      for (int round = 0; round < 3; ++round) {
        const int next = (rank + 1) % size, before = (rank + size - 1) % size;
        std::vector<uint8_t> to_next = Sent(rank, next), to_before = Sent(rank, before);
        std::vector<uint8_t> from_next(to_next.size()), from_before(to_next.size());
        std::vector<Message> messages = {
            {.send = true, .buffer = to_next.data(), .bytes = kBytes, .peer = next},
            {.buffer = from_before.data(), .bytes = kBytes, .peer = before}};
        if (size > 2) {
          messages.push_back({.send = true,
                              .buffer = to_before.data(),
                              .bytes = kBytes,
                              .peer = before,
                              .phase = Phase::kBackward});
          messages.push_back({.buffer = from_next.data(),
                              .bytes = kBytes,
                              .peer = next,
                              .phase = Phase::kBackward});
        }
        const absl::Status status = comm.Exchange(messages, {.unit = "test"}, Event()).Wait();
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(from_before, Sent(before, rank));
        if (size > 2) {
          EXPECT_EQ(from_next, Sent(next, rank));
        }
      }
    });
    for (int rank = 0; rank < size; ++rank) {
      const TrafficCounters& traffic = ranks[rank].traffic();
      EXPECT_EQ(traffic.Get(CollectiveOp::kSend, Phase::kForward), 3 * kBytes);
      EXPECT_EQ(traffic.Get(CollectiveOp::kSend, Phase::kBackward), size > 2 ? 3 * kBytes : 0);
    }
  }
}

TEST_P(ExchangeTest, ItStartsAfterWhatItIsToldAndNotAtAllWhereThatFailed) {
  Ranks ranks(2);
  ranks.Each([&](int rank) {
    std::unique_ptr<Communicator> one_by_one = std::make_unique<OneByOne>(&ranks[rank]);
    Communicator& comm = GetParam() ? *one_by_one : ranks[rank];
    uint8_t byte = 0;
    const Event failed = DoneEvent(absl::InternalError("a kernel failed"));
    const absl::Status status =
        comm.Exchange({{.send = rank == 0, .buffer = &byte, .bytes = 1, .peer = 1 - rank}},
                      {.unit = "test"}, failed)
            .Wait();
    EXPECT_THAT(Text(status), testing::HasSubstr("a kernel failed"));
  });
}

TEST(ExchangeArguments, AWrongPeerIsNamed) {
  Ranks ranks(2);
  uint8_t byte = 0;
  const absl::Status status =
      ranks[0]
          .Exchange({{.send = true, .buffer = &byte, .bytes = 1, .peer = 0}}, {.unit = "test"},
                    Event())
          .Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace zeroshard
