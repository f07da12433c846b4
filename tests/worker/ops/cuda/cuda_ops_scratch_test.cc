#include "worker/ops/cuda/cuda_ops_scratch.h"

#include <gtest/gtest.h>

#include "worker/device/device.h"

namespace zeroshard::cuda {
namespace {

TEST(Scratch, GrowsToTheMostThatWasAskedForAndStays) {
  const auto device = MakeCpuDevice();
  Scratch scratch(device.get());
  const auto bytes = [&] { return device->memory().Bytes(MemoryKind::kBuffers); };
  ASSERT_TRUE(scratch.Get(0).ok());
  EXPECT_EQ(bytes(), 0);
  const auto first = scratch.Get(1000);
  ASSERT_TRUE(first.ok());
  EXPECT_NE(*first, nullptr);
  EXPECT_EQ(bytes(), int64_t{1} << 20);
  EXPECT_EQ(*scratch.Get(int64_t{1} << 20), *first);
  ASSERT_TRUE(scratch.Get((int64_t{1} << 20) + 1).ok());
  EXPECT_EQ(bytes(), int64_t{2} << 20);
  EXPECT_EQ(device->memory().PeakBytes(MemoryKind::kBuffers), int64_t{2} << 20);  // not three
  ASSERT_TRUE(scratch.Get(5).ok());
  EXPECT_EQ(bytes(), int64_t{2} << 20);
}

TEST(Scratch, IsThereAgainAfterMoreThanThereIsWasAskedFor) {
  const auto device = MakeCpuDevice();
  Scratch scratch(device.get());
  ASSERT_TRUE(scratch.Get(1000).ok());
  EXPECT_EQ(scratch.Get(int64_t{1} << 60).status().code(), absl::StatusCode::kResourceExhausted);
  const auto again = scratch.Get(1000);
  ASSERT_TRUE(again.ok());
  EXPECT_NE(*again, nullptr);
}

}  // namespace
}  // namespace zeroshard::cuda
