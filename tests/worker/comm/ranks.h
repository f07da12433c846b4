// Runs ranks as threads of the test's process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"
#include "worker/comm/gloo_communicator.h"
#include "worker/comm/memory_rendezvous.h"
#include "worker/device/device.h"

namespace zeroshard {

struct RankOptions {
  absl::Duration connect_timeout = absl::Seconds(20);
  absl::Duration operation_timeout = absl::Seconds(20);
  GlooTuning tuning = {};
  std::shared_ptr<const Presence> presence = nullptr;
};

class Ranks {
 public:
  explicit Ranks(int size, RankOptions options = {})
      : device_(MakeCpuDevice()), communicators_(size) {
    std::vector<absl::Status> statuses(size);
    Each([&](int rank) {
      auto made = MakeGlooCommunicator(
          CommunicatorOptions{rank, size, "127.0.0.1", options.connect_timeout,
                              options.operation_timeout, nullptr, options.presence},
          options.tuning, &rendezvous_, device_.get());
      if (made.ok()) communicators_[rank] = *std::move(made);
      statuses[rank] = made.status();
    });
    for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  }

  int size() const { return static_cast<int>(communicators_.size()); }
  Communicator& operator[](int rank) { return *communicators_[rank]; }
  void Destroy(int rank) { communicators_[rank] = nullptr; }
  Device& device() { return *device_; }

  // Calls `body` with each rank, all at once, and waits for all.
  void Each(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) threads.emplace_back([&body, rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::unique_ptr<Device> device_;
  MemoryRendezvous rendezvous_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
};

inline std::string Text(const absl::Status& status) { return std::string(status.message()); }

inline CollectiveInfo Info(Phase phase = Phase::kBackward) {
  CollectiveInfo info;
  info.phase = phase;
  info.unit = "blocks.3";
  info.step = 7;
  return info;
}

}  // namespace zeroshard
