#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/cpu_memory.h"
#include "worker/device/device.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

Buffer MustAllocate(Device* device, size_t bytes, MemoryKind kind) {
  absl::StatusOr<Buffer> buffer = device->Allocate(bytes, kind);
  EXPECT_TRUE(buffer.ok()) << buffer.status();
  return buffer.ok() ? *std::move(buffer) : Buffer();
}

TEST(DeviceMemoryTest, IsAlignedZeroedAndWritableAtAnySize) {
  const auto device = MakeCpuDevice();
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{1000}, cpu::kMapFrom - 1,
                             cpu::kMapFrom, cpu::kMapFrom + 1, size_t{5} << 20}) {
    // Twice, so that the second may get back what the first dirtied.
    for (int i = 0; i < 2; ++i) {
      const Buffer buffer = MustAllocate(device.get(), bytes, MemoryKind::kBuffers);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u) << bytes;
      EXPECT_EQ(buffer.bytes(), bytes);
      uint8_t* const data = buffer.as<uint8_t>();
      for (size_t at = 0; at < bytes; ++at) ASSERT_EQ(data[at], 0) << bytes << " at " << at;
      std::memset(data, 0xA5, bytes);
    }
  }
}

TEST(DeviceMemoryTest, AccountsEachKindApartWithItsPeak) {
  const auto device = MakeCpuDevice();
  const MemoryAccounting& memory = device->memory();
  {
    const Buffer a = MustAllocate(device.get(), 100, MemoryKind::kParameters);
    {
      const Buffer b = MustAllocate(device.get(), cpu::kMapFrom, MemoryKind::kParameters);
      EXPECT_EQ(memory.Bytes(MemoryKind::kParameters), 100 + int64_t{cpu::kMapFrom});
    }
    const Buffer c = MustAllocate(device.get(), 7, MemoryKind::kGradients);
    EXPECT_EQ(memory.Bytes(MemoryKind::kParameters), 100);
    EXPECT_EQ(memory.Bytes(MemoryKind::kGradients), 7);
  }
  EXPECT_EQ(memory.Bytes(MemoryKind::kParameters), 0);
  EXPECT_EQ(memory.PeakBytes(MemoryKind::kParameters), 100 + int64_t{cpu::kMapFrom});
  EXPECT_EQ(memory.PeakBytes(MemoryKind::kGradients), 7);
  EXPECT_EQ(memory.PeakBytes(MemoryKind::kOptimizer), 0);
}

TEST(DeviceMemoryTest, MovedBuffersAreFreedOnce) {
  const auto device = MakeCpuDevice();
  const auto in_use = [&] { return device->memory().Bytes(MemoryKind::kActivations); };
  Buffer a = MustAllocate(device.get(), 10, MemoryKind::kActivations);
  Buffer b = MustAllocate(device.get(), 20, MemoryKind::kActivations);
  void* const data = a.data();
  b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.bytes(), 10u);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT: what a moved-from buffer is, is what is tested
  EXPECT_EQ(in_use(), 10);
  Buffer c(std::move(b));
  EXPECT_EQ(in_use(), 10);
  c = Buffer();
  EXPECT_EQ(in_use(), 0);
}

TEST(DeviceMemoryTest, NothingCostsNothing) {
  const auto device = MakeCpuDevice();
  const Buffer buffer = MustAllocate(device.get(), 0, MemoryKind::kBuffers);
  EXPECT_EQ(buffer.bytes(), 0u);
  EXPECT_EQ(device->memory().PeakBytes(MemoryKind::kBuffers), 0);
}

TEST(DeviceMemoryTest, RefusesWhatDoesNotExistWithTheNumbers) {
  const auto device = MakeCpuDevice();
  const Buffer held = MustAllocate(device.get(), 640, MemoryKind::kGradients);
  for (const size_t bytes : {size_t{1} << 60, std::numeric_limits<size_t>::max()}) {
    const absl::StatusOr<Buffer> buffer = device->Allocate(bytes, MemoryKind::kOptimizer);
    EXPECT_EQ(buffer.status().code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(buffer.status().message()),
                testing::AllOf(HasSubstr(std::to_string(bytes)), HasSubstr("optimizer"),
                               HasSubstr("640 bytes in all")));
  }
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kOptimizer), 0);
}

TEST(DeviceMemoryTest, CountsOfManyThreadsAddUp) {
  const auto device = MakeCpuDevice();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&device] {
      for (int i = 0; i < 500; ++i) MustAllocate(device.get(), 64, MemoryKind::kBuffers);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kBuffers), 0);
  EXPECT_GE(device->memory().PeakBytes(MemoryKind::kBuffers), 64);
  EXPECT_LE(device->memory().PeakBytes(MemoryKind::kBuffers), 4 * 64);
}

TEST(DeviceMemoryTest, KindsHaveTheNamesOfTheMetric) {
  EXPECT_STREQ(NameOf(MemoryKind::kParameters), "parameters");
  EXPECT_STREQ(NameOf(MemoryKind::kGradients), "gradients");
  EXPECT_STREQ(NameOf(MemoryKind::kOptimizer), "optimizer");
  EXPECT_STREQ(NameOf(MemoryKind::kActivations), "activations");
  EXPECT_STREQ(NameOf(MemoryKind::kBuffers), "buffers");
  EXPECT_EQ(MakeCpuDevice()->name(), "cpu");
}

TEST(DeviceMemoryTest, HostMemoryIsZeroedAndCountsAsBuffers) {
  const auto device = MakeCpuDevice();
  EXPECT_TRUE(device->is_host());
  for (const size_t bytes : {size_t{1}, cpu::kMapFrom + 1}) {
    const absl::StatusOr<Buffer> buffer = device->AllocateHost(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(buffer->bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 64, 0u);
    for (size_t at = 0; at < bytes; ++at) ASSERT_EQ(buffer->as<uint8_t>()[at], 0);
  }
  EXPECT_EQ(device->memory().Bytes(MemoryKind::kBuffers), 0);
  EXPECT_EQ(device->memory().PeakBytes(MemoryKind::kBuffers), int64_t{cpu::kMapFrom} + 1);
  const absl::Status refused = device->AllocateHost(std::numeric_limits<size_t>::max()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("18446744073709551615 bytes"));
}

}  // namespace
}  // namespace zeroshard
