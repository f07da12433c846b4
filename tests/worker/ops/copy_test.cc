// Ops::Copy, Zero and CopyRows.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "worker/ops/ops.h"

namespace zeroshard {
namespace {

using Bytes = std::vector<uint8_t>;

// Around cache lines, and more than three threads' smallest shares.
constexpr int64_t kSizes[] = {0, 1, 63, 64, 65, 1000, 3 * 262144 + 17};

Bytes Counting(int64_t size) {
  Bytes bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7 + i / 251 + 1);
  return bytes;
}

TEST(CopyTest, CopiesAndZeroesJustTheBytesAsked) {
  for (const int threads : {1, 2, 3}) {
    const std::unique_ptr<Ops> ops = MakeCpuOps(threads);
    for (const int64_t size : kSizes) {
      const Bytes from = Counting(size + 2);
      Bytes to(from.size(), 0xAA), expected(from.size(), 0xAA);
      for (size_t i = 1; i + 1 < from.size(); ++i) expected[i] = from[i];
      ops->Copy(to.data() + 1, from.data() + 1, static_cast<size_t>(size));
      EXPECT_EQ(to, expected) << size << " bytes, " << threads << " threads";
      for (size_t i = 1; i + 1 < from.size(); ++i) expected[i] = 0;
      ops->Zero(to.data() + 1, static_cast<size_t>(size));
      EXPECT_EQ(to, expected) << size << " bytes, " << threads << " threads";
    }
  }
}

TEST(CopyTest, OfNothingTakesNullPointers) {
  const std::unique_ptr<Ops> ops = MakeCpuOps(2);
  ops->Copy(nullptr, nullptr, 0);
  ops->Zero(nullptr, 0);
  ops->CopyRows(nullptr, 0, nullptr, 0, 0, 8);
  ops->CopyRows(nullptr, 8, nullptr, 8, 3, 0);
}

TEST(CopyTest, RowsKeepWhatLiesBetweenThem) {
  struct Case {
    int64_t rows, bytes, to_stride, from_stride;
  };
  const Case cases[] = {
      {1, 5, 0, 0},    {4, 1, 2, 3},    {5, 3, 7, 4},      {9, 16, 16, 16},
      {9, 16, 32, 16}, {9, 16, 16, 40}, {300, 64, 65, 64}, {7, 200003, 200004, 200010}};
  for (const int threads : {1, 2, 3}) {
    const std::unique_ptr<Ops> ops = MakeCpuOps(threads);
    for (const Case& c : cases) {
      const Bytes from = Counting((c.rows - 1) * c.from_stride + c.bytes);
      Bytes to(static_cast<size_t>((c.rows - 1) * c.to_stride + c.bytes + 1), 0xAA);
      Bytes expected = to;
      for (int64_t row = 0; row < c.rows; ++row) {
        for (int64_t i = 0; i < c.bytes; ++i) {
          expected[static_cast<size_t>(row * c.to_stride + i)] =
              from[static_cast<size_t>(row * c.from_stride + i)];
        }
      }
      ops->CopyRows(to.data(), c.to_stride, from.data(), c.from_stride, c.rows, c.bytes);
      EXPECT_EQ(to, expected) << c.rows << " rows of " << c.bytes << ", " << threads << " threads";
    }
  }
}

}  // namespace
}  // namespace zeroshard
