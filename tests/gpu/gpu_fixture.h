// A test's GPU and what moves between it and the host.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/ops/cuda/cuda_ops.h"

namespace zeroshard {

// Skipped where there is no usable GPU; run.sh has made sure that there is one.
class GpuFixture : public testing::Test {
 protected:
  void SetUp() override {
    if (const absl::Status none = CheckCudaDevice(0); !none.ok()) GTEST_SKIP() << none;
    auto device = MakeCudaDevice(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto ops = MakeCudaOps(device_.get());
    ASSERT_TRUE(ops.ok()) << ops.status();
    ops_ = *std::move(ops);
  }
  void TearDown() override { ops_.reset(); }

  Buffer Upload(const std::vector<char>& bytes) {
    auto buffer = device_->Allocate(bytes.size(), MemoryKind::kBuffers);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    if (!bytes.empty()) {
      const absl::Status status =
          CopyAndWait(device_.get(), buffer->data(), bytes.data(), bytes.size());
      EXPECT_TRUE(status.ok()) << status;
    }
    return *std::move(buffer);
  }
  std::vector<char> Download(const Buffer& buffer) {
    std::vector<char> bytes(buffer.bytes());
    if (!bytes.empty()) {
      const absl::Status status =
          CopyAndWait(device_.get(), bytes.data(), buffer.data(), bytes.size());
      EXPECT_TRUE(status.ok()) << status;
    }
    return bytes;
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Ops> ops_;
};

}  // namespace zeroshard
