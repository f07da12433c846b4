// Each collective against arithmetic done here, at several world sizes.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/ranks.h"
#include "worker/comm/traffic.h"

namespace zeroshard {
namespace {

using ::testing::Each;

// bf16 by the definition: the nearest of the two neighbours, ties to the even one.
uint16_t ToBF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  const uint32_t low = bits & 0xffff;
  uint32_t high = bits >> 16;
  if (low > 0x8000 || (low == 0x8000 && (high & 1) != 0)) ++high;
  return static_cast<uint16_t>(high);
}
float FromBF16(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

// Contribution of `rank` at global position `i`; sums of these are not exact, so order shows.
float Value(int rank, int64_t i) {
  const float magnitude = static_cast<float>(std::pow(7.0, (i + 3 * rank) % 9));
  return ((i * 31 + rank * 17) % 2 == 0 ? 1.0f : -1.0f) * magnitude *
         (1.0f + static_cast<float>((i * 13 + rank * 5) % 101) / 128.0f);
}

__extension__ typedef _Float16 Half;  // with the compiler's conversions
template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Half>;

template <typename T>
T Encode(float value) {
  if constexpr (sizeof(T) == 4 || kIsHalf<T>) {
    return static_cast<T>(value);
  } else {
    return ToBF16(value);
  }
}
template <typename T>
float Decode(T value) {
  if constexpr (sizeof(T) == 4 || kIsHalf<T>) {
    return static_cast<float>(value);
  } else {
    return FromBF16(value);
  }
}
template <typename T>
constexpr DType kTypeOf = kIsHalf<T>       ? DType::kF16
                          : sizeof(T) == 4 ? DType::kF32
                                           : DType::kBF16;
// So that fp16 holds the sums of eight ranks.
template <typename T>
constexpr float kScaleOf = kIsHalf<T> ? 0x1p-11f : 1.0f;

struct FoldCase {
  std::vector<int64_t> counts;
  int contributors = 0;
  bool accumulate = false;
  bool in_place = false;
  GlooTuning tuning = {};
};

// Runs a reduce-scatter and compares every bit of every rank's output with a plain loop.
template <typename In, typename Out>
void ExpectFolded(Ranks& ranks, const FoldCase& c) {
  const int size = ranks.size();
  std::vector<uint64_t> before(size);
  for (int r = 0; r < size; ++r) {
    before[r] = ranks[r].traffic().Get(CollectiveOp::kReduceScatter, Phase::kBackward);
  }
  int64_t total = 0;
  for (int64_t count : c.counts) total += count;
  std::vector<std::vector<In>> inputs(size, std::vector<In>(total));
  std::vector<std::vector<Out>> outputs(size);
  for (int r = 0; r < size; ++r) {
    for (int64_t i = 0; i < total; ++i) inputs[r][i] = Encode<In>(kScaleOf<In> * Value(r, i));
    outputs[r].assign(c.counts[r], Encode<Out>(c.accumulate ? 0.375f : 123.0f));
  }
  const std::vector<std::vector<In>> original = inputs;
  ranks.Each([&](int r) {
    ReduceScatterArgs args;
    args.input = inputs[r].data();
    args.type = kTypeOf<In>;
    args.counts = c.counts;
    args.contributors = c.contributors;
    args.output = outputs[r].data();
    if (c.in_place) {
      int64_t start = 0;
      for (int p = 0; p < r; ++p) start += c.counts[p];
      args.output = inputs[r].data() + start;
    }
    args.output_type = kTypeOf<Out>;
    args.accumulate = c.accumulate;
    const absl::Status status = ranks[r].ReduceScatter(args, Info()).Wait();
    EXPECT_TRUE(status.ok()) << status;
  });
  int64_t start = 0;
  for (int r = 0; r < size; ++r) {
    if (c.in_place && c.counts[r] > 0)
      std::memcpy(outputs[r].data(), inputs[r].data() + start, c.counts[r] * sizeof(In));
    for (int64_t i = 0; i < c.counts[r]; ++i) {
      float sum = c.accumulate ? 0.375f : 0.0f;
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

template <typename In, typename Out>
void ExpectFolded(const FoldCase& c) {
  Ranks ranks(static_cast<int>(c.counts.size()), {.tuning = c.tuning});
  ExpectFolded<In, Out>(ranks, c);
}
class Worlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, Worlds, ::testing::Values(1, 2, 3, 4, 8));

TEST_P(Worlds, ReduceScatterFoldsFp32InRankOrder) {
  ExpectFolded<float, float>(
      {.counts = std::vector<int64_t>(GetParam(), 1000), .contributors = GetParam()});
}

TEST_P(Worlds, ReduceScatterSumsBf16InFp32AndRoundsOnce) {
  ExpectFolded<uint16_t, uint16_t>(
      {.counts = std::vector<int64_t>(GetParam(), 1003), .contributors = GetParam()});
}

TEST_P(Worlds, ReduceScatterAccumulatesBf16IntoFp32) {
  ExpectFolded<uint16_t, float>({.counts = std::vector<int64_t>(GetParam(), 517),
                                 .contributors = GetParam(),
                                 .accumulate = true});
}

TEST_P(Worlds, ReduceScatterSumsFp16InFp32AndRoundsOnce) {
  ExpectFolded<Half, Half>(
      {.counts = std::vector<int64_t>(GetParam(), 1003), .contributors = GetParam()});
}

TEST_P(Worlds, ReduceScatterAccumulatesFp16IntoFp32) {
  ExpectFolded<Half, float>({.counts = std::vector<int64_t>(GetParam(), 517),
                             .contributors = GetParam(),
                             .accumulate = true});
}

TEST_P(Worlds, ReduceScatterInPlaceFp32) {
  ExpectFolded<float, float>({.counts = std::vector<int64_t>(GetParam(), 999),
                              .contributors = GetParam(),
                              .in_place = true});
}

TEST_P(Worlds, ReduceScatterInPlaceBf16InSmallPieces) {
  ExpectFolded<uint16_t, uint16_t>({.counts = std::vector<int64_t>(GetParam(), 999),
                                    .contributors = GetParam(),
                                    .in_place = true,
                                    .tuning = {.piece_elements = 100, .pieces_in_flight = 2}});
}

TEST_P(Worlds, ReduceScatterOfFewerContributors) {
  for (int contributors = 1; contributors < GetParam(); contributors += 2) {
    ExpectFolded<uint16_t, float>(
        {.counts = std::vector<int64_t>(GetParam(), 77), .contributors = contributors});
  }
}

TEST_P(Worlds, ReduceScatterWithRanksThatOwnNothing) {
  std::vector<int64_t> counts(GetParam(), 0);
  counts[GetParam() / 2] = 200;
  Ranks ranks(GetParam());
  ExpectFolded<float, float>(ranks, {.counts = counts, .contributors = GetParam()});
  ExpectFolded<float, float>(
      {.counts = std::vector<int64_t>(GetParam(), 0), .contributors = GetParam()});
}

TEST(ReduceScatter, PiecesOfEverySizeAroundTheBoundary) {
  const GlooTuning tuning{.piece_elements = 64, .pieces_in_flight = 2};
  Ranks ranks(3, {.tuning = tuning});
  for (int64_t count : {1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 257}) {
    ExpectFolded<float, float>(
        ranks, {.counts = {count, 64, 2 * count}, .contributors = 3, .accumulate = true});
  }
}

TEST(ReduceScatter, DefaultPiecesAroundTheBoundary) {
  const int64_t piece = 512 * 1024;
  for (int64_t count : {piece - 1, piece, piece + 1, 5 * piece + 3}) {
    ExpectFolded<uint16_t, uint16_t>({.counts = {count, 10}, .contributors = 2});
  }
}

TEST(ReduceScatter, ScratchStaysWithinItsBound) {
  ExpectFolded<float, float>({.counts = std::vector<int64_t>(4, 5000),
                              .contributors = 4,
                              .tuning = {.piece_elements = 1000, .scratch_elements = 90}});
  Ranks ranks(2, {.tuning = {.piece_elements = 1000, .pieces_in_flight = 3}});
  std::vector<float> input(40000), output(20000);
  std::vector<std::vector<float>> outputs(2, output);
  ranks.Each([&](int r) {
    for (int round = 0; round < 3; ++round) {
      const ReduceScatterArgs args{.input = input.data(),
                                   .counts = {20000, 20000},
                                   .contributors = 2,
                                   .output = outputs[r].data()};
      EXPECT_TRUE(ranks[r].ReduceScatter(args, Info()).Wait().ok());
    }
  });
  // Two ranks of this process: three pieces of 1000 fp32 elements each, rounded up to 64 bytes.
  EXPECT_EQ(ranks.device().memory().PeakBytes(MemoryKind::kBuffers), 2 * 3 * RoundUp(4000, 64));
}

TEST(ReduceScatter, OrderOfTheSumIsTheOrderOfRanks) {
  // 1e8 + 1 is 1e8 in fp32, so only the right order gives these.
  const std::vector<float> by_rank = {1e8f, 1.0f, -1e8f, 2.0f};
  Ranks ranks(4);
  std::vector<float> sums(4);
  ranks.Each([&](int r) {
    const std::vector<float> input(4, by_rank[r]);
    const ReduceScatterArgs args{
        .input = input.data(), .counts = {1, 1, 1, 1}, .contributors = 4, .output = &sums[r]};
    EXPECT_TRUE(ranks[r].ReduceScatter(args, Info()).Wait().ok());
  });
  EXPECT_THAT(sums, Each(2.0f));
  ranks.Each([&](int r) {
    const std::vector<float> input(4, by_rank[3 - r]);  // ((2 - 1e8) + 1) + 1e8
    const ReduceScatterArgs args{
        .input = input.data(), .counts = {1, 1, 1, 1}, .contributors = 4, .output = &sums[r]};
    EXPECT_TRUE(ranks[r].ReduceScatter(args, Info()).Wait().ok());
  });
  EXPECT_THAT(sums, Each(0.0f));
}

TEST(ReduceScatter, NegativeZeroStartsFromPositiveZeroAndNanPassesThrough) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  Ranks ranks(2);
  std::vector<std::vector<uint16_t>> outputs(2, std::vector<uint16_t>(40));
  ranks.Each([&](int r) {
    std::vector<uint16_t> input(80, ToBF16(-0.0f));
    for (int part : {0, 40}) {
      if (r == 1) input[part + 1] = ToBF16(nan);
      if (r == 0) input[part + 2] = 0x7f81;  // a NaN whose payload lies in the low bits
      input[part + 3] = ToBF16(r == 0 ? inf : -inf);
      input[part + 39] = ToBF16(inf);
    }
    const ReduceScatterArgs args{.input = input.data(),
                                 .type = DType::kBF16,
                                 .counts = {40, 40},
                                 .contributors = 2,
                                 .output = outputs[r].data(),
                                 .output_type = DType::kBF16};
    EXPECT_TRUE(ranks[r].ReduceScatter(args, Info()).Wait().ok());
  });
  for (const auto& output : outputs) {
    EXPECT_EQ(output[0], 0);
    for (int i : {1, 2, 3}) EXPECT_TRUE(std::isnan(FromBF16(output[i]))) << i;
    EXPECT_EQ(output[38], 0);
    EXPECT_EQ(FromBF16(output[39]), inf);
  }
}

TEST_P(Worlds, AllGatherBringsEveryPartToAllRanks) {
  Ranks ranks(GetParam());
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

template <typename T>
void ExpectAllReduced(Ranks& ranks, int64_t count) {
  const int size = ranks.size();
  std::vector<uint64_t> before(size);
  for (int r = 0; r < size; ++r) {
    before[r] = ranks[r].traffic().Get(CollectiveOp::kAllReduce, Phase::kStep);
  }
  std::vector<std::vector<T>> buffers(size, std::vector<T>(count));
  for (int r = 0; r < size; ++r) {
    for (int64_t i = 0; i < count; ++i) buffers[r][i] = Encode<T>(Value(r, i));
  }
  const auto original = buffers;
  ranks.Each([&](int r) {
    const absl::Status status =
        ranks[r].AllReduce(buffers[r].data(), count, kTypeOf<T>, Info(Phase::kStep)).Wait();
    EXPECT_TRUE(status.ok()) << status;
  });
  std::vector<T> want(count);
  for (int64_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += Decode<T>(original[r][i]);
    want[i] = Encode<T>(sum);
  }
  int64_t own = CeilDiv(count, size);
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

TEST_P(Worlds, AllReduceGivesTheSameBitsEverywhere) {
  Ranks ranks(GetParam());
  for (int64_t count : {0, 1, 3, 4096, 4097, 20011}) {
    ExpectAllReduced<float>(ranks, count);
    ExpectAllReduced<uint16_t>(ranks, count);
  }
}

TEST(TwoRanks, AllReduceGivesTheSameBitsInOneRoundAndInTwo) {
  Ranks ranks(2);
  for (int64_t count : {int64_t{300000}, int64_t{1} << 20, (int64_t{1} << 20) + 1}) {
    ExpectAllReduced<float>(ranks, count);
    ExpectAllReduced<uint16_t>(ranks, count);
  }
}

TEST_P(Worlds, BroadcastFromEveryRoot) {
  Ranks ranks(GetParam());
  ranks.Each([&](int r) {
    for (int root = 0; root < GetParam(); ++root) {
      std::vector<char> data(1001, r == root ? static_cast<char>('a' + root) : '?');
      const absl::Status status = ranks[r].Broadcast(data.data(), 1001, root, Info()).Wait();
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_THAT(data, ::testing::Each(static_cast<char>('a' + root)));
    }
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kBroadcast, Phase::kBackward),
              (GetParam() - 1) * 1001);
  });
}

TEST(SendRecv, ARingOfDifferentSizesArrivesInOrder) {
  Ranks ranks(3);
  ranks.Each([&](int r) {
    const int to = (r + 1) % 3, from = (r + 2) % 3;
    std::vector<Event> events;
    std::vector<std::vector<int>> sent, got;
    for (int n : {1, 1000, 0, 50000}) {
      sent.emplace_back(n, 10 * r + n);
      got.emplace_back(n, -1);
    }
    for (int i = 0; i < 4; ++i) {
      const int64_t bytes = sent[i].size() * 4;
      // One waits, the other sends first: a stream runs one operation at a time.
      if (r == 0) events.push_back(ranks[r].Send(sent[i].data(), bytes, to, Info()));
      events.push_back(ranks[r].Recv(got[i].data(), bytes, from, Info()));
      if (r != 0) events.push_back(ranks[r].Send(sent[i].data(), bytes, to, Info()));
    }
    for (const Event& event : events) ASSERT_TRUE(event.Wait().ok()) << event.Wait();
    for (int i = 0; i < 4; ++i) {
      EXPECT_THAT(got[i], ::testing::Each(10 * from + static_cast<int>(sent[i].size())));
    }
    EXPECT_EQ(ranks[r].traffic().Get(CollectiveOp::kSend, Phase::kBackward), 4 * 51001);
  });
}

TEST_P(Worlds, BarrierLetsNobodyThroughBeforeTheLast) {
  Ranks ranks(GetParam());
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

TEST(Streams, OperationsQueueUpAndStartAfterTheirEvents) {
  Ranks ranks(2);
  ranks.Each([&](int r) {
    std::unique_ptr<HostStream> compute = MakeHostStream("compute");
    std::vector<std::vector<float>> buffers(20, std::vector<float>(3000, -1.0f));
    std::vector<Event> events;
    for (int i = 0; i < 20; ++i) {
      Event filled = compute->Enqueue([&, i] {
        std::fill_n(buffers[i].begin() + r * 1500, 1500, static_cast<float>(10 * i + r));
        return absl::OkStatus();
      });
      events.push_back(ranks[r].AllGather(buffers[i].data(), 1500, DType::kF32, Info(), filled));
      events.push_back(ranks[r].AllReduce(buffers[i].data(), 3000, DType::kF32, Info()));
    }
    for (auto it = events.rbegin(); it != events.rend(); ++it) ASSERT_TRUE(it->Wait().ok());
    for (int i = 0; i < 20; ++i) {
      EXPECT_EQ(buffers[i][0], 2.0f * (10 * i));
      EXPECT_EQ(buffers[i][2999], 2.0f * (10 * i + 1));
    }
    EXPECT_GT(ranks[r].BusySeconds(), 0.0);
  });
}

TEST(Arguments, WrongOnesAreRefusedByName) {
  Ranks ranks(1);
  float x = 0;
  auto refused = [&](ReduceScatterArgs args) {
    Ranks one(1);
    args.input = args.output = &x;
    return one[0].ReduceScatter(args, Info()).Wait();
  };
  EXPECT_THAT(Text(refused({.type = DType::kI32, .counts = {1}, .contributors = 1})),
              ::testing::HasSubstr("not of int32"));
  EXPECT_THAT(Text(refused({.counts = {1, 1}, .contributors = 1})),
              ::testing::HasSubstr("2 counts for 1 ranks"));
  EXPECT_THAT(Text(refused({.counts = {1}, .contributors = 2})),
              ::testing::HasSubstr("contributors is 2"));
  EXPECT_THAT(Text(refused({.counts = {-1}, .contributors = 1})), ::testing::HasSubstr("-1"));
  const absl::Status self = ranks[0].Send(&x, 4, 0, Info()).Wait();
  EXPECT_EQ(self.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Text(self), ::testing::HasSubstr("send of blocks.3 (step 7, backward)"));
}

}  // namespace
}  // namespace zeroshard
