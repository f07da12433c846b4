#include "shard_store/state/job_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <set>

#include "common/checksum.h"
#include "tests/shard_store/state/state_world.h"

namespace zeroshard::store {
namespace {

using testing::HasSubstr;

struct Case {
  const char* name;
  bool bf16, sgd, frozen;
  int64_t chunk_elements;
  int threads;
  uint32_t hidden, vocab;
  bool stochastic = false;
};

class ApplyTest : public testing::TestWithParam<std::tuple<Case, bool>> {};

TEST_P(ApplyTest, IsBitForBitTheOptimizerOverWholeTensors) {
  const Case& c = std::get<0>(GetParam());
  JobShape shape;
  shape.nvme = std::get<1>(GetParam());
  shape.bf16 = c.bf16;
  shape.sgd = c.sgd;
  shape.stochastic = c.stochastic;
  shape.hidden = c.hidden;
  shape.vocab = c.vocab;
  // wte is frozen beside a trained wpe, the head is frozen whole.
  if (c.frozen) shape.trainable = {"wpe.weight", "blocks.0.mlp.*", "blocks.0.ln_1.*"};
  World world(shape, c.chunk_elements, c.threads);
  EXPECT_TRUE(StateEquals(world.state_.get(), world.reference_, world.chunks_));
  std::set<uint32_t> trained;
  for (const auto& [id, chunk] : world.chunks_)
    if (chunk.trained) trained.insert(id);
  EXPECT_EQ(trained.size() < world.chunks_.size(), c.frozen);
  for (const uint64_t step : {1, 2, 3, 4}) {
    world.Stage(step);
    const auto seen = world.Apply(Decision(step, step == 3));
    EXPECT_EQ(seen.size(), trained.size());
    EXPECT_TRUE(StateEquals(world.state_.get(), world.reference_, world.chunks_))
        << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Of, ApplyTest,
    testing::Combine(
        testing::Values(Case{"Bf16Of64", true, false, false, 64, 3, 64, 100},
                        Case{"Bf16Of64000", true, false, false, 64000, 2, 64, 100},
                        Case{"Bf16OfAMillionInParts", true, false, false, 1 << 20, 4, 256, 5000},
                        Case{"Fp32Of64", false, false, false, 64, 2, 64, 100},
                        Case{"Fp32Of4096", false, false, false, 4096, 3, 64, 101},
                        Case{"Fp32InParts", false, false, false, 1 << 20, 5, 256, 700},
                        Case{"Bf16Frozen", true, false, true, 4096, 2, 64, 101},
                        Case{"Fp32Frozen", false, false, true, 4096, 2, 64, 101},
                        Case{"StochasticOf64000", true, false, false, 64000, 2, 64, 100, true},
                        Case{"StochasticFrozen", true, false, true, 4096, 2, 64, 101, true},
                        Case{"StochasticInParts", true, true, false, 1 << 20, 4, 256, 5000, true},
                        Case{"SgdBf16", true, true, false, 4096, 2, 64, 101},
                        Case{"SgdFp32Frozen", false, true, true, 64, 2, 64, 100}),
        testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param).name) + (std::get<1>(info.param) ? "OnDisk" : "");
    });

// Over both kinds of state.
class EachState : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(In, EachState, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "Disk" : "Memory");
});

TEST_P(EachState, DigestsAreTheChecksumsOfTheMasterWeightsWhateverTheParts) {
  for (const int threads : {1, 16}) {
    World world({.hidden = 256, .vocab = 1200, .nvme = GetParam()}, 1 << 20, threads, true);
    for (const uint64_t step : {1, 2}) {
      world.Stage(step);
      const auto digests = world.Apply(Decision(step, step == 2));
      ASSERT_EQ(digests.size(), world.chunks_.size());
      for (const auto& [id, digest] : digests) {
        const Chunk& chunk = world.chunks_.at(id);
        const auto& master = world.reference_.Values(StateKind::kMaster, chunk.unit);
        EXPECT_EQ(digest, Crc32c(master.data() + chunk.begin,
                                 static_cast<size_t>(chunk.size()) * sizeof(float)));
      }
    }
  }
}

// As a store takes it over from another, chunk by chunk and kind by kind.
void CopyState(const World& from, World* to) {
  for (const auto& [id, chunk] : from.chunks_) {
    for (int k = 0; k < kStateKinds; ++k) {
      const auto kind = static_cast<StateKind>(k);
      const bool kept = kind == StateKind::kMaster ||
                        (chunk.trained && !(from.shape_.sgd && kind == StateKind::kExpAvgSq));
      ASSERT_EQ(to->state_->HasKind(id, kind), kept) << id << " " << NameOf(kind);
      if (!kept) continue;
      std::vector<float> values(static_cast<size_t>(chunk.size()));
      ASSERT_TRUE(from.state_->GetState(id, kind, 0, absl::MakeSpan(values)).ok());
      ASSERT_TRUE(to->state_->SetState(id, kind, 0, values).ok());
    }
    ASSERT_TRUE(to->state_->FinishChunk(id).ok());
  }
}

// A unit's length is a multiple of 64, so no other test has one that vectors do not fill.
TEST_P(EachState, AChunkOfOneElementIsUpdatedAndCopiedAsAnyOther) {
  for (const JobShape& shape :
       {JobShape{.bf16 = true}, JobShape{.bf16 = false}, JobShape{.bf16 = true, .sgd = true}}) {
    JobShape here = shape;
    here.trainable = {"blocks.*"};
    here.nvme = GetParam();
    const int64_t elements = AllButOneOfTheBlock(MakeModel(MakeSpec(here)));
    World from(here, elements, 2, /*digests=*/true), to(here, elements, 2);
    const auto one = std::find_if(from.chunks_.begin(), from.chunks_.end(),
                                  [](const auto& entry) { return entry.second.size() == 1; });
    ASSERT_NE(one, from.chunks_.end());
    ASSERT_TRUE(one->second.trained);
    for (const uint64_t step : {1, 2, 3}) {
      from.Stage(step);
      const auto digests = from.Apply(Decision(step, step == 2));
      EXPECT_TRUE(StateEquals(from.state_.get(), from.reference_, from.chunks_)) << step;
      const float value =
          from.reference_.Values(StateKind::kMaster, 1)[static_cast<size_t>(elements)];
      EXPECT_EQ(digests.at(one->first), Crc32c(&value, sizeof(value)));
    }
    CopyState(from, &to);
    EXPECT_TRUE(StateEquals(to.state_.get(), from.reference_, to.chunks_));
    EXPECT_TRUE(absl::IsInvalidArgument(to.state_->Parameters(one->first, 1, 1).status()));
  }
}

TEST(JobStateTest, PinnedParametersStayWhileTheNextStepIsApplied) {
  for (const bool bf16 : {true, false}) {
    JobShape shape;
    shape.bf16 = bf16;
    shape.trainable = {"wpe.weight", "blocks.*"};
    World world(shape, 4096, 2);
    const uint64_t used = world.budget_.used();
    const Chunk& chunk = world.chunks_.at(1);
    ASSERT_TRUE(chunk.trained);
    const std::vector<char> before = world.reference_.Parameters(chunk);
    auto pinned = world.state_->Parameters(1, 64, 128);
    ASSERT_TRUE(pinned.ok()) << pinned.status();
    const size_t width = bf16 ? 2 : 4;
    const auto wanted = absl::MakeConstSpan(before).subspan(64 * width, 128 * width);
    for (const uint64_t step : {1, 2}) {
      world.Stage(step);
      world.Apply(Decision(step));
      EXPECT_EQ(pinned->bytes, wanted);
      EXPECT_TRUE(StateEquals(world.state_.get(), world.reference_, world.chunks_));
    }
    EXPECT_EQ(world.budget_.used(), used + static_cast<uint64_t>(chunk.size()) * width);
    // They outlive the state.
    world.state_ = nullptr;
    EXPECT_EQ(pinned->bytes, wanted);
    EXPECT_EQ(world.budget_.used(), static_cast<uint64_t>(chunk.size()) * width);
    *pinned = {};
    EXPECT_EQ(world.budget_.used(), 0u);
  }
}

// One thread: an update that waited on it would hold up everything.
TEST(JobStateTest, WithoutMemoryForASecondBufferAnUpdateWaitsUntilReadersLetGoAndHoldsUpNothing) {
  for (const bool bf16 : {true, false}) {
    JobShape shape;
    shape.bf16 = bf16;
    World world(shape, 4096, 1);
    auto pinned = world.state_->Parameters(0, 0, 64);
    auto other = world.state_->Parameters(2, 0, 64);
    ASSERT_TRUE(pinned.ok() && other.ok());
    const uint64_t free = kPlenty - world.budget_.used();
    ASSERT_TRUE(world.budget_.Take(free, "the test").ok());
    world.Stage(1);
    std::mutex mutex;
    std::condition_variable changed;
    std::set<uint32_t> ready;
    bool ended = false;
    absl::Status result;
    world.state_->Apply(
        Decision(1),
        [&](uint32_t chunk, uint32_t) {
          std::lock_guard<std::mutex> lock(mutex);
          ready.insert(chunk);
          changed.notify_all();
        },
        [&](const absl::Status& status) {
          std::lock_guard<std::mutex> lock(mutex);
          result = status;
          ended = true;
          changed.notify_all();
        });
    const auto await = [&](const std::function<bool()>& holds) {
      std::unique_lock<std::mutex> lock(mutex);
      return changed.wait_for(lock, std::chrono::seconds(30), holds);
    };
    // All the other chunks, and whatever else the pool is given.
    ASSERT_TRUE(await([&] { return ready.size() == world.chunks_.size() - 2; }));
    std::promise<void> ran;
    world.pool_.Add([&] { ran.set_value(); });
    ASSERT_EQ(ran.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
    {
      std::lock_guard<std::mutex> lock(mutex);
      EXPECT_FALSE(ended);
      EXPECT_FALSE(ready.contains(0) || ready.contains(2));
    }
    *pinned = {};
    ASSERT_TRUE(await([&] { return ready.contains(0); }));
    // The other while it is still read, in memory that came free.
    world.budget_.Give(free);
    ASSERT_TRUE(await([&] { return ended; }));
    EXPECT_TRUE(result.ok()) << result;
    world.reference_.Step(Decision(1));
    EXPECT_TRUE(StateEquals(world.state_.get(), world.reference_, world.chunks_));
  }
}

TEST(JobStateTest, AReaderThatNeverLetsGoFailsTheStepInTheEndAndSaysWhy) {
  JobShape shape;
  shape.step_seconds = 1;
  World world(shape, 4096, 1);
  const auto pinned = world.state_->Parameters(0, 0, 64);
  ASSERT_TRUE(pinned.ok());
  ASSERT_TRUE(world.budget_.Take(kPlenty - world.budget_.used(), "the test").ok());
  world.Stage(1);
  std::promise<absl::Status> done;
  world.state_->Apply(
      Decision(1), [](uint32_t, uint32_t) {},
      [&](const absl::Status& status) { done.set_value(status); });
  const absl::Status status = done.get_future().get();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("1 s (timeouts.step_seconds) 1 answers"),
                             HasSubstr("chunk 0 of job small"), HasSubstr("hold 1 of its chunks"),
                             HasSubstr("--memory-limit")));
}

TEST(JobStateTest, AJobThatDoesNotFitIsRefusedWithTheNumbersAndLeavesNothing) {
  const v1::JobSpec spec = MakeSpec({});
  const ModelTable model = MakeModel(spec);
  TaskPool pool(1);
  JobStateOptions options;
  options.spec = spec;
  options.model = &model;
  options.chunks = AllChunks(model, 4096);
  options.pool = &pool;
  int64_t elements = 0;
  for (const UnitTable& unit : model.units) elements += unit.length;
  const uint64_t bytes = static_cast<uint64_t>(elements) * (4 + 4 + 4 + 2 + 2);
  EXPECT_EQ(BytesOf(options), bytes);

  MemoryBudget tight(bytes - 1);
  options.budget = &tight;
  const auto refused = JobState::Create(options);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()),
              testing::AllOf(HasSubstr(std::to_string(bytes) + " bytes"),
                             HasSubstr(std::to_string(bytes - 1))));
  EXPECT_EQ(tight.used(), 0u);

  MemoryBudget exact(bytes);
  options.budget = &exact;
  auto first = JobState::Create(options);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(exact.used(), bytes);
  const v1::StoreUsage usage = (*first)->usage();
  EXPECT_EQ(usage.chunks(), options.chunks.size());
  EXPECT_EQ(usage.master_bytes(), static_cast<uint64_t>(elements) * 4);
  EXPECT_EQ(usage.parameter_bytes(), static_cast<uint64_t>(elements) * 2);
  EXPECT_TRUE(absl::IsResourceExhausted(JobState::Create(options).status()));
  first->reset();
  EXPECT_EQ(exact.used(), 0u);
  EXPECT_TRUE(JobState::Create(options).ok());
}

TEST(JobStateTest, AChangeOfChunksKeepsThoseThatStayAndFreesTheOthers) {
  World world({}, 4096, 2);
  world.Stage(1);
  world.Apply(Decision(1));
  std::map<uint32_t, Chunk> fewer = world.chunks_;
  fewer.erase(0);
  const Chunk last = world.chunks_.rbegin()->second;
  const uint32_t last_id = world.chunks_.rbegin()->first;
  std::vector<uint32_t> keep;
  for (const auto& [id, chunk] : fewer)
    if (id != last_id) keep.push_back(id);
  ASSERT_TRUE(world.state_->Change(fewer, keep).ok());
  JobStateOptions options = world.options_;
  options.chunks = fewer;
  EXPECT_EQ(world.budget_.used(), BytesOf(options));
  EXPECT_TRUE(absl::IsInvalidArgument(world.state_->Parameters(0, 0, 1).status()));
  fewer.erase(last_id);
  EXPECT_TRUE(StateEquals(world.state_.get(), world.reference_, fewer));
  // The one that is new has nothing of what was there.
  std::vector<float> values(static_cast<size_t>(last.size()));
  ASSERT_TRUE(world.state_->GetState(last_id, StateKind::kMaster, 0, absl::MakeSpan(values)).ok());
  EXPECT_THAT(values, testing::Each(0.0f));
}

TEST_P(EachState, StateCopiedChunkByChunkIsTheSameState) {
  for (const bool bf16 : {true, false}) {
    JobShape shape;
    shape.bf16 = bf16;
    shape.nvme = GetParam();
    shape.trainable = {"wpe.weight", "blocks.0.mlp.*"};
    World from(shape, 4096, 2);
    from.Stage(1);
    from.Apply(Decision(1));
    World to(shape, 4096, 2);
    CopyState(from, &to);
    EXPECT_TRUE(StateEquals(to.state_.get(), from.reference_, to.chunks_));
  }
}

TEST_P(EachState, WhatIsNotHereOrDoesNotFitIsRefused) {
  JobShape shape;
  shape.nvme = GetParam();
  shape.trainable = {"blocks.*"};
  World world(shape, 4096, 1);
  JobState* state = world.state_.get();
  const uint32_t frozen = 0,
                 trained = static_cast<uint32_t>(ChunkTable::Make(world.model_, 4096).first[1]);
  const std::vector<char> bytes(256);
  const absl::Span<const char> parts[] = {bytes};
  EXPECT_TRUE(state->Stage(trained, 1, 0, 128, parts).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(state->Stage(trained, 1, 0, 127, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(state->Stage(trained, 1, 4096 - 64, 128, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(state->Stage(trained, 1, -1, 128, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(state->Stage(frozen, 1, 0, 128, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(state->Stage(100000, 1, 0, 128, parts)));
  EXPECT_TRUE(absl::IsInvalidArgument(state->Parameters(trained, 0, 4097).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      state->Parameters(trained, 1, std::numeric_limits<int64_t>::max()).status()));
  std::vector<float> values(64);
  EXPECT_TRUE(absl::IsInvalidArgument(state->SetState(frozen, StateKind::kExpAvg, 0, values)));
  EXPECT_TRUE(absl::IsInvalidArgument(
      state->GetState(trained, StateKind::kExpAvg, 4090, absl::MakeSpan(values))));
  EXPECT_TRUE(absl::IsInvalidArgument(state->Digest({100000}).status()));
}

TEST_P(EachState, TheWeightDigestIsThatOfTheWholeUnitsHoweverTheyAreCut) {
  JobShape shape;
  shape.nvme = GetParam();
  shape.trainable = {"wpe.weight", "blocks.*"};
  World world(shape, 64 * 9, 3);
  world.Stage(1);
  world.Apply(Decision(1));
  WeightDigest wanted;
  for (size_t u = 0; u < world.model_.units.size(); ++u)
    wanted.Add(u, 0, world.reference_.Values(StateKind::kMaster, static_cast<int>(u)));
  std::vector<uint32_t> first, rest;
  for (const auto& [id, chunk] : world.chunks_) (id % 3 == 0 ? first : rest).push_back(id);
  const auto a = world.state_->Digest(first), b = world.state_->Digest(rest);
  ASSERT_TRUE(a.ok() && b.ok());
  WeightDigest total = *a;
  total.Combine(*b);
  EXPECT_EQ(total.Hex(), wanted.Hex());
}

// A source that fails at one tensor.
class BrokenSource : public FreshWeights {
 public:
  using FreshWeights::FreshWeights;
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    if (tensor.name == "blocks.0.mlp.fc.weight")
      return absl::DataLossError("file f: " + tensor.name);
    return FreshWeights::Read(tensor, begin, end, out);
  }
};

TEST_P(EachState, FillingEndsWithTheSourcesErrorOrWhenItIsStopped) {
  World world({.nvme = GetParam()}, 4096, 2);
  std::vector<uint32_t> all;
  for (const auto& [id, chunk] : world.chunks_) all.push_back(id);
  const BrokenSource broken(1);
  const absl::Status status =
      world.state_->Fill({&broken, nullptr, nullptr}, all, nullptr, nullptr);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("blocks.0.mlp.fc.weight"));
  std::atomic<bool> stop = true;
  const FreshWeights fresh(1);
  EXPECT_TRUE(
      absl::IsCancelled(world.state_->Fill({&fresh, nullptr, nullptr}, all, nullptr, &stop)));
}

TEST(TaskPoolTest, RunsTasksInOrderAndAllOfThemBeforeItEnds) {
  std::vector<int> order;
  {
    TaskPool pool(1);
    for (int i = 0; i < 100; ++i) pool.Add([&order, i] { order.push_back(i); }, i % 3 - 1);
  }
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

}  // namespace
}  // namespace zeroshard::store
