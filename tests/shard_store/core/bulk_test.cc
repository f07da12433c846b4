// What ranks may push and pull, chunk by chunk, at every moment of a step.
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/shard_store/core/control_fixture.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;
using Pull = JobControl::Pull;

class BulkTest : public ControlTest {
 protected:
  uint32_t Size(uint32_t chunk) const {
    return static_cast<uint32_t>(control_.chunks().at(chunk).size());
  }
  absl::StatusOr<Pull> Pulled(uint64_t step, uint32_t chunk) const {
    return control_.CheckPull(now_.generation(), now_.epoch(), step, chunk, 0, 1);
  }
};

TEST_F(BulkTest, OfAnotherGenerationEpochOrStepIsRefusedWithWhatIsWanted) {
  v1::StoreDirective directive = Opening();
  directive.set_generation(3);
  Open(directive);
  DoStep(1);
  const absl::Status old = control_.CheckPush(2, 1, 2, 0, 0, 64);
  EXPECT_TRUE(absl::IsFailedPrecondition(old));
  EXPECT_THAT(old.message(), HasSubstr("generation 2"));
  EXPECT_THAT(old.message(), HasSubstr("generation 3 is open"));
  EXPECT_TRUE(absl::IsUnavailable(control_.CheckPush(4, 1, 2, 0, 0, 64)));
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.CheckPush(3, 2, 2, 0, 0, 64)));
  const absl::Status ahead = control_.CheckPush(3, 1, 3, 0, 0, 64);
  EXPECT_TRUE(absl::IsFailedPrecondition(ahead));
  EXPECT_THAT(ahead.message(), HasSubstr("of step 3"));
  EXPECT_THAT(ahead.message(), HasSubstr("step 2 is wanted"));
  EXPECT_TRUE(control_.CheckPush(3, 1, 2, 0, 0, 64).ok());
}

TEST_F(BulkTest, NothingIsOpenBeforeTheFirstDirective) {
  EXPECT_TRUE(absl::IsUnavailable(control_.CheckStream(1)));
}

TEST_F(BulkTest, AChunkThatIsNotHereOrElementsItLacksAreRefused) {
  Open(OpeningOn({{0}, {1}, {0}}, 2));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(1, 1, 0, 64)));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(1, 99, 0, 64)));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(1, 0, 0, 0)));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(1, 0, 1, Size(0))));
  EXPECT_TRUE(absl::IsInvalidArgument(Push(1, 0, 0xffffffff, 0xffffffff)));
  EXPECT_TRUE(absl::IsInvalidArgument(control_.CheckPull(1, 1, 0, 1, 0, 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(control_.CheckPull(1, 1, 0, 0, Size(0), 1).status()));
  EXPECT_EQ(control_.report().sealed_step(), 0u);
}

TEST_F(BulkTest, SealedExactlyWhenEveryElementOfEveryTrainedChunkIsHere) {
  Open();
  for (const uint32_t chunk : {0u, 1u, 2u}) {
    // Two ranks, whose shards end within the chunk; the last in two pieces.
    const uint32_t half = Size(chunk) / 2;
    EXPECT_TRUE(Push(1, chunk, half, Size(chunk) - half).ok());
    EXPECT_TRUE(Push(1, chunk, 0, half - 1).ok());
    EXPECT_EQ(control_.report().sealed_step(), 0u);
    EXPECT_THAT(control_.MissingGradients(), HasSubstr(absl::StrCat("the first is ", half - 1)));
    EXPECT_TRUE(Push(1, chunk, half - 1, 1).ok());
  }
  EXPECT_EQ(control_.report().sealed_step(), 1u);
  EXPECT_EQ(control_.MissingGradients(), "");
}

TEST_F(BulkTest, TheSameRangeAgainIsTakenAndAnyOtherOverlapRefused) {
  Open();
  EXPECT_TRUE(Push(1, 0, 0, 64).ok());
  EXPECT_TRUE(Push(1, 0, 0, 64).ok());
  const absl::Status status = Push(1, 0, 32, 64);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(status.message(), HasSubstr("elements 32 to 95 overlap elements 0 to 63"));
  EXPECT_TRUE(absl::IsInvalidArgument(control_.CheckPush(1, 1, 1, 0, 0, 32)));
}

TEST(BulkOfTinyChunks, AChunkOfOneElement) {
  // Units of 128 x n elements in chunks of 127: the last chunk of a unit is what is left over.
  const v1::JobSpec spec = SmallSpec();
  const ModelTable model = *MakeModelTable(spec.model());
  const int64_t elements = model.units.back().length - 1;
  const ChunkTable table = ChunkTable::Make(model, elements);
  const auto last = static_cast<uint32_t>(table.chunks.size() - 1);
  ASSERT_EQ(table.chunks.back().size(), 1);
  JobControl control("small-1", elements);
  ASSERT_TRUE(control.OnDirective(Opening(spec, elements)).ok());
  control.OnLoaded(absl::OkStatus());
  for (const auto& [number, chunk] : control.chunks()) {
    if (number == last) continue;
    ASSERT_TRUE(control.OnStaged(1, 1, 1, number, 0, static_cast<uint32_t>(chunk.size())).ok());
  }
  EXPECT_EQ(control.report().sealed_step(), 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(control.OnStaged(1, 1, 1, last, 0, 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(control.OnStaged(1, 1, 1, last, 1, 1)));
  EXPECT_TRUE(control.OnStaged(1, 1, 1, last, 0, 1).ok());
  EXPECT_EQ(control.report().sealed_step(), 1u);
}

TEST_F(BulkTest, ARankThatOwnsNothingIsNotWaitedForAndAStoreWithoutChunksIsSealedAtOnce) {
  Open(OpeningOn({{1}, {1}, {1}}, 2));
  EXPECT_TRUE(control_.chunks().empty());
  EXPECT_EQ(control_.report().sealed_step(), 1u);
  ASSERT_TRUE(Say(Decide(1)).apply);
  EXPECT_EQ(control_.report().sealed_step(), 0u);
  control_.OnApplied(absl::OkStatus());
  EXPECT_EQ(Version(), 1u);
  EXPECT_EQ(control_.report().sealed_step(), 2u);
}

TEST_F(BulkTest, FrozenChunksStageNothingAndServeAnyVersion) {
  v1::JobSpec spec = SmallSpec();
  spec.mutable_model()->add_trainable("blocks.*");
  Open(Opening(spec));
  ASSERT_EQ(control_.chunks().size(), 3u);
  EXPECT_FALSE(control_.chunks().at(0).trained);
  ASSERT_TRUE(control_.chunks().at(1).trained);
  const absl::Status status = Push(1, 0, 0, 64);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(status.message(), HasSubstr("not trained"));
  EXPECT_EQ(*Pulled(0, 0), Pull::kReady);
  EXPECT_EQ(*Pulled(7, 0), Pull::kReady);
  EXPECT_TRUE(Push(1, 1, 0, Size(1)).ok());
  EXPECT_EQ(control_.report().sealed_step(), 1u);
  ASSERT_TRUE(Say(Decide(1)).apply);
  EXPECT_EQ(*Pulled(1, 0), Pull::kReady);
  EXPECT_EQ(*Pulled(1, 1), Pull::kWait);
  FinishApply();
  EXPECT_EQ(*Pulled(1, 1), Pull::kReady);
}

TEST_F(BulkTest, WhileLoadingPullsWaitAndPushesComeAgain) {
  now_ = Opening();
  Say(now_);
  EXPECT_EQ(*Pulled(0, 0), Pull::kWait);
  EXPECT_TRUE(absl::IsUnavailable(Push(1, 0, 0, 64)));
  EXPECT_TRUE(absl::IsFailedPrecondition(Pulled(5, 0).status()));
  control_.OnLoaded(absl::OkStatus());
  EXPECT_EQ(*Pulled(0, 0), Pull::kReady);
  EXPECT_EQ(*Pulled(1, 0), Pull::kWait);
  EXPECT_TRUE(Push(1, 0, 0, 64).ok());
}

TEST_F(BulkTest, WhileApplyingEachChunkIsReadyAloneAndItsOldVersionGone) {
  Open();
  DoStep(1);
  PushAll(2);
  EXPECT_EQ(*Pulled(1, 0), Pull::kReady);
  EXPECT_EQ(*Pulled(2, 0), Pull::kWait);
  EXPECT_TRUE(absl::IsFailedPrecondition(Pulled(0, 0).status()));
  Say(Decide(2));
  for (const uint32_t chunk : {0u, 1u}) {
    EXPECT_EQ(*Pulled(2, chunk), Pull::kWait);
    const absl::Status gone = Pulled(1, chunk).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(gone));
    EXPECT_THAT(gone.message(), HasSubstr("is gone"));
  }
  control_.OnChunkApplied(0, 0);
  EXPECT_EQ(*Pulled(2, 0), Pull::kReady);
  EXPECT_EQ(*Pulled(2, 1), Pull::kWait);
  EXPECT_EQ(*Pulled(3, 0), Pull::kWait);
  EXPECT_TRUE(absl::IsFailedPrecondition(Pulled(4, 0).status()));
  FinishApply();
  EXPECT_EQ(*Pulled(2, 1), Pull::kReady);
}

TEST_F(BulkTest, GradientsOfTheNextStepAreTakenByChunksThatAreUpdated) {
  Open();
  PushAll(1);
  Say(Decide(1));
  EXPECT_TRUE(absl::IsUnavailable(Push(2, 0, 0, Size(0))));
  control_.OnChunkApplied(0, 0);
  EXPECT_TRUE(Push(2, 0, 0, Size(0)).ok());
  EXPECT_TRUE(absl::IsUnavailable(Push(2, 1, 0, Size(1))));
  for (const uint32_t chunk : {1u, 2u}) {
    control_.OnChunkApplied(chunk, 0);
    EXPECT_TRUE(Push(2, chunk, 0, Size(chunk)).ok());
  }
  EXPECT_EQ(control_.report().sealed_step(), 0u);  // its version is not the one before yet
  control_.OnApplied(absl::OkStatus());
  EXPECT_EQ(control_.report().sealed_step(), 2u);
  EXPECT_TRUE(Say(Decide(2)).apply);
}

TEST_F(BulkTest, GradientsOfADecidedStepSaidAgainAreNotWritten) {
  Open();
  PushAll(1);
  Say(Decide(1));
  EXPECT_TRUE(absl::IsAlreadyExists(control_.CheckPush(1, 1, 1, 0, 0, 64)));
  EXPECT_TRUE(Push(1, 0, 0, 64).ok());
  FinishApply();
  EXPECT_TRUE(absl::IsAlreadyExists(control_.CheckPush(1, 1, 1, 0, 0, 64)));
  EXPECT_TRUE(Push(1, 0, 0, 64).ok());
  EXPECT_THAT(control_.MissingGradients(), HasSubstr("the first is 0"));  // of step 2: none
}

TEST_F(BulkTest, WhatWasBeingStagedWhenTheGenerationEndedIsRefused) {
  Open();
  ASSERT_TRUE(control_.CheckPush(1, 1, 1, 0, 0, 64).ok());
  v1::StoreDirective next = now_;
  next.set_generation(2);
  Say(next);
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.OnStaged(1, 1, 1, 0, 0, 64)));
  EXPECT_TRUE(control_.OnStaged(2, 1, 1, 0, 32, 64).ok());  // nothing of before is in its way
}

TEST_F(BulkTest, OfAStateThatFailedNothingIsServed) {
  Open();
  control_.Fail(absl::DataLossError("chunk 2: bad"));
  EXPECT_TRUE(absl::IsUnavailable(Pulled(0, 0).status()));
  EXPECT_TRUE(absl::IsUnavailable(Push(1, 0, 0, 64)));
  control_.Fail(absl::InternalError("another"));
  EXPECT_EQ(control_.report().problem(), "chunk 2: bad");
}

v1::BulkHello HelloOf(uint32_t rank, const std::string& member, const std::string& incarnation,
                      uint64_t generation = 1) {
  v1::BulkHello hello;
  hello.set_run_id("small-1");
  hello.set_generation(generation);
  hello.set_rank(rank);
  hello.set_member(member);
  hello.set_incarnation(incarnation);
  return hello;
}

TEST_F(BulkTest, ARankIsOneIncarnationOfOneMemberForAsLongAsItsGenerationIsOpen) {
  Open();
  EXPECT_TRUE(control_.Admit(HelloOf(0, "worker-0", "old")).ok());
  EXPECT_TRUE(control_.Admit(HelloOf(0, "worker-0", "old")).ok()) << "its second stream";
  EXPECT_TRUE(control_.Admit(HelloOf(1, "worker-1", "other")).ok());
  const absl::Status anew = control_.Admit(HelloOf(0, "worker-0", "new"));
  EXPECT_TRUE(absl::IsFailedPrecondition(anew)) << anew;
  EXPECT_THAT(std::string(anew.message()), testing::AllOf(HasSubstr("rank 0 of small-1"),
                                                          HasSubstr("incarnation old of worker-0"),
                                                          HasSubstr("not new of worker-0")));
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.Admit(HelloOf(1, "worker-0", "old"))));
  now_.set_generation(2);
  Say(now_);
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.Admit(HelloOf(0, "worker-0", "old"))));
  EXPECT_TRUE(control_.Admit(HelloOf(0, "worker-0", "new", 2)).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.Admit(HelloOf(0, "worker-0", "old", 2))));
}

TEST_F(BulkTest, AStoreThatCopiesMustHaveChunksInTheMapInThatIncarnation) {
  v1::StoreDirective directive = OpeningOn({{0, 1}, {0, 1}, {0, kNoStore}}, 3);
  v1::StoreMap& map = *directive.mutable_job()->mutable_map();
  for (int i = 0; i < 3; ++i) {
    map.mutable_stores(i)->set_member("store-" + std::to_string(i));
    map.mutable_stores(i)->set_incarnation("i" + std::to_string(i));
  }
  Open(directive);
  const auto admit = [&](const std::string& member, const std::string& incarnation) {
    v1::BulkHello hello = HelloOf(1, member, incarnation);
    hello.set_store(true);
    return control_.Admit(hello);
  };
  EXPECT_TRUE(admit("store-1", "i1").ok());
  const absl::Status old = admit("store-1", "i0");
  EXPECT_TRUE(absl::IsFailedPrecondition(old)) << old;
  EXPECT_THAT(std::string(old.message()),
              testing::AllOf(HasSubstr("store-1"), HasSubstr("i0"), HasSubstr("incarnation i1")));
  EXPECT_TRUE(absl::IsUnavailable(admit("store-2", "i2"))) << "nothing is placed there";
  EXPECT_TRUE(absl::IsUnavailable(admit("store-9", "i1")));
  // A later map has it.
  map.set_placement(5, 2);
  directive.set_map_version(2);
  Say(directive);
  EXPECT_TRUE(admit("store-2", "i2").ok());
}

}  // namespace
}  // namespace zeroshard::store
