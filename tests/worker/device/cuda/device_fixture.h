// A CUDA device over a fake runtime, and events for tests to end.
#pragma once

#include <atomic>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/device/cuda/fake_runtime.h"
#include "worker/device/cuda/cuda_device.h"
#include "worker/device/cuda/event.h"
#include "worker/device/host_stream.h"

namespace zeroshard::cuda {

class CudaDeviceFixture : public testing::Test {
 protected:
  CudaDeviceFixture() {
    absl::StatusOr<std::unique_ptr<CudaDevice>> made = CudaDevice::Create(&runtime_, 0);
    EXPECT_TRUE(made.ok()) << made.status();
    device_ = *std::move(made);
  }

  Buffer Memory(size_t bytes, MemoryKind kind = MemoryKind::kBuffers) {
    absl::StatusOr<Buffer> buffer = device_->Allocate(bytes, kind);
    EXPECT_TRUE(buffer.ok()) << buffer.status();
    return buffer.ok() ? *std::move(buffer) : Buffer();
  }

  FakeRuntime runtime_;
  std::unique_ptr<CudaDevice> device_;
};

// An event of the host that ends when the test says so.
class HostGate {
 public:
  Event event() const { return event_; }
  void Open(absl::Status status = absl::OkStatus()) { open_.set_value(std::move(status)); }

 private:
  std::promise<absl::Status> open_;
  std::unique_ptr<HostStream> stream_ = MakeHostStream("gate");
  Event event_ = stream_->Enqueue([this] { return open_.get_future().get(); });
};

// What a communicator's event is: recorded on the GPU, with an end of its own.
class CommEvent : public GpuEvent {
 public:
  explicit CommEvent(Event recorded) : recorded_(std::move(recorded)) {}
  void End(absl::Status status) {
    status_ = std::move(status);
    ended_ = true;
  }
  bool Done() const override { return ended_ && recorded_.Done(); }
  absl::Status Wait() override {
    EXPECT_TRUE(ended_) << "this would wait for ever";
    recorded_.Wait().IgnoreError();
    return status_;
  }
  bool Recorded() const override { return true; }
  absl::StatusOr<EventHandle> AwaitRecorded() override {
    return AsGpuEvent(recorded_)->AwaitRecorded();
  }

 private:
  const Event recorded_;
  absl::Status status_;
  std::atomic<bool> ended_ = false;
};

}  // namespace zeroshard::cuda
