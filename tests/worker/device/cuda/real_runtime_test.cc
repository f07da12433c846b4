// The CUDA runtime itself. Without a GPU: that a program with it starts, and what it says.
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/device/host_stream.h"

namespace zeroshard::cuda {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

bool HaveGpu() {
  int count = 0;
  return RealRuntime()->DeviceCount(&count) == Error::kOk && count > 0;
}

TEST(CudaRuntimeTest, WithoutAGpuItSaysWhatIsMissing) {
  if (HaveGpu()) GTEST_SKIP() << "there is a GPU";
  for (const absl::Status& status : {CheckCudaDevice(0), MakeCudaDevice(0).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("cuda:0: no usable GPU"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("--device cpu"));
  }
}

TEST(CudaRuntimeTest, ErrorsOfOtherCodesCallsHaveTheirNames) {
  const absl::Status status = ZS_CUDA_CALL(700);
  EXPECT_THAT(std::string(status.message()), HasSubstr("cudaErrorIllegalAddress"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("real_runtime_test.cc:"));
  EXPECT_TRUE(ZS_CUDA_CALL(0).ok());
}

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!HaveGpu()) GTEST_SKIP() << "no GPU";
    absl::StatusOr<std::unique_ptr<Device>> made = MakeCudaDevice(0);
    ASSERT_TRUE(made.ok()) << made.status();
    device_ = *std::move(made);
  }
  Buffer Memory(size_t bytes) { return *device_->Allocate(bytes, MemoryKind::kBuffers); }
  Buffer Pinned(size_t bytes, uint8_t value) {
    Buffer buffer = *device_->AllocateHost(bytes);
    std::memset(buffer.data(), value, bytes);
    return buffer;
  }

  std::unique_ptr<Device> device_;
};

TEST_F(GpuTest, MemoryIsZeroForEveryStreamAlsoWhenItIsUsedAgain) {
  constexpr size_t kBytes = size_t{64} << 20;
  const auto side = device_->NewStream("side");
  const Buffer ones = Pinned(kBytes, 1), out = Pinned(kBytes, 2);
  for (int i = 0; i < 4; ++i) {
    const Buffer memory = Memory(kBytes);
    ASSERT_TRUE(side->Copy(out.data(), memory.data(), kBytes).Wait().ok());
    const std::vector<uint8_t> seen(out.as<uint8_t>(), out.as<uint8_t>() + kBytes);
    ASSERT_THAT(seen, Each(0)) << i;
    device_->compute()->Copy(memory.data(), ones.data(), kBytes);
  }
}

TEST_F(GpuTest, CopiesFollowEventsOfStreamsAndOfTheHost) {
  constexpr size_t kBytes = size_t{32} << 20;
  const auto up = device_->NewStream("up"), down = device_->NewStream("down");
  const Buffer in = Pinned(kBytes, 3), out = Pinned(kBytes, 4);
  const Buffer a = Memory(kBytes), b = Memory(kBytes);
  std::promise<void> go;
  const auto host = MakeHostStream("host");
  const Event gate = host->Enqueue([&] {
    go.get_future().wait();
    return absl::OkStatus();
  });
  const Event there = up->Copy(a.data(), in.data(), kBytes, gate);
  EXPECT_FALSE(there.Done());
  go.set_value();
  const Event across = device_->compute()->Copy(b.data(), a.data(), kBytes, there);
  ASSERT_TRUE(down->Copy(out.data(), b.data(), kBytes, across).Wait().ok());
  EXPECT_EQ(std::memcmp(out.data(), in.data(), kBytes), 0);
  EXPECT_TRUE(device_->compute()->Record().Wait().ok());
}

TEST_F(GpuTest, MoreThanTheGpuHasIsRefusedAndTheDeviceStaysUsable) {
  const absl::Status refused = device_->Allocate(size_t{1} << 44, MemoryKind::kOptimizer).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(Memory(1024).bytes(), 1024u);
  EXPECT_TRUE(device_->compute()->Record().Wait().ok());
}

TEST_F(GpuTest, ManyDevicesOneAfterAnotherGiveEverythingBack) {
  size_t before = 0, after = 0, total = 0;
  ASSERT_EQ(RealRuntime()->MemoryInfo(&before, &total), Error::kOk);
  for (int i = 0; i < 3; ++i) {
    device_ = *MakeCudaDevice(0);
    const Buffer memory = Memory(size_t{256} << 20);
  }
  device_.reset();
  ASSERT_EQ(RealRuntime()->MemoryInfo(&after, &total), Error::kOk);
  EXPECT_LT(before, after + (size_t{128} << 20));
}

}  // namespace
}  // namespace zeroshard::cuda
