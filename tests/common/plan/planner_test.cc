#include "common/plan/planner.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

// 7.5 B parameters on 64 ranks (Rajbhandari et al. 2020, figure 1).
TEST(ModelStateBytesTest, GivesThePublishedFigures) {
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 0) / 1e9, 120.0, 0.05);
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 1) / 1e9, 31.4, 0.05);
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 2) / 1e9, 16.6, 0.05);
  EXPECT_NEAR(ModelStateBytes(7.5e9, 64, 3) / 1e9, 1.9, 0.05);
}

// Rows of a table of 10 columns that starts at element 64.
TEST(RowsTouchedTest, CountsRowsThatAreOwnedInPart) {
  const ElementRange table{64, 64 + 1000};
  EXPECT_EQ(RowsTouched(table, {64, 64}, 10), 0);
  EXPECT_EQ(RowsTouched(table, {64, 74}, 10), 1);
  EXPECT_EQ(RowsTouched(table, {64, 75}, 10), 2);
  EXPECT_EQ(RowsTouched(table, {73, 75}, 10), 2);
  EXPECT_EQ(RowsTouched(table, {128, 192}, 10), 7);  // elements 64 to 127: rows 6 to 12
  EXPECT_EQ(RowsTouched(table, table, 10), 100);
}

// 2^31 micro-batches: the plan is arithmetic, not a loop over them, and its sums do not wrap.
TEST(PlanShardsTest, AnAbsurdlyLargeBatchIsPlannedAtOnce) {
  v1::JobSpec spec;
  spec.mutable_model()->set_architecture("gpt2");
  spec.mutable_model()->set_hidden_size(4096);
  spec.mutable_model()->set_layers(96);
  spec.mutable_model()->set_heads(32);
  spec.mutable_model()->set_sequence_length(1024);
  spec.mutable_model()->set_vocab_size(50257);
  spec.mutable_resources()->set_workers(64);
  spec.mutable_zero_optimization()->set_stage(3);
  spec.mutable_bf16()->set_enabled(true);
  spec.set_train_micro_batch_size_per_gpu(1);
  spec.set_train_batch_size(64);
  const auto one_round = PlanShards(spec);
  ASSERT_TRUE(one_round.ok()) << one_round.status();
  spec.set_train_batch_size(uint64_t{1} << 31);
  const auto plans = PlanShards(spec);
  ASSERT_TRUE(plans.ok()) << plans.status();
  const double rounds = static_cast<double>((uint64_t{1} << 31) / 64);
  const double expected = rounds * static_cast<double>((*one_round)[0].traffic_bytes_per_step());
  EXPECT_NEAR(static_cast<double>((*plans)[0].traffic_bytes_per_step()), expected, 1e-3 * expected);
}

// Counted here tensor by tensor, by the layout's rule that each starts at a multiple of 64.
TEST(CheckpointCopyBytesTest, IsTwelveBytesOfWhatIsTrainedAndFourOfWhatIsFrozen) {
  v1::JobSpec spec;
  spec.mutable_model()->set_architecture("gpt2");
  spec.mutable_model()->set_hidden_size(64);
  spec.mutable_model()->set_layers(2);
  spec.mutable_model()->set_heads(2);
  spec.mutable_model()->set_sequence_length(16);
  spec.mutable_model()->set_vocab_size(300);
  spec.set_train_micro_batch_size_per_gpu(1);
  spec.set_train_batch_size(3);
  constexpr uint64_t kEmbedding = 300 * 64 + 16 * 64;
  constexpr uint64_t kBlock = 2 * 64 + 4 * (64 * 64 + 64) + 2 * 64 + 2 * 64 * 256 + 256 + 64;
  constexpr uint64_t kHead = 2 * 64;  // tied
  spec.mutable_model()->set_tie_embeddings(true);
  for (const bool bf16 : {false, true}) {
    for (uint32_t stage = 0; stage <= 3; ++stage) {
      for (const bool frozen : {false, true}) {
        spec.mutable_bf16()->set_enabled(bf16);
        spec.mutable_zero_optimization()->set_stage(stage);
        spec.mutable_model()->clear_trainable();
        if (frozen) spec.mutable_model()->add_trainable("blocks.1.*");
        const auto model = MakeModelTable(spec.model());
        ASSERT_TRUE(model.ok()) << model.status();
        const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, 3));
        uint64_t sum = 0;
        for (int rank = 0; rank < 3; ++rank) sum += CheckpointCopyBytes(*model, policy, rank);
        EXPECT_EQ(sum, frozen ? 4 * (kEmbedding + kBlock + kHead) + 12 * kBlock
                              : 12 * (kEmbedding + 2 * kBlock + kHead))
            << "stage " << stage;
        // The first has whole shards of every unit.
        const auto shard = [](uint64_t length) { return (length + 3 * 64 - 1) / (3 * 64) * 64; };
        EXPECT_EQ(CheckpointCopyBytes(*model, policy, 0),
                  (frozen ? 4 : 12) * (shard(kEmbedding) + shard(kBlock) + shard(kHead)) +
                      12 * shard(kBlock));
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
