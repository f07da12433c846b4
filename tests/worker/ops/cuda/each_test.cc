#include "worker/ops/cuda/each.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/kernels/convert.h"
#include "tests/worker/ops/cuda/launch_emulation.h"

namespace zeroshard::cuda {
namespace {

// Counts how often an element is visited.
struct Visit {
  int64_t cols;
  int* visits;

  template <class Cols>
  void Row(int64_t row, const Cols& mine) const {
    mine.Each([&](auto width, int64_t col) {
      for (int k = 0; k < decltype(width)::value; ++k) ++visits[row * cols + col + k];
    });
  }
};

TEST(CudaEachTest, EveryElementIsVisitedOnce) {
  const EachPlan odd = {.threads_x = 3, .threads_y = 2, .blocks_x = 2, .blocks_y = 5};
  for (const int64_t rows : {1, 2, 7, 300}) {
    for (const int64_t cols : {1, 7, 8, 9, 64, 250, 4099}) {
      for (const bool aligned : {false, true}) {
        for (const int64_t packs : {1, 4}) {
          std::vector<int> visits(static_cast<size_t>(rows * cols));
          RunEach(Visit{cols, visits.data()}, rows, cols, aligned, packs);
          const Visit again{cols, visits.data()};
          aligned ? RunPlan<true>(again, rows, cols, odd) : RunPlan<false>(again, rows, cols, odd);
          ASSERT_EQ(visits, std::vector<int>(visits.size(), 2))
              << rows << " x " << cols << (aligned ? " aligned" : "");
        }
      }
    }
  }
}

TEST(CudaEachTest, ALaunchStaysWithinWhatAGpuAllows) {
  const int64_t huge = int64_t{1} << 40;
  for (const int64_t rows : {int64_t{1}, int64_t{100}, int64_t{1} << 20, huge}) {
    for (const int64_t cols : {int64_t{1}, int64_t{64}, int64_t{1} << 20, huge}) {
      for (const bool aligned : {false, true}) {
        const EachPlan plan = PlanEach(rows, cols, aligned);
        EXPECT_LE(plan.threads_x * plan.threads_y, 256);
        EXPECT_GE(plan.blocks_x, 1);
        EXPECT_GE(plan.blocks_y, 1);
        EXPECT_LE(plan.blocks_y, 65535);
        EXPECT_LE(plan.blocks_x * plan.blocks_y, 1 << 17);
        EXPECT_LE(plan.blocks_x, CeilDiv(cols, plan.threads_x));
      }
    }
  }
}

TEST(CudaEachTest, OnlyWholeWordsFromAnEvenStartAreAligned) {
  alignas(16) const char memory[64] = {};
  EXPECT_TRUE(AreAligned(1, 7, {memory, memory + 16, nullptr}));
  EXPECT_TRUE(AreAligned(3, 16, {memory}));
  EXPECT_FALSE(AreAligned(3, 7, {memory})) << "the second row starts in a word";
  EXPECT_FALSE(AreAligned(1, 8, {memory, memory + 2}));
}

TEST(CudaElementTest, Bf16KeepsItsBitsThroughFp32) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Bf16 element{static_cast<uint16_t>(bits)};
    const float value = Element<Bf16>::Widen(element);
    const uint16_t back = Element<Bf16>::Narrow(value).bits;
    ASSERT_EQ(back, std::isnan(value) ? bits | 0x40 : bits);
  }
}

// Around every bf16: the number itself, just beside it, the tie to the next and just beside that.
TEST(CudaElementTest, RoundsToNearestEvenAsTheCpuDoes) {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      values.push_back(FromBits(high << 16 | low));
    }
  }
  std::vector<uint16_t> wanted(values.size());
  cpu::Convert(values.data(), DType::kF32, static_cast<int64_t>(values.size()), wanted.data(),
               DType::kBF16, 1);
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(Element<Bf16>::Narrow(values[i]).bits, wanted[i]) << std::hex << BitsOf(values[i]);
  }
  EXPECT_EQ(Rounded(1.00390625f, DType::kBF16), 1.0f) << "a tie between 1 and 1.0078125";
  EXPECT_EQ(Rounded(1.00390625f, DType::kF32), 1.00390625f);
}

TEST(CudaElementTest, PacksHoldElementsInOrder) {
  ForEachType([](auto element, DType dtype) {
    using T = decltype(element);
    Array<T> from(cpu::Values{1, 2, 3, 4, 5, 6, 7, 8}), to(8), copy(8);
    float values[kPack];
    Load<kPack>(from.data(), values);
    for (int i = 0; i < kPack; ++i) ASSERT_EQ(values[i], static_cast<float>(i + 1));
    Store<kPack>(values, to.data());
    ExpectSameBits(to, from, NameOf(dtype));
    CopyElements<kPack>(from.data(), copy.data());
    ExpectSameBits(copy, from, NameOf(dtype));
  });
}

}  // namespace
}  // namespace zeroshard::cuda
