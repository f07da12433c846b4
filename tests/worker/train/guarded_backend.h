// Ranks on devices that the host cannot reach, whose work is done later than it is asked for:
// collectives and stores go through host memory there, as they do for a GPU without NCCL.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "tests/worker/device/guarded_device.h"
#include "tests/worker/device/guarded_ops.h"
#include "tests/worker/train/cluster_harness.h"
#include "worker/comm/staged_communicator.h"
#include "worker/zero/staged_store.h"

namespace zeroshard {

// Seeds below kSchedules: all ranks are eager, lazy or delayed. From there on their schedules
// differ.
constexpr uint64_t kSchedules = 3;
inline uint64_t DeviceSeed(uint64_t seed, int rank) {
  const auto r = static_cast<uint64_t>(rank);
  return seed + r * (seed < kSchedules ? kSchedules : 1);
}

// Small enough that transfers have to wait for each other.
constexpr size_t kStagedStoreBytes = size_t{64} << 10;

inline RankBackend GuardedBackend(uint64_t seed) {
  RankBackend backend;
  backend.device = [seed](int rank) {
    return std::make_unique<GuardedDevice>(DeviceSeed(seed, rank));
  };
  backend.ops = [](Device* device) {
    return std::make_unique<GuardedOps>(static_cast<GuardedDevice*>(device));
  };
  backend.comm = [](std::unique_ptr<Communicator> comm, Device* device) {
    return MakeStagedCommunicator(std::move(comm), device);
  };
  backend.store = [](std::unique_ptr<StateStore> store, Device* device, DType type) {
    return MakeStagedStore(std::move(store), device, type, kStagedStoreBytes);
  };
  return backend;
}

}  // namespace zeroshard
