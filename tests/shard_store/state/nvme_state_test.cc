// What only a state on the disk does; the rest is in job_state_test.cc, over both kinds.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <future>
#include <mutex>
#include <utility>

#include "common/checkpoint/file_system.h"
#include "common/plan/nvme_bytes.h"
#include "common/status_macros.h"
#include "tests/shard_store/nvme/disk_faults.h"
#include "tests/shard_store/state/small_job.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

class NvmeStateTest : public testing::Test {
 protected:
  void Make(const JobShape& shape, int64_t chunk_elements, uint64_t memory) {
    shape_ = shape;
    shape_.nvme = true;
    spec_ = MakeSpec(shape_);
    model_ = MakeModel(spec_);
    chunks_ = AllChunks(model_, chunk_elements);
    budget_ = std::make_unique<MemoryBudget>(memory);
    options_.spec = spec_;
    options_.model = &model_;
    options_.chunks = chunks_;
    options_.budget = budget_.get();
    options_.pool = &pool_;
    options_.nvme = disk_.Options();
    options_.nvme.hook = &faults_;
    options_.nvme.stall_limit = absl::Milliseconds(200);
    options_.nvme.chunk_elements = chunk_elements;
    auto state = JobState::Create(options_);
    ASSERT_TRUE(state.ok()) << state.status();
    state_ = *std::move(state);
    reference_ = std::make_unique<Reference>(model_, shape_);
    const FreshWeights fresh(shape_.seed);
    std::vector<uint32_t> all;
    for (const auto& [id, chunk] : chunks_) all.push_back(id);
    ASSERT_TRUE(state_->Fill({&fresh, nullptr, nullptr}, all, nullptr, nullptr).ok());
  }

  absl::Status Stage(uint64_t step) {
    const size_t width = shape_.bf16 ? 2 : 4;
    for (size_t u = 0; u < model_.units.size(); ++u) {
      const std::vector<char> gradient = GradientOf(model_, u, step, shape_.bf16);
      for (const auto& [id, chunk] : chunks_) {
        if (static_cast<size_t>(chunk.unit) != u) continue;
        const absl::Span<const char> part[] = {absl::MakeConstSpan(gradient).subspan(
            static_cast<size_t>(chunk.begin) * width, static_cast<size_t>(chunk.size()) * width)};
        ZS_RETURN_IF_ERROR(state_->Stage(id, step, 0, chunk.size(), part));
      }
    }
    return absl::OkStatus();
  }
  absl::Status Apply(uint64_t step) {
    std::promise<absl::Status> done;
    state_->Apply(
        Decision(step), [](uint32_t, uint32_t) {},
        [&](const absl::Status& status) { done.set_value(status); });
    return done.get_future().get();
  }
  void Step(uint64_t step) {
    absl::Status status = Stage(step);
    if (status.ok()) status = Apply(step);
    ASSERT_TRUE(status.ok()) << status;
    reference_->Step(Decision(step));
  }
  // What is said where the disk answers so, in one of the ways to it.
  absl::Status Meet(const std::string& way, const nvme::DiskHook::Verdict& verdict) {
    ZS_RETURN_IF_ERROR(Stage(2));
    faults_.Set([verdict](const auto&) { return verdict; });
    if (way == "step") return Apply(2);
    if (way == "pull") return state_->Parameters(0, 0, 1).status();
    if (way == "digest") return state_->Digest({0}).status();
    if (way == "copy") {
      float value = 0;
      return state_->GetState(0, StateKind::kExpAvg, 0, absl::MakeSpan(&value, 1));
    }
    const TempFolder checkpoint;
    v1::SnapshotOrder order;
    order.set_step(1);
    order.set_folder(checkpoint.path());
    order.set_count(1);
    order.add_chunks(0);
    state_->PreserveSnapshot(order);
    const v1::SnapshotReport report = state_->WriteSnapshot(
        &FileSystem::Real(), [](uint64_t) {}, nullptr);
    EXPECT_FALSE(report.problem().empty());
    return state_->Health();
  }

  uint64_t InFolder() const {
    uint64_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(disk_.folder.path()))
      if (entry.path().extension() == ".chunks") bytes += entry.file_size();
    return bytes;
  }

  JobShape shape_;
  v1::JobSpec spec_;
  ModelTable model_;
  std::map<uint32_t, Chunk> chunks_;
  std::unique_ptr<MemoryBudget> budget_;
  SmallDisk disk_;
  nvme::DiskFaults faults_;
  TaskPool pool_{2};
  JobStateOptions options_;
  std::unique_ptr<JobState> state_;
  std::unique_ptr<Reference> reference_;
};

TEST_F(NvmeStateTest, AStateOfFourTimesTheMemoryIsTrainedWithinIt) {
  constexpr int64_t kElements = 1 << 16;
  const uint64_t memory = NvmeMemoryBytes(kElements);
  ASSERT_NO_FATAL_FAILURE(Make({.hidden = 512, .vocab = 11500}, kElements, memory));
  uint64_t state = 0;
  for (const auto& [id, chunk] : chunks_)
    state += zeroshard::BytesOf(chunk, DType::kBF16, false).Total();
  EXPECT_GE(state, 4 * memory);
  EXPECT_EQ(budget_->used(), memory);
  EXPECT_EQ(state_->usage().nvme_bytes(), InFolder());
  ASSERT_NO_FATAL_FAILURE(Step(1));
  EXPECT_EQ(budget_->used(), memory);
  EXPECT_TRUE(StateEquals(state_.get(), *reference_, chunks_));
  state_ = nullptr;
  EXPECT_EQ(budget_->used(), 0u);
  EXPECT_EQ(InFolder(), 0u);
}

TEST_F(NvmeStateTest, AnErrorOfTheDiskIsSaidWhereverItIsMetAndTheStateIsOfNoUse) {
  for (const char* way : {"step", "pull", "digest", "copy", "snapshot"}) {
    SCOPED_TRACE(way);
    ASSERT_NO_FATAL_FAILURE(Make({}, 4096, uint64_t{1} << 30));
    ASSERT_NO_FATAL_FAILURE(Step(1));
    const absl::Status status = Meet(way, nvme::Answer(-EIO));
    EXPECT_TRUE(IsOfTheState(status)) << status;
    EXPECT_EQ(state_->Health(), status);
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr(strerror(EIO)), HasSubstr(disk_.folder.path()),
                               HasSubstr(" bytes at ")));
    faults_.Set({});
    state_ = nullptr;
    EXPECT_EQ(InFolder(), 0u);
  }
}

TEST_F(NvmeStateTest, GradientsThatTheDiskDoesNotTakeFailThePushOrTheStep) {
  ASSERT_NO_FATAL_FAILURE(Make({}, 4096, uint64_t{1} << 30));
  ASSERT_NO_FATAL_FAILURE(Step(1));
  faults_.Set([](const auto& attempt) {
    return attempt.write ? nvme::Answer(-EIO) : nvme::DiskHook::Verdict{};
  });
  absl::Status status = Stage(2);
  faults_.Set({});
  if (status.ok()) status = Apply(2);
  EXPECT_TRUE(IsOfTheState(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(strerror(EIO)));
  EXPECT_FALSE(state_->Health().ok());
}

TEST_F(NvmeStateTest, ADiskThatDoesNotAnswerIsAnErrorInTimeWhereverItIsMet) {
  for (const char* way : {"step", "pull", "snapshot"}) {
    SCOPED_TRACE(way);
    ASSERT_NO_FATAL_FAILURE(Make({}, 4096, uint64_t{1} << 30));
    ASSERT_NO_FATAL_FAILURE(Step(1));
    nvme::DiskHook::Verdict hang;
    hang.what = nvme::DiskHook::Verdict::kHang;
    const absl::Status status = Meet(way, hang);
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(disk_.folder.path()));
    EXPECT_FALSE(state_->Health().ok());
    faults_.Set({});
    state_ = nullptr;
    EXPECT_EQ(InFolder(), 0u);
  }
}

TEST_F(NvmeStateTest, WhatTheCoordinatorCountsIsWhatTheFileTakes) {
  for (const JobShape& shape : {JobShape{}, JobShape{.bf16 = false}, JobShape{.sgd = true},
                                JobShape{.trainable = {"wpe.weight", "blocks.*"}},
                                JobShape{.bf16 = false, .trainable = {"wpe.weight", "blocks.*"}}}) {
    state_ = nullptr;
    ASSERT_NO_FATAL_FAILURE(Make(shape, 4096, uint64_t{1} << 30));
    EXPECT_EQ(InFolder(), DiskBytesOf(options_));
    EXPECT_EQ(disk_.budget.used(), DiskBytesOf(options_));
    EXPECT_EQ(budget_->used(), zeroshard::store::BytesOf(options_));
  }
}

TEST_F(NvmeStateTest, AChangeOfChunksMovesThoseThatStayToANewFile) {
  ASSERT_NO_FATAL_FAILURE(Make({}, 4096, uint64_t{1} << 30));
  ASSERT_NO_FATAL_FAILURE(Step(1));
  std::map<uint32_t, Chunk> fewer = chunks_;
  fewer.erase(0);
  const uint32_t last = chunks_.rbegin()->first;
  std::vector<uint32_t> keep;
  for (const auto& [id, chunk] : fewer)
    if (id != last) keep.push_back(id);
  ASSERT_TRUE(state_->Change(fewer, keep).ok());
  JobStateOptions options = options_;
  options.chunks = fewer;
  EXPECT_EQ(InFolder(), DiskBytesOf(options));
  EXPECT_EQ(disk_.budget.used(), DiskBytesOf(options));
  EXPECT_TRUE(absl::IsInvalidArgument(state_->Parameters(0, 0, 1).status()));
  // Nothing was written of the one that is new.
  std::vector<float> values(64);
  EXPECT_FALSE(state_->GetState(last, StateKind::kMaster, 0, absl::MakeSpan(values)).ok());
  fewer.erase(last);
  EXPECT_TRUE(StateEquals(state_.get(), *reference_, fewer));
}

TEST_F(NvmeStateTest, AChangeThatDoesNotFitBesideTheOldFileIsRefusedAndLeavesWhatStays) {
  ASSERT_NO_FATAL_FAILURE(Make({}, 4096, uint64_t{1} << 30));
  ASSERT_TRUE(disk_.budget.Take(disk_.budget.limit() - disk_.budget.used(), "the test").ok());
  std::map<uint32_t, Chunk> kept = chunks_;
  kept.erase(0);
  std::vector<uint32_t> keep;
  for (const auto& [id, chunk] : kept) keep.push_back(id);
  const absl::Status status = state_->Change(chunks_, keep);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("--nvme-limit"));
  EXPECT_TRUE(StateEquals(state_.get(), *reference_, kept));
}

// Reads once as many threads read as there are buffers for everything, or two seconds later.
class SlowSource : public ParameterSource {
 public:
  SlowSource(const ParameterSource* from, JobState* state) : from_(*from), state_(*state) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      all_ = all_ || ++reading_ >= kNvmeOtherBuffers;
      changed_.notify_all();
      changed_.wait_for(lock, std::chrono::seconds(2), [this] { return all_; });
      if (!std::exchange(asked_, true)) {
        lock.unlock();
        float value = 0;
        status_ = state_.GetState(0, StateKind::kExpAvg, 0, absl::MakeSpan(&value, 1));
      }
    }
    return from_.Read(tensor, begin, end, out);
  }
  absl::Status status_of_another() const { return status_; }
  bool all() const { return all_; }

 private:
  const ParameterSource& from_;
  JobState& state_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int reading_ = 0;
  mutable bool all_ = false, asked_ = false;
  mutable absl::Status status_;
};

TEST_F(NvmeStateTest, ASlowSourceHoldsNoBuffersOfTheDisk) {
  TaskPool pool(kNvmeOtherBuffers);
  ASSERT_NO_FATAL_FAILURE(Make({}, 4096, uint64_t{1} << 30));
  state_ = nullptr;
  options_.pool = &pool;
  auto state = JobState::Create(options_);
  ASSERT_TRUE(state.ok()) << state.status();
  std::vector<uint32_t> all;
  for (const auto& [id, chunk] : chunks_) all.push_back(id);
  ASSERT_GE(all.size(), static_cast<size_t>(kNvmeOtherBuffers));
  const FreshWeights fresh(shape_.seed);
  const SlowSource slow(&fresh, state->get());
  EXPECT_TRUE((*state)->Fill({&slow, nullptr, nullptr}, all, nullptr, nullptr).ok());
  EXPECT_TRUE(slow.all());
  // Nothing is there yet: it was looked for at once.
  EXPECT_TRUE(absl::IsFailedPrecondition(slow.status_of_another())) << slow.status_of_another();
  EXPECT_TRUE(StateEquals(state->get(), *reference_, chunks_));
  *state = nullptr;
}

// They share the section through which state passes.
TEST_F(NvmeStateTest, DigestsAtOnceAreThoseOfOneAfterTheOther) {
  Make({.bf16 = false}, 4096, kPlenty);
  std::vector<uint32_t> halves[2];
  for (const auto& [id, chunk] : chunks_) halves[id % 2].push_back(id);
  WeightDigest wanted[2];
  for (int half = 0; half < 2; ++half) {
    const auto digest = state_->Digest(halves[half]);
    ASSERT_TRUE(digest.ok()) << digest.status();
    wanted[half] = *digest;
  }
  std::future<int> wrong[2];
  for (int half = 0; half < 2; ++half) {
    wrong[half] = std::async(std::launch::async, [&, half] {
      int count = 0;
      for (int i = 0; i < 50; ++i) {
        const auto digest = state_->Digest(halves[half]);
        count += digest.ok() && digest->Hex() == wanted[half].Hex() ? 0 : 1;
      }
      return count;
    });
  }
  EXPECT_EQ(wrong[0].get(), 0);
  EXPECT_EQ(wrong[1].get(), 0);
}

}  // namespace
}  // namespace zeroshard::store
