#include <cstring>
#include <limits>
#include <thread>

#include "tests/worker/device/cuda/device_fixture.h"

namespace zeroshard::cuda {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

class CudaMemoryTest : public CudaDeviceFixture {
 protected:
  std::vector<uint8_t> Read(Stream* stream, const Buffer& buffer) {
    std::vector<uint8_t> out(buffer.bytes(), 0xAA);
    EXPECT_TRUE(stream->Copy(out.data(), buffer.data(), buffer.bytes()).Wait().ok());
    return out;
  }
};

TEST_F(CudaMemoryTest, IsZeroForEveryStreamAtOnce) {
  const auto before = device_->NewStream("before");
  const Buffer buffer = Memory(1000);
  const auto after = device_->NewStream("after");
  EXPECT_EQ(runtime_.Calls("SynchronizeStream"), 0) << "the host waits for nothing";
  for (Stream* stream : {before.get(), after.get(), static_cast<Stream*>(device_->compute())}) {
    EXPECT_THAT(Read(stream, buffer), Each(0));
  }
}

TEST_F(CudaMemoryTest, WhatIsFreedServesTheNextWithoutDisturbingWorkOnTheWay) {
  std::vector<uint8_t> in(256, 5), out(256);
  Buffer first = Memory(256);
  void* const data = first.data();
  device_->compute()->Copy(data, in.data(), 256);
  const Event old = device_->compute()->Copy(out.data(), data, 256);
  first = Buffer();  // the copies have not run yet
  const Buffer second = Memory(256);
  EXPECT_EQ(second.data(), data);
  EXPECT_THAT(Read(device_->NewStream("side").get(), second), Each(0));
  EXPECT_TRUE(old.Wait().ok());
  EXPECT_EQ(out, in);
  EXPECT_EQ(runtime_.reserved_bytes(), 256u);
}

TEST_F(CudaMemoryTest, AccountsTheBytesAskedForByKindWithTheirPeak) {
  {
    const Buffer a = Memory(100, MemoryKind::kParameters), b = Memory(7, MemoryKind::kGradients);
    const Buffer c = Memory(30, MemoryKind::kParameters);
    EXPECT_EQ(device_->memory().Bytes(MemoryKind::kParameters), 130);
    EXPECT_EQ(device_->memory().Bytes(MemoryKind::kGradients), 7);
  }
  EXPECT_EQ(device_->memory().Bytes(MemoryKind::kParameters), 0);
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kParameters), 130);
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kGradients), 7);
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kBuffers), 0);
}

TEST_F(CudaMemoryTest, NothingCostsNothing) {
  EXPECT_EQ(Memory(0).data(), nullptr);
  EXPECT_EQ(device_->AllocateHost(0)->data(), nullptr);
  EXPECT_EQ(runtime_.Calls("AllocateAsync") + runtime_.Calls("HostAllocate"), 0);
}

TEST_F(CudaMemoryTest, RefusesWhatDoesNotFitWithTheNumbersAndARemedy) {
  const Buffer held = Memory(size_t{1} << 19, MemoryKind::kOptimizer);
  const Buffer more = Memory(1000, MemoryKind::kBuffers);
  for (const size_t bytes : {size_t{1} << 20, std::numeric_limits<size_t>::max()}) {
    const absl::Status refused = device_->Allocate(bytes, MemoryKind::kActivations).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(
        std::string(refused.message()),
        AllOf(HasSubstr("cuda:0: no " + std::to_string(bytes) + " bytes for activations"),
              HasSubstr("525288 bytes (parameters 0, gradients 0, optimizer 524288, "
                        "activations 0, buffers 1000)"),
              HasSubstr("523288 of the GPU's 1048576 are free"), HasSubstr("smaller micro-batch")));
  }
  EXPECT_EQ(device_->memory().Bytes(MemoryKind::kActivations), 0);
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kActivations), 0);
}

TEST_F(CudaMemoryTest, GivesThePoolsFreePiecesBackBeforeItRefuses) {
  Memory(700 << 10);  // freed at once; the pool keeps it
  EXPECT_EQ(runtime_.reserved_bytes(), size_t{700} << 10);
  const Buffer larger = Memory(900 << 10);
  EXPECT_EQ(larger.bytes(), size_t{900} << 10);
  EXPECT_EQ(runtime_.reserved_bytes(), size_t{900} << 10);
}

TEST_F(CudaMemoryTest, MemoryThatCannotBeZeroedIsGivenBack) {
  runtime_.Fail("SetAsync", Error::kInvalidValue);
  EXPECT_EQ(device_->Allocate(10, MemoryKind::kBuffers).status().code(),
            absl::StatusCode::kInternal);
  runtime_.Fail("AllocateAsync", Error::kInvalidValue);
  EXPECT_THAT(std::string(device_->Allocate(10, MemoryKind::kBuffers).status().message()),
              HasSubstr("AllocateAsync"));
  EXPECT_EQ(device_->memory().PeakBytes(MemoryKind::kBuffers), 0);
}

TEST_F(CudaMemoryTest, ABufferThatIsLateKeepsItsPool) {
  Buffer buffer = Memory(10);
  Buffer pinned = *device_->AllocateHost(10);
  device_.reset();
  buffer = Buffer();  // the runtime's destructor looks at what is left
  pinned = Buffer();
}

TEST_F(CudaMemoryTest, CountsOfManyThreadsAddUp) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([this] {
      for (int i = 0; i < 200; ++i) {
        Memory(64);
        EXPECT_TRUE(device_->AllocateHost(64).ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(device_->memory().Bytes(MemoryKind::kBuffers), 0);
  EXPECT_LE(device_->memory().PeakBytes(MemoryKind::kBuffers), 4 * 64);
  EXPECT_LE(runtime_.Calls("HostAllocate"), 4);
}

TEST_F(CudaMemoryTest, PinnedMemoryIsZeroedKeptAndUsedAgain) {
  for (int i = 0; i < 10; ++i) {
    const absl::StatusOr<Buffer> buffer = device_->AllocateHost(5000);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    const std::vector<uint8_t> seen(buffer->as<uint8_t>(), buffer->as<uint8_t>() + 5000);
    EXPECT_THAT(seen, Each(0));
    std::memset(buffer->data(), 0xA5, 5000);
  }
  EXPECT_EQ(runtime_.Calls("HostAllocate"), 1);
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    EXPECT_EQ(device_->memory().PeakBytes(static_cast<MemoryKind>(kind)), 0);
  }
}

TEST_F(CudaMemoryTest, APinnedBlockServesNothingMuchSmaller) {
  const Buffer large = *device_->AllocateHost(64 << 10);
  { const Buffer freed = *device_->AllocateHost(64 << 10); }
  const Buffer half = *device_->AllocateHost(32 << 10);
  EXPECT_EQ(runtime_.Calls("HostAllocate"), 2);
  const Buffer small = *device_->AllocateHost(4 << 10);
  EXPECT_EQ(runtime_.Calls("HostAllocate"), 3);
}

TEST_F(CudaMemoryTest, FreePinnedBlocksGoBeforeItRefuses) {
  { const Buffer freed = *device_->AllocateHost(700 << 10); }
  const Buffer held = *device_->AllocateHost(8192);
  EXPECT_TRUE(device_->AllocateHost(900 << 10).ok());
  EXPECT_EQ(runtime_.Calls("HostFree"), 1);
  for (const size_t bytes : {size_t{2} << 20, std::numeric_limits<size_t>::max()}) {
    const absl::Status refused = device_->AllocateHost(bytes).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("no " + std::to_string(bytes) + " bytes of pinned"),
                      HasSubstr("8192 in use and 0 kept"), HasSubstr("buffer_count")));
  }
  runtime_.Fail("HostAllocate", Error::kInvalidValue);
  EXPECT_EQ(device_->AllocateHost(1 << 16).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace zeroshard::cuda
