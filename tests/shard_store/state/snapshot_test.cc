// A version is written while later steps are applied.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <optional>
#include <thread>

#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "common/plan/nvme_bytes.h"
#include "common/spec/timeouts.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/state/gated_files.h"
#include "tests/shard_store/state/state_world.h"

namespace zeroshard::store {
namespace {

constexpr int64_t kChunk = 4096;

// In the middle of what is written.
constexpr uint64_t kHalfway = 40000;

class SnapshotTest : public testing::TestWithParam<bool> {
 protected:
  // Over the state in memory and that on the disk.
  virtual bool nvme() const { return GetParam(); }
  // Chunks that can change while a snapshot has written nothing yet.
  size_t spare() const { return nvme() ? kNvmeSpareSlots : 4; }

  void Make(JobShape shape, uint64_t limit = kPlenty, int64_t chunk_elements = kChunk) {
    shape.nvme = nvme();
    world_ = nullptr;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
      std::filesystem::remove(entry.path());
    world_ = std::make_unique<World>(shape, chunk_elements, 2, /*digests=*/false, limit);
  }
  std::future<absl::Status> Begin(uint64_t step) {
    world_->Stage(step);
    return world_->Begin(Decision(step));
  }
  void Step(uint64_t step) { ASSERT_TRUE(Begin(step).get().ok()); }
  JobState* state() { return world_->state_.get(); }
  // Keeps the version that is here, and writes it on another thread.
  std::future<v1::SnapshotReport> Write(uint64_t step) {
    state()->PreserveSnapshot(Order(step, 0, 1, [](uint32_t) { return true; }));
    return std::async(std::launch::async,
                      [this] { return state()->WriteSnapshot(&files_, nullptr, nullptr); });
  }

  v1::SnapshotOrder Order(uint64_t step, uint32_t index, uint32_t count,
                          const std::function<bool(uint32_t)>& mine) {
    v1::SnapshotOrder order;
    order.set_step(step);
    order.set_folder(folder_.path());
    order.set_index(index);
    order.set_count(count);
    for (const auto& [id, chunk] : world_->chunks_)
      if (mine(id)) order.add_chunks(id);
    return order;
  }

  // What the files hold is `wanted`, and has the digests that were reported. These are of blocks of
  // 64 elements, which no job's chunks cut; `whole_blocks`: nor do those here.
  void Check(const std::vector<v1::SnapshotReport>& reports, const Reference& wanted,
             bool whole_blocks = true) {
    Manifest manifest;
    manifest.spec = world_->spec_;
    WeightDigest digests[kStateKinds];
    for (const v1::SnapshotReport& report : reports) {
      ASSERT_EQ(report.problem(), "");
      EXPECT_TRUE(report.done());
      ASSERT_EQ(report.digests_size(), 6);
      manifest.files.push_back({report.file(), report.bytes(), report.crc32c()});
      for (int k = 0; k < kStateKinds; ++k)
        digests[k].Combine({report.digests(2 * k), report.digests(2 * k + 1)});
    }
    const auto reader = CheckpointReader::OpenCollected(folder_.path(), manifest);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_TRUE((*reader)->VerifyFiles(0, 1).ok());
    EXPECT_TRUE((*reader)->CheckModel(world_->model_, !world_->shape_.sgd).ok());
    for (int k = 0; k < (world_->shape_.sgd ? 2 : kStateKinds); ++k) {
      const auto kind = static_cast<StateKind>(k);
      const auto digest = DigestOf(**reader, world_->model_, kind);
      ASSERT_TRUE(digest.ok()) << digest.status();
      if (whole_blocks) {
        EXPECT_EQ(digests[k].Hex(), *digest);
      }
      const auto source = (*reader)->Source(kind);
      for (size_t u = 0; u < world_->model_.units.size(); ++u) {
        for (const ParameterInfo& tensor : world_->model_.units[u].parameters) {
          if (k > 0 && !tensor.trainable) continue;
          std::vector<float> values(static_cast<size_t>(tensor.size));
          ASSERT_TRUE(source->Read(tensor, 0, tensor.size, values.data()).ok());
          EXPECT_EQ(std::memcmp(values.data(),
                                wanted.Values(kind, static_cast<int>(u)).data() + tensor.offset,
                                values.size() * sizeof(float)),
                    0)
              << NameOf(kind) << " of " << tensor.name;
        }
      }
    }
  }

  const MemoryFolder folder_;
  GatedFiles files_;
  std::unique_ptr<World> world_;
};

INSTANTIATE_TEST_SUITE_P(In, SnapshotTest, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

// The coordinator would only know that nothing moves, and a store that is late with a step it
// fences.
TEST_P(SnapshotTest, OneThatFindsNoMemoryToWriteWithSaysSoBeforeTheCoordinatorLosesPatience) {
  Make({.step_seconds = 2});
  const uint64_t all = world_->writing_.limit();
  ASSERT_TRUE(world_->writing_.Take(all, "four writers that hang").ok());
  Step(1);
  EXPECT_THAT(
      Write(1).get().problem(),
      testing::AllOf(testing::HasSubstr(absl::StrCat(
                         "for ", absl::FormatDuration(WriterPatience(world_->spec_)), " other")),
                     testing::HasSubstr("a checkpoint folder whose file system does not answer")));
  state()->EndSnapshot();
  world_->writing_.Give(all);
  Check({Write(1).get()}, world_->reference_);
}

TEST_P(SnapshotTest, OneOfNoChunksHasNoValuesAndWaitsForNoMemory) {
  Make({.step_seconds = 2});
  ASSERT_TRUE(world_->writing_.Take(world_->writing_.limit(), "writers that hang").ok());
  state()->PreserveSnapshot(Order(0, 0, 1, [](uint32_t) { return false; }));
  const v1::SnapshotReport report = state()->WriteSnapshot(&files_, nullptr, nullptr);
  EXPECT_EQ(report.problem(), "");
  EXPECT_TRUE(std::filesystem::exists(folder_ / report.file()));
  EXPECT_THAT(report.digests(), testing::Each(0u));
}

TEST_P(SnapshotTest, AChunkOfOneElementIsSavedAsAnyOther) {
  for (const bool bf16 : {true, false}) {
    const JobShape shape{.bf16 = bf16};
    Make(shape, kPlenty, AllButOneOfTheBlock(MakeModel(MakeSpec(shape))));
    const auto& chunks = world_->chunks_;
    ASSERT_TRUE(std::any_of(chunks.begin(), chunks.end(),
                            [](const auto& entry) { return entry.second.size() == 1; }));
    Step(1);
    const Reference then = world_->reference_;
    files_.Close();
    auto report = Write(1);
    files_.WaitForWriter();
    std::future<absl::Status> step = Begin(2);
    files_.Open();
    EXPECT_TRUE(step.get().ok());
    Check({report.get()}, then, /*whole_blocks=*/false);
    state()->EndSnapshot();
  }
}

TEST_P(SnapshotTest, IsTheVersionItWasTakenAtWhileLaterStepsAreApplied) {
  for (const JobShape& shape :
       {JobShape{.bf16 = true}, JobShape{.bf16 = false},
        JobShape{.bf16 = true, .trainable = {"wpe.weight", "blocks.0.mlp.*"}},
        JobShape{.bf16 = true, .sgd = true}}) {
    Make(shape);
    Step(1);
    Step(2);
    const Reference then = world_->reference_;
    const uint64_t used = world_->budget_.used();
    state()->PreserveSnapshot(Order(2, 0, 1, [](uint32_t) { return true; }));
    files_.Close();
    std::atomic<uint64_t> written = 0;
    auto report = std::async(std::launch::async, [&] {
      return state()->WriteSnapshot(
          &files_, [&](uint64_t bytes) { written += bytes; }, nullptr);
    });
    files_.WaitForWriter();  // at the header: it holds no chunk yet
    std::future<absl::Status> step = Begin(3);
    world_->WaitForApplied(spare());  // as many as are copied
    EXPECT_EQ(step.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
    files_.Open();
    EXPECT_TRUE(step.get().ok());
    Step(4);
    const v1::SnapshotReport seen = report.get();
    Check({seen}, then);
    EXPECT_GT(written, 0u);
    std::filesystem::remove(folder_ / seen.file());
    state()->EndSnapshot();
    EXPECT_EQ(world_->budget_.used(), used);
    Step(5);
    EXPECT_TRUE(StateEquals(state(), world_->reference_, world_->chunks_));
  }
}

class MemorySnapshotTest : public SnapshotTest {
  bool nvme() const override { return false; }
};

INSTANTIATE_TEST_SUITE_P(In, MemorySnapshotTest, testing::Values(false));

TEST_P(MemorySnapshotTest, WithoutMemoryForCopiesUpdatesWaitForTheDiskAlone) {
  Make({});
  const uint64_t bytes = world_->budget_.used();
  Make({}, bytes);
  Step(1);
  const Reference then = world_->reference_;
  state()->PreserveSnapshot(Order(1, 0, 1, [](uint32_t) { return true; }));
  EXPECT_EQ(world_->budget_.used(), bytes);
  auto report = std::async(std::launch::async,
                           [&] { return state()->WriteSnapshot(&files_, nullptr, nullptr); });
  Step(2);
  Step(3);
  Check({report.get()}, then);
  state()->EndSnapshot();
}

TEST_P(SnapshotTest, StoresWriteAFileEachWhichTogetherAreTheModel) {
  Make({.trainable = {"wpe.weight", "blocks.*"}});
  Step(1);
  const Reference then = world_->reference_;
  std::vector<v1::SnapshotReport> reports;
  for (const uint32_t index : {0, 1, 2}) {  // the last has nothing to write
    state()->PreserveSnapshot(Order(1, index, 3, [index](uint32_t id) { return id % 2 == index; }));
    reports.push_back(state()->WriteSnapshot(&files_, nullptr, nullptr));
    state()->EndSnapshot();
  }
  Check(reports, then);
}

TEST_P(SnapshotTest, OneThatIsGivenUpHoldsNeitherStepsNorMemoryThoughAWriteDoesNotReturn) {
  for (const std::optional<uint64_t> data : {std::optional<uint64_t>(), {kHalfway}}) {
    SCOPED_TRACE(data ? "in the data" : "in the header");
    Make({});
    Step(1);
    const uint64_t used = world_->budget_.used();
    files_.Close(data);
    std::future<v1::SnapshotReport> report = Write(1);
    files_.WaitForWriter();
    std::future<absl::Status> step = Begin(2);
    world_->WaitForApplied(spare());
    state()->EndSnapshot();
    // All of these while the writer is still held up.
    EXPECT_EQ(world_->budget_.used(), used);
    ASSERT_EQ(step.wait_for(std::chrono::seconds(30)), std::future_status::ready);
    EXPECT_TRUE(step.get().ok());
    Step(3);
    files_.Open();
    const v1::SnapshotReport seen = report.get();
    EXPECT_TRUE(seen.done());
    EXPECT_NE(seen.problem(), "");
    EXPECT_TRUE(StateEquals(state(), world_->reference_, world_->chunks_));
  }
}

TEST_P(SnapshotTest, TheNextIsKeptWhileOneThatWasGivenUpIsInAWriteAndWrittenAfterIt) {
  Make({});
  Step(1);
  files_.Close(kHalfway);
  std::future<v1::SnapshotReport> first = Write(1);
  files_.WaitForWriter();
  state()->EndSnapshot();
  Step(2);
  const Reference then = world_->reference_;
  state()->PreserveSnapshot(Order(2, 0, 1, [](uint32_t) { return true; }));
  std::future<absl::Status> step = Begin(3);
  world_->WaitForApplied(spare());
  files_.Open();
  EXPECT_NE(first.get().problem(), "");
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
    std::filesystem::remove(entry.path());
  const v1::SnapshotReport second = state()->WriteSnapshot(&files_, nullptr, nullptr);
  state()->EndSnapshot();
  EXPECT_TRUE(step.get().ok());
  Check({second}, then);
  EXPECT_TRUE(StateEquals(state(), world_->reference_, world_->chunks_));
}

TEST_P(MemorySnapshotTest, AStateGivesBackAllItsMemoryThoughAWriteDoesNotReturn) {
  Make({.trainable = {"wpe.weight", "blocks.*"}});
  Step(1);
  files_.Close(kHalfway);
  std::future<v1::SnapshotReport> report = Write(1);
  files_.WaitForWriter();
  EXPECT_TRUE(state()->Free());
  EXPECT_EQ(world_->budget_.used(), 0u);
  EXPECT_EQ(state()->usage().chunks(), 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(state()->Parameters(0, 0, 1).status()));
  EXPECT_GT(world_->writing_.used(), 0u);
  files_.Open();
  EXPECT_NE(report.get().problem(), "");
  EXPECT_EQ(world_->writing_.used(), 0u);
}

TEST_P(SnapshotTest, ADiskThatFailsIsReportedAndTrainingGoesOn) {
  Make({});
  Step(1);
  state()->PreserveSnapshot(Order(1, 0, 1, [](uint32_t) { return true; }));
  files_.Fail("no space left on device");
  const v1::SnapshotReport report = state()->WriteSnapshot(&files_, nullptr, nullptr);
  EXPECT_THAT(report.problem(), testing::HasSubstr("no space left"));
  std::future<absl::Status> step = Begin(2);
  state()->EndSnapshot();
  EXPECT_TRUE(step.get().ok());
  EXPECT_TRUE(StateEquals(state(), world_->reference_, world_->chunks_));
}

TEST_P(SnapshotTest, AStateFilledFromItIsThatStateWhateverTheChunks) {
  for (const bool sgd : {false, true}) {
    Make({.sgd = sgd, .trainable = {"wpe.weight", "blocks.0.mlp.*"}});
    Step(1);
    Step(2);
    state()->PreserveSnapshot(Order(2, 0, 1, [](uint32_t) { return true; }));
    const v1::SnapshotReport report = state()->WriteSnapshot(&files_, nullptr, nullptr);
    state()->EndSnapshot();
    Manifest manifest;
    manifest.files.push_back({report.file(), report.bytes(), report.crc32c()});
    const auto reader = CheckpointReader::OpenCollected(folder_.path(), manifest);
    ASSERT_TRUE(reader.ok()) << reader.status();
    const auto master = (*reader)->Source(StateKind::kMaster);
    const auto exp_avg = (*reader)->Source(StateKind::kExpAvg);
    const auto exp_avg_sq = (*reader)->Source(StateKind::kExpAvgSq);
    const std::map<uint32_t, Chunk> chunks = AllChunks(world_->model_, 64 * 37);
    JobStateOptions options = world_->options_;
    options.chunks = chunks;
    auto made = JobState::Create(options);
    ASSERT_TRUE(made.ok()) << made.status();
    const std::unique_ptr<JobState> other = *std::move(made);
    std::vector<uint32_t> all;
    for (const auto& [id, chunk] : chunks) all.push_back(id);
    std::atomic<size_t> told = 0;
    ASSERT_TRUE(other
                    ->Fill(
                        {master.get(), exp_avg.get(), sgd ? nullptr : exp_avg_sq.get()}, all,
                        [&](uint32_t) { ++told; }, nullptr)
                    .ok());
    EXPECT_EQ(told, chunks.size());
    EXPECT_TRUE(StateEquals(other.get(), world_->reference_, chunks));
    std::filesystem::remove(folder_ / report.file());
  }
}

}  // namespace
}  // namespace zeroshard::store
