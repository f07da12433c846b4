// Runs ranks as threads of the test's process, over the fake NCCL.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/comm/nccl/fake_nccl.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/comm/nccl/nccl_communicator.h"
#include "worker/device/device.h"

namespace zeroshard {

struct NcclRankOptions {
  absl::Duration connect_timeout = absl::Seconds(20);
  absl::Duration operation_timeout = absl::Seconds(20);
  bool deterministic = true;
  NcclTuning tuning = {};
  std::shared_ptr<const Presence> presence = nullptr;
  std::string line = "";
};

class NcclRanks {
 public:
  explicit NcclRanks(int size, const NcclRankOptions& options = {})
      : device_(MakeCpuDevice()), communicators_(size) {
    std::vector<absl::Status> statuses(size);
    Each([&](int rank) {
      auto made = MakeNcclCommunicator(
          CommunicatorOptions{rank, size, "", options.connect_timeout, options.operation_timeout,
                              nullptr, options.presence, options.deterministic, options.line},
          options.tuning, nccl_.Api(), &rendezvous_, device_.get());
      if (made.ok()) communicators_[rank] = *std::move(made);
      statuses[rank] = made.status();
    });
    for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  }
  ~NcclRanks() {
    Each([this](int rank) { Destroy(rank); });
    EXPECT_THAT(nccl_.violations(), ::testing::IsEmpty());
    EXPECT_EQ(device_->memory().Bytes(MemoryKind::kBuffers), 0);
  }

  int size() const { return static_cast<int>(communicators_.size()); }
  Communicator& operator[](int rank) { return *communicators_[rank]; }
  void Destroy(int rank) { communicators_[rank] = nullptr; }
  Device& device() { return *device_; }
  FakeNccl& nccl() { return nccl_; }

  // Calls `body` with each rank, all at once, and waits for all.
  void Each(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  FakeNccl nccl_;
  std::unique_ptr<Device> device_;
  MemoryRendezvous rendezvous_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

inline std::string Text(const absl::Status& status) { return std::string(status.message()); }

inline CollectiveInfo Info(Phase phase = Phase::kBackward) {
  return {.phase = phase, .unit = "blocks.3", .step = 7};
}

}  // namespace zeroshard
