// That the emulation multiplies as the PTX documentation says, and finds what it is there to find.
#include "tests/worker/ops/cuda/simt_emulator.h"

#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard::cuda {
namespace {

using ::testing::HasSubstr;
using Simt = BlockEmulator::Simt;

// A [16, 16] by B [16, 8] with fragments from ldmatrix: of A as it lies, of B [16, 8] transposed.
template <class T>
void ExpectProduct() {
  std::mt19937 generator(1);
  std::vector<float> a(256), b(128), c(128), got(128);
  for (auto* each : {&a, &b, &c}) {
    for (float& x : *each) x = static_cast<float>(generator() % 9) - 4;
  }
  BlockEmulator emulator(32, 1024, 3);
  ASSERT_TRUE(emulator.Run(1, [&](const Simt& simt, void* shared) {
    auto* a_tile = static_cast<T*>(shared);
    T* b_tile = a_tile + 256;
    const auto lane = static_cast<size_t>(simt.thread());
    for (size_t i = lane; i < 256; i += 32) a_tile[i] = Element<T>::Narrow(a[i]);
    for (size_t i = lane; i < 128; i += 32) b_tile[i] = Element<T>::Narrow(b[i]);
    simt.SyncWarp();
    uint32_t left[4], right[4];
    simt.LoadMatrices(a_tile + lane % 16 * 16 + lane / 16 * 8, left);
    simt.LoadMatricesTransposed(b_tile + lane % 16 * 8, right);
    float sums[4];
    for (size_t i = 0; i < 4; ++i) sums[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
    simt.template MultiplyAdd<T>(left, right[0], right[1], sums);
    for (size_t i = 0; i < 4; ++i) got[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
  })) << emulator.error();
  for (size_t row = 0; row < 16; ++row) {
    for (size_t column = 0; column < 8; ++column) {
      float wanted = c[row * 8 + column];
      for (size_t k = 0; k < 16; ++k) wanted += a[row * 16 + k] * b[k * 8 + column];
      EXPECT_EQ(got[row * 8 + column], wanted) << row << " " << column;
    }
  }
}
TEST(SimtEmulator, MultipliesMatricesThatLdmatrixLoaded) {
  ExpectProduct<Bf16>();
  ExpectProduct<Fp16>();
}

// Threads of two warps hand a number on; without the barrier some read before it is written.
std::set<float> HandOn(bool synchronised) {
  std::set<float> seen;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    BlockEmulator emulator(64, 256, seed);
    EXPECT_TRUE(emulator.Run(1, [&](const Simt& simt, void* shared) {
      auto* values = static_cast<float*>(shared);
      values[simt.thread()] = 1;
      if (synchronised) simt.SyncBlock();
      const float other = values[63 - simt.thread()];
      seen.insert(other == other ? other : -1);  // what was never written is NaN
    }));
  }
  return seen;
}
TEST(SimtEmulator, ShowsAMissingBarrier) {
  EXPECT_EQ(HandOn(true), std::set<float>{1});
  EXPECT_EQ(HandOn(false), (std::set<float>{-1, 1}));
}

// A copy that nobody waited for has arrived in some runs only.
TEST(SimtEmulator, ShowsACopyThatWasNotWaitedFor) {
  alignas(16) const float from[4] = {5, 6, 7, 8};
  std::set<bool> waited, not_waited;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    BlockEmulator emulator(32, 512, seed);
    EXPECT_TRUE(emulator.Run(1, [&](const Simt& simt, void* shared) {
      auto* to = static_cast<float*>(shared) + simt.thread() * 4;
      simt.CopyAsync16(to, from, true);
      simt.CommitCopies();
      simt.CommitCopies();  // an empty group, as the kernels have
      simt.WaitCopies<2>();
      not_waited.insert(to[3] == 8);
      simt.WaitCopies<1>();
      waited.insert(to[3] == 8);
    }));
  }
  EXPECT_EQ(waited, std::set<bool>{true});
  EXPECT_EQ(not_waited, (std::set<bool>{false, true}));
}

std::string ErrorOf(const BlockEmulator::Body& body) {
  BlockEmulator emulator(64, 256, 1);
  EXPECT_FALSE(emulator.Run(1, body));
  return emulator.error();
}
TEST(SimtEmulator, RefusesWhatAGpuWouldNotForgive) {
  EXPECT_THAT(ErrorOf([](const Simt& simt, void*) {
                simt.thread() == 5 ? simt.SyncWarp() : void(simt.ShuffleXor(1, 1));
              }),
              HasSubstr("different operations"));
  EXPECT_THAT(ErrorOf([](const Simt& simt, void*) {
                if (simt.thread() != 40) simt.SyncBlock();
              }),
              HasSubstr("wait for others"));
  EXPECT_THAT(ErrorOf([](const Simt& simt, void* shared) {
                uint32_t to[4];
                simt.LoadMatrices(static_cast<char*>(shared) + 8, to);
              }),
              HasSubstr("misaligned"));
  EXPECT_THAT(ErrorOf([](const Simt& simt, void* shared) {
                uint32_t to[4];
                simt.LoadMatrices(static_cast<char*>(shared) + 256, to);
              }),
              HasSubstr("outside"));
  EXPECT_THAT(ErrorOf([](const Simt&, void* shared) { static_cast<char*>(shared)[256] = 0; }),
              HasSubstr("behind shared memory"));
}

TEST(SimtEmulator, CountsBankConflicts) {
  const auto conflicts = [](int row_bytes) {
    BlockEmulator emulator(32, 8192, 1);
    EXPECT_TRUE(emulator.Run(1, [&](const Simt& simt, void* shared) {
      uint32_t to[4];
      simt.LoadMatrices(static_cast<char*>(shared) + simt.thread() * row_bytes, to);
    }));
    return emulator.bank_conflicts();
  };
  EXPECT_EQ(conflicts(16), 0);
  EXPECT_EQ(conflicts(128), 4 * (1 + 2 + 3 + 4 + 5 + 6 + 7));
}

}  // namespace
}  // namespace zeroshard::cuda
