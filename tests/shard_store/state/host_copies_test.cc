// Jobs that have replicas: copies between stores, digests.
#include <algorithm>

#include "tests/shard_store/state/host_fixture.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

class HostCopiesTest : public StoreHostFixture {};
class EachHostCopies : public EachStateFixture {};

INSTANTIATE_TEST_SUITE_P(In, EachHostCopies, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

// How the second store reaches the first, which was told this; what it is told later has it too.
using Reach = std::function<absl::StatusOr<std::unique_ptr<PeerReader>>(
    TestStore* first, v1::StoreDirective* told, const v1::BulkHello& hello)>;

// That refuses at first.
Reach NotUpYet() {
  return [refused = 0](
             TestStore* first, v1::StoreDirective*,
             const v1::BulkHello& hello) mutable -> absl::StatusOr<std::unique_ptr<PeerReader>> {
    if (++refused <= 2) return absl::UnavailableError("not up yet");
    return LocalPeer::Connect(first->host.get(), hello);
  };
}

// One step on a store, then a second store beside it, and a step on both.
void CopyAndGoOn(const JobShape& shape, int64_t chunk_elements, const Reach& reach = NotUpYet()) {
  TestStore first(kPlenty, kPlenty, chunk_elements), second(kPlenty, kPlenty, chunk_elements);
  TestJob job("run-1", shape, chunk_elements);
  job.SetStores(2, 2, 1);
  job.Tell(&first);
  job.WaitForStep(&first, 0);
  const auto stream = job.Open(&first);
  job.Step(&first, stream, 1);

  job.SetStores(2, 2);
  job.next_.set_map_version(2);
  job.Tell(&first);
  v1::StoreDirective to_first = job.next_;
  second.connect = [&](const v1::StoreMap::Store& peer,
                       const v1::BulkHello& hello) -> absl::StatusOr<std::unique_ptr<PeerReader>> {
    EXPECT_EQ(peer.member(), "store-0");
    EXPECT_EQ(hello.member(), "store-1");
    return reach(&first, &to_first, hello);
  };
  job.next_.mutable_job()->set_store(1);
  job.next_.mutable_job()->mutable_copy()->set_epoch(1);
  job.next_.mutable_job()->mutable_copy()->set_step(1);
  for (const auto& [id, chunk] : job.chunks_) {
    v1::StoreJob::Copy* copy = job.next_.mutable_job()->add_copies();
    copy->set_chunk(id);
    copy->set_from_store(0);
  }
  job.Tell(&second);
  job.WaitForStep(&second, 1);
  const auto other = job.Open(&second);
  job.ExpectParameters(&second, other, 1);

  // The next step on both.
  job.PushAll(&first, stream.get(), 2);
  job.PushAll(&second, other.get(), 2);
  job.Decide(2);
  job.Tell(&second);
  *to_first.mutable_decision() = job.next_.decision();
  first.host->OnDirective(to_first);
  const v1::StoreReport b = job.WaitForStep(&second, 2);
  const v1::StoreReport a = job.WaitForStep(&first, 2);
  job.ExpectParameters(&first, stream, 2);
  job.ExpectParameters(&second, other, 2);
  ASSERT_EQ(b.chunk_digests_size(), static_cast<int>(job.chunks_.size()));
  EXPECT_THAT(b.chunk_digests(), testing::Contains(testing::Ne(0u)));
  EXPECT_THAT(a.chunk_digests(), testing::ElementsAreArray(b.chunk_digests()));
}

TEST_P(EachHostCopies, ANewReplicaIsCopiedFromAnotherAndHasTheSameDigests) {
  CopyAndGoOn({.trainable = {"wpe.weight", "blocks.*"}, .nvme = GetParam()}, kChunk);
}

// A source that hears of a map without the store that copies, before the fifth read of that, and of
// one with it again once it was asked in vain.
class ForgetfulSource {
 public:
  absl::StatusOr<std::unique_ptr<PeerReader>> Connect(TestStore* first, v1::StoreDirective* told,
                                                      const v1::BulkHello& hello) {
    auto peer = LocalPeer::Connect(first->host.get(), hello);
    if (peer.ok()) return std::make_unique<Reader>(this, first, told, *std::move(peer));
    EXPECT_TRUE(absl::IsUnavailable(peer.status())) << peer.status();
    ++refused;
    told->set_map_version(told->map_version() + 2);
    first->host->OnDirective(*told);
    return peer.status();
  }

  int reads = 0, ended = 0, refused = 0;

 private:
  class Reader : public PeerReader {
   public:
    Reader(ForgetfulSource* source, TestStore* first, v1::StoreDirective* told,
           std::unique_ptr<PeerReader> peer)
        : source_(*source), first_(*first), told_(*told), peer_(std::move(peer)) {}
    absl::Status Read(const v1::StateVersion& version, uint32_t chunk, StateKind kind,
                      int64_t begin, absl::Span<float> values) override {
      if (++source_.reads == 5) {
        v1::StoreDirective without = told_;
        without.set_map_version(told_.map_version() + 1);
        for (uint32_t& store : *without.mutable_job()->mutable_map()->mutable_placement())
          if (store == 1) store = kNoStore;
        first_.host->OnDirective(without);
      }
      const absl::Status status = peer_->Read(version, chunk, kind, begin, values);
      if (!status.ok()) {
        EXPECT_TRUE(absl::IsUnavailable(status)) << status;
        ++source_.ended;
      }
      return status;
    }
    void Cancel() override { peer_->Cancel(); }

   private:
    ForgetfulSource& source_;
    TestStore& first_;
    v1::StoreDirective& told_;
    const std::unique_ptr<PeerReader> peer_;
  };
};

TEST_P(EachHostCopies, OneThatIsNotLetInAnyMoreGoesOnWhereItWasOnceItIsAgain) {
  ForgetfulSource source;
  CopyAndGoOn({.trainable = {"wpe.weight", "blocks.*"}, .nvme = GetParam()}, kChunk,
              [&](TestStore* first, v1::StoreDirective* told, const v1::BulkHello& hello) {
                return source.Connect(first, told, hello);
              });
  EXPECT_GT(source.reads, 5);
  EXPECT_EQ(source.ended, 1);
  EXPECT_EQ(source.refused, 1);
}

TEST_P(EachHostCopies, AChunkOfOneElementIsHeldAndUpdatedAndCopiedAndPulled) {
  const JobShape shape{.trainable = {"wpe.weight", "blocks.*"}, .nvme = GetParam()};
  const ModelTable model = MakeModel(MakeSpec(shape));
  const int64_t elements = AllButOneOfTheBlock(model);
  const std::map<uint32_t, Chunk> chunks = AllChunks(model, elements);
  ASSERT_TRUE(std::any_of(chunks.begin(), chunks.end(), [](const auto& entry) {
    return entry.second.size() == 1 && entry.second.trained;
  }));
  CopyAndGoOn(shape, elements);
}

TEST_P(EachHostCopies, TwoStoresCopyFromEachOtherAtOnce) {
  TestStore stores[2];
  TestJob job("run-1", {.nvme = GetParam()});
  const auto peer = [&](const v1::StoreMap::Store& store,
                        const v1::BulkHello& hello) -> absl::StatusOr<std::unique_ptr<PeerReader>> {
    return LocalPeer::Connect(stores[store.member() == "store-0" ? 0 : 1].host.get(), hello);
  };
  for (TestStore& store : stores) store.connect = peer;

  // Even chunks on the first, odd ones on the second.
  job.SetStores(2, 2);
  v1::StoreMap* map = job.next_.mutable_job()->mutable_map();
  for (uint32_t c = 0; c < job.chunks_.size(); ++c) {
    map->set_placement(static_cast<int>(2 * c), c % 2);
    map->set_placement(static_cast<int>(2 * c + 1), kNoStore);
  }
  const auto tell = [&](uint32_t i) {
    v1::StoreJob* own = job.next_.mutable_job();
    own->set_store(i);
    own->clear_copies();
    for (uint32_t c = 0; own->has_copy() && c < job.chunks_.size(); ++c) {
      if (c % 2 == i) continue;
      v1::StoreJob::Copy* copy = own->add_copies();
      copy->set_chunk(c);
      copy->set_from_store(1 - i);
    }
    job.Tell(&stores[i]);
  };
  for (uint32_t i = 0; i < 2; ++i) {
    tell(i);
    job.WaitForStep(&stores[i], 0);
    const auto stream = job.Open(&stores[i]);
    for (const auto& [id, chunk] : job.chunks_) {
      if (id % 2 != i || !chunk.trained) continue;
      const absl::Status status = job.Push(&stores[i], stream.get(), 1, id);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  job.Decide(1);
  for (uint32_t i = 0; i < 2; ++i) {
    tell(i);
    job.WaitForStep(&stores[i], 1);
  }

  job.SetStores(2, 2);
  job.next_.set_map_version(2);
  job.next_.mutable_job()->mutable_copy()->set_epoch(1);
  job.next_.mutable_job()->mutable_copy()->set_step(1);
  for (uint32_t i = 0; i < 2; ++i) tell(i);
  for (TestStore& store : stores) {
    job.WaitFor(&store, [](const v1::StoreReport& report) {
      return report.map_version() == 2 && report.phase() == v1::STORE_PHASE_READY;
    });
    job.ExpectParameters(&store, job.Open(&store), 1);
  }
}

TEST_F(HostCopiesTest, APeerThatDoesNotAnswerFailsTheLoadAndIsNamed) {
  TestStore store;
  TestJob job("run-1");
  job.SetStores(2, 2);
  v1::StoreJob* to = job.next_.mutable_job();
  to->set_store(1);
  to->mutable_spec()->mutable_timeouts()->set_start_seconds(1);
  to->mutable_copy()->set_epoch(1);
  to->mutable_copy()->set_step(7);
  v1::StoreJob::Copy* copy = to->add_copies();
  copy->set_chunk(0);
  copy->set_from_store(0);
  for (const auto& [id, chunk] : job.chunks_) {
    if (id == 0) continue;
    copy = to->add_copies();
    copy->set_chunk(id);
    copy->set_from_store(0);
  }
  job.Tell(&store);
  const v1::StoreReport failed = job.WaitForFailure(&store);
  EXPECT_EQ(failed.error_code(), "UNAVAILABLE");
  EXPECT_THAT(failed.problem(), testing::AllOf(HasSubstr("store-0"), HasSubstr("127.0.0.1:7000"),
                                               HasSubstr("chunk 0")));
}

TEST_P(EachHostCopies, DigestsAreToldWhereThereAreReplicas) {
  TestStore a, b;
  TestJob job("run-1", {.bf16 = false, .nvme = GetParam()});
  job.SetStores(2, 2);
  v1::StoreReport reports[2];
  TestStore* stores[] = {&a, &b};
  std::shared_ptr<StoreHost::Stream> streams[2];
  for (uint32_t i = 0; i < 2; ++i) {
    job.next_.mutable_job()->set_store(i);
    job.Tell(stores[i]);
    job.WaitForStep(stores[i], 0);
    streams[i] = job.Open(stores[i]);
    job.PushAll(stores[i], streams[i].get(), 1);
  }
  job.Decide(1);
  for (uint32_t i = 0; i < 2; ++i) {
    job.next_.mutable_job()->set_store(i);
    job.Tell(stores[i]);
    reports[i] = job.WaitForStep(stores[i], 1);
  }
  EXPECT_EQ(reports[0].chunk_digests_size(), static_cast<int>(job.chunks_.size()));
  EXPECT_THAT(reports[0].chunk_digests(), testing::ElementsAreArray(reports[1].chunk_digests()));
}

}  // namespace
}  // namespace zeroshard::store
