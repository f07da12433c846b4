// Ranks that train on one GPU, and how a curve is compared.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/train/cluster_harness.h"
#include "worker/comm/staged_communicator.h"
#include "worker/device/cuda/make_cuda_device.h"
#include "worker/ops/cuda/cuda_ops.h"
#include "worker/zero/staged_store.h"

namespace zeroshard {

// Ranks share the GPU: collectives and stores go through host memory.
inline RankBackend GpuBackend() {
  RankBackend backend;
  backend.device = [](int) {
    auto device = MakeCudaDevice(0);
    EXPECT_TRUE(device.ok()) << device.status();
    return *std::move(device);
  };
  backend.ops = [](Device* device) {
    auto ops = MakeCudaOps(device);
    EXPECT_TRUE(ops.ok()) << ops.status();
    return *std::move(ops);
  };
  backend.comm = [](std::unique_ptr<Communicator> comm, Device* device) {
    return MakeStagedCommunicator(std::move(comm), device);
  };
  backend.store = [](std::unique_ptr<StateStore> store, Device* device, DType type) {
    return MakeStagedStore(std::move(store), device, type, size_t{8} << 20);
  };
  return backend;
}

// Within `tolerance`; the norms, which rounding reaches more directly, within ten times that.
inline void ExpectCurve(const std::vector<v1::StepRecord>& seen,
                        const std::vector<v1::StepRecord>& wanted, double tolerance) {
  ASSERT_EQ(seen.size(), wanted.size());
  for (size_t i = 0; i < seen.size(); ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i + 1);
    EXPECT_NEAR(seen[i].loss(), wanted[i].loss(), tolerance * wanted[i].loss());
    EXPECT_NEAR(seen[i].grad_norm(), wanted[i].grad_norm(), 10 * tolerance * wanted[i].grad_norm());
    EXPECT_EQ(seen[i].learning_rate(), wanted[i].learning_rate());
    EXPECT_EQ(seen[i].tokens(), wanted[i].tokens());
  }
}

}  // namespace zeroshard
