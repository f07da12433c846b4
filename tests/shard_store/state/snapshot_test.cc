// A version is written while later steps are applied.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <future>
#include <mutex>
#include <thread>

#include "common/checkpoint/reader.h"
#include "common/checkpoint/store.h"
#include "common/plan/nvme_bytes.h"
#include "tests/common/temp_folder.h"
#include "tests/shard_store/state/gated_files.h"
#include "tests/shard_store/state/small_job.h"

namespace zeroshard::store {
namespace {

constexpr int64_t kChunk = 4096;

class SnapshotTest : public testing::TestWithParam<bool> {
 protected:
  void Make(const JobShape& shape, uint64_t limit = uint64_t{1} << 30) {
    shape_ = shape;
    shape_.nvme = nvme();
    spec_ = MakeSpec(shape_);
    model_ = MakeModel(spec_);
    chunks_ = AllChunks(model_, kChunk);
    budget_ = std::make_unique<MemoryBudget>(limit);
    state_ = MakeState(chunks_);
    reference_ = std::make_unique<Reference>(model_, shape);
    const FreshWeights fresh(shape.seed);
    std::vector<uint32_t> all;
    for (const auto& [id, chunk] : chunks_) all.push_back(id);
    ASSERT_TRUE(state_->Fill({&fresh, nullptr, nullptr}, all, nullptr, nullptr).ok());
  }
  // Over the state in memory and that on the disk.
  virtual bool nvme() const { return GetParam(); }
  // Chunks that can change while a snapshot has written nothing yet.
  size_t spare() const { return nvme() ? kNvmeSpareSlots : 4; }
  void TearDown() override { state_ = nullptr; }

  std::unique_ptr<JobState> MakeState(const std::map<uint32_t, Chunk>& chunks) {
    JobStateOptions options;
    options.spec = spec_;
    options.model = &model_;
    options.chunks = chunks;
    options.budget = budget_.get();
    options.pool = &pool_;
    if (nvme()) options.nvme = disk_.Options();
    auto state = JobState::Create(options);
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? *std::move(state) : nullptr;
  }

  void Stage(uint64_t step) {
    const int64_t width = shape_.bf16 ? 2 : 4;
    for (size_t u = 0; u < model_.units.size(); ++u) {
      const std::vector<char> gradient = GradientOf(model_, u, step, shape_.bf16);
      for (const auto& [id, chunk] : chunks_) {
        if (!chunk.trained || static_cast<size_t>(chunk.unit) != u) continue;
        const absl::Span<const char> part[] = {absl::MakeConstSpan(
            gradient.data() + chunk.begin * width, static_cast<size_t>(chunk.size() * width))};
        ASSERT_TRUE(state_->Stage(id, 0, chunk.size(), part).ok());
      }
    }
  }
  // Begins a step; `changed_` is notified of every chunk.
  std::future<absl::Status> Begin(uint64_t step) {
    Stage(step);
    auto done = std::make_shared<std::promise<absl::Status>>();
    applied_ = 0;
    state_->Apply(
        Decision(step),
        [this](uint32_t, uint32_t) {
          std::lock_guard<std::mutex> lock(mutex_);
          ++applied_;
          changed_.notify_all();
        },
        [done](const absl::Status& status) { done->set_value(status); });
    reference_->Step(Decision(step));
    return done->get_future();
  }
  void Step(uint64_t step) { ASSERT_TRUE(Begin(step).get().ok()); }
  void WaitForApplied(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30), [&] {
      return applied_ >= count;
    })) << applied_;
  }

  v1::SnapshotOrder Order(uint64_t step, uint32_t index, uint32_t count,
                          const std::function<bool(uint32_t)>& mine) {
    v1::SnapshotOrder order;
    order.set_step(step);
    order.set_folder(folder_.path());
    order.set_index(index);
    order.set_count(count);
    for (const auto& [id, chunk] : chunks_)
      if (mine(id)) order.add_chunks(id);
    return order;
  }

  // What the files hold is `wanted`, and has the digests that were reported.
  void Check(const std::vector<v1::SnapshotReport>& reports, const Reference& wanted) {
    Manifest manifest;
    manifest.spec = spec_;
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
    EXPECT_TRUE((*reader)->CheckModel(model_, !shape_.sgd).ok());
    for (int k = 0; k < (shape_.sgd ? 2 : kStateKinds); ++k) {
      const auto kind = static_cast<StateKind>(k);
      const auto digest = DigestOf(**reader, model_, kind);
      ASSERT_TRUE(digest.ok()) << digest.status();
      EXPECT_EQ(digests[k].Hex(), *digest);
      const auto source = (*reader)->Source(kind);
      for (size_t u = 0; u < model_.units.size(); ++u) {
        for (const ParameterInfo& tensor : model_.units[u].parameters) {
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
  JobShape shape_;
  v1::JobSpec spec_;
  ModelTable model_;
  std::map<uint32_t, Chunk> chunks_;
  std::unique_ptr<MemoryBudget> budget_;
  SmallDisk disk_;
  TaskPool pool_{2};
  GatedFiles files_;
  std::unique_ptr<JobState> state_;
  std::unique_ptr<Reference> reference_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t applied_ = 0;
};

INSTANTIATE_TEST_SUITE_P(In, SnapshotTest, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

TEST_P(SnapshotTest, IsTheVersionItWasTakenAtWhileLaterStepsAreApplied) {
  for (const JobShape& shape :
       {JobShape{.bf16 = true}, JobShape{.bf16 = false},
        JobShape{.bf16 = true, .trainable = {"wpe.weight", "blocks.0.mlp.*"}},
        JobShape{.bf16 = true, .sgd = true}}) {
    state_ = nullptr;
    Make(shape);
    Step(1);
    Step(2);
    const Reference then = *reference_;
    const uint64_t used = budget_->used();
    state_->PreserveSnapshot(Order(2, 0, 1, [](uint32_t) { return true; }));
    files_.Close();
    std::atomic<uint64_t> written = 0;
    auto report = std::async(std::launch::async, [&] {
      return state_->WriteSnapshot(
          &files_, [&](uint64_t bytes) { written += bytes; }, nullptr);
    });
    files_.WaitForWriter();  // at the header: it holds no chunk yet
    std::future<absl::Status> step = Begin(3);
    WaitForApplied(spare());  // as many as are copied
    EXPECT_EQ(step.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
    files_.Open();
    EXPECT_TRUE(step.get().ok());
    Step(4);
    const v1::SnapshotReport seen = report.get();
    Check({seen}, then);
    EXPECT_GT(written, 0u);
    std::filesystem::remove(folder_ / seen.file());
    state_->EndSnapshot();
    EXPECT_EQ(budget_->used(), used);
    Step(5);
    EXPECT_TRUE(StateEquals(state_.get(), *reference_, chunks_));
  }
}

class MemorySnapshotTest : public SnapshotTest {
  bool nvme() const override { return false; }
};

INSTANTIATE_TEST_SUITE_P(In, MemorySnapshotTest, testing::Values(false));

TEST_P(MemorySnapshotTest, WithoutMemoryForCopiesUpdatesWaitForTheDiskAlone) {
  Make({});
  const uint64_t bytes = budget_->used();
  state_ = nullptr;
  Make({}, bytes);
  Step(1);
  const Reference then = *reference_;
  state_->PreserveSnapshot(Order(1, 0, 1, [](uint32_t) { return true; }));
  EXPECT_EQ(budget_->used(), bytes);
  auto report = std::async(std::launch::async,
                           [&] { return state_->WriteSnapshot(&files_, nullptr, nullptr); });
  Step(2);
  Step(3);
  Check({report.get()}, then);
  state_->EndSnapshot();
}

TEST_P(SnapshotTest, StoresWriteAFileEachWhichTogetherAreTheModel) {
  Make({.trainable = {"wpe.weight", "blocks.*"}});
  Step(1);
  const Reference then = *reference_;
  std::vector<v1::SnapshotReport> reports;
  for (const uint32_t index : {0, 1, 2}) {  // the last has nothing to write
    state_->PreserveSnapshot(Order(1, index, 3, [index](uint32_t id) { return id % 2 == index; }));
    reports.push_back(state_->WriteSnapshot(&files_, nullptr, nullptr));
    state_->EndSnapshot();
  }
  Check(reports, then);
}

TEST_P(SnapshotTest, OneThatIsGivenUpHoldsNothingBackAndSaysSo) {
  Make({});
  Step(1);
  state_->PreserveSnapshot(Order(1, 0, 1, [](uint32_t) { return true; }));
  files_.Close();
  auto report = std::async(std::launch::async,
                           [&] { return state_->WriteSnapshot(&files_, nullptr, nullptr); });
  files_.WaitForWriter();
  std::future<absl::Status> step = Begin(2);
  WaitForApplied(spare());
  state_->EndSnapshot();
  EXPECT_TRUE(step.get().ok());  // while the writer is still held up
  files_.Open();
  const v1::SnapshotReport seen = report.get();
  EXPECT_TRUE(seen.done());
  EXPECT_NE(seen.problem(), "");
  EXPECT_TRUE(StateEquals(state_.get(), *reference_, chunks_));
}

TEST_P(SnapshotTest, ADiskThatFailsIsReportedAndTrainingGoesOn) {
  Make({});
  Step(1);
  state_->PreserveSnapshot(Order(1, 0, 1, [](uint32_t) { return true; }));
  files_.Fail("no space left on device");
  const v1::SnapshotReport report = state_->WriteSnapshot(&files_, nullptr, nullptr);
  EXPECT_THAT(report.problem(), testing::HasSubstr("no space left"));
  std::future<absl::Status> step = Begin(2);
  state_->EndSnapshot();
  EXPECT_TRUE(step.get().ok());
  EXPECT_TRUE(StateEquals(state_.get(), *reference_, chunks_));
}

TEST_P(SnapshotTest, AStateFilledFromItIsThatStateWhateverTheChunks) {
  for (const bool sgd : {false, true}) {
    state_ = nullptr;
    Make({.sgd = sgd, .trainable = {"wpe.weight", "blocks.0.mlp.*"}});
    Step(1);
    Step(2);
    state_->PreserveSnapshot(Order(2, 0, 1, [](uint32_t) { return true; }));
    const v1::SnapshotReport report = state_->WriteSnapshot(&files_, nullptr, nullptr);
    state_->EndSnapshot();
    Manifest manifest;
    manifest.files.push_back({report.file(), report.bytes(), report.crc32c()});
    const auto reader = CheckpointReader::OpenCollected(folder_.path(), manifest);
    ASSERT_TRUE(reader.ok()) << reader.status();
    const auto master = (*reader)->Source(StateKind::kMaster);
    const auto exp_avg = (*reader)->Source(StateKind::kExpAvg);
    const auto exp_avg_sq = (*reader)->Source(StateKind::kExpAvgSq);
    const std::map<uint32_t, Chunk> chunks = AllChunks(model_, 64 * 37);
    const std::unique_ptr<JobState> other = MakeState(chunks);
    std::vector<uint32_t> all;
    for (const auto& [id, chunk] : chunks) all.push_back(id);
    std::atomic<size_t> told = 0;
    ASSERT_TRUE(other
                    ->Fill(
                        {master.get(), exp_avg.get(), sgd ? nullptr : exp_avg_sq.get()}, all,
                        [&](uint32_t) { ++told; }, nullptr)
                    .ok());
    EXPECT_EQ(told, chunks.size());
    EXPECT_TRUE(StateEquals(other.get(), *reference_, chunks));
    std::filesystem::remove(folder_ / report.file());
  }
}

}  // namespace
}  // namespace zeroshard::store
