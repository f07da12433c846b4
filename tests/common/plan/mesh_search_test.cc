#include "common/plan/mesh_search.h"

#include <set>
#include <tuple>

#include "common/plan/model_shape.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kGB = 1'000'000'000;

ClusterSize ClusterOf(int devices, uint64_t memory) {
  ClusterSize cluster;
  cluster.devices = devices;
  cluster.device_memory = memory;
  cluster.network = 50e9;
  cluster.device_link = 450e9;
  cluster.host_link = 50e9;
  cluster.memory_speed = 200e9;
  cluster.peak = 1e15;
  cluster.peak_share = 0.4;
  cluster.link_share = 0.8;
  return cluster;
}

Workload WorkOf(double parameters, int64_t batch) {
  Workload work;
  work.model = *MakeModelTable(*ShapeOf(parameters, {}));
  work.options.dtype = DType::kBF16;
  work.fetch_one_ahead = true;
  work.micro_batches = batch;
  return work;
}

// Every factorisation of twelve devices is there once a stage, fitting or not.
TEST(MeshSearchTest, EveryMeshAndStageHasAnAnswer) {
  const Workload work = WorkOf(1.5e9, 48);
  const ClusterSize cluster = ClusterOf(12, 12 * kGB);
  const MeshSearch search = SearchMeshes(work, cluster);
  std::set<std::tuple<int, int, int>> answered;
  for (const Evaluation& e : search.fits) {
    const Configuration& c = e.configuration;
    EXPECT_EQ(c.Devices(), 12);
    EXPECT_TRUE(e.Fits());
    EXPECT_TRUE(answered.insert({c.tensor, c.pipeline, c.stage}).second);
  }
  for (const Misfit& m : search.misfits) {
    EXPECT_EQ(m.tensor * m.pipeline * m.data, 12);
    for (const Evaluation& e : m.nearest) {
      EXPECT_FALSE(e.lacks.empty());
      EXPECT_TRUE(answered.insert({m.tensor, m.pipeline, e.configuration.stage}).second);
    }
    for (int stage = 0; stage <= 3 && !m.impossible.empty(); ++stage)
      EXPECT_TRUE(answered.insert({m.tensor, m.pipeline, stage}).second) << m.impossible;
  }
  size_t wanted = 0;
  for (int tensor = 1; tensor <= 8; ++tensor)
    for (int pipeline = 1; pipeline <= 12; ++pipeline) wanted += 12 % (tensor * pipeline) == 0;
  EXPECT_EQ(answered.size(), 4 * wanted);
  EXPECT_FALSE(search.fits.empty());
  EXPECT_FALSE(search.misfits.empty());
}

TEST(MeshSearchTest, TheBestIsFirstAndNoWayOfItsMeshIsFaster) {
  const Workload work = WorkOf(7.5e9, 64);
  const ClusterSize cluster = ClusterOf(8, 40 * kGB);
  const MeshSearch search = SearchMeshes(work, cluster);
  ASSERT_GE(search.fits.size(), 2u);
  for (size_t i = 1; i < search.fits.size(); ++i)
    EXPECT_GE(search.fits[i - 1].time.TokensPerSecond(), search.fits[i].time.TokensPerSecond());
  for (const Evaluation& e : search.fits) {
    Configuration other = e.configuration;
    other.checkpointing = !other.checkpointing;
    const Evaluation changed = Evaluate(work, cluster, other);
    if (changed.Fits()) {
      EXPECT_LE(changed.time.TokensPerSecond(), e.time.TokensPerSecond()) << Describe(other);
    }
  }
}

TEST(MeshSearchTest, ReasonsNameMemoryBubbleTrafficAndTheLimit) {
  Workload work = WorkOf(7.5e9, 8);
  ClusterSize cluster = ClusterOf(8, 80 * kGB);
  Configuration c;
  c.stage = 1;
  c.tensor = 2;
  c.pipeline = 4;
  Evaluation e = Evaluate(work, cluster, c);
  EXPECT_THAT(ReasonOf(e),
              AllOf(HasSubstr(" GB on a rank of "), HasSubstr("computing "), HasSubstr("bubble "),
                    HasSubstr("8 micro-batches"), HasSubstr("stages equal 27.3 %"),
                    HasSubstr("tensor traffic "), HasSubstr("limited by computing")));
  cluster.device_link = 1e9;
  e = Evaluate(work, cluster, c);
  EXPECT_EQ(LimitOf(e.time), StepLimit::kTensor);
  c.tensor = 1;
  c.pipeline = 8;
  work.micro_batches = 1;
  e = Evaluate(work, ClusterOf(8, 80 * kGB), c);
  EXPECT_EQ(LimitOf(e.time), StepLimit::kBubble);
}

TEST(MeshSearchTest, WhatCannotBeCutSaysWhy) {
  Workload work = WorkOf(1.5e9, 8);
  const MeshSearch search = SearchMeshes(work, ClusterOf(7, 80 * kGB));
  bool found = false;
  for (const Misfit& m : search.misfits) {
    if (m.tensor != 7) continue;
    EXPECT_THAT(m.impossible, HasSubstr("heads (model.heads) on 7 tensor ranks"));
    found = true;
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace zeroshard
