// What a snapshot keeps of a file while steps go on.
#include <gmock/gmock.h>

#include "tests/shard_store/nvme/chunk_file_fixture.h"

namespace zeroshard::nvme {
namespace {

class ChunkVersions : public ChunkFileTest {};

INSTANTIATE_TEST_SUITE_P(Engines, ChunkVersions, ::testing::Values(Engine::kRing, Engine::kThreads),
                         EngineName);

TEST_P(ChunkVersions, WithoutASnapshotUpdatesStayInPlace) {
  Make();
  WriteState(1, 1, 1);
  Update(1, 2, 2);
  ExpectHas(1, 2, 2);
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(1, kMaster, 1).status()));
  EXPECT_EQ(file_->free_spare_slots(), 1);
}

TEST_P(ChunkVersions, ASnapshotKeepsItsVersionWhileStepsGoOn) {
  Make();
  WriteState(1, 1, 1);
  ASSERT_TRUE(file_->Preserve().ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(file_->Preserve().status()));
  Update(1, 2, 2);
  EXPECT_EQ(file_->free_spare_slots(), 0);
  Update(1, 3, 3);  // the slot is overwritten, not the snapshot
  ExpectHas(1, 3, 3);
  ExpectHas(1, ChunkFile::Preserved(1), 1);
  file_->Release(1, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(1, kMaster, ChunkFile::Preserved(1)).status()));
  ExpectHas(1, 3, 3);
  Update(1, 4, 4);  // home again
  EXPECT_EQ(file_->free_spare_slots(), 1);
  ExpectHas(1, 4, 4);
}

TEST_P(ChunkVersions, TheNextSnapshotMayBeginWhileAChunkIsAway) {
  Make();
  WriteState(1, 1, 1);
  ASSERT_TRUE(file_->Preserve().ok());
  Update(1, 2, 2);
  file_->ReleaseAll(1);
  ASSERT_TRUE(file_->Preserve().ok());
  Update(1, 3, 3);
  ExpectHas(1, ChunkFile::Preserved(2), 2);
  // The writer of the one before may find out only now that it was given up.
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(1, kMaster, ChunkFile::Preserved(1)).status()));
  file_->Release(1, 1);
  file_->ReleaseAll(1);
  ExpectHas(1, ChunkFile::Preserved(2), 2);
  ExpectHas(1, 3, 3);
  file_->ReleaseAll(2);
  EXPECT_EQ(file_->free_spare_slots(), 1);
  ExpectHas(1, 3, 3);
}

TEST_P(ChunkVersions, WithoutASpareSlotAnUpdateWaitsForTheSnapshot) {
  Make();
  WriteState(0, 1, 1);
  WriteState(1, 1, 1);
  ASSERT_TRUE(file_->Preserve().ok());
  Update(0, 2, 2);  // takes the slot
  int retries = 0;
  const auto begun = file_->BeginUpdate(1, [&] { ++retries; });
  ASSERT_TRUE(begun.ok());
  EXPECT_FALSE(*begun);
  EXPECT_EQ(retries, 0);
  const absl::Status refused = Write(1, kMaster, 2, 2);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << "what is preserved is never overwritten";
  ExpectHas(1, ChunkFile::Preserved(1), 1);
  file_->Release(1, 1);
  EXPECT_EQ(retries, 1);
  Update(1, 2, 2);
  ExpectHas(1, 2, 2);
}

TEST_P(ChunkVersions, AReleaseDuringAnUpdateKeepsWhatTheUpdateReads) {
  Make();
  WriteState(1, 1, 1);
  ASSERT_TRUE(file_->Preserve().ok());
  Update(1, 2, 2);
  file_->ReleaseAll(1);
  ASSERT_TRUE(file_->Preserve().ok());
  ASSERT_TRUE(*file_->BeginUpdate(1, nullptr));  // from the slot to home
  file_->ReleaseAll(2);
  ExpectHas(1, 2, 2);
  WriteState(1, 3, 3);
  file_->FinishUpdate(1);
  EXPECT_EQ(file_->free_spare_slots(), 1);
  ExpectHas(1, 3, 3);
}

TEST_P(ChunkVersions, ASkippedStepMovesTheVersionAndNotTheSnapshot) {
  Make();
  WriteState(1, 1, 1);
  ASSERT_TRUE(Write(1, kParameters, 1, 1).ok());
  ASSERT_TRUE(file_->Preserve().ok());
  file_->AdvanceVersion(1, 2);
  ExpectHas(1, 2, 1);
  ExpectHas(1, ChunkFile::Preserved(1), 1);
  EXPECT_TRUE(Read(1, kParameters, 2).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(1, kMaster, 1).status()));
  Update(1, 3, 3);
  ExpectHas(1, ChunkFile::Preserved(1), 1);
  ExpectHas(1, 3, 3);
}

TEST_P(ChunkVersions, DroppedStagingCannotBeRead) {
  Make();
  ASSERT_TRUE(Write(1, kStaging, 2, 1).ok());
  ASSERT_TRUE(Write(1, kMaster, 1, 1).ok());
  file_->DropStaging();
  EXPECT_TRUE(absl::IsFailedPrecondition(Read(1, kStaging, 2).status()));
  EXPECT_TRUE(Read(1, kMaster, 1).ok());
  ASSERT_TRUE(Write(1, kStaging, 2, 3).ok());
  EXPECT_TRUE(Read(1, kStaging, 2).ok());
}

TEST_P(ChunkVersions, WhatIsOverwrittenBetweenReadAndCheckIsNoDamage) {
  Make();
  ASSERT_TRUE(Write(0, kMaster, 1, 1).ok());
  WaitGroup group;
  IoBuffer buffer;
  ASSERT_TRUE(file_
                  ->Read({0, kMaster, 0}, 1, pool_->TryTake(),
                         [&, ended = group.Add()](absl::Status status, IoBuffer got) {
                           buffer = std::move(got);
                           ended(std::move(status), IoBuffer());
                         })
                  .ok());
  ASSERT_TRUE(group.Wait().ok());
  ASSERT_TRUE(file_->Check({0, kMaster, 0}, 1, buffer).ok());
  ASSERT_TRUE(Write(0, kMaster, 2, 2).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(file_->Check({0, kMaster, 0}, 1, buffer)));
}

TEST_P(ChunkVersions, FrozenAndUnknownChunksAreNotUpdated) {
  Make();
  EXPECT_TRUE(absl::IsInvalidArgument(file_->BeginUpdate(2, nullptr).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(file_->BeginUpdate(99, nullptr).status()));
  ASSERT_TRUE(*file_->BeginUpdate(1, nullptr));
  EXPECT_TRUE(absl::IsFailedPrecondition(file_->BeginUpdate(1, nullptr).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(file_->Preserve().status()))
      << "not in the middle of an update";
}

}  // namespace
}  // namespace zeroshard::nvme
