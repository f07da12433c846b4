// What a job holds and sends equals what the planner predicts, to the byte.
#include <cmath>

#include "tests/worker/train/cluster_harness.h"

namespace zeroshard {
namespace {

struct Case {
  const char* model;
  int world;
  int stage;
  std::vector<std::string> overrides;
};

void ExpectPlanHolds(const Case& c) {
  std::vector<std::string> overrides = c.overrides;
  overrides.push_back(absl::StrFormat("zero_optimization.stage=%d", c.stage));
  overrides.push_back(absl::StrFormat("resources.workers=%d", c.world));
  const v1::JobSpec spec = MakeSpec(c.model, overrides);
  const int64_t sequence = spec.model().sequence_length();
  const MemoryDataset data(ChainTokens(sequence * 40 + 1, 61), sequence);
  const auto results = TrainJob(spec, {.world = c.world}, data);
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok()) << model.status();
  const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, c.world));
  for (int rank = 0; rank < c.world; ++rank) {
    SCOPED_TRACE(absl::StrFormat("stage %d world %d rank %d %s", c.stage, c.world, rank,
                                 c.overrides.empty() ? "" : c.overrides[0]));
    const RankResult& result = results[static_cast<size_t>(rank)];
    ASSERT_TRUE(result.status.ok()) << result.status;
    const RankPlan plan = PlanRank(*model, policy, rank);
    const auto held = [&](MemoryKind kind) {
      return static_cast<uint64_t>(result.memory[static_cast<int>(kind)]);
    };
    EXPECT_EQ(held(MemoryKind::kParameters), plan.parameters);
    EXPECT_EQ(held(MemoryKind::kGradients), plan.gradients);
    EXPECT_EQ(held(MemoryKind::kOptimizer), plan.optimizer);
    EXPECT_EQ(held(MemoryKind::kActivations), plan.activations);
    // What the rank itself counts of a step: nothing travels beside the first two's.
    if (spec.steps() >= 2) {
      EXPECT_GT(result.last_step.step, 0u);
      EXPECT_EQ(result.last_step.sent, plan.StepBytes());
      EXPECT_EQ(result.last_step.pushed, 0u);
      EXPECT_EQ(result.last_step.pulled, 0u);
    }
    for (int op = 0; op < kCollectiveOps; ++op) {
      for (int phase = 0; phase < kPhases; ++phase) {
        EXPECT_EQ(result.traffic[op][phase], plan.step[op][phase] * spec.steps())
            << NameOf(static_cast<CollectiveOp>(op)) << " " << NameOf(static_cast<Phase>(phase));
      }
    }
  }
}

// A vocabulary large enough that rows travel as rows.
const char kManyTokens[] = "model.vocab_size=997";

TEST(PlanTest, MemoryAndTrafficOfARunEqualThePlan) {
  for (const char* model : {TinyGpt2(), TinyLlama()})
    for (int world : {1, 2, 3})
      for (int stage : {0, 1, 2, 3})
        for (const char* more : {"steps=2", kManyTokens, "bf16.enabled=true", "deterministic=true",
                                 "train_batch_size=4"})
          ExpectPlanHolds({model, world, stage, {more}});
}

TEST(PlanTest, KeptAndResidentUnitsSaveTheTrafficThatThePlanSaysTheySave) {
  for (const char* more :
       {"zero_optimization.stage3_max_reuse_distance=1000000000",
        "zero_optimization.stage3_param_persistence_threshold=4000",
        "zero_optimization.stage3_max_live_parameters=15000", "activation_checkpointing=true"})
    ExpectPlanHolds(
        {TinyGpt2(), 3, 3, {more, "zero_optimization.stage3_max_reuse_distance=30000"}});
}

TEST(PlanTest, FrozenTensorsCostWhatThePlanSays) {
  for (const char* trainable :
       {"model.trainable=['wpe.weight', 'blocks.1.*']", "model.trainable=['wte.weight']",
        "model.trainable=['blocks.*.mlp.*']"})
    for (const char* more : {"model.vocab_size=61", kManyTokens})
      for (int stage : {0, 1, 2, 3})
        for (const char* batch : {"train_batch_size=4", "train_batch_size=6"})
          ExpectPlanHolds({TinyGpt2(), 2, stage, {trainable, more, batch, "steps=2"}});
}

// Four ranks, and shards that are rounded up to 64: some own nothing of the small units.
TEST(PlanTest, ARankThatOwnsNothingIsPlannedAsItIs) {
  for (int stage : {0, 1, 2, 3})
    ExpectPlanHolds({TinyGpt2(), 4, stage, {"model.hidden_size=16", "model.layers=1"}});
}

// The table of the ZeRO stages (section 5) for a model whose layout needs no padding: Llama,
// untied, hidden 64, every tensor and every unit a multiple of 64 * 4 ranks.
TEST(PlanTest, TrafficAndStateAreTheTableOfTheStages) {
  const char* text = R"(
name: table
model: {architecture: llama, hidden_size: 256, layers: 2, heads: 4, intermediate_size: 512,
        sequence_length: 64, vocab_size: 256}
data: {train: [unused], tokenizer: tokens}
resources: {workers: 4}
train_batch_size: 24
train_micro_batch_size_per_gpu: 2
steps: 1
seed: 1
bf16: {enabled: true}
zero_optimization: {stage: 0, stage3_param_persistence_threshold: 0, stage3_max_reuse_distance: 0}
)";
  const int n = 4;
  for (int rounds : {1, 3}) {
    for (int stage : {0, 1, 2, 3}) {
      const v1::JobSpec spec =
          MakeSpec(text, {absl::StrFormat("zero_optimization.stage=%d", stage),
                          absl::StrFormat("train_batch_size=%d", 2 * n * rounds)});
      const auto model = MakeModelTable(spec.model());
      ASSERT_TRUE(model.ok());
      const double psi = static_cast<double>(model->ParameterCount());
      const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, n));
      const RankPlan plan = PlanRank(*model, policy, 0);
      const double gradient = rounds == 1 ? 2 : 4;
      const double share = stage >= 1 ? 1.0 / n : 1;
      EXPECT_EQ(plan.optimizer, 12 * psi * share);
      EXPECT_EQ(plan.gradients, gradient * psi * (stage >= 2 ? 1.0 / n : 1));
      EXPECT_EQ(plan.parameters, 2 * psi * (stage >= 3 ? 1.0 / n : 1));
      const double units[] = {2.0, 2.0, rounds + 1.0, 3.0 * rounds};
      // The embedding is not gathered for its backward and the head serves both with one gather, so
      // stage 3 saves one all-gather of each a micro-batch.
      double elements = units[stage] * psi;
      if (stage == 3) {
        const double once = static_cast<double>(model->units.front().length) +
                            static_cast<double>(model->units.back().length);
        elements -= once * rounds;
      }
      const double totals = static_cast<double>(StatsBytes(rounds)) * (n - 1);
      EXPECT_EQ(static_cast<double>(plan.StepBytes()), elements * 2 * (n - 1) / n + totals)
          << "stage " << stage << " rounds " << rounds;
    }
  }
}

}  // namespace
}  // namespace zeroshard
