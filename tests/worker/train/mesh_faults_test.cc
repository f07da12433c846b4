// Ranks of a mesh that are gone, numbers that are not, what a mesh counts and what it refuses.
#include <atomic>
#include <limits>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/mesh_job.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const MeshShape kCube{.pipeline = 2, .data = 2, .tensor = 2};

v1::JobSpec Spec(const std::string& model, const std::vector<std::string>& overrides) {
  return MakeSpec(MeshJob(model), overrides);
}

// In every position, in forward or backward: nobody waits for a deadline (a minute in the harness).
TEST(MeshFaultsTest, ARankThatIsGoneEndsTheWaitsOfAll) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec spec = Spec("gpt2", {"zero_optimization.stage=3", "steps=3", "model.layers=2"});
  for (int gone = 0; gone < kCube.Ranks(); ++gone) {
    const StepPhase phase = gone % 3 == 0 ? StepPhase::kForward : StepPhase::kBackward;
    MeshRun run{.shape = kCube};
    run.dies = [&](int rank, uint64_t step, StepPhase now, const std::string&) {
      return rank == gone && step == 2 && now == phase;
    };
    const absl::Time start = absl::Now();
    const std::vector<RankResult> results = TrainMesh(spec, run, data);
    EXPECT_LT(absl::Now() - start, absl::Seconds(40));
    for (size_t rank = 0; rank < results.size(); ++rank) {
      EXPECT_FALSE(results[rank].status.ok())
          << "rank " << rank << " while " << gone << " was gone";
      EXPECT_EQ(results[rank].records.size(), 1u);
    }
  }
}

// While one rank hangs, those that need something of it say that they wait, also in the middle of a
// forward or backward: who is to blame is told by that.
TEST(MeshFaultsTest, WhoNeedsARankThatHangsSaysThatItWaits) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec spec = Spec("gpt2", {"zero_optimization.stage=1", "steps=2", "model.layers=2"});
  for (const MeshShape& shape : {MeshShape{.pipeline = 2}, MeshShape{.tensor = 2}}) {
    std::atomic<bool> waits[2] = {false, false}, seen{false}, hung{false};
    MeshRun run{.shape = shape};
    run.on_wait = [&](int rank, bool now) { waits[rank] = now; };
    run.dies = [&](int rank, uint64_t step, StepPhase phase, const std::string&) {
      if (rank != 0 || step != 2 || phase != StepPhase::kForward || hung.exchange(true))
        return false;
      EXPECT_FALSE(waits[0]);
      for (int i = 0; i < 3000 && !waits[1]; ++i) absl::SleepFor(absl::Milliseconds(10));
      seen = waits[1].load();
      return false;
    };
    for (const RankResult& result : TrainMesh(spec, run, data))
      EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_TRUE(seen);
    EXPECT_FALSE(waits[0]);
    EXPECT_FALSE(waits[1]);
  }
}

// A NaN in the head's norm: every rank names the loss, the first of the last stage's ranks and its
// samples.
TEST(MeshFaultsTest, ANanEndsTheJobWithOneMessageOnAllRanks) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec spec = Spec("llama", {"zero_optimization.stage=2"});
  MeshRun run{.shape = kCube};
  run.prepare = [](int, Trainer* trainer) {
    std::vector<float> values(64, 1.0f);
    values[3] = std::numeric_limits<float>::quiet_NaN();
    return trainer->SetTensor("norm_f.weight", values);
  };
  const std::vector<RankResult> results = TrainMesh(spec, run, data);
  for (const RankResult& result : results) {
    EXPECT_TRUE(IsNonFinite(result.status)) << result.status;
    EXPECT_EQ(result.status.message(), results[0].status.message());
    EXPECT_THAT(std::string(result.status.message()),
                AllOf(HasSubstr("step 1: non-finite loss"), HasSubstr("on rank 4 in micro-batch 0"),
                      HasSubstr("samples 0 to 1")));
  }
}

// One row of one tensor rank's part of a matrix: the gradient is not finite, and all know it.
TEST(MeshFaultsTest, ANanOfOneTensorRankIsKnownToAll) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec spec = Spec("gpt2", {"zero_optimization.stage=1"});
  MeshRun run{.shape = {.data = 2, .tensor = 4}};
  run.prepare = [](int, Trainer* trainer) {
    std::vector<float> values(256, 0.0f);
    values[200] = std::numeric_limits<float>::infinity();
    return trainer->SetTensor("blocks.3.mlp.fc.bias", values);
  };
  for (const RankResult& result : TrainMesh(spec, run, data)) {
    EXPECT_TRUE(IsNonFinite(result.status)) << result.status;
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 1: non-finite"));
  }
}

TEST(MeshFaultsTest, AnOverflowIsSkippedOnAllRanks) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec spec =
      Spec("gpt2", {"fp16={enabled: true, initial_scale_power: 20, hysteresis: 1}",
                    "zero_optimization.stage=2", "steps=8", "model.layers=2"});
  const RankResult alone = TrainJob(spec, {.world = 1}, data)[0];
  ASSERT_TRUE(alone.status.ok()) << alone.status;
  EXPECT_TRUE(alone.records.front().skipped()) << "this scale overflows nowhere";
  const std::vector<RankResult> results = TrainMesh(spec, {.shape = kCube}, data);
  for (const RankResult& result : results) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_TRUE(result.records.front().skipped());
    EXPECT_FALSE(result.records.back().skipped()) << "the scale does not fall";
    for (size_t i = 0; i < result.records.size(); ++i) {
      EXPECT_EQ(result.records[i].skipped(), results[0].records[i].skipped()) << i;
      EXPECT_EQ(result.records[i].loss_scale(), results[0].records[i].loss_scale()) << i;
    }
  }
}

// Over all ranks a token counts once; what a rank sends in a step is what its lines counted.
TEST(MeshFaultsTest, TokensAndBytesAreCountedOnce) {
  const MemoryDataset data = MeshData();
  for (const MeshShape& shape : {kCube, MeshShape{.data = 2, .tensor = 4}}) {
    const v1::JobSpec spec = Spec("llama", {"zero_optimization.stage=2"});
    uint64_t tokens = 0, wanted = 0;
    const std::vector<RankResult> results = TrainMesh(spec, {.shape = shape}, data);
    for (const RankResult& result : results) {
      ASSERT_TRUE(result.status.ok()) << result.status;
      tokens += result.tokens;
      uint64_t sent = 0;
      for (const auto& op : result.traffic)
        for (const uint64_t bytes : op) sent += bytes;
      EXPECT_EQ(result.last_step.sent * spec.steps(), sent);
    }
    for (const v1::StepRecord& record : results[0].records) wanted += record.tokens();
    EXPECT_EQ(tokens, wanted);
    EXPECT_EQ(wanted, 2u * 6 * 12);
  }
}

// With one micro-batch every stage waits while the others work, however they were cut.
TEST(MeshFaultsTest, IdleSharesOfOneMicroBatchAreThoseOfArithmetic) {
  const MemoryDataset data = MeshData();
  const v1::JobSpec spec = Spec("gpt2", {"train_batch_size=2"});
  for (const int p : {1, 2, 4}) {
    const std::vector<RankResult> results =
        TrainMesh(spec, {.shape = {.pipeline = p, .tensor = 2}}, data);
    for (const RankResult& result : results) {
      ASSERT_TRUE(result.status.ok()) << result.status;
      EXPECT_DOUBLE_EQ(result.bubble.predicted, (p - 1.0) / p);
      EXPECT_NEAR(result.bubble.counted, (p - 1.0) / p, 1e-12);
      uint64_t all = 0;
      for (const uint64_t phase : result.phases) all += phase;
      EXPECT_EQ(result.stage_wait > 0, p > 1);
      EXPECT_LE(result.stage_wait, result.phases[static_cast<int>(StepPhase::kCommunication)]);
      EXPECT_LT(result.stage_wait, all);
    }
  }
}

absl::Status StatusOf(const std::vector<std::string>& overrides, const MeshRun& run) {
  const MemoryDataset data = MeshData();
  return TrainMesh(Spec("llama", overrides), run, data)[0].status;
}

TEST(MeshFaultsTest, WhatDoesNotFitIsRefusedWithTheNumbers) {
  const auto expect = [](const absl::Status& status, const std::vector<std::string>& texts) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& text : texts)
      EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  expect(StatusOf({}, {.shape = {.tensor = 3}}), {"8 heads", "3 tensor ranks", "parallel.tensor"});
  expect(StatusOf({"model.heads=6", "model.kv_heads=3", "model.hidden_size=96"},
                  {.shape = {.tensor = 2}}),
         {"3 key and value heads", "2 tensor ranks"});
  expect(StatusOf({"model.layers=1"}, {.shape = {.pipeline = 4, .tensor = 2}}),
         {"parallel.pipeline", "3 units"});
  expect(StatusOf({"sample={prompts: [unused], interval_steps: 1}", "data.tokenizer=bytes",
                   "model.vocab_size=256"},
                  {.shape = {.tensor = 2}}),
         {"sample.prompts", "parallel.tensor 2", "`zeroshard generate`"});
}

}  // namespace
}  // namespace zeroshard
