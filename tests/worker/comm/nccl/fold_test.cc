// The kernel's arithmetic, run on the CPU, against the CPU's own sum in rank order.
#include "worker/comm/nccl/fold.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "worker/comm/fold.h"

namespace zeroshard {
namespace {

template <int N>
void RunPacks(const FoldArgs& args) {
  VisitFoldTypes(args, [&](auto in, auto out) {
    int64_t i = 0;
    for (; i + N <= args.count; i += N) FoldPack<decltype(in), decltype(out), N>(args, i);
    for (; i < args.count; ++i) FoldPack<decltype(in), decltype(out), 1>(args, i);
  });
}

struct Case {
  DType type, output_type;
  int contributors, own_rank;
  bool accumulate;
  int64_t count;
};

// Any finite bits, among them subnormal ones: every addition and rounding counts.
std::vector<uint32_t> AlignedBits(std::mt19937* random, size_t words, DType type) {
  std::vector<uint32_t> bits(words);
  const uint32_t exponent = type == DType::kF16 ? 0x7c00 : 0x7f80;  // of a 16-bit one
  for (uint32_t& word : bits) {
    do {
      word = (*random)();
    } while (type == DType::kF32
                 ? !std::isfinite(std::bit_cast<float>(word))
                 : (word & exponent) == exponent || (word >> 16 & exponent) == exponent);
  }
  return bits;
}

void ExpectAsOnTheCpu(const Case& c, std::mt19937* random) {
  const auto element = static_cast<int64_t>(SizeOf(c.type));
  const int64_t stride = RoundUp(c.count + 1, 64);
  const auto inputs =
      AlignedBits(random, static_cast<size_t>((c.contributors + 1) * stride), c.type);
  const char* data = reinterpret_cast<const char*>(inputs.data());
  FoldArgs args;
  args.staged = data;
  args.stride = stride;
  args.own = data + c.contributors * stride * element;
  args.own_rank = c.own_rank;
  args.contributors = c.contributors;
  args.type = c.type;
  args.count = c.count;
  args.accumulate = c.accumulate;
  args.output_type = c.output_type;
  std::vector<const void*> contributions;
  for (int rank = 0, staged = 0; rank < c.contributors; ++rank) {
    contributions.push_back(rank == c.own_rank ? args.own : data + staged++ * stride * element);
  }
  const auto start = AlignedBits(random, static_cast<size_t>(c.count) + 1, c.output_type);
  std::vector<uint32_t> want = start;
  FoldInRankOrder(contributions, c.type, c.count, c.accumulate, want.data(), c.output_type);
  for (int width : {1, kFoldPack}) {
    std::vector<uint32_t> got = start;
    args.out = got.data();
    width == 1 ? RunPacks<1>(args) : RunPacks<kFoldPack>(args);
    ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * 4), 0)
        << "packs of " << width << ", " << NameOf(c.type) << " to " << NameOf(c.output_type) << ", "
        << c.contributors << " contributors, own " << c.own_rank << ", " << c.count << " elements";
  }
}

TEST(NcclFold, HasTheBitsOfTheCpusSum) {
  std::mt19937 random(1);
  for (const auto& [type, output] :
       {std::pair(DType::kF32, DType::kF32), std::pair(DType::kBF16, DType::kF32),
        std::pair(DType::kBF16, DType::kBF16), std::pair(DType::kF16, DType::kF32),
        std::pair(DType::kF16, DType::kF16)}) {
    for (int contributors : {1, 2, 3, 5, 8}) {
      for (int own = -1; own < contributors; ++own) {
        for (bool accumulate : {false, true}) {
          for (int64_t count : {1, 3, 4, 67, 200}) {
            ExpectAsOnTheCpu({type, output, contributors, own, accumulate, count}, &random);
          }
        }
      }
    }
  }
}

TEST(NcclFold, TiesGoToTheEvenNeighbourAndStartIsPositiveZero) {
  // 1 + 2^-8 lies between bf16's 1 and 1 + 2^-7; 1 + 3 * 2^-8 between that and 1 + 2^-6.
  const std::vector<uint16_t> ones(3, 0x3f80), small = {0x3b80, 0x3c40, 0x8000};
  const std::vector<uint16_t> negative_zero(3, 0x8000);
  std::vector<uint16_t> out(3);
  FoldArgs args{.staged = small.data(),
                .own = ones.data(),
                .own_rank = 0,
                .contributors = 2,
                .type = DType::kBF16,
                .count = 3,
                .out = out.data(),
                .output_type = DType::kBF16};
  RunPacks<1>(args);
  EXPECT_EQ(out[0], 0x3f80);
  EXPECT_EQ(out[1], 0x3f82);
  EXPECT_EQ(out[2], 0x3f80);
  args.own = negative_zero.data();
  args.contributors = 1;
  RunPacks<1>(args);
  EXPECT_EQ(out[0], 0);
}

TEST(NcclFold, NanStaysNan) {
  const std::vector<uint16_t> own = {0x7f81, 0xffff, 0x7f80};  // two NaNs, infinity
  const std::vector<uint16_t> other = {0x3f80, 0x3f80, 0xff80};
  std::vector<uint16_t> out(3);
  RunPacks<1>({.staged = other.data(),
               .own = own.data(),
               .own_rank = 1,
               .contributors = 2,
               .type = DType::kBF16,
               .count = 3,
               .out = out.data(),
               .output_type = DType::kBF16});
  for (uint16_t value : out) {
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(uint32_t{value} << 16)));
  }
}

TEST(NcclFold, OfFp16OverflowsToInfinityOnlyOnceItIsRounded) {
  // 65504 + 16 is half a unit beyond the largest number; 65504 + 15 is not. Sums are fp32: what
  // leaves the range and comes back is finite, and an infinity stays one.
  const std::vector<uint16_t> first = {0x7bff, 0x7bff, 0xfbff, 0x7bff, 0x7c00};
  const std::vector<uint16_t> second = {0x4c00, 0x4b80, 0xcc00, 0x7bff, 0xfbff};
  const std::vector<uint16_t> third = {0, 0, 0, 0xfbff, 0xfbff};
  std::vector<uint16_t> staged = first;
  staged.insert(staged.end(), second.begin(), second.end());
  std::vector<uint16_t> out(5);
  FoldArgs args{.staged = staged.data(),
                .stride = 5,
                .own = third.data(),
                .own_rank = 2,
                .contributors = 3,
                .type = DType::kF16,
                .count = 5,
                .out = out.data(),
                .output_type = DType::kF16};
  RunPacks<1>(args);
  EXPECT_EQ(out, (std::vector<uint16_t>{0x7c00, 0x7bff, 0xfc00, 0x7bff, 0x7c00}));
  std::vector<float> wide(5);
  args.out = wide.data();
  args.output_type = DType::kF32;
  RunPacks<1>(args);
  EXPECT_EQ(wide, (std::vector<float>{65520, 65519, -65520, 65504, INFINITY}));
}

TEST(NcclFold, PacksAreForMemoryThatIsAlignedToThem) {
  alignas(64) float memory[64];
  FoldArgs args{.staged = memory, .stride = 8, .own = memory + 16, .count = 8, .out = memory + 32};
  EXPECT_EQ(FoldWidth(args), kFoldPack);
  args.own = memory + 17;
  EXPECT_EQ(FoldWidth(args), 1);
  args.own = memory + 16;
  args.stride = 6;
  EXPECT_EQ(FoldWidth(args), 1);
  args.stride = 8;
  args.out = memory + 33;
  EXPECT_EQ(FoldWidth(args), 1);
}

}  // namespace
}  // namespace zeroshard
