// Which directives are followed, in which order, and which are refused.
#include <functional>

#include "gmock/gmock.h"
#include "tests/shard_store/core/control_fixture.h"

namespace zeroshard::store {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint32_t kNone = kNoStore;

class DirectiveTest : public ControlTest {};

TEST_F(DirectiveTest, TheFirstLoadsEveryChunkPutHereAndOpensTheGeneration) {
  v1::StoreDirective directive = OpeningOn({{0}, {1}, {0}}, 2);
  const Orders orders = Say(directive);
  EXPECT_TRUE(orders.load);
  EXPECT_THAT(orders.keep, IsEmpty());
  EXPECT_FALSE(orders.apply);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_LOADING);
  EXPECT_EQ(control_.report().generation(), 1u);
  EXPECT_EQ(control_.report().map_version(), 1u);
  EXPECT_EQ(control_.report().term(), 1u);
  EXPECT_EQ(control_.report().sealed_step(), 0u);
  ASSERT_EQ(control_.chunks().size(), 2u);
  EXPECT_TRUE(control_.chunks().contains(0) && control_.chunks().contains(2));
  control_.OnLoaded(absl::OkStatus());
  EXPECT_EQ(Phase(), v1::STORE_PHASE_READY);
  EXPECT_EQ(Version(), 0u);
  EXPECT_EQ(control_.epoch(), 1u);
}

TEST_F(DirectiveTest, SaidAgainDoesNothing) {
  Open();
  const std::string before = control_.report().SerializeAsString();
  const Orders orders = Say(Opening());
  EXPECT_FALSE(orders.load || orders.end_streams || orders.drop_staging || orders.forget);
  EXPECT_FALSE(orders.apply || orders.snapshot || orders.digest_step);
  EXPECT_EQ(control_.report().SerializeAsString(), before);
}

TEST_F(DirectiveTest, ALoadThatFailsSaysWhyAndIsNotRepeated) {
  EXPECT_TRUE(Say(Opening()).load);
  control_.OnLoaded(absl::DataLossError("step-4/state-0.safetensors: a checksum differs"));
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_EQ(control_.report().error_code(), "DATA_LOSS");
  EXPECT_THAT(control_.report().problem(), HasSubstr("a checksum differs"));
  EXPECT_FALSE(Say(Opening()).load);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_TRUE(absl::IsUnavailable(control_.CheckStream(1)));
}

TEST_F(DirectiveTest, RefusesAnOlderTermGenerationEpochMapOrStep) {
  v1::StoreDirective directive = Opening();
  directive.set_term(3);
  directive.set_generation(4);
  directive.set_epoch(2);
  directive.mutable_job()->mutable_base()->set_epoch(2);
  directive.set_map_version(5);
  Open(directive);
  DoStep(1);
  DoStep(2);
  const struct {
    const char* name;
    std::function<void(v1::StoreDirective*)> change;
    const char* seen;
  } cases[] = {
      {"term", [](auto* d) { d->set_term(2); }, "of term 2; here it is at term 3"},
      {"generation", [](auto* d) { d->set_generation(3); }, "of generation 3;"},
      {"epoch",
       [](auto* d) {
         d->set_epoch(1);
         d->mutable_decision()->set_epoch(1);
       },
       "of epoch 1; here it is at epoch 2"},
      {"map", [](auto* d) { d->set_map_version(4); }, "of map version 4;"},
      {"step", [](auto* d) { d->mutable_decision()->set_step(1); }, "of step 1;"},
      {"no step", [](auto* d) { d->clear_decision(); }, "of step 0; here it is at step 2"},
  };
  for (const auto& test : cases) {
    SCOPED_TRACE(test.name);
    v1::StoreDirective stale = now_;
    test.change(&stale);
    const absl::Status status = Refusal(stale);
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(status.message(), HasSubstr(test.seen));
  }
  EXPECT_TRUE(control_.OnDirective(now_).ok());
}

TEST_F(DirectiveTest, AnOlderStepIsRefusedWhileTheNextIsBeingApplied) {
  Open();
  DoStep(1);
  PushAll(2);
  const v1::StoreDirective first = now_;
  Say(Decide(2));
  EXPECT_TRUE(absl::IsFailedPrecondition(Refusal(first)));
}

TEST_F(DirectiveTest, ANewTermAloneIsTaken) {
  Open();
  v1::StoreDirective next = now_;
  next.set_term(2);
  EXPECT_FALSE(Say(next).load);
  EXPECT_EQ(control_.report().term(), 2u);
}

TEST_F(DirectiveTest, WithoutAMapThatIsHereItAsksForIt) {
  v1::StoreDirective bare = Opening();
  bare.clear_job();
  EXPECT_THAT(Refusal(bare).message(), HasSubstr("its map is wanted"));
  Open();
  EXPECT_TRUE(control_.OnDirective(bare).ok());
  bare.set_map_version(2);
  EXPECT_TRUE(absl::IsFailedPrecondition(Refusal(bare)));
  bare.set_map_version(1);
  bare.set_epoch(2);
  EXPECT_TRUE(absl::IsFailedPrecondition(Refusal(bare)));
}

TEST_F(DirectiveTest, RefusesWhatMakesNoSense) {
  const struct {
    const char* name;
    std::function<void(v1::StoreDirective*)> change;
    const char* says;
  } cases[] = {
      {"another run", [](auto* d) { d->set_run_id("other-1"); }, "other-1"},
      {"no replica", [](auto* d) { d->mutable_job()->mutable_map()->set_replicas(0); },
       "0 replicas"},
      {"more replicas than stores",
       [](auto* d) { d->mutable_job()->mutable_map()->set_replicas(2); },
       "2 replicas; wanted 1 to 1"},
      {"not a store of the map", [](auto* d) { d->mutable_job()->set_store(1); }, "store 1 of 1"},
      {"too few places",
       [](auto* d) { d->mutable_job()->mutable_map()->mutable_placement()->RemoveLast(); },
       "2 places; wanted 3"},
      {"a place on no store", [](auto* d) { d->mutable_job()->mutable_map()->set_placement(1, 7); },
       "store 7 of 1"},
      {"a chunk that the table lacks",
       [](auto* d) { d->mutable_job()->add_copies()->set_chunk(3); }, "chunk 3 is to be copied"},
      {"a copy from itself", [](auto* d) { d->mutable_job()->add_copies()->set_chunk(1); },
       "from store 0"},
      {"a base of another epoch", [](auto* d) { d->mutable_job()->mutable_base()->set_epoch(9); },
       "base of epoch 9"},
      {"a decision of another epoch", [](auto* d) { *d->mutable_decision() = Decided(2, 1, 1); },
       "decision for epoch 2"},
      {"a snapshot of a chunk that is not here",
       [](auto* d) { d->mutable_snapshot()->add_chunks(8); }, "chunk 8"},
      {"a model that is none",
       [](auto* d) { d->mutable_job()->mutable_spec()->mutable_model()->set_layers(0); },
       "model.layers"},
  };
  for (const auto& test : cases) {
    SCOPED_TRACE(test.name);
    v1::StoreDirective bad = Opening();
    test.change(&bad);
    const absl::Status status = Refusal(bad);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(test.says));
  }
}

TEST_F(DirectiveTest, TheDecisionIsAppliedBeforeTheNewGenerationDropsStaging) {
  Open();
  PushAll(1);
  v1::StoreDirective next = Decide(1);
  next.set_generation(2);
  const Orders orders = Say(next);
  ASSERT_TRUE(orders.apply);
  EXPECT_EQ(orders.apply->step(), 1u);
  EXPECT_TRUE(orders.end_streams);
  EXPECT_FALSE(orders.drop_staging);  // it is being used
  EXPECT_EQ(control_.generation(), 2u);
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.CheckStream(1)));
  EXPECT_TRUE(control_.CheckStream(2).ok());
  FinishApply();
  EXPECT_EQ(Version(), 1u);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_READY);
  EXPECT_EQ(control_.report().sealed_step(), 0u);
}

TEST_F(DirectiveTest, ANewGenerationDropsWhatWasStagedInTheOldOne) {
  Open();
  PushAll(1);
  v1::StoreDirective next = now_;
  next.set_generation(2);
  const Orders orders = Say(next);
  EXPECT_TRUE(orders.end_streams);
  EXPECT_TRUE(orders.drop_staging);
  EXPECT_EQ(control_.report().sealed_step(), 0u);
  EXPECT_FALSE(control_.MissingGradients().empty());
  // The old generation's seal is of no use for a decision any more.
  *next.mutable_decision() = Decided(1, 1, 1);
  EXPECT_FALSE(Say(next).apply);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
}

TEST_F(DirectiveTest, AGapFailsTheJobHere) {
  Open();
  DoStep(1);
  PushAll(2);
  EXPECT_FALSE(Say(Decide(3)).apply);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_EQ(control_.report().error_code(), "DATA_LOSS");
  EXPECT_THAT(control_.report().problem(), HasSubstr("step 3"));
  EXPECT_THAT(control_.report().problem(), HasSubstr("at step 1"));
}

TEST_F(DirectiveTest, ADecisionAheadOfWhatIsLoadedFailsTheJobHere) {
  v1::StoreDirective directive = Opening();
  *directive.mutable_decision() = Decided(1, 5, 1);
  EXPECT_FALSE(Say(directive).load);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_THAT(control_.report().problem(), HasSubstr("being loaded as that of step 0"));
}

TEST_F(DirectiveTest, ADecisionWithoutAllGradientsFailsTheJobHere) {
  Open();
  EXPECT_TRUE(Push(1, 0, 0, 64).ok());
  EXPECT_FALSE(Say(Decide(1)).apply);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_THAT(control_.report().problem(), HasSubstr("chunk 0 lacks"));
}

TEST_F(DirectiveTest, ASkipNeedsNoGradients) {
  Open();
  v1::StoreDirective next = Decide(1);
  next.mutable_decision()->set_skip(true);
  ASSERT_TRUE(Say(next).apply);
  control_.OnApplied(absl::OkStatus());
  EXPECT_EQ(Version(), 1u);
  EXPECT_TRUE(control_.report().decision().skip());
}

TEST_F(DirectiveTest, TwoDecisionsOfOneStepFailTheJobHere) {
  Open();
  PushAll(1);
  Say(Decide(1));
  EXPECT_FALSE(Say(Decide(1)).apply);  // the same: nothing
  EXPECT_EQ(Phase(), v1::STORE_PHASE_APPLYING);
  FinishApply();
  EXPECT_FALSE(Say(Decide(1)).apply);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_READY);
  v1::StoreDirective other = Decide(1);
  other.mutable_decision()->set_multiplier(0.25f);
  Say(other);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_EQ(control_.report().error_code(), "INTERNAL");
  EXPECT_THAT(control_.report().problem(), HasSubstr("decided twice"));
}

TEST_F(DirectiveTest, ApplyThenOpenThenTheNextStep) {
  Open();
  DoStep(1);
  now_.set_generation(2);
  EXPECT_TRUE(Say(now_).end_streams);
  DoStep(2);
  EXPECT_EQ(control_.report().decision().generation(), 2u);
}

TEST_F(DirectiveTest, AnUpdateThatFailsFailsTheJobHere) {
  Open();
  PushAll(1);
  Say(Decide(1));
  control_.OnApplied(absl::ResourceExhaustedError("no space left on the NVMe folder"));
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_EQ(control_.report().error_code(), "RESOURCE_EXHAUSTED");
  EXPECT_EQ(Version(), 0u);
}

TEST_F(DirectiveTest, DroppedItForgetsEverythingAndNeverComesBack) {
  Open();
  PushAll(1);
  v1::StoreDirective drop = now_;
  drop.set_drop(true);
  drop.set_term(2);
  v1::StoreDirective old = drop;
  old.set_term(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(Refusal(old)));
  const Orders orders = Say(drop);
  EXPECT_TRUE(orders.forget && orders.end_streams);
  EXPECT_TRUE(control_.dropped());
  EXPECT_TRUE(control_.chunks().empty());
  EXPECT_FALSE(Say(drop).forget);
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.CheckStream(1)));
  now_.set_term(9);
  EXPECT_TRUE(absl::IsFailedPrecondition(Refusal(now_)));
  EXPECT_FALSE(control_.OnLoaded(absl::OkStatus()).load);
  EXPECT_TRUE(control_.dropped());
}

TEST_F(DirectiveTest, ARollbackWhileApplyingLoadsAnewAndResultsOfBeforeCountForNothing) {
  Open();
  DoStep(1);
  PushAll(2);
  ASSERT_TRUE(Say(Decide(2)).apply);
  control_.OnChunkApplied(0, 1);
  v1::StoreDirective back = Opening();
  back.set_epoch(2);
  back.set_generation(2);
  back.set_map_version(2);
  back.mutable_job()->mutable_base()->set_epoch(2);
  back.mutable_job()->mutable_base()->set_step(1);
  const Orders orders = Say(back);
  EXPECT_TRUE(orders.load && orders.end_streams && orders.drop_staging);
  EXPECT_THAT(orders.keep, IsEmpty());
  control_.OnChunkApplied(1, 1);
  control_.OnApplied(absl::OkStatus());
  EXPECT_EQ(Phase(), v1::STORE_PHASE_LOADING);
  EXPECT_EQ(Version(), 1u);
  EXPECT_EQ(control_.epoch(), 2u);
  control_.OnLoaded(absl::OkStatus());
  now_ = back;
  PushAll(2);
  EXPECT_TRUE(Say(Decide(2)).apply);
}

TEST_F(DirectiveTest, ARollbackWhileLoadingLoadsAnew) {
  Say(Opening());
  v1::StoreDirective back = Opening();
  back.set_epoch(2);
  back.mutable_job()->mutable_base()->set_epoch(2);
  EXPECT_TRUE(Say(back).load);
  EXPECT_EQ(control_.epoch(), 2u);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_LOADING);
}

TEST_F(DirectiveTest, ANewEpochEndsAFailure) {
  Open();
  control_.Fail(absl::DataLossError("chunk 1: a checksum differs"));
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  v1::StoreDirective back = Opening();
  back.set_epoch(2);
  back.mutable_job()->mutable_base()->set_epoch(2);
  EXPECT_TRUE(Say(back).load);
  EXPECT_EQ(control_.report().problem(), "");
  control_.OnLoaded(absl::OkStatus());
  EXPECT_EQ(Phase(), v1::STORE_PHASE_READY);
}

// --- the map changes within an epoch ---

v1::StoreDirective Moved(v1::StoreDirective directive,
                         const std::vector<std::vector<uint32_t>>& placement, uint32_t stores,
                         const std::vector<uint32_t>& copied, uint64_t step) {
  const v1::StoreDirective other = OpeningOn(placement, stores);
  directive.set_map_version(directive.map_version() + 1);
  directive.set_generation(directive.generation() + 1);
  *directive.mutable_job() = other.job();
  for (const uint32_t chunk : copied) {
    v1::StoreJob::Copy& copy = *directive.mutable_job()->add_copies();
    copy.set_chunk(chunk);
    copy.set_from_store(1);
  }
  directive.mutable_job()->mutable_copy()->set_epoch(1);
  directive.mutable_job()->mutable_copy()->set_step(step);
  return directive;
}

TEST_F(DirectiveTest, AMapThatAddsChunksKeepsThoseThatAreHere) {
  Open(OpeningOn({{0, 1}, {1, 2}, {0, 2}}, 3));
  DoStep(1);
  const Orders orders = Say(Moved(now_, {{0, 1}, {1, 0}, {0, 1}}, 3, {1}, 1));
  EXPECT_TRUE(orders.load);
  EXPECT_THAT(orders.keep, ElementsAre(0, 2));
  EXPECT_EQ(control_.report().map_version(), 2u);
  EXPECT_EQ(control_.generation(), 2u);
  EXPECT_EQ(control_.report().decision().step(), 1u);
  EXPECT_TRUE(control_.report().chunk_digests().empty());
  control_.OnLoaded(absl::OkStatus());
  EXPECT_EQ(Version(), 1u);
  now_.set_generation(2);
  now_.set_map_version(2);
  DoStep(2);
  EXPECT_THAT(control_.report().chunk_digests(), ElementsAre(100, 101, 102));
}

TEST_F(DirectiveTest, AMapThatLeavesTheChunksAloneLoadsNothing) {
  Open(OpeningOn({{0, 1}, {1, 2}, {0, 2}}, 3));
  DoStep(1);
  PushAll(2);
  Say(Decide(2));  // also while a step is applied
  EXPECT_FALSE(Say(Moved(now_, {{0, 1}, {1, kNone}, {0, 1}}, 3, {}, 0)).load);
  EXPECT_EQ(control_.report().map_version(), 2u);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_APPLYING);
  FinishApply();
  EXPECT_EQ(Version(), 2u);
}

TEST_F(DirectiveTest, AStepThatIsDecidedIsAppliedBeforeChunksJoin) {
  Open(OpeningOn({{0, 1}, {1, 2}, {0, 2}}, 3));
  DoStep(1);
  PushAll(2);
  const Orders first = Say(Moved(Decide(2), {{0, 1}, {1, 0}, {0, 1}}, 3, {1}, 2));
  ASSERT_TRUE(first.apply);
  EXPECT_FALSE(first.load);
  EXPECT_EQ(control_.report().map_version(), 1u);
  EXPECT_EQ(control_.generation(), 1u);  // the map is not here yet
  for (const uint32_t chunk : {0u, 2u}) control_.OnChunkApplied(chunk, 7);
  const Orders then = control_.OnApplied(absl::OkStatus());
  EXPECT_TRUE(then.load && then.end_streams);
  EXPECT_THAT(then.keep, ElementsAre(0, 2));
  EXPECT_EQ(control_.report().map_version(), 2u);
  EXPECT_EQ(control_.generation(), 2u);
  control_.OnLoaded(absl::OkStatus());
  EXPECT_EQ(Version(), 2u);
}

TEST_F(DirectiveTest, AStepUnderWayIsFinishedBeforeChunksJoinAndOlderMapsAreRefusedMeanwhile) {
  Open(OpeningOn({{0, 1}, {1, 2}, {0, 2}}, 3));
  PushAll(1);
  Say(Decide(1));
  const v1::StoreDirective old = now_;
  const v1::StoreDirective moved = Moved(now_, {{0, 1}, {1, 0}, {0, 1}}, 3, {1}, 1);
  EXPECT_FALSE(Say(moved).load);
  EXPECT_TRUE(absl::IsFailedPrecondition(Refusal(old)));
  EXPECT_FALSE(Say(moved).load);
  EXPECT_TRUE(control_.OnApplied(absl::OkStatus()).load);
}

TEST_F(DirectiveTest, AMapDuringALoadKeepsOnlyWhatWasWholeBefore) {
  Open(OpeningOn({{0, 1}, {1, 2}, {0, 2}}, 3));
  DoStep(1);
  const v1::StoreDirective moved = Moved(now_, {{0, 1}, {1, 0}, {0, 1}}, 3, {1}, 1);
  EXPECT_THAT(Say(moved).keep, ElementsAre(0, 2));
  // The store that it copies from is gone: another is named.
  v1::StoreDirective again = moved;
  again.set_map_version(3);
  again.mutable_job()->mutable_copies(0)->set_from_store(2);
  const Orders orders = Say(again);
  EXPECT_TRUE(orders.load);
  EXPECT_THAT(orders.keep, ElementsAre(0, 2));
}

TEST_F(DirectiveTest, AStoreThatComesNewCopiesTheVersionThatOthersHave) {
  v1::StoreDirective joining = Moved(Opening(), {{1, 0}, {1, 2}, {2, 0}}, 3, {0, 2}, 6);
  *joining.mutable_decision() = Decided(1, 6, 1);
  EXPECT_TRUE(Say(joining).load);
  EXPECT_EQ(Version(), 6u);
  control_.OnLoaded(absl::OkStatus());
  EXPECT_EQ(Phase(), v1::STORE_PHASE_READY);
  EXPECT_EQ(control_.report().decision().step(), 6u);
}

TEST_F(DirectiveTest, AChunkThatCanBeHadFromNowhereFailsTheJobHere) {
  Open(OpeningOn({{0, 1}, {1, 2}, {0, 2}}, 3));
  DoStep(1);
  EXPECT_FALSE(Say(Moved(now_, {{0, 1}, {1, 0}, {0, 1}}, 3, {}, 0)).load);
  EXPECT_EQ(Phase(), v1::STORE_PHASE_FAILED);
  EXPECT_THAT(control_.report().problem(), HasSubstr("chunk 1"));
}

TEST_F(DirectiveTest, BeforeTheFirstStepAChunkThatJoinsIsLoadedFromTheBase) {
  Open(OpeningOn({{0}, {1}, {0}}, 2));
  const Orders orders = Say(Moved(now_, {{0}, {0}, {0}}, 1, {}, 0));
  EXPECT_TRUE(orders.load);
  EXPECT_THAT(orders.keep, ElementsAre(0, 2));
}

// --- snapshots and digests ---

v1::SnapshotOrder SnapshotOf(uint64_t step) {
  v1::SnapshotOrder order;
  order.set_step(step);
  order.set_folder("/ckpt/tmp");
  order.add_chunks(0);
  order.set_count(1);
  return order;
}

TEST_F(DirectiveTest, ASnapshotBeginsOnceItsVersionIsHereAndIsReported) {
  Open();
  PushAll(1);
  v1::StoreDirective next = Decide(1);
  *next.mutable_snapshot() = SnapshotOf(1);
  const Orders orders = Say(next);
  EXPECT_TRUE(orders.apply);
  EXPECT_FALSE(orders.snapshot);
  const Orders then = control_.OnApplied(absl::OkStatus());
  ASSERT_TRUE(then.snapshot);
  EXPECT_EQ(then.snapshot->step(), 1u);
  EXPECT_FALSE(Say(next).snapshot);  // once
  v1::SnapshotReport written;
  written.set_step(1);
  written.set_done(true);
  written.set_file("state-0.safetensors");
  control_.OnSnapshot(written);
  EXPECT_EQ(control_.report().snapshot().file(), "state-0.safetensors");
  EXPECT_FALSE(Say(next).snapshot);
  next.clear_snapshot();
  EXPECT_FALSE(Say(next).cancel_snapshot);  // nothing is under way
  EXPECT_FALSE(control_.report().has_snapshot());
}

TEST_F(DirectiveTest, ASnapshotOfTheVersionHereIsKeptBeforeTheNextStepIsApplied) {
  Open();
  DoStep(1);
  PushAll(2);
  v1::StoreDirective next = Decide(2);
  *next.mutable_snapshot() = SnapshotOf(1);
  const Orders orders = Say(next);
  EXPECT_TRUE(orders.snapshot && orders.apply);
}

TEST_F(DirectiveTest, ASnapshotThatComesTooLateIsAnsweredWithAProblem) {
  Open();
  DoStep(1);
  DoStep(2);
  v1::StoreDirective next = now_;
  *next.mutable_snapshot() = SnapshotOf(1);
  EXPECT_FALSE(Say(next).snapshot);
  EXPECT_TRUE(control_.report().snapshot().done());
  EXPECT_THAT(control_.report().snapshot().problem(), HasSubstr("step 2"));
}

TEST_F(DirectiveTest, ASnapshotThatIsNotWantedAnyMoreIsGivenUp) {
  Open();
  v1::StoreDirective next = now_;
  *next.mutable_snapshot() = SnapshotOf(0);
  ASSERT_TRUE(Say(next).snapshot);
  EXPECT_TRUE(Say(now_).cancel_snapshot);
  v1::SnapshotReport late;
  late.set_done(true);
  control_.OnSnapshot(late);
  EXPECT_FALSE(control_.report().has_snapshot());
  // Also one that a rollback overtakes.
  ASSERT_TRUE(Say(next).snapshot);
  v1::StoreDirective back = Opening();
  back.set_epoch(2);
  back.mutable_job()->mutable_base()->set_epoch(2);
  EXPECT_TRUE(Say(back).cancel_snapshot);
}

TEST_F(DirectiveTest, ADigestIsMadeOnceOfTheVersionThatIsWanted) {
  Open();
  PushAll(1);
  v1::StoreDirective next = Decide(1);
  next.set_digest_step(1);
  EXPECT_FALSE(Say(next).digest_step);
  EXPECT_EQ(control_.OnApplied(absl::OkStatus()).digest_step, 1u);
  EXPECT_FALSE(Say(next).digest_step);
  control_.OnDigest(1, 5, 6);
  EXPECT_EQ(control_.report().digest_step(), 1u);
  EXPECT_EQ(control_.report().digest_low(), 5u);
  EXPECT_EQ(control_.report().digest_high(), 6u);
  EXPECT_FALSE(Say(next).digest_step);
}

TEST_F(DirectiveTest, DigestsOfChunksAreReportedWithReplicasAndSurviveASkip) {
  Open(OpeningOn({{0, 1}, {1, 2}, {0, 2}}, 3));
  EXPECT_TRUE(control_.report().chunk_digests().empty());
  DoStep(1);
  EXPECT_THAT(control_.report().chunk_digests(), ElementsAre(100, 102));
  v1::StoreDirective skip = Decide(2);
  skip.mutable_decision()->set_skip(true);
  Say(skip);
  control_.OnApplied(absl::OkStatus());
  EXPECT_EQ(Version(), 2u);
  EXPECT_THAT(control_.report().chunk_digests(), ElementsAre(100, 102));
}

TEST_F(DirectiveTest, ProgressGrowsWithWhatIsDone) {
  Open();
  uint64_t last = control_.report().progress();
  PushAll(1);
  Say(Decide(1));
  control_.OnChunkApplied(0, 0);
  EXPECT_GT(control_.report().progress(), last);
  last = control_.report().progress();
  control_.OnProgress();
  EXPECT_GT(control_.report().progress(), last);
}

TEST_F(DirectiveTest, AMapForAnotherIncarnationOfThisStoreIsRefused) {
  v1::StoreDirective directive = Opening();
  v1::StoreMap& map = *directive.mutable_job()->mutable_map();
  map.mutable_stores(0)->set_incarnation("before");
  const std::string untouched = control_.report().SerializeAsString();
  const absl::Status refused = control_.OnDirective(directive, "now").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              testing::AllOf(HasSubstr("small-1"), HasSubstr("incarnation before of store-0"),
                             HasSubstr("incarnation now")));
  EXPECT_EQ(control_.report().SerializeAsString(), untouched);
  EXPECT_TRUE(control_.OnDirective(directive, "before").ok());
  control_.OnLoaded(absl::OkStatus());
  // Of what is here already, too: this process was fenced and is another now.
  directive.clear_job();
  directive.set_generation(2);
  EXPECT_TRUE(absl::IsFailedPrecondition(control_.OnDirective(directive, "now").status()));
  EXPECT_EQ(control_.generation(), 1u);
  EXPECT_TRUE(control_.OnDirective(directive, "before").ok());
  EXPECT_EQ(control_.generation(), 2u);
  // To forget it needs no name.
  directive.set_drop(true);
  EXPECT_TRUE(control_.OnDirective(directive, "now").ok());
  EXPECT_TRUE(control_.dropped());
}

}  // namespace
}  // namespace zeroshard::store
