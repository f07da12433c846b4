#include "common/plan/zero_policy.h"

#include <string>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

ModelTable Model(const char* architecture) {
  v1::ModelSpec model;
  model.set_architecture(architecture);
  model.set_hidden_size(64);
  model.set_layers(3);
  model.set_heads(4);
  model.set_sequence_length(16);
  model.set_vocab_size(128);
  return *MakeModelTable(model);
}

ZeroOptions Stage3() {
  ZeroOptions options;
  options.stage = 3;
  options.world = 2;
  options.persistence_threshold = 0;
  options.max_reuse_distance = 0;
  return options;
}

// "f0 f1" for forward uses of units 0 and 1, "b1" for a backward one; '+' gathered, '-' released.
std::string Schedule(const ZeroPolicy& policy) {
  std::string text;
  for (const UnitUse& use : policy.uses) {
    if (!text.empty()) text += ' ';
    text += use.backward ? 'b' : 'f';
    text += std::to_string(use.unit);
    if (use.gather) text += '+';
    if (use.release) text += '-';
  }
  return text;
}

TEST(ZeroPolicyTest, EveryUseIsGatheredJustBeforeAndReleasedStraightAfter) {
  EXPECT_EQ(Schedule(MakeZeroPolicy(Model("llama"), Stage3())),
            "f0+- f1+- f2+- f3+- f4+- b3+- b2+- b1+-");
}

TEST(ZeroPolicyTest, ATiedTableIsGatheredAgainForTheHead) {
  EXPECT_EQ(Schedule(MakeZeroPolicy(Model("gpt2"), Stage3())),
            "f0+- f1+- f2+- f3+- f0+- f4+- b3+- b2+- b1+-");
}

TEST(ZeroPolicyTest, AUnitIsKeptWhileItsNextUseIsNear) {
  const ModelTable model = Model("llama");
  ZeroOptions options = Stage3();
  const int64_t block = model.units[1].length, head = model.units[4].length;
  options.max_reuse_distance = head;  // of the last block: only the head lies in between
  EXPECT_EQ(Schedule(MakeZeroPolicy(model, options)), "f0+- f1+- f2+- f3+ f4+- b3- b2+- b1+-");
  options.max_reuse_distance = head + 2 * block;
  EXPECT_EQ(Schedule(MakeZeroPolicy(model, options)), "f0+- f1+- f2+ f3+ f4+- b3- b2- b1+-");
  options.max_live = block;  // room for one: the second block, which comes first
  EXPECT_EQ(Schedule(MakeZeroPolicy(model, options)), "f0+- f1+- f2+ f3+- f4+- b3+- b2- b1+-");
}

TEST(ZeroPolicyTest, SmallUnitsAndOtherStagesAreNeverGathered) {
  ZeroOptions options = Stage3();
  options.persistence_threshold = 1 << 20;
  EXPECT_EQ(Schedule(MakeZeroPolicy(Model("llama"), options)), "f0 f1 f2 f3 f4 b3 b2 b1");
  options = Stage3();
  options.stage = 2;
  EXPECT_EQ(Schedule(MakeZeroPolicy(Model("llama"), options)), "f0 f1 f2 f3 f4 b3 b2 b1");
}

// Offloaded shards that are final in their first round; the embedding's waits for its rows.
TEST(ZeroPolicyTest, AGradientThatIsFinalOnceReducedIsNotKept) {
  for (int stage = 0; stage <= 3; ++stage) {
    for (const bool offload : {false, true}) {
      for (const bool deterministic : {false, true}) {
        for (const int64_t micro_batches : {1, 2, 3}) {
          ZeroOptions options = Stage3();
          options.stage = stage;
          options.offload_optimizer = offload;
          options.deterministic = deterministic;
          options.micro_batches = micro_batches;
          const ZeroPolicy policy = MakeZeroPolicy(Model("gpt2"), options);
          const bool leaves = offload && stage >= 2 && micro_batches <= 2;  // of two ranks
          EXPECT_TRUE(policy.KeepsGradient(0));
          for (const int unit : {1, 3, 4}) {
            EXPECT_EQ(policy.KeepsGradient(unit), !leaves)
                << "stage " << stage << " offload " << offload << " deterministic " << deterministic
                << " micro-batches " << micro_batches;
          }
        }
      }
    }
  }
}

TEST(ZeroPolicyTest, ARaggedLastRoundHasFewerContributors) {
  ZeroOptions options = Stage3();
  options.world = 4;
  options.micro_batches = 10;
  const ZeroPolicy policy = MakeZeroPolicy(Model("llama"), options);
  EXPECT_EQ(policy.rounds, 3);
  EXPECT_EQ(policy.Contributors(0), 4);
  EXPECT_EQ(policy.Contributors(1), 4);
  EXPECT_EQ(policy.Contributors(2), 2);
}

}  // namespace
}  // namespace zeroshard
