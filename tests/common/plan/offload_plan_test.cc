// What an offloaded job's ranks hold, push and pull, counted here unit by unit.
#include <algorithm>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/chunk_table.h"
#include "common/plan/planner.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

constexpr uint64_t kC = 64, kV = 300, kT = 16, kLayers = 2;
constexpr uint64_t kEmbedding = kV * kC + kT * kC;
constexpr uint64_t kBlock = 12 * kC * kC + 13 * kC;
constexpr uint64_t kHead = 2 * kC;  // tied
const std::vector<uint64_t> kUnits = {kEmbedding, kBlock, kBlock, kHead};

v1::JobSpec Spec(uint32_t stage, bool bf16, bool parameters_too, int workers) {
  v1::JobSpec spec;
  spec.mutable_model()->set_architecture("gpt2");
  spec.mutable_model()->set_hidden_size(kC);
  spec.mutable_model()->set_layers(kLayers);
  spec.mutable_model()->set_heads(2);
  spec.mutable_model()->set_sequence_length(kT);
  spec.mutable_model()->set_vocab_size(kV);
  spec.mutable_resources()->set_workers(static_cast<uint32_t>(workers));
  spec.set_train_micro_batch_size_per_gpu(1);
  spec.set_train_batch_size(static_cast<uint64_t>(workers));
  spec.mutable_bf16()->set_enabled(bf16);
  v1::ZeroSpec* zero = spec.mutable_zero_optimization();
  zero->set_stage(stage);
  zero->set_stage3_param_persistence_threshold(0);
  zero->set_stage3_max_reuse_distance(0);
  zero->mutable_offload_optimizer()->set_device("cpu");
  if (parameters_too) zero->mutable_offload_param()->set_device("cpu");
  spec.mutable_store()->set_replicas(1);
  return spec;
}

struct Planned {
  ModelTable model;
  ZeroPolicy policy;
  RankPlan rank(int r) const { return PlanRank(model, policy, r); }
};

Planned PlanOf(const v1::JobSpec& spec) {
  Planned planned;
  planned.model = *MakeModelTable(spec.model());
  planned.policy = MakeZeroPolicy(
      planned.model, MakeZeroOptions(spec, static_cast<int>(spec.resources().workers())));
  return planned;
}

uint64_t Shard(uint64_t length, int world) {
  const uint64_t step = 64 * static_cast<uint64_t>(world);
  return (length + step - 1) / step * 64;
}
uint64_t OwnedOf(uint64_t length, int world, int rank) {
  const uint64_t shard = Shard(length, world);
  const uint64_t begin = std::min(length, shard * static_cast<uint64_t>(rank));
  return std::min(length, begin + shard) - begin;
}

TEST(OffloadPlan, ARankKeepsNoOptimizerStateAndWritesNoCheckpoint) {
  for (const bool bf16 : {false, true}) {
    for (uint32_t stage = 1; stage <= 3; ++stage) {
      for (const int world : {1, 3, 8}) {
        const Planned planned = PlanOf(Spec(stage, bf16, false, world));
        v1::JobSpec kept = Spec(stage, bf16, false, world);
        kept.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("none");
        const Planned without = PlanOf(kept);
        for (int rank = 0; rank < world; ++rank) {
          const RankPlan plan = planned.rank(rank), other = without.rank(rank);
          EXPECT_EQ(plan.optimizer, 0u);
          EXPECT_GT(other.optimizer + static_cast<uint64_t>(other.owned_parameters == 0), 0u);
          EXPECT_EQ(CheckpointCopyBytes(planned.model, planned.policy, rank), 0u);
          // Of gradients that are final at once the embedding's alone is kept.
          uint64_t leaves = 0;
          for (size_t u = 1; u < kUnits.size() && stage >= 2; ++u)
            leaves += OwnedOf(kUnits[u], world, rank) * (bf16 ? 2 : 4);
          EXPECT_EQ(plan.gradients, other.gradients - leaves);
          // The rest is as without offload.
          EXPECT_EQ(plan.parameters, other.parameters);
          EXPECT_EQ(plan.activations, other.activations);
          EXPECT_EQ(plan.step, other.step);
          EXPECT_EQ(other.push, 0u);
          EXPECT_EQ(other.pull, 0u);
        }
      }
    }
  }
}

TEST(OffloadPlan, ARankPushesItsShardOnceAStepAndReplicaAndPullsItOnce) {
  for (const bool bf16 : {false, true}) {
    for (uint32_t stage = 1; stage <= 3; ++stage) {
      for (const int world : {1, 2, 3, 8}) {
        for (const uint64_t rounds : {1, 5}) {
          for (const uint32_t replicas : {1u, 2u}) {
            v1::JobSpec spec = Spec(stage, bf16, false, world);
            spec.set_train_batch_size(rounds * static_cast<uint64_t>(world));
            spec.mutable_store()->set_replicas(replicas);
            const Planned planned = PlanOf(spec);
            for (int rank = 0; rank < world; ++rank) {
              uint64_t owned = 0;
              for (const uint64_t unit : kUnits) owned += OwnedOf(unit, world, rank);
              const uint64_t wire = bf16 ? 2 : 4;
              EXPECT_EQ(planned.rank(rank).push, owned * wire * replicas);
              EXPECT_EQ(planned.rank(rank).pull, owned * wire);
            }
          }
        }
      }
    }
  }
}

// Forward and backward each pull a block; the embedding serves two uses (tied), the head one.
TEST(OffloadPlan, WithoutParametersARankPullsItsShardForEveryGather) {
  for (const bool bf16 : {false, true}) {
    for (const int world : {1, 3}) {
      for (const uint64_t rounds : {1, 4}) {
        v1::JobSpec spec = Spec(3, bf16, true, world);
        spec.set_train_batch_size(rounds * static_cast<uint64_t>(world));
        const Planned planned = PlanOf(spec);
        for (int rank = 0; rank < world; ++rank) {
          const auto owned = [&](uint64_t unit) { return OwnedOf(unit, world, rank); };
          const uint64_t wire = bf16 ? 2 : 4;
          const RankPlan plan = planned.rank(rank);
          EXPECT_EQ(plan.parameters, 0u);
          EXPECT_EQ(plan.optimizer, 0u);
          EXPECT_EQ(
              plan.pull,
              rounds * wire * (2 * owned(kEmbedding) + 2 * kLayers * owned(kBlock) + owned(kHead)));
          EXPECT_EQ(plan.push, wire * (owned(kEmbedding) + kLayers * owned(kBlock) + owned(kHead)));
          // Forward only, of nine micro-batches.
          const uint64_t eval_rounds =
              (9 + static_cast<uint64_t>(world) - 1) / static_cast<uint64_t>(world);
          EXPECT_EQ(PlanEvaluationPull(planned.policy, rank, 9),
                    eval_rounds * wire *
                        (2 * owned(kEmbedding) + kLayers * owned(kBlock) + owned(kHead)));
        }
      }
    }
  }
}

TEST(OffloadPlan, EvaluationPullsNothingWhereParametersAreKept) {
  for (uint32_t stage = 1; stage <= 3; ++stage) {
    EXPECT_EQ(PlanEvaluationPull(PlanOf(Spec(stage, true, false, 2)).policy, 0, 9), 0u);
  }
}

TEST(OffloadPlan, SmallUnitsStayWholeAndArePulledOnceAStep) {
  v1::JobSpec spec = Spec(3, true, true, 2);
  spec.set_train_batch_size(6);
  spec.mutable_zero_optimization()->set_stage3_param_persistence_threshold(kHead);
  const RankPlan plan = PlanOf(spec).rank(0);
  EXPECT_EQ(plan.parameters, 2 * Shard(kHead, 2) * 2);
  EXPECT_EQ(plan.pull, 2 * (OwnedOf(kHead, 2, 0) + 3 * (2 * OwnedOf(kEmbedding, 2, 0) +
                                                        2 * kLayers * OwnedOf(kBlock, 2, 0))));
}

// Blocks are pulled for forward and backward of each micro-batch though nothing of them changes.
TEST(OffloadPlan, FrozenUnitsArePulledForEachGatherOrAtTheStartAlone) {
  for (const bool parameters_too : {false, true}) {
    v1::JobSpec spec = Spec(3, true, parameters_too, 2);
    spec.mutable_model()->add_trainable("blocks.0.*");
    const RankPlan plan = PlanOf(spec).rank(1);
    const auto owned = [](uint64_t unit) { return OwnedOf(unit, 2, 1); };
    EXPECT_EQ(plan.push, 2 * owned(kBlock));
    EXPECT_EQ(plan.pull, parameters_too
                             ? 2 * (2 * owned(kEmbedding) + 4 * owned(kBlock) + owned(kHead))
                             : 2 * owned(kBlock));
  }
}

TEST(OffloadPlan, ASingleRankPullsForEachUseAtStageThreeUnlessTheUnitIsSmall) {
  const ZeroPolicy pulled = PlanOf(Spec(3, true, true, 1)).policy;
  for (size_t u = 0; u < kUnits.size(); ++u) {
    EXPECT_FALSE(pulled.resident[u]);
    EXPECT_FALSE(pulled.KeepsParameters(static_cast<int>(u)));
  }
  for (const UnitUse& use : pulled.uses) {
    EXPECT_TRUE(use.gather);
    EXPECT_TRUE(use.release);
  }
  const ZeroPolicy kept = PlanOf(Spec(3, true, false, 1)).policy;
  for (size_t u = 0; u < kUnits.size(); ++u) EXPECT_TRUE(kept.resident[u]);
}

TEST(OffloadPlan, GatheredUnitsStayUnderMaxLiveParameters) {
  v1::JobSpec spec = Spec(3, true, true, 1);
  v1::ZeroSpec* zero = spec.mutable_zero_optimization();
  zero->set_stage3_max_reuse_distance(uint64_t{1} << 40);
  const uint64_t widest = std::max(kBlock, kEmbedding + kHead);
  std::vector<int> gathers;
  for (const uint64_t room : {uint64_t{0}, kBlock, 2 * kBlock, uint64_t{1} << 40}) {
    zero->set_stage3_max_live_parameters(widest + room);
    std::vector<bool> live(kUnits.size(), false);
    int count = 0;
    for (const UnitUse& use : PlanOf(spec).policy.uses) {
      live[static_cast<size_t>(use.unit)] = true;
      count += use.gather;
      uint64_t sum = 0;
      for (size_t u = 0; u < kUnits.size(); ++u) sum += live[u] ? kUnits[u] : 0;
      // The head uses the tied table too.
      if (use.unit == 3 && !live[0]) sum += kEmbedding;
      EXPECT_LE(sum, widest + room);
      if (use.release) live[static_cast<size_t>(use.unit)] = false;
    }
    gathers.push_back(count);
  }
  // Seven uses without reuse; with room for all, each unit is gathered once.
  EXPECT_EQ(gathers.front(), 7);
  EXPECT_EQ(gathers.back(), 4);
  EXPECT_TRUE(std::is_sorted(gathers.rbegin(), gathers.rend()));
}

TEST(OffloadPlan, ABoundBelowTheWidestUseIsNotedWithWhatIsNeeded) {
  v1::JobSpec spec = Spec(3, true, true, 2);
  v1::ZeroSpec* zero = spec.mutable_zero_optimization();
  const uint64_t widest = std::max(kBlock, kEmbedding + kHead);
  for (const uint64_t low : {uint64_t{0}, widest - 1}) {
    zero->set_stage3_max_live_parameters(low);
    const std::string note = NoteOnLiveParameters(spec);
    EXPECT_NE(note.find(absl::StrCat("seen ", low, ",")), std::string::npos) << note;
    EXPECT_NE(note.find(absl::StrCat("write ", widest, " or more")), std::string::npos) << note;
  }
  zero->set_stage3_max_live_parameters(widest);
  EXPECT_EQ(NoteOnLiveParameters(spec), "");
  zero->clear_offload_param();
  zero->set_stage3_max_live_parameters(0);
  EXPECT_EQ(NoteOnLiveParameters(spec), "");
}

TEST(PlanStore, CountsOneCopyOfEveryChunk) {
  for (const bool sgd : {false, true}) {
    for (const bool bf16 : {false, true}) {
      v1::JobSpec spec = Spec(2, bf16, false, 3);
      spec.mutable_store()->set_replicas(2);
      spec.mutable_optimizer()->set_type(sgd ? "SGD" : "AdamW");
      const auto plan = PlanStore(spec);
      ASSERT_TRUE(plan.ok()) << plan.status();
      constexpr uint64_t kAll = kEmbedding + kLayers * kBlock + kHead;
      EXPECT_EQ(plan->chunks(), 4u);
      EXPECT_EQ(plan->state_bytes(), kAll * ((sgd ? 8 : 12) + (bf16 ? 2 : 0)));
      EXPECT_EQ(plan->staging_bytes(), kAll * (bf16 ? 2 : 4));
      EXPECT_EQ(plan->replicas(), 2u);
    }
  }
}

TEST(PlanStore, FrozenUnitsAreParametersAlone) {
  v1::JobSpec spec = Spec(3, true, false, 2);
  spec.mutable_model()->add_trainable("blocks.0.*");
  const auto plan = PlanStore(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->state_bytes(), 14 * kBlock + 2 * (kEmbedding + kBlock + kHead));
  EXPECT_EQ(plan->staging_bytes(), 2 * kBlock);
}

TEST(PlanStore, TheChunksAreThoseOfTheTable) {
  v1::JobSpec spec = Spec(1, true, false, 1);
  spec.mutable_model()->set_hidden_size(512);
  const auto plan = PlanStore(spec);
  ASSERT_TRUE(plan.ok()) << plan.status();
  const ChunkTable table = ChunkTable::Make(*MakeModelTable(spec.model()));
  EXPECT_EQ(plan->chunks(), table.chunks.size());
  EXPECT_GT(table.chunks.size(), 4u);
  uint64_t state = 0, staging = 0;
  for (const Chunk& chunk : table.chunks) {
    state += BytesOf(chunk, DType::kBF16, false).State();
    staging += BytesOf(chunk, DType::kBF16, false).staging;
  }
  EXPECT_EQ(plan->state_bytes(), state);
  EXPECT_EQ(plan->staging_bytes(), staging);
}

TEST(PlanStore, AJobWithoutOffloadHasNone) {
  v1::JobSpec spec = Spec(2, true, false, 1);
  spec.mutable_zero_optimization()->mutable_offload_optimizer()->set_device("none");
  const auto plan = PlanStore(spec);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->ByteSizeLong(), 0u);
}

TEST(PlanShards, SayWhatIsPushedAndPulled) {
  v1::JobSpec spec = Spec(3, true, true, 2);
  const Planned planned = PlanOf(spec);
  const auto plans = PlanShards(spec);
  ASSERT_TRUE(plans.ok()) << plans.status();
  ASSERT_EQ(plans->size(), 2u);
  for (int rank = 0; rank < 2; ++rank) {
    const v1::ShardPlan& plan = (*plans)[static_cast<size_t>(rank)];
    EXPECT_EQ(plan.push_bytes_per_step(), planned.rank(rank).push);
    EXPECT_EQ(plan.pull_bytes_per_step(), planned.rank(rank).pull);
    EXPECT_EQ(plan.optimizer_bytes(), 0u);
    EXPECT_GT(plan.push_bytes_per_step(), 0u);
  }
}

// 2^31 micro-batches of a model of 2e14 parameters: the sum stops at the largest number.
TEST(PlanShards, PullsOfAnAbsurdBatchDoNotWrap) {
  v1::JobSpec spec = Spec(3, true, true, 1);
  spec.mutable_model()->set_hidden_size(65536);
  spec.mutable_model()->set_heads(512);
  spec.mutable_model()->set_layers(4096);
  spec.set_train_batch_size(uint64_t{1} << 31);
  const auto plans = PlanShards(spec);
  ASSERT_TRUE(plans.ok()) << plans.status();
  EXPECT_EQ((*plans)[0].pull_bytes_per_step(), std::numeric_limits<uint64_t>::max());
}

}  // namespace
}  // namespace zeroshard
