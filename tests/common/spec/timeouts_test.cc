#include "common/spec/timeouts.h"

#include "gtest/gtest.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

v1::JobSpec Spec(uint32_t start, uint32_t step, uint32_t collective) {
  v1::JobSpec spec;
  spec.mutable_timeouts()->set_start_seconds(start);
  spec.mutable_timeouts()->set_step_seconds(step);
  spec.mutable_timeouts()->set_collective_seconds(collective);
  return spec;
}

TEST(Timeouts, WhatIsNotGivenIsWhatNormalisingFillsIn) {
  const v1::JobSpec bare, normal = Normalised({});
  EXPECT_EQ(StartTimeout(bare), StartTimeout(normal));
  EXPECT_EQ(StepTimeout(bare), StepTimeout(normal));
  EXPECT_EQ(CollectiveTimeout(bare), CollectiveTimeout(normal));
  EXPECT_EQ(StartTimeout(bare), absl::Minutes(2));
  EXPECT_EQ(StepTimeout(bare), absl::Minutes(10));
  EXPECT_EQ(CollectiveTimeout(bare), absl::Minutes(5));
  const v1::JobSpec given = Spec(1, 2, 3);
  EXPECT_EQ(StartTimeout(given), absl::Seconds(1));
  EXPECT_EQ(StepTimeout(given), absl::Seconds(2));
  EXPECT_EQ(CollectiveTimeout(given), absl::Seconds(3));
  EXPECT_EQ(SaveTimeout(given), absl::Seconds(5));
}

// Who waits for memory speaks before the coordinator gives up a snapshot, a save or the store.
TEST(Timeouts, AWriterLosesPatienceWellBeforeTheCoordinator) {
  for (const v1::JobSpec& spec :
       {v1::JobSpec(), Spec(1, 1, 1), Spec(60, 10, 3600), Spec(60, 3600, 10)}) {
    EXPECT_LE(2 * WriterPatience(spec), SnapshotTimeout(spec)) << spec.ShortDebugString();
    EXPECT_LE(2 * WriterPatience(spec), StepTimeout(spec)) << spec.ShortDebugString();
    EXPECT_LE(SnapshotTimeout(spec), SaveTimeout(spec)) << spec.ShortDebugString();
    EXPECT_GT(WriterPatience(spec), absl::ZeroDuration());
  }
  EXPECT_EQ(WriterPatience(v1::JobSpec()), absl::Seconds(150));
}

}  // namespace
}  // namespace zeroshard
