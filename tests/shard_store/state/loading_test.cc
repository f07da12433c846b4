// What takes long beside the steps of other jobs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <mutex>

#include "tests/shard_store/state/state_world.h"

namespace zeroshard::store {
namespace {

// Values that are held up until Open.
class GatedSource : public ParameterSource {
 public:
  explicit GatedSource(uint64_t seed) : fresh_(seed) {}
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    std::unique_lock<std::mutex> lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    lock.unlock();
    return fresh_.Read(tensor, begin, end, out);
  }
  bool AwaitReaders(int count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30), [&] { return waiting_ >= count; });
  }
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  const FreshWeights fresh_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable int waiting_ = 0;
  bool open_ = false;
};

class LoadingTest : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(In, LoadingTest, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

TEST_P(LoadingTest, AJobWhoseFilesDoNotAnswerHoldsUpNoStepOfAnother) {
  for (const int threads : {1, 3}) {
    World world({.nvme = GetParam()}, 4096, threads);
    JobStateOptions options = world.options_;
    if (GetParam()) options.nvme.run_id = "run-other";
    auto other = JobState::Create(options);
    ASSERT_TRUE(other.ok()) << other.status();
    GatedSource source(world.shape_.seed);
    std::vector<uint32_t> ids;
    for (const auto& [id, chunk] : options.chunks) ids.push_back(id);
    auto filled = std::async(std::launch::async, [&] {
      return (*other)->Fill({&source, nullptr, nullptr}, ids, nullptr, nullptr);
    });
    EXPECT_TRUE(source.AwaitReaders(threads)) << "it loads on as many threads as there are";
    for (const uint64_t step : {1, 2}) {
      world.Stage(step);
      std::future<absl::Status> applied = world.Begin(Decision(step));
      const bool done = applied.wait_for(std::chrono::seconds(30)) == std::future_status::ready;
      EXPECT_TRUE(done) << "step " << step << " waits for the other job's files";
      if (!done) source.Open();
      EXPECT_TRUE(applied.get().ok());
    }
    source.Open();
    EXPECT_TRUE(filled.get().ok());
    EXPECT_TRUE(StateEquals(world.state_.get(), world.reference_, world.chunks_));
    EXPECT_TRUE(StateEquals(other->get(), Reference(world.model_, world.shape_), world.chunks_));
  }
}

TEST_P(LoadingTest, AnErrorOrAStopEndsItAndAnExceptionIsAnError) {
  World world({.nvme = GetParam()}, 4096, 2);
  class Bad : public ParameterSource {
   public:
    explicit Bad(bool throws) : throws_(throws) {}
    absl::Status Read(const ParameterInfo&, int64_t, int64_t, float*) const override {
      if (throws_) throw std::bad_alloc();
      return absl::DataLossError("a file that is damaged");
    }

   private:
    const bool throws_;
  };
  std::vector<uint32_t> ids;
  for (const auto& [id, chunk] : world.chunks_) ids.push_back(id);
  const Bad damaged(false), throws(true);
  EXPECT_TRUE(
      absl::IsDataLoss(world.state_->Fill({&damaged, nullptr, nullptr}, ids, nullptr, nullptr)));
  EXPECT_TRUE(absl::IsResourceExhausted(
      world.state_->Fill({&throws, nullptr, nullptr}, ids, nullptr, nullptr)));
  const FreshWeights fresh(1);
  const std::atomic<bool> stop = true;
  int told = 0;
  EXPECT_TRUE(absl::IsCancelled(world.state_->Fill(
      {&fresh, nullptr, nullptr}, ids, [&](uint32_t) { ++told; }, &stop)));
  EXPECT_EQ(told, 0);
}

}  // namespace
}  // namespace zeroshard::store
