// Each collective against arithmetic done here, at several world sizes.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/nccl/nccl_ranks.h"
#include "worker/comm/traffic.h"

namespace zeroshard {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

// bf16 by the definition: the nearest of the two neighbours, ties to the even one.
uint16_t ToBF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t low = bits & 0xffff;
  uint32_t high = bits >> 16;
  if (low > 0x8000 || (low == 0x8000 && (high & 1) != 0)) ++high;
  return static_cast<uint16_t>(high);
}
float FromBF16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

// With the compiler's conversions.
struct Half {
  __extension__ typedef _Float16 Native;
  Native value;
};

template <typename T>
T Encode(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else if constexpr (std::is_same_v<T, Half>) {
    return {static_cast<Half::Native>(value)};
  } else {
    return ToBF16(value);
  }
}
template <typename T>
float Decode(T value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else if constexpr (std::is_same_v<T, Half>) {
    return static_cast<float>(value.value);
  } else {
    return FromBF16(value);
  }
}
template <typename T>
constexpr DType kTypeOf = sizeof(T) == 4            ? DType::kF32
                          : std::is_same_v<T, Half> ? DType::kF16
                                                    : DType::kBF16;

// Contribution of `rank` at global position `i`; sums of these are not exact, so order shows.
float Rough(int rank, int64_t i) {
  const float magnitude = static_cast<float>(std::pow(7.0, (i + 3 * rank) % 9));
  return ((i * 31 + rank * 17) % 2 == 0 ? 1.0f : -1.0f) * magnitude *
         (1.0f + static_cast<float>((i * 13 + rank * 5) % 101) / 128.0f);
}
// The same within fp16's range, most of the time.
float RoughHalf(int rank, int64_t i) { return Rough(rank, i) * 0x1p-8f; }
// Sums of these are exact in fp32 and in both 16-bit types.
float Whole(int rank, int64_t i) { return static_cast<float>((i * 5 + rank * 3) % 23); }

struct FoldCase {
  std::vector<int64_t> counts;
  int contributors = 0;
  bool accumulate = false;
  bool in_place = false;
  float (*value)(int, int64_t) = Rough;
};

// Runs a reduce-scatter and compares every bit of every rank's output with a plain loop.
template <typename In, typename Out>
void ExpectFolded(NcclRanks& ranks, const FoldCase& c) {
  const int size = ranks.size();
  const float start_value = c.accumulate ? 3.0f : 0.0f;
  const int64_t total = std::accumulate(c.counts.begin(), c.counts.end(), int64_t{0});
  std::vector<uint64_t> before(size);
  std::vector<std::vector<In>> inputs(size, std::vector<In>(total));
  std::vector<std::vector<Out>> outputs(size);
  for (int r = 0; r < size; ++r) {
    before[r] = ranks[r].traffic().Get(CollectiveOp::kReduceScatter, Phase::kBackward);
    for (int64_t i = 0; i < total; ++i) inputs[r][i] = Encode<In>(c.value(r, i));
    outputs[r].assign(c.counts[r], Encode<Out>(c.accumulate ? start_value : 123.0f));
  }
  const std::vector<std::vector<In>> original = inputs;
  ranks.Each([&](int r) {
    ReduceScatterArgs args;
    args.input = r < c.contributors ? inputs[r].data() : nullptr;
    args.type = kTypeOf<In>;
    args.counts = c.counts;
    args.contributors = c.contributors;
    args.output = outputs[r].data();
    if (c.in_place) {
      args.output =
          inputs[r].data() + std::accumulate(c.counts.begin(), c.counts.begin() + r, int64_t{0});
    }
    args.output_type = kTypeOf<Out>;
    args.accumulate = c.accumulate;
    const absl::Status status = ranks[r].ReduceScatter(args, Info()).Wait();
    EXPECT_TRUE(status.ok()) << status;
  });
  int64_t start = 0;
  for (int r = 0; r < size; ++r) {
    if (c.in_place && c.counts[r] > 0) {
      std::memcpy(outputs[r].data(), inputs[r].data() + start, c.counts[r] * sizeof(In));
    }
    for (int64_t i = 0; i < c.counts[r]; ++i) {
      float sum = start_value;
      for (int p = 0; p < c.contributors; ++p) sum += Decode<In>(original[p][start + i]);
      const Out want = Encode<Out>(sum);
      ASSERT_EQ(std::memcmp(&outputs[r][i], &want, sizeof(want)), 0)
          << "rank " << r << " of " << size << ", element " << i << ": "
          << Decode<Out>(outputs[r][i]) << ", expected " << Decode<Out>(want);
    }
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kReduceScatter, Phase::kBackward) - before[r],
              r < c.contributors ? (total - c.counts[r]) * static_cast<int64_t>(sizeof(In)) : 0);
    start += c.counts[r];
  }
}

class NcclWorlds : public ::testing::TestWithParam<int> {
 protected:
  std::vector<int64_t> Equal(int64_t count) { return std::vector<int64_t>(GetParam(), count); }
};
INSTANTIATE_TEST_SUITE_P(Sizes, NcclWorlds, ::testing::Values(1, 2, 3, 4));

TEST_P(NcclWorlds, ReduceScatterFoldsInRankOrderAndRoundsOnce) {
  NcclRanks ranks(GetParam());
  const FoldCase c{.counts = Equal(1003), .contributors = GetParam()};
  ExpectFolded<float, float>(ranks, c);
  ExpectFolded<uint16_t, uint16_t>(ranks, c);
  ExpectFolded<uint16_t, float>(ranks, c);
}

TEST_P(NcclWorlds, ReduceScatterOfFp16FoldsInRankOrderAndRoundsOnce) {
  NcclRanks ranks(GetParam());
  FoldCase c{.counts = Equal(1003), .contributors = GetParam(), .value = RoughHalf};
  ExpectFolded<Half, Half>(ranks, c);
  ExpectFolded<Half, float>(ranks, c);
  c.accumulate = true;
  ExpectFolded<Half, Half>(ranks, c);
  c.accumulate = false;
  c.in_place = true;
  ExpectFolded<Half, Half>(ranks, c);
}

TEST_P(NcclWorlds, ReduceScatterAccumulates) {
  NcclRanks ranks(GetParam());
  const FoldCase c{.counts = Equal(517), .contributors = GetParam(), .accumulate = true};
  ExpectFolded<float, float>(ranks, c);
  ExpectFolded<uint16_t, float>(ranks, c);
  ExpectFolded<uint16_t, uint16_t>(ranks, c);
}

TEST_P(NcclWorlds, ReduceScatterInPlaceInPiecesOfTheStaging) {
  NcclRanks ranks(GetParam(), {.tuning = {.staging_bytes = 3 * 64 * 4}});
  const FoldCase c{.counts = Equal(999), .contributors = GetParam(), .in_place = true};
  ExpectFolded<float, float>(ranks, c);
  ExpectFolded<uint16_t, uint16_t>(ranks, c);
}

TEST_P(NcclWorlds, ReduceScatterOfFewerContributors) {
  NcclRanks ranks(GetParam());
  for (int contributors = 1; contributors < GetParam(); ++contributors) {
    ExpectFolded<uint16_t, float>(ranks, {.counts = Equal(77), .contributors = contributors});
    ExpectFolded<float, float>(
        ranks, {.counts = Equal(77), .contributors = contributors, .accumulate = true});
  }
}

TEST_P(NcclWorlds, ReduceScatterOfUnequalPartsAndOfNone) {
  NcclRanks ranks(GetParam(), {.tuning = {.staging_bytes = 1000}});
  std::vector<int64_t> counts = Equal(0);
  ExpectFolded<float, float>(ranks, {.counts = counts, .contributors = GetParam()});
  counts[GetParam() / 2] = 200;
  ExpectFolded<float, float>(ranks, {.counts = counts, .contributors = GetParam()});
  ExpectFolded<uint16_t, float>(ranks, {.counts = counts, .contributors = 1});
  for (int r = 0; r < GetParam(); ++r) counts[r] = 300 - 130 * r > 0 ? 300 - 130 * r : 0;
  ExpectFolded<uint16_t, uint16_t>(ranks, {.counts = counts, .contributors = GetParam()});
}

TEST(NcclReduceScatter, PiecesOfEverySizeAroundTheBoundary) {
  NcclRanks ranks(3, {.tuning = {.staging_bytes = 3 * 64 * 4}});  // pieces of 64 fp32 elements
  for (int64_t count : {1, 63, 64, 65, 127, 128, 129, 193}) {
    ExpectFolded<float, float>(
        ranks, {.counts = {count, 64, 2 * count}, .contributors = 3, .accumulate = true});
  }
}

TEST(NcclReduceScatter, StagingStaysWithinItsBound) {
  NcclRanks ranks(2, {.tuning = {.staging_bytes = 2 * 4096}});
  ExpectFolded<float, float>(ranks, {.counts = {20000, 20000}, .contributors = 2});
  // Each of the two ranks of this process stages one piece of 1024 fp32 elements of the other.
  EXPECT_EQ(ranks.device().memory().PeakBytes(MemoryKind::kBuffers), 2 * 4096);
}

TEST(NcclReduceScatter, OrderOfTheSumIsTheOrderOfRanks) {
  // 1e8 + 1 is 1e8 in fp32, so only the right order gives 2; NCCL's here is the reverse.
  const std::vector<float> by_rank = {1e8f, 1.0f, -1e8f, 2.0f};
  for (bool deterministic : {true, false}) {
    NcclRanks ranks(4, {.deterministic = deterministic});
    std::vector<float> sums(4);
    ranks.Each([&](int r) {
      const std::vector<float> input(4, by_rank[r]);
      const ReduceScatterArgs args{
          .input = input.data(), .counts = {1, 1, 1, 1}, .contributors = 4, .output = &sums[r]};
      EXPECT_TRUE(ranks[r].ReduceScatter(args, Info()).Wait().ok());
    });
    EXPECT_THAT(sums, Each(deterministic ? 2.0f : 0.0f));
  }
}

TEST_P(NcclWorlds, WithoutDeterminismSumsOfEqualPartsAreNcclsOwn) {
  NcclRanks ranks(GetParam(), {.deterministic = false});
  FoldCase c{.counts = Equal(130), .contributors = GetParam(), .value = Whole};
  ExpectFolded<float, float>(ranks, c);
  ExpectFolded<uint16_t, uint16_t>(ranks, c);
  ExpectFolded<uint16_t, float>(ranks, c);
  ExpectFolded<Half, Half>(ranks, c);
  ExpectFolded<Half, float>(ranks, c);
  c.in_place = true;
  ExpectFolded<uint16_t, uint16_t>(ranks, c);
  c.in_place = false;
  c.accumulate = true;
  ExpectFolded<uint16_t, float>(ranks, c);
  ExpectFolded<Half, float>(ranks, c);
  if (GetParam() > 1) {
    EXPECT_THAT(ranks.nccl().calls(0), Each(FakeCall::kReduceScatter));
    EXPECT_EQ(ranks.nccl().calls(0).size(), 8u);
  } else {
    EXPECT_THAT(ranks.nccl().calls(0), ::testing::IsEmpty());
  }
}

TEST_P(NcclWorlds, WithoutDeterminismOtherSumsAreFoldedInRankOrder) {
  NcclRanks ranks(GetParam(), {.deterministic = false, .tuning = {.scratch_bytes = 100}});
  std::vector<int64_t> counts = Equal(50);
  ExpectFolded<uint16_t, uint16_t>(ranks, {.counts = counts, .contributors = 1});
  // More than the scratch holds.
  ExpectFolded<float, float>(ranks,
                             {.counts = counts, .contributors = GetParam(), .accumulate = true});
  counts[0] = 20;
  if (GetParam() > 1) {
    ExpectFolded<float, float>(ranks, {.counts = counts, .contributors = GetParam()});
  }
}

TEST_P(NcclWorlds, AllGatherBringsEveryPartToAllRanks) {
  NcclRanks ranks(GetParam());
  const int64_t count = 12345;
  ranks.Each([&](int r) {
    std::vector<uint16_t> buffer(GetParam() * count, 0xdead);
    for (int64_t i = 0; i < count; ++i) buffer[r * count + i] = static_cast<uint16_t>(r * 7 + i);
    const absl::Status status =
        ranks[r].AllGather(buffer.data(), count, DType::kBF16, Info(Phase::kForward)).Wait();
    ASSERT_TRUE(status.ok()) << status;
    for (int p = 0; p < GetParam(); ++p) {
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(buffer[p * count + i], static_cast<uint16_t>(p * 7 + i)) << p << " " << i;
      }
    }
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kAllGather, Phase::kForward),
              (GetParam() - 1) * count * 2);
    EXPECT_TRUE(ranks[r].AllGather(buffer.data(), 0, DType::kU8, Info()).Wait().ok());
  });
}

TEST_P(NcclWorlds, GathersTogetherAreOneGroupAndOneEvent) {
  NcclRanks ranks(GetParam());
  const std::vector<int64_t> counts = {100, 0, 1, 4097};
  ranks.Each([&](int r) {
    std::vector<std::vector<float>> buffers;
    std::vector<GatherPart> parts;
    for (size_t i = 0; i < counts.size(); ++i) {
      buffers.emplace_back(GetParam() * counts[i], -1.0f);
      std::fill_n(buffers[i].begin() + r * counts[i], counts[i], static_cast<float>(10 * i + r));
      parts.push_back({buffers[i].data(), counts[i]});
    }
    const std::vector<Event> events =
        ranks[r].AllGatherTogether(parts, DType::kF32, Info(Phase::kStep), {});
    ASSERT_EQ(events.size(), counts.size());
    for (const Event& event : events) {
      EXPECT_EQ(event.state(), events[0].state());
      ASSERT_TRUE(event.Wait().ok()) << event.Wait();
    }
    for (size_t i = 0; i < counts.size(); ++i) {
      for (int p = 0; p < GetParam(); ++p) {
        for (int64_t e = 0; e < counts[i]; ++e) {
          ASSERT_EQ(buffers[i][p * counts[i] + e], static_cast<float>(10 * i + p)) << i << " " << e;
        }
      }
    }
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kAllGather, Phase::kStep),
              (GetParam() - 1) * (100 + 1 + 4097) * 4);
  });
  const bool alone = GetParam() == 1;
  EXPECT_EQ(ranks.nccl().groups(0), alone ? 0 : 1);
  EXPECT_EQ(ranks.nccl().calls(0).size(), alone ? 0u : 3u);  // nothing is sent of what is empty
}

TEST_P(NcclWorlds, MemoryIsRegisteredForAsLongAsItsRegistrationLives) {
  NcclRanks ranks(GetParam());
  const bool alone = GetParam() == 1;
  ranks.Each([&](int r) {
    std::vector<float> a(GetParam() * 64, 1.0f), b(10);
    {
      auto first = ranks[r].Register(a.data(), a.size() * 4);
      ASSERT_TRUE(first.ok()) << first.status();
      auto second = ranks[r].Register(b.data(), 40);
      ASSERT_TRUE(second.ok()) << second.status();
      EXPECT_TRUE(ranks[r].Register(nullptr, 0).ok());  // of a rank that holds nothing
      // Handing one on keeps it.
      const Registration moved = *std::move(second);
      const std::map<void*, size_t> both = {{a.data(), a.size() * 4}, {b.data(), 40}};
      EXPECT_EQ(ranks.nccl().registered(r), (alone ? std::map<void*, size_t>() : both));
      EXPECT_TRUE(ranks[r].AllGather(a.data(), 64, DType::kF32, Info()).Wait().ok());
    }
    EXPECT_TRUE(ranks.nccl().registered(r).empty());
    EXPECT_TRUE(ranks[r].Barrier(Info()).Wait().ok());
  });
}

TEST(NcclRegistration, IsDoneWithoutWhereNcclRefuses) {
  NcclRanks ranks(2);
  ranks.nccl().RefuseRegistrations();
  ranks.Each([&](int r) {
    std::vector<float> a(128, 1.0f);
    auto registration = ranks[r].Register(a.data(), 512);
    ASSERT_TRUE(registration.ok()) << registration.status();
    EXPECT_TRUE(ranks.nccl().registered(r).empty());
    EXPECT_TRUE(ranks[r].AllGather(a.data(), 64, DType::kF32, Info()).Wait().ok());
  });
}

TEST(NcclRegistration, EndsWithTheCommunicatorThatFailed) {
  NcclRanks ranks(2);
  ranks.Each([&](int r) {
    std::vector<float> a(128);
    auto registration = ranks[r].Register(a.data(), 512);
    ASSERT_TRUE(registration.ok()) << registration.status();
    ranks[r].Abort("for the test");
    EXPECT_EQ(ranks[r].Register(a.data(), 8).status().code(), absl::StatusCode::kAborted);
  });  // and is ended without another call of NCCL: the fake takes note of those
}

template <typename T>
void ExpectAllReduced(NcclRanks& ranks, int64_t count, float (*value)(int, int64_t)) {
  const int size = ranks.size();
  std::vector<uint64_t> before(size);
  std::vector<std::vector<T>> buffers(size, std::vector<T>(count));
  for (int r = 0; r < size; ++r) {
    before[r] = ranks[r].traffic().Get(CollectiveOp::kAllReduce, Phase::kStep);
    for (int64_t i = 0; i < count; ++i) buffers[r][i] = Encode<T>(value(r, i));
  }
  std::vector<T> want(count);
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += Decode<T>(buffers[r][i]);
    want[i] = Encode<T>(sum);
  }
  ranks.Each([&](int r) {
    const absl::Status status =
        ranks[r].AllReduce(buffers[r].data(), count, kTypeOf<T>, Info(Phase::kStep)).Wait();
    EXPECT_TRUE(status.ok()) << status;
  });
  const int64_t own = CeilDiv(count, size);
  for (int r = 0; r < size; ++r) {
    EXPECT_TRUE(count == 0 || std::memcmp(buffers[r].data(), want.data(), count * sizeof(T)) == 0)
        << "rank " << r << " of " << size << ", " << count << " elements";
    const int64_t part = std::clamp<int64_t>(count - r * own, 0, own);
    const int64_t sent = count <= 4096 ? (size - 1) * count : count - part + (size - 1) * part;
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kAllReduce, Phase::kStep) - before[r],
              (size == 1 ? 0 : sent) * static_cast<int64_t>(sizeof(T)));
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kReduceScatter, Phase::kStep), 0);
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kAllGather, Phase::kStep), 0);
  }
}

TEST_P(NcclWorlds, AllReduceGivesTheSameBitsEverywhere) {
  NcclRanks ranks(GetParam());
  for (int64_t count : {0, 1, 3, 4096, 4097, 8192, 20011}) {
    ExpectAllReduced<float>(ranks, count, Rough);
    ExpectAllReduced<uint16_t>(ranks, count, Rough);
    ExpectAllReduced<Half>(ranks, count, RoughHalf);
  }
}

TEST_P(NcclWorlds, AllReduceWithoutDeterminismIsNcclsOwn) {
  NcclRanks ranks(GetParam(), {.deterministic = false});
  for (int64_t count : {1, 5000}) {
    ExpectAllReduced<float>(ranks, count, Whole);
    ExpectAllReduced<uint16_t>(ranks, count, Whole);
    ExpectAllReduced<Half>(ranks, count, Whole);
  }
  EXPECT_EQ(ranks.nccl().calls(0).size(), GetParam() > 1 ? 6u : 0u);
  EXPECT_THAT(ranks.nccl().calls(0), Each(FakeCall::kAllReduce));
}

TEST(NcclAllReduce, NegativeZerosAddUpToPositiveZeroAtEveryWorldSize) {
  for (int size : {1, 2}) {
    NcclRanks ranks(size);
    ranks.Each([&](int r) {
      float x = -0.0f;
      EXPECT_TRUE(ranks[r].AllReduce(&x, 1, DType::kF32, Info()).Wait().ok());
      EXPECT_FALSE(std::signbit(x));
    });
  }
}

TEST_P(NcclWorlds, BroadcastFromEveryRoot) {
  NcclRanks ranks(GetParam());
  ranks.Each([&](int r) {
    for (int root = 0; root < GetParam(); ++root) {
      std::vector<char> data(1001, r == root ? static_cast<char>('a' + root) : '?');
      const absl::Status status = ranks[r].Broadcast(data.data(), 1001, root, Info()).Wait();
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_THAT(data, Each(static_cast<char>('a' + root)));
    }
    EXPECT_TRUE(ranks[r].Broadcast(nullptr, 0, 0, Info()).Wait().ok());
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kBroadcast, Phase::kBackward),
              (GetParam() - 1) * 1001);
  });
}

TEST(NcclSendRecv, ARingOfDifferentSizesArrivesInOrder) {
  NcclRanks ranks(3);
  ranks.Each([&](int r) {
    const int to = (r + 1) % 3, from = (r + 2) % 3;
    std::vector<Event> events;
    std::vector<std::vector<int>> sent, got;
    for (int n : {1, 1000, 0, 50000}) {
      sent.emplace_back(n, 10 * r + n);
      got.emplace_back(n, -1);
    }
    for (int i = 0; i < 4; ++i) {
      const auto bytes = static_cast<int64_t>(sent[i].size() * 4);
      // One waits, the other sends first: a stream runs one operation at a time.
      if (r == 0) events.push_back(ranks[r].Send(sent[i].data(), bytes, to, Info()));
      events.push_back(ranks[r].Recv(got[i].data(), bytes, from, Info()));
      if (r != 0) events.push_back(ranks[r].Send(sent[i].data(), bytes, to, Info()));
    }
    for (const Event& event : events) ASSERT_TRUE(event.Wait().ok()) << event.Wait();
    for (int i = 0; i < 4; ++i) {
      EXPECT_THAT(got[i], Each(10 * from + static_cast<int>(sent[i].size())));
    }
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kSend, Phase::kBackward), 4 * 51001);
  });
}

TEST_P(NcclWorlds, BarrierLetsNobodyThroughBeforeTheLast) {
  NcclRanks ranks(GetParam());
  std::atomic<int> arrived{0};
  ranks.Each([&](int r) {
    for (int round = 1; round <= 20; ++round) {
      ++arrived;
      ASSERT_TRUE(ranks[r].Barrier(Info()).Wait().ok());
      EXPECT_GE(arrived.load(), round * GetParam());
    }
    for (int op = 0; op < kCollectiveOps; ++op) {
      EXPECT_EQ(ranks[r].traffic().Get(static_cast<CollectiveOp>(op), Phase::kBackward), 0);
    }
  });
}

TEST_P(NcclWorlds, HostMemoryIsGatheredInPieces) {
  NcclRanks ranks(GetParam(), {.tuning = {.host_bytes = 100}});
  ranks.Each([&](int r) {
    uint64_t sent = 0;
    for (int64_t bytes : {0, 1, 25, 26, 1003}) {
      std::vector<char> all(GetParam() * bytes, '?');
      std::fill_n(all.begin() + r * bytes, bytes, static_cast<char>('a' + r));
      const absl::Status status = ranks[r].AllGatherHost(all.data(), bytes, Info());
      ASSERT_TRUE(status.ok()) << status;
      for (int64_t i = 0; i < GetParam() * bytes; ++i) {
        ASSERT_EQ(all[i], static_cast<char>('a' + i / bytes)) << i << " of " << bytes;
      }
      sent += (GetParam() - 1) * bytes;
    }
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kAllGather, Phase::kBackward), sent);
  });
}

TEST(NcclStreams, OperationsQueueUpAndStartAfterTheirEvents) {
  NcclRanks ranks(2);
  ranks.Each([&](int r) {
    constexpr int kRounds = 20;
    std::vector<std::vector<float>> buffers(kRounds, std::vector<float>(3000, -1.0f));
    std::vector<std::shared_ptr<HostEvent>> filled;
    std::vector<Event> events;
    for (int i = 0; i < kRounds; ++i) {
      // Every other one the GPU can wait for by itself.
      filled.push_back(i % 2 == 0 ? std::make_shared<FakeGpuEvent>()
                                  : std::make_shared<HostEvent>());
      events.push_back(
          ranks[r].AllGather(buffers[i].data(), 1500, DType::kF32, Info(), Event(filled[i])));
      events.push_back(ranks[r].AllReduce(buffers[i].data(), 3000, DType::kF32, Info()));
    }
    for (int i = 0; i < kRounds; ++i) {
      EXPECT_FALSE(events[2 * i].Done());
      std::fill_n(buffers[i].begin() + r * 1500, 1500, static_cast<float>(10 * i + r));
      filled[i]->Finish(absl::OkStatus());
    }
    for (auto it = events.rbegin(); it != events.rend(); ++it) {
      ASSERT_TRUE(it->Wait().ok()) << it->Wait();
      EXPECT_TRUE(it->Done());
    }
    for (int i = 0; i < kRounds; ++i) {
      EXPECT_EQ(buffers[i][0], 2.0f * (10 * i));
      EXPECT_EQ(buffers[i][2999], 2.0f * (10 * i + 1));
    }
    EXPECT_GT(ranks[r].BusySeconds(), 0.0);
  });
}

TEST(NcclStreams, AnEventMayOutliveTheCommunicatorAndKeepsNothingOfTheGpu) {
  NcclRanks ranks(2);
  std::vector<Event> events(2);
  ranks.Each([&](int r) {
    events[r] = ranks[r].Barrier(Info());
    EXPECT_TRUE(events[r].Wait().ok());
    ranks.Destroy(r);
    EXPECT_TRUE(events[r].Done());
    EXPECT_TRUE(events[r].Wait().ok());
  });
  EXPECT_EQ(ranks.nccl().live_marks(), 4);
  events.clear();
  EXPECT_EQ(ranks.nccl().live_marks(), 0);
}

TEST(NcclArguments, WrongOnesAreRefusedByName) {
  float x = 0;
  auto refused = [&](ReduceScatterArgs args) {
    NcclRanks one(1);
    args.input = args.output = &x;
    const absl::Status status = one[0].ReduceScatter(args, Info()).Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return Text(status);
  };
  EXPECT_THAT(refused({.type = DType::kI32, .counts = {1}, .contributors = 1}),
              HasSubstr("not of int32"));
  EXPECT_THAT(refused({.counts = {1, 1}, .contributors = 1}), HasSubstr("2 counts for 1 ranks"));
  EXPECT_THAT(refused({.counts = {1}, .contributors = 2}), HasSubstr("contributors is 2"));
  EXPECT_THAT(refused({.counts = {-1}, .contributors = 1}), HasSubstr("-1"));
  EXPECT_THAT(refused({.counts = {1}, .contributors = 1, .output_type = DType::kBF16}),
              HasSubstr("the output is bf16"));
  NcclRanks ranks(1);
  const absl::Status self = ranks[0].Send(&x, 4, 0, Info()).Wait();
  EXPECT_EQ(self.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(self), HasSubstr("send of blocks.3 (step 7, backward) on rank 0 of 1"));
}

}  // namespace
}  // namespace zeroshard
