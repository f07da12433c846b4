// Collectives by way of host memory, over a device that the host cannot reach: the same bits as
// Gloo's over host memory.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/ranks.h"
#include "tests/worker/device/guarded_device.h"
#include "worker/comm/staged_communicator.h"
#include "worker/device/host_event.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr size_t kElements = 60000;  // of 16 bits
using Memory = std::vector<uint16_t>;

// Ranks on guarded devices of different schedules.
class StagedRanks {
 public:
  StagedRanks(int size, uint64_t seed) : communicators_(static_cast<size_t>(size)) {
    for (int r = 0; r < size; ++r) {
      devices_.push_back(std::make_unique<GuardedDevice>(seed + static_cast<uint64_t>(r)));
    }
    Each([&](int r) {
      const CommunicatorOptions options{r, size, "127.0.0.1", absl::Seconds(20), absl::Seconds(20)};
      auto made = MakeGlooCommunicator(options, &rendezvous_, &device(r));
      ASSERT_TRUE(made.ok()) << made.status();
      communicators_[static_cast<size_t>(r)] = MakeStagedCommunicator(*std::move(made), &device(r));
    });
  }
  int size() const { return static_cast<int>(communicators_.size()); }
  GuardedDevice& device(int rank) { return *devices_[static_cast<size_t>(rank)]; }
  Communicator& operator[](int rank) { return *communicators_[static_cast<size_t>(rank)]; }
  void Destroy(int rank) { communicators_[static_cast<size_t>(rank)] = nullptr; }
  void Each(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<std::unique_ptr<GuardedDevice>> devices_;
  MemoryRendezvous rendezvous_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

// An array of the device, of bf16 or, two and two, of fp32 numbers.
class Array {
 public:
  Array(GuardedDevice* device, const Memory& values) : device_(device), values_(values) {
    absl::StatusOr<Buffer> buffer =
        device->Allocate(values.size() * sizeof(uint16_t), MemoryKind::kBuffers);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    buffer_ = *std::move(buffer);
    filled_ = device->compute()->Copy(buffer_.data(), values_.data(), buffer_.bytes());
  }
  void* data() const { return buffer_.data(); }
  // Under way when the constructor returns.
  const Event& filled() const { return filled_; }
  Memory After(const Event& event) {
    Memory read(values_.size());
    const absl::Status status = device_->NewStream("read")
                                    ->Copy(read.data(), buffer_.data(), buffer_.bytes(), event)
                                    .Wait();
    EXPECT_TRUE(status.ok()) << status;
    return read;
  }
  Memory Now() { return After({}); }

 private:
  GuardedDevice* const device_;
  const Memory values_;
  Buffer buffer_;
  Event filled_;
};

// Numbers between 1 and 16 of either sign; sums of their fp32 pairs are rounded.
Memory Values(int rank, int salt) {
  Memory values(kElements);
  uint32_t state = static_cast<uint32_t>(1 + rank * 977 + salt * 131);
  for (uint16_t& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<uint16_t>((0x3f80 + (state >> 16) % 0x200) | ((state >> 9) & 0x8000));
  }
  return values;
}

struct Operation {
  std::string name;
  std::function<Event(Communicator&, char* memory, const Event& after)> start;
};

std::vector<Operation> Operations(int size) {
  std::vector<Operation> all;
  for (const int64_t count : {1003, 0}) {
    all.push_back({count > 0 ? "all_gather" : "nothing",
                   [count](Communicator& c, char* memory, const Event& after) {
                     return c.AllGather(memory, count, DType::kBF16, Info(), after);
                   }});
  }
  for (const int contributors : {1, size}) {
    for (const bool accumulate : {false, true}) {
      for (const DType type : {DType::kBF16, DType::kF32}) {
        all.push_back({"reduce_scatter", [=](Communicator& c, char* memory, const Event& after) {
                         ReduceScatterArgs args;
                         args.input = memory;
                         args.type = type;
                         for (int r = 0; r < size; ++r) args.counts.push_back(517 + 3 * r);
                         args.contributors = contributors;
                         args.output = memory + 60000;
                         args.accumulate = accumulate;
                         return c.ReduceScatter(args, Info(), after);
                       }});
      }
    }
  }
  all.push_back({"in place", [=](Communicator& c, char* memory, const Event& after) {
                   ReduceScatterArgs args;
                   args.input = memory;
                   args.type = args.output_type = DType::kBF16;
                   args.counts.assign(static_cast<size_t>(size), 999);
                   args.contributors = size;
                   args.output = memory + c.rank() * 999 * 2;
                   return c.ReduceScatter(args, Info(), after);
                 }});
  all.push_back({"owned by one", [=](Communicator& c, char* memory, const Event& after) {
                   ReduceScatterArgs args;
                   args.input = memory;
                   args.counts.assign(static_cast<size_t>(size), 0);
                   args.counts.back() = 1000;
                   args.contributors = size;
                   args.output = memory + 60000;
                   return c.ReduceScatter(args, Info(), after);
                 }});
  for (const int64_t count : {1, 1000, 20011}) {
    all.push_back({"all_reduce", [count](Communicator& c, char* memory, const Event& after) {
                     return c.AllReduce(memory, count, DType::kF32, Info(), after);
                   }});
  }
  for (int root = 0; root < size; ++root) {
    all.push_back({"broadcast", [root](Communicator& c, char* memory, const Event& after) {
                     return c.Broadcast(memory, 5001, root, Info(), after);
                   }});
  }
  if (size > 1) {
    all.push_back({"send", [size](Communicator& c, char* memory, const Event& after) {
                     if (c.rank() == 0) return c.Send(memory, 7777, size - 1, Info(), after);
                     if (c.rank() == size - 1) return c.Recv(memory, 7777, 0, Info(), after);
                     return Event();
                   }});
    // Of two ranks both neighbours are one: messages of a pair match in order.
    all.push_back({"exchange", [size](Communicator& c, char* memory, const Event& after) {
                     const int next = (c.rank() + 1) % size, last = (c.rank() + size - 1) % size;
                     return c.Exchange(
                         {{.send = true, .buffer = memory, .bytes = 5003, .peer = next},
                          {.buffer = memory + 60000, .bytes = 5003, .peer = last},
                          {.send = true, .buffer = memory + 7000, .bytes = 0, .peer = last},
                          {.send = true,
                           .buffer = memory + 7000,
                           .bytes = 30001,
                           .peer = last,
                           .phase = Phase::kBackward},
                          {.buffer = memory + 66000, .bytes = 0, .peer = next},
                          {.buffer = memory + 66001, .bytes = 30001, .peer = next}},
                         Info(), after);
                   }});
  }
  all.push_back({"no message", [](Communicator& c, char*, const Event& after) {
                   return c.Exchange({}, Info(), after);
                 }});
  return all;
}

class StagedWorlds : public testing::TestWithParam<std::tuple<int, uint64_t>> {};
INSTANTIATE_TEST_SUITE_P(SizesAndSeeds, StagedWorlds,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values<uint64_t>(0, 1, 2)));

TEST_P(StagedWorlds, EveryOperationBringsTheBitsAndCountsTheBytesOfGlooOverHostMemory) {
  const auto [size, seed] = GetParam();
  const std::vector<Operation> operations = Operations(size);
  Ranks host(size);
  StagedRanks staged(size, seed);
  host.Each([&](int r) {
    std::vector<Memory> wanted;
    for (size_t i = 0; i < operations.size(); ++i) {
      Memory& memory = wanted.emplace_back(Values(r, static_cast<int>(i)));
      const absl::Status status =
          operations[i].start(host[r], reinterpret_cast<char*>(memory.data()), {}).Wait();
      ASSERT_TRUE(status.ok()) << status;
    }
    // All of them at once.
    std::vector<std::unique_ptr<Array>> arrays;
    std::vector<Event> events;
    for (size_t i = 0; i < operations.size(); ++i) {
      arrays.push_back(std::make_unique<Array>(&staged.device(r), Values(r, static_cast<int>(i))));
      events.push_back(operations[i].start(staged[r], static_cast<char*>(arrays[i]->data()),
                                           arrays[i]->filled()));
    }
    for (size_t i = 0; i < operations.size(); ++i) {
      // A rank that takes no part has nothing to wait for but its own memory.
      const Event done = AllOf({arrays[i]->filled(), events[i]});
      EXPECT_EQ(arrays[i]->After(done), wanted[i]) << operations[i].name << ", number " << i;
    }
    for (int op = 0; op < kCollectiveOps; ++op) {
      const auto which = static_cast<CollectiveOp>(op);
      for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
        EXPECT_EQ(staged[r].traffic().Get(which, phase), host[r].traffic().Get(which, phase))
            << NameOf(which) << ", " << NameOf(phase);
      }
    }
    EXPECT_EQ(staged[r].rank(), r);
    EXPECT_EQ(staged[r].size(), size);
    EXPECT_GT(staged[r].BusySeconds(), 0.0);
  });
}

TEST_P(StagedWorlds, WhatRanksTellEachOtherStaysInHostMemory) {
  const auto [size, seed] = GetParam();
  StagedRanks staged(size, seed);
  staged.Each([&](int r) {
    std::string said(static_cast<size_t>(size), '?');
    said[static_cast<size_t>(r)] = static_cast<char>('a' + r);
    EXPECT_TRUE(staged[r].AllGatherHost(said.data(), 1, Info()).ok());
    EXPECT_EQ(said, std::string("abcd").substr(0, static_cast<size_t>(size)));
    EXPECT_TRUE(staged[r].Barrier(Info()).Wait().ok());
  });
}

TEST(Staged, MoreOperationsThanHaveHostMemoryWaitForOneAnother) {
  StagedRanks staged(2, 1);
  const int rounds = 5 * static_cast<int>(kStagedOperations);
  staged.Each([&](int r) {
    Array array(&staged.device(r), Memory(2000, static_cast<uint16_t>(0x3f80 + r)));
    Event last = array.filled();
    for (int i = 0; i < rounds; ++i) {
      last = staged[r].AllGather(array.data(), 1000, DType::kBF16, Info(), last);
    }
    const Memory read = array.After(last);
    EXPECT_EQ(read.front(), 0x3f80);
    EXPECT_EQ(read.back(), 0x3f81);
  });
}

TEST(Staged, AnOperationAfterWorkThatFailedHasItsErrorAndWritesNothing) {
  StagedRanks staged(2, 2);
  staged.Each([&](int r) {
    const Memory values = Values(r, 0);
    Array array(&staged.device(r), values);
    ASSERT_TRUE(array.filled().Wait().ok());
    const Event broken = r == 0 ? DoneEvent(absl::DataLossError("no gradient")) : Event();
    const absl::Status status =
        staged[r].AllReduce(array.data(), 100, DType::kF32, Info(), broken).Wait();
    EXPECT_THAT(Text(status), HasSubstr("no gradient"));
    if (r == 0) {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    }
    EXPECT_EQ(array.Now(), values);
    EXPECT_FALSE(staged[r].Barrier(Info()).Wait().ok()) << "unusable from now on";
  });
}

// Nothing waits here but the communicator: it is one stream of operations, whatever the copies are.
TEST_P(StagedWorlds, AnOperationSeesWhatTheOnesBeforeItBrought) {
  const auto [size, seed] = GetParam();
  Ranks host(size);
  StagedRanks staged(size, seed);
  constexpr int kRounds = 12;
  const auto run = [size = size](Communicator& c, char* memory, const Event& after) {
    Event last = after;
    for (int round = 0; round < kRounds; ++round) {
      ReduceScatterArgs args;
      args.input = memory;
      args.counts.assign(static_cast<size_t>(size), 700);
      args.contributors = size;
      args.output = memory + 60000;
      args.accumulate = round > 0;
      last = c.ReduceScatter(args, Info(), round == 0 ? after : Event());
      if (round % 3 != 2) continue;
      last = c.AllReduce(memory + 60000, 700, DType::kF32, Info());
      if (size == 1) continue;
      // On to the next rank, what came from the one before.
      const int next = (c.rank() + 1) % size, before = (c.rank() + size - 1) % size;
      last = c.Exchange({{.send = true, .buffer = memory + 60000, .bytes = 1400, .peer = next},
                         {.buffer = memory + 61400, .bytes = 1400, .peer = before}},
                        Info());
    }
    return last;
  };
  host.Each([&](int r) {
    Memory wanted = Values(r, 5);
    const absl::Status status = run(host[r], reinterpret_cast<char*>(wanted.data()), {}).Wait();
    ASSERT_TRUE(status.ok()) << status;
    Array array(&staged.device(r), Values(r, 5));
    EXPECT_EQ(array.After(run(staged[r], static_cast<char*>(array.data()), array.filled())),
              wanted);
  });
}

// More at once than a connection holds by itself, again and again, and each round with what the one
// before brought.
TEST(Staged, TwoRanksThatSendToEachOtherDoNotWaitForOneAnother) {
  constexpr size_t kMebibytes = 3;
  StagedRanks staged(2, 3);
  staged.Each([&](int r) {
    Array mine(&staged.device(r), Memory(kMebibytes << 19, static_cast<uint16_t>(r + 1)));
    Array others(&staged.device(r), Memory(kMebibytes << 19, 0));
    Event last = AllOf({mine.filled(), others.filled()});
    for (int round = 0; round < 3 * static_cast<int>(kStagedOperations); ++round) {
      Array& from = round % 2 == 0 ? mine : others;
      Array& to = round % 2 == 0 ? others : mine;
      last = staged[r].Exchange(
          {{.send = true, .buffer = from.data(), .bytes = kMebibytes << 20, .peer = 1 - r},
           {.buffer = to.data(), .bytes = kMebibytes << 20, .peer = 1 - r}},
          Info(), last);
    }
    // Odd rounds bring back what even ones sent.
    const absl::Status status = last.Wait();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(mine.Now(), Memory(kMebibytes << 19, static_cast<uint16_t>(r + 1)));
    EXPECT_EQ(others.Now(), Memory(kMebibytes << 19, static_cast<uint16_t>(2 - r)));
  });
}

TEST(Staged, AnExchangeWithWorkThatFailedOrWithAnAbortWritesNothing) {
  for (const bool abort : {false, true}) {
    StagedRanks staged(2, 2);
    staged.Each([&](int r) {
      const Memory values = Values(r, 0);
      Array array(&staged.device(r), values);
      ASSERT_TRUE(array.filled().Wait().ok());
      if (abort && r == 1) return;  // does not come
      const bool fails = !abort && r == 0;
      const Event exchanged = staged[r].Exchange(
          {{.send = true, .buffer = array.data(), .bytes = 1000, .peer = 1 - r},
           {.buffer = static_cast<char*>(array.data()) + 2000, .bytes = 1000, .peer = 1 - r}},
          Info(), fails ? DoneEvent(absl::DataLossError("no gradient")) : Event());
      if (abort) staged[r].Abort("generation 8 begins");
      const absl::Status status = exchanged.Wait();
      EXPECT_THAT(Text(status), HasSubstr(abort ? "generation 8 begins" : "no gradient"));
      EXPECT_EQ(array.Now(), values);
      EXPECT_EQ(staged[r].traffic().Get(CollectiveOp::kSend, Phase::kForward), 0);
      EXPECT_FALSE(staged[r].Barrier(Info()).Wait().ok()) << "unusable from now on";
    });
  }
}

TEST(Staged, AbortEndsWhatIsOnItsWayAndLeavesItsMemoryAlone) {
  StagedRanks staged(3, 0);
  const Memory values = Values(0, 0);
  Array first(&staged.device(0), values), second(&staged.device(0), values);
  const Event pending =
      staged[0].AllGather(first.data(), 1000, DType::kBF16, Info(), first.filled());
  const Event queued =
      staged[0].AllReduce(second.data(), 1000, DType::kF32, Info(), second.filled());
  staged[0].Abort("generation 8 begins");
  for (const Event& event : {pending, queued, staged[0].Barrier(Info())}) {
    EXPECT_EQ(event.Wait().code(), absl::StatusCode::kAborted);
    EXPECT_THAT(Text(event.Wait()), HasSubstr("generation 8 begins"));
  }
  EXPECT_EQ(first.Now(), values);
  EXPECT_EQ(second.Now(), values);
  const absl::Status peer = staged[2].Barrier(Info()).Wait();
  EXPECT_EQ(peer.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(peer), HasSubstr("generation 8 begins"));
}

TEST(Staged, DestructionEndsPendingOperations) {
  StagedRanks staged(2, 1);
  Array array(&staged.device(0), Values(0, 0));
  const Event pending =
      staged[0].AllGather(array.data(), 1000, DType::kBF16, Info(), array.filled());
  staged.Destroy(0);
  EXPECT_EQ(pending.Wait().code(), absl::StatusCode::kAborted);
}

TEST(Staged, WrongArgumentsAreRefusedByName) {
  const auto refused = [](const std::function<Event(Communicator&)>& start) {
    StagedRanks staged(1, 0);
    return start(staged[0]).Wait();
  };
  const absl::Status counts = refused([](Communicator& c) {
    return c.ReduceScatter({.counts = {1, 1}, .contributors = 1}, Info());
  });
  EXPECT_THAT(Text(counts), HasSubstr("2 counts for 1 ranks"));
  for (const auto& start : std::vector<std::function<Event(Communicator&)>>{
           [](Communicator& c) { return c.AllGather(nullptr, -1, DType::kF32, Info()); },
           [](Communicator& c) { return c.AllReduce(nullptr, -1, DType::kF32, Info()); },
           [](Communicator& c) { return c.Broadcast(nullptr, -1, 0, Info()); },
           [](Communicator& c) {
             return c.ReduceScatter({.counts = {-1}, .contributors = 1}, Info());
           }}) {
    const absl::Status status = refused(start);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(status), HasSubstr("is -1"));
  }
  EXPECT_EQ(refused([](Communicator& c) { return c.Send(nullptr, 0, 0, Info()); }).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(refused([](Communicator& c) {
                return c.Exchange({{.send = true, .bytes = -1}}, Info());
              })),
              HasSubstr("bytes is -1"));
}

// Ends every operation at once, whatever it should start after.
class Hasty : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Event AllGather(void*, int64_t, DType, const CollectiveInfo&, const Event&) override {
    return over();
  }
  Event ReduceScatter(ReduceScatterArgs, const CollectiveInfo&, const Event&) override {
    return over();
  }
  Event AllReduce(void*, int64_t, DType, const CollectiveInfo&, const Event&) override {
    return over();
  }
  Event Broadcast(void*, int64_t, int, const CollectiveInfo&, const Event&) override {
    return over();
  }
  Event Send(const void*, int64_t, int, const CollectiveInfo&, const Event&) override {
    return over();
  }
  Event Recv(void*, int64_t, int, const CollectiveInfo&, const Event&) override { return over(); }
  Event Exchange(std::vector<Message>, const CollectiveInfo&, const Event&) override {
    return over();
  }
  Event Barrier(const CollectiveInfo&) override { return over(); }
  absl::Status AllGatherHost(void*, int64_t, const CollectiveInfo&) override { return status_; }
  void Abort(const std::string&) override {}
  const TrafficCounters& traffic() const override { return traffic_; }
  double BusySeconds() const override { return 0; }

 private:
  Event over() const { return DoneEvent(status_); }
  const absl::Status status_ = absl::AbortedError("over already");
  TrafficCounters traffic_;
};

TEST(Staged, AnOperationThatFailsEarlyIsNotDoneBeforeItsCopiesAre) {
  GuardedDevice device(0);
  const auto staged = MakeStagedCommunicator(std::make_unique<Hasty>(), &device);
  Array array(&device, Values(0, 0));
  for (const Operation& operation : Operations(1)) {
    if (operation.name == "nothing") continue;
    auto before = std::make_shared<HostEvent>();
    const Event event = operation.start(*staged, static_cast<char*>(array.data()), Event(before));
    EXPECT_FALSE(event.Done()) << operation.name;
    before->Finish(absl::OkStatus());
    EXPECT_EQ(event.Wait(), absl::AbortedError("over already")) << operation.name;
  }
}

}  // namespace
}  // namespace zeroshard
