// Jobs whose state is in the shard stores have the same bits as without.
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

// At every shape, also where a job's numbers depend on world and stage.
void ExpectSameAsWithout(const std::string& text, const std::vector<std::string>& more,
                         const std::vector<int>& worlds = {1, 2, 3, 4},
                         const TokenDataset& data = TinyData()) {
  for (int world : worlds) {
    for (int stage : {1, 2, 3}) {
      const std::string expected = TrainFingerprint(
          Spec(text, {world, stage}, Offload::kNone, more), {.world = world}, data);
      for (Offload offload : OffloadsOf(stage)) {
        EXPECT_EQ(OffloadedFingerprint(Spec(text, {world, stage}, offload, more), world, data),
                  expected)
            << "world " << world << " stage " << stage
            << (offload == Offload::kAll ? " with offload_param " : " ") << more[0];
      }
    }
  }
}

class OffloadNumbers : public testing::TestWithParam<const char*> {
 protected:
  const char* Job() const { return GetParam() == std::string("gpt2") ? TinyGpt2() : TinyLlama(); }
};
INSTANTIATE_TEST_SUITE_P(Models, OffloadNumbers, testing::Values("gpt2", "llama"),
                         [](const auto& info) { return std::string(info.param); });

// Three micro-batches of two samples: accumulation at worlds 1 and 2 (ragged there), an idle rank
// at
// 4. Clipping is on in all of these jobs.
TEST_P(OffloadNumbers, Fp32) { ExpectSameAsWithout(Job(), {"bf16.enabled=false"}); }
TEST_P(OffloadNumbers, Bf16) { ExpectSameAsWithout(Job(), {"bf16.enabled=true"}); }
TEST_P(OffloadNumbers, StochasticRounding) {
  ExpectSameAsWithout(Job(), {"bf16={enabled: true, stochastic_rounding: true}"});
  ExpectSameAsWithout(
      Job(),
      {"bf16={enabled: true, stochastic_rounding: true}", "model.trainable=['blocks.*.mlp.*']"},
      {2});
}
TEST_P(OffloadNumbers, WithoutClipping) {
  ExpectSameAsWithout(Job(), {"gradient_clipping=0", "bf16.enabled=true"}, {1, 2});
}
TEST_P(OffloadNumbers, WithoutAccumulation) {
  ExpectSameAsWithout(Job(), {"train_batch_size=4", "bf16.enabled=true"}, {2, 3});
  ExpectSameAsWithout(Job(), {"train_batch_size=2"}, {1});
}
TEST_P(OffloadNumbers, WhereRowsTravelAsRows) {
  ExpectSameAsWithout(Job(), {"model.vocab_size=997", "bf16.enabled=true"}, {1, 2, 3});
}
TEST_P(OffloadNumbers, WithFrozenTensors) {
  for (const char* trainable :
       {"model.trainable=['blocks.1.*', '*_f*']", "model.trainable=['blocks.*.mlp.*']"})
    ExpectSameAsWithout(Job(), {trainable, "bf16.enabled=true"}, {1, 2});
}

// Five micro-batches: the last round of worlds 2 and 3 is ragged.
TEST_P(OffloadNumbers, WithActivationCheckpointingAndRaggedAccumulation) {
  ExpectSameAsWithout(
      Job(), {"activation_checkpointing=true", "train_batch_size=10", "bf16.enabled=true"}, {2, 3});
}
TEST_P(OffloadNumbers, OfPackedDocuments) {
  ExpectSameAsWithout(Job(), {"bf16.enabled=true"}, {2},
                      Documents(ChainTokens(24 * 40 + 1, 61), 24));
}

// What is dropped belongs to the step and the sample, also in a generation that begins later.
TEST(OffloadTest, Dropout) {
  const std::vector<std::string> more = {"model.embd_pdrop=0.1", "model.attn_pdrop=0.2",
                                         "model.resid_pdrop=0.1", "bf16.enabled=true"};
  ExpectSameAsWithout(TinyGpt2(), more, {1, 3});
}

TEST(OffloadTest, TheOtherTyingHasTheSameNumbersToo) {
  ExpectSameAsWithout(TinyGpt2(), {"model.tie_embeddings=false", "bf16.enabled=true"}, {1, 3});
  ExpectSameAsWithout(TinyLlama(), {"model.tie_embeddings=true", "bf16.enabled=true"}, {1, 3});
}

TEST(OffloadTest, OnlyPositionsAreTrainedOfTheEmbedding) {
  ExpectSameAsWithout(TinyGpt2(), {"model.trainable=['wpe.weight']", "deterministic=true"}, {1, 2});
  ExpectSameAsWithout(TinyGpt2(), {"model.trainable=['wte.weight']"}, {2});
}

// The final norm has 64 elements in two tensors here, the blocks a few hundred: most ranks own
// nothing of a unit, some nothing at all.
TEST(OffloadTest, EmptyShards) {
  const std::vector<std::string> small = {"model.hidden_size=16", "model.layers=1",
                                          "bf16.enabled=true"};
  ExpectSameAsWithout(TinyGpt2(), small, {4});
  ExpectSameAsWithout(TinyLlama(), small, {4});
}

TEST(OffloadTest, DeterministicJobsHaveOneResultAtAnyWorldSizeAndStage) {
  const MemoryDataset data = TinyData();
  for (const char* precision : {"bf16.enabled=false", "bf16.enabled=true"}) {
    const std::vector<std::string> more = {"deterministic=true", precision, "train_batch_size=10"};
    const std::string expected =
        TrainFingerprint(Spec(TinyGpt2(), {1, 0}, Offload::kNone, more), {.world = 1}, data);
    for (int world : {1, 2, 3})
      for (int stage : {1, 2, 3})
        for (Offload offload : OffloadsOf(stage))
          EXPECT_EQ(
              OffloadedFingerprint(Spec(TinyGpt2(), {world, stage}, offload, more), world, data),
              expected)
              << precision << " stage " << stage << " world " << world;
  }
}

TEST(OffloadTest, ScheduleSettingsAndTheOrderOfUpdatesChangeNothing) {
  const MemoryDataset data = TinyData();
  const int world = 2;
  const std::string expected = TrainFingerprint(
      Spec(TinyGpt2(), {world, 3}, Offload::kNone, {"bf16.enabled=true"}), {.world = world}, data);
  uint64_t seed = 0;
  for (const char* setting :
       {"zero_optimization.overlap_comm=false", "zero_optimization.reduce_bucket_size=64",
        "zero_optimization.reduce_bucket_size=1000",
        "zero_optimization.stage3_prefetch_bucket_size=0",
        "zero_optimization.stage3_prefetch_bucket_size=13000",
        "zero_optimization.stage3_max_live_parameters=0",
        "zero_optimization.stage3_max_reuse_distance=1000000000",
        "zero_optimization.stage3_param_persistence_threshold=4000",
        "zero_optimization.stage3_param_persistence_threshold=1000000",
        "zero_optimization.offload_optimizer={device: cpu, buffer_count: 1, buffer_size: 64}",
        "activation_checkpointing=true"}) {
    for (Offload offload : OffloadsOf(3)) {
      const v1::JobSpec spec =
          Spec(TinyGpt2(), {world, 3}, offload, {setting, "bf16.enabled=true"});
      EXPECT_EQ(OffloadedFingerprint(spec, world, data, ++seed), expected) << setting;
    }
  }
}

TEST(OffloadTest, AStepWithoutALossIsCommittedAsASkip) {
  MemoryDataset data(ChainTokens(24 * 40 + 1, 61), 24);
  const SampleOrder order(40, 7);
  std::set<int64_t> silent;  // the samples of step 2
  for (int64_t i = 6; i < 12; ++i) silent.insert(order.At(i));
  data.MaskTargets([&](int64_t sample, int64_t) { return silent.count(sample) > 0; });
  const std::string expected =
      TrainFingerprint(Spec(TinyGpt2(), {2, 2}, Offload::kNone), {.world = 2}, data);
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer);
  MemoryStores stores(spec, {});
  const auto results = TrainOffloaded(spec, {.world = 2}, data, &stores);
  ExpectAllOk(results);
  stores.WaitForVersion(4);
  EXPECT_EQ(Fingerprint(results[0]) + stores.Digest(), expected);
  const auto decisions = stores.decisions();
  ASSERT_EQ(decisions.size(), 4u);
  for (const v1::StepDecision& decision : decisions)
    EXPECT_EQ(decision.skip(), decision.step() == 2) << decision.step();
}

// A generation that ends, and another of another world size that goes on: the steps of one run.
TEST(OffloadTest, GoesOnAtTheVersionAndPositionOfTheAssignment) {
  const MemoryDataset data = TinyData();
  for (Offload offload : {Offload::kOptimizer, Offload::kAll}) {
    const std::vector<std::string> more = {"deterministic=true", "bf16.enabled=true"};
    const std::string expected =
        TrainFingerprint(Spec(TinyGpt2(), {1, 0}, Offload::kNone, more), {.world = 1}, data);
    v1::JobSpec spec = Spec(TinyGpt2(), {2, 3}, offload, more);
    MemoryStores stores(spec, {});
    RunOptions first{.world = 2};
    first.on_step = [&](int rank, const v1::StepRecord& record) {
      if (rank == 0 && record.step() == 2) stores.Abort("generation 2 has begun");
    };
    const auto before = TrainOffloaded(spec, first, data, &stores);
    for (const RankResult& result : before) EXPECT_FALSE(result.status.ok());
    stores.WaitForVersion(2);
    RunOptions second{.world = 3};
    second.first_step = 3;
    second.next_sample = 12;
    stores.Continue();
    const auto after = TrainOffloaded(spec, second, data, &stores);
    ExpectAllOk(after);
    stores.WaitForVersion(4);
    RankResult all = before[0];
    all.records.insert(all.records.end(), after[0].records.begin(), after[0].records.end());
    EXPECT_EQ(Fingerprint(all) + stores.Digest(), expected);
  }
}

TEST(OffloadTest, TensorsAreTheStoresParameters) {
  const MemoryDataset data = TinyData();
  for (Offload offload : {Offload::kOptimizer, Offload::kAll}) {
    const v1::JobSpec spec = Spec(TinyGpt2(), {3, 3}, offload, {"bf16.enabled=true"});
    MemoryStores stores(spec, {});
    RunOptions options{.world = 3};
    options.tensors = {"wte.weight", "blocks.1.mlp.fc.weight", "ln_f.bias"};
    const auto results = TrainOffloaded(spec, options, data, &stores);
    ExpectAllOk(results);
    stores.WaitForVersion(4);
    for (const RankResult& result : results)
      for (size_t i = 0; i < options.tensors.size(); ++i)
        EXPECT_EQ(result.tensors.at(i), stores.Parameters(options.tensors[i])) << i;
  }
}

}  // namespace
}  // namespace zeroshard
