// A small job's state with what it lives on and what it must be equal to.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/shard_store/state/small_job.h"

namespace zeroshard::store {

// A state, its pool and its reference.
class World {
 public:
  World(const JobShape& shape, int64_t chunk_elements, int threads, bool digests = false,
        uint64_t limit = kPlenty)
      : shape_(shape),
        spec_(MakeSpec(shape)),
        model_(MakeModel(spec_)),
        chunks_(AllChunks(model_, chunk_elements)),
        budget_(limit),
        pool_(threads),
        reference_(model_, shape) {
    options_.spec = spec_;
    options_.model = &model_;
    options_.chunks = chunks_;
    options_.digests = digests;
    options_.budget = &budget_;
    options_.writing = &writing_;
    options_.pool = &pool_;
    if (shape.nvme) options_.nvme = disk_.Options();
    auto state = JobState::Create(options_);
    EXPECT_TRUE(state.ok()) << state.status();
    state_ = *std::move(state);
    const FreshWeights fresh(shape.seed);
    std::vector<uint32_t> all;
    for (const auto& [id, chunk] : chunks_) all.push_back(id);
    EXPECT_TRUE(state_->Fill({&fresh, nullptr, nullptr}, all, nullptr, nullptr).ok());
  }

  void Stage(uint64_t step) {
    const int64_t width = shape_.bf16 ? 2 : 4;
    for (size_t u = 0; u < model_.units.size(); ++u) {
      const std::vector<char> gradient = GradientOf(model_, u, step, shape_.bf16);
      for (const auto& [id, chunk] : chunks_) {
        if (!chunk.trained || static_cast<size_t>(chunk.unit) != u) continue;
        // In two runs, the later first, and the first of those in two pieces.
        const char* at = gradient.data() + chunk.begin * width;
        const int64_t half = chunk.size() / 3;
        const auto part = [&](int64_t begin, int64_t end) {
          return absl::MakeConstSpan(at + begin * width,
                                     static_cast<size_t>((end - begin) * width));
        };
        const absl::Span<const char> late[] = {part(half, chunk.size())};
        const absl::Span<const char> early[] = {part(0, half / 2), part(half / 2, half)};
        EXPECT_TRUE(state_->Stage(id, step, half, chunk.size() - half, late).ok());
        if (half > 0) {
          EXPECT_TRUE(state_->Stage(id, step, 0, half, early).ok());
        }
      }
    }
  }

  // Returns the digests by chunk.
  std::map<uint32_t, uint32_t> Apply(const v1::StepDecision& decision) {
    std::mutex mutex;
    std::map<uint32_t, uint32_t> digests;
    std::promise<absl::Status> done;
    state_->Apply(
        decision,
        [&](uint32_t chunk, uint32_t digest) {
          std::lock_guard<std::mutex> lock(mutex);
          EXPECT_TRUE(digests.emplace(chunk, digest).second) << "chunk " << chunk << " twice";
        },
        [&](const absl::Status& status) { done.set_value(status); });
    const absl::Status status = done.get_future().get();
    EXPECT_TRUE(status.ok()) << status;
    reference_.Step(decision);
    return digests;
  }

  // Begins a step whose gradients are staged; returns at once.
  std::future<absl::Status> Begin(const v1::StepDecision& decision) {
    applied_ = 0;
    auto done = std::make_shared<std::promise<absl::Status>>();
    state_->Apply(
        decision,
        [this](uint32_t, uint32_t) {
          std::lock_guard<std::mutex> lock(mutex_);
          ++applied_;
          changed_.notify_all();
        },
        [done](const absl::Status& status) { done->set_value(status); });
    reference_.Step(decision);
    return done->get_future();
  }
  void WaitForApplied(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, std::chrono::seconds(30), [&] {
      return applied_ >= count;
    })) << applied_;
  }

  const JobShape shape_;
  const v1::JobSpec spec_;
  const ModelTable model_;
  const std::map<uint32_t, Chunk> chunks_;
  MemoryBudget budget_;
  MemoryBudget writing_{uint64_t{1} << 30};  // what writes snapshots has its own, as in a store
  SmallDisk disk_;
  TaskPool pool_;
  Reference reference_;
  JobStateOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t applied_ = 0;
  std::unique_ptr<JobState> state_;
};

}  // namespace zeroshard::store
