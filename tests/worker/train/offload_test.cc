// Jobs whose state is in the shard stores: the same bits as without, the traffic of the plan, what
// a rank holds, and how they end.
#include <chrono>
#include <limits>
#include <thread>

#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/checkpoint_harness.h"
#include "tests/worker/train/memory_stores.h"

namespace zeroshard {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

// Documents of 7 tokens, whatever the text.
class Documents : public MemoryDataset {
 public:
  using MemoryDataset::MemoryDataset;
  bool masks_documents() const override { return true; }
  void DocumentStarts(int64_t, absl::Span<int32_t> starts) const override {
    for (size_t i = 0; i < starts.size(); ++i) starts[i] = static_cast<int32_t>(i / 7 * 7);
  }
};

// How a job is offloaded.
enum class Offload { kNone, kOptimizer, kAll };

v1::JobSpec Spec(const std::string& text, Shape shape, Offload offload,
                 std::vector<std::string> more = {}) {
  if (offload != Offload::kNone) more.push_back("zero_optimization.offload_optimizer.device=cpu");
  if (offload == Offload::kAll) more.push_back("zero_optimization.offload_param.device=cpu");
  more.push_back(absl::StrFormat("resources.workers=%d", shape.world));
  more.push_back(absl::StrFormat("zero_optimization.stage=%d", shape.stage));
  return MakeSpec(text, more);
}

std::vector<RankResult> TrainOffloaded(const v1::JobSpec& spec, RunOptions options,
                                       const TokenDataset& data, MemoryStores* stores) {
  options.store = [stores](int rank) { return stores->MakeRank(rank); };
  return TrainJob(spec, options, data);
}

// What every rank agrees on, with the digest of the weights that the stores have at the end.
std::string OffloadedFingerprint(const v1::JobSpec& spec, int world, const TokenDataset& data,
                                 uint64_t seed = 1) {
  MemoryStores stores(spec, {.seed = seed});
  const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
  for (const RankResult& result : results) {
    EXPECT_TRUE(result.status.ok()) << result.status;
    EXPECT_EQ(result.records.size(), spec.steps());
    EXPECT_EQ(result.digest, "");
    EXPECT_EQ(Fingerprint(result), Fingerprint(results[0])) << "ranks disagree";
  }
  stores.WaitForVersion(spec.steps());
  return Fingerprint(results[0]) + stores.Digest();
}

std::vector<Offload> OffloadsOf(int stage) {
  if (stage == 3) return {Offload::kOptimizer, Offload::kAll};
  return {Offload::kOptimizer};
}

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

TEST(OffloadTest, EvaluationSeesTheVersionAfterItsStepAndChangesNothing) {
  const MemoryDataset data = TinyData();
  const MemoryDataset eval(ChainTokens(24 * 11 + 1, 61, 99), 24);
  const auto with_eval = [](v1::JobSpec spec) {
    spec.mutable_eval()->add_data("unused");
    spec.mutable_eval()->set_interval_steps(1);
    return spec;
  };
  for (int stage : {1, 3}) {
    RunOptions options{.world = 2};
    options.eval_data = &eval;
    const auto without =
        TrainJob(with_eval(Spec(TinyGpt2(), {2, stage}, Offload::kNone)), options, data);
    for (Offload offload : OffloadsOf(stage)) {
      const v1::JobSpec spec = with_eval(Spec(TinyGpt2(), {2, stage}, offload));
      MemoryStores stores(spec, {});
      const auto results = TrainOffloaded(spec, options, data, &stores);
      for (const RankResult& result : results) {
        ASSERT_TRUE(result.status.ok()) << result.status;
        ASSERT_EQ(result.records.size(), spec.steps());
        for (size_t i = 0; i < result.records.size(); ++i) {
          EXPECT_EQ(result.records[i].eval_loss(), without[0].records.at(i).eval_loss());
          EXPECT_EQ(result.records[i].loss(), without[0].records.at(i).loss());
        }
      }
    }
  }
}

TEST(OffloadTest, SamplesAreThoseWithoutOffload) {
  const MemoryDataset data(ChainTokens(24 * 40 + 1, 256), 24);
  const auto tokenizer = Tokenizer::Load("bytes");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  RunOptions options{.world = 2};
  options.tokenizer = tokenizer->get();
  const auto with_samples = [](v1::JobSpec spec) {
    spec.mutable_data()->set_tokenizer("bytes");
    spec.mutable_sample()->set_interval_steps(3);
    spec.mutable_sample()->add_prompts("The ");
    spec.mutable_sample()->set_max_tokens(8);
    spec.mutable_sample()->set_temperature(0.8);
    return spec;
  };
  const auto texts = [](const RankResult& result) {
    std::vector<std::string> seen;
    for (const v1::SampleRecord& record : result.samples)
      seen.push_back(absl::StrFormat("%d %s: %s", record.step(), record.prompt(), record.text()));
    return seen;
  };
  const std::vector<std::string> more = {"model.vocab_size=256"};
  for (int stage : {2, 3}) {
    const auto without =
        TrainJob(with_samples(Spec(TinyLlama(), {2, stage}, Offload::kNone, more)), options, data);
    ExpectAllOk(without);
    ASSERT_EQ(without[0].samples.size(), 2u) << "after steps 3 and 4";
    for (Offload offload : OffloadsOf(stage)) {
      const v1::JobSpec spec = with_samples(Spec(TinyLlama(), {2, stage}, offload, more));
      MemoryStores stores(spec, {});
      const auto results = TrainOffloaded(spec, options, data, &stores);
      ExpectAllOk(results);
      EXPECT_EQ(texts(results[0]), texts(without[0]));
      EXPECT_EQ(Fingerprint(results[0]) + stores.Digest(), Fingerprint(without[0]));
    }
  }
}

// A rank was lost between a step's decision and the report of its evaluation.
TEST(OffloadTest, AnEvaluationThatIsOwedIsMadeBeforeAnythingElse) {
  const MemoryDataset data = TinyData();
  const MemoryDataset eval(ChainTokens(24 * 11 + 1, 61, 99), 24);
  const std::vector<std::string> more = {"deterministic=true", "bf16.enabled=true"};
  RunOptions options{.world = 2};
  options.eval_data = &eval;
  for (Offload offload : {Offload::kOptimizer, Offload::kAll}) {
    v1::JobSpec spec = Spec(TinyGpt2(), {2, 3}, offload, more);
    spec.mutable_eval()->add_data("unused");
    spec.mutable_eval()->set_interval_steps(1);
    MemoryStores whole(spec, {});
    const auto undisturbed = TrainOffloaded(spec, options, data, &whole);
    ExpectAllOk(undisturbed);

    MemoryStores stores(spec, {});
    RunOptions first = options;
    first.on_step = [&](int rank, const v1::StepRecord& record) {
      if (rank == 0 && record.step() == 2) stores.Abort("rank 0 is gone");
    };
    for (const RankResult& result : TrainOffloaded(spec, first, data, &stores))
      EXPECT_FALSE(result.status.ok());
    // The rest, by another number of ranks; and once more when no step is left.
    for (uint64_t done : {2, 4}) {
      stores.WaitForVersion(done);
      stores.Continue();
      RunOptions next = options;
      next.world = 3;
      next.first_step = done + 1;
      next.next_sample = 6 * done;
      next.evaluate = true;
      const auto results = TrainOffloaded(spec, next, data, &stores);
      ExpectAllOk(results);
      for (const RankResult& result : results) {
        ASSERT_EQ(result.records.size(), 4 - done + 1);
        const auto& wanted = undisturbed[0].records;
        EXPECT_EQ(result.records[0].tokens(), 0u) << "nothing was trained";
        for (size_t i = 0; i < result.records.size(); ++i) {
          EXPECT_EQ(result.records[i].step(), done + i);
          EXPECT_EQ(result.records[i].eval_loss(), wanted.at(done + i - 1).eval_loss());
          if (i == 0) continue;
          EXPECT_EQ(result.records[i].loss(), wanted.at(done + i - 1).loss());
        }
      }
    }
    EXPECT_EQ(stores.Digest(), whole.Digest());
  }
}

TEST(OffloadTest, NothingIsEvaluatedThatIsNotOwedOrThatTheJobDoesNotHave) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {1, 2}, Offload::kOptimizer);
  MemoryStores stores(spec, {});
  RunOptions options{.world = 1};
  options.evaluate = true;
  const auto results = TrainOffloaded(spec, options, data, &stores);
  ExpectAllOk(results);
  EXPECT_EQ(results[0].records.size(), 4u);
}

TEST(OffloadTest, ARunThatBeganWithACheckpointHasAsManySamplesAsThat) {
  const MemoryDataset data = TinyData();
  MemoryFolder folder;
  const std::string dir = folder / "ckpt";
  ExpectAllOk(TrainJob(SavingSpec(TinyGpt2(), {1, 0}, 2, dir), {.world = 1}, data));
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer);
  v1::StateVersion base;
  base.set_step(2);
  MemoryStores stores(spec, {.base = base});
  RunOptions options = Resume(2, dir + "/" + CheckpointName(2), 2);
  options.next_sample = 12;
  const auto refused =
      TrainOffloaded(spec, options, MemoryDataset(ChainTokens(24 * 41 + 1, 61), 24), &stores);
  EXPECT_EQ(refused[0].status.code(), absl::StatusCode::kInvalidArgument) << refused[0].status;
  EXPECT_THAT(std::string(refused[0].status.message()),
              testing::AllOf(HasSubstr("has 41 samples"), HasSubstr("had 40")));
  EXPECT_FALSE(refused[1].status.ok());
  EXPECT_TRUE(stores.decisions().empty());
  MemoryStores right(spec, {.base = base});
  ExpectAllOk(TrainOffloaded(spec, options, data, &right));
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

TEST(OffloadTest, CommitsSayWhereTheDataGoOn) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 1}, Offload::kOptimizer);
  std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> seen;
  MemoryStores::Options options;
  options.on_commit = [&](const v1::StepRecord& record, uint64_t next, uint64_t samples) {
    EXPECT_GT(record.tokens(), 0u);
    seen.emplace_back(record.step(), next, samples);
  };
  MemoryStores stores(spec, options);
  ExpectAllOk(TrainOffloaded(spec, {.world = 2}, data, &stores));
  const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> wanted = {
      {1, 6, 40}, {2, 12, 40}, {3, 18, 40}, {4, 24, 40}};
  EXPECT_EQ(seen, wanted);
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

TEST(OffloadTest, AFirstStepThatIsNotTheOneAfterTheVersionIsRefused) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {1, 1}, Offload::kOptimizer);
  v1::StateVersion base;
  base.set_step(2);
  MemoryStores stores(spec, {.base = base});
  const auto results = TrainOffloaded(spec, {.world = 1}, data, &stores);
  EXPECT_TRUE(absl::IsInvalidArgument(results[0].status)) << results[0].status;
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("wanted 3"));
  const auto without = TrainJob(spec, {.world = 1}, data);
  EXPECT_TRUE(absl::IsInvalidArgument(without[0].status)) << "no stores at all";
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

// Memory by kind and traffic, to ranks and to stores, are the plan's.
void ExpectPlanHolds(const v1::JobSpec& spec, int world, const TokenDataset& data) {
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok()) << model.status();
  const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, world));
  MemoryStores stores(spec, {});
  const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
  for (int rank = 0; rank < world; ++rank) {
    SCOPED_TRACE(absl::StrFormat("rank %d", rank));
    const RankResult& result = results[static_cast<size_t>(rank)];
    ASSERT_TRUE(result.status.ok()) << result.status;
    const RankPlan plan = PlanRank(*model, policy, rank);
    const auto held = [&](MemoryKind kind) {
      return static_cast<uint64_t>(result.memory[static_cast<int>(kind)]);
    };
    EXPECT_EQ(held(MemoryKind::kParameters), plan.parameters);
    EXPECT_EQ(held(MemoryKind::kGradients), plan.gradients);
    EXPECT_EQ(held(MemoryKind::kOptimizer), 0u);
    EXPECT_EQ(plan.optimizer, 0u);
    EXPECT_EQ(held(MemoryKind::kActivations), plan.activations);
    // At the start a rank pulls what it keeps, and the ranks gather what they keep whole.
    uint64_t first_pull = 0, first_gather = 0;
    const uint64_t size = SizeOf(policy.options.dtype);
    for (size_t u = 0; u < policy.layouts.size(); ++u) {
      const ShardLayout& layout = policy.layouts[u];
      if (!policy.KeepsParameters(static_cast<int>(u))) continue;
      first_pull += static_cast<uint64_t>(layout.End(rank) - layout.Begin(rank)) * size;
      if (policy.resident[u])
        first_gather += static_cast<uint64_t>(layout.shard * (world - 1)) * size;
    }
    EXPECT_EQ(stores.pushed(rank), plan.push * spec.steps());
    EXPECT_EQ(stores.pulled(rank), plan.pull * spec.steps() + first_pull);
    for (int op = 0; op < kCollectiveOps; ++op) {
      for (int phase = 0; phase < kPhases; ++phase) {
        const bool gathers = op == static_cast<int>(CollectiveOp::kAllGather) &&
                             phase == static_cast<int>(Phase::kStep);
        EXPECT_EQ(result.traffic[op][phase],
                  plan.step[op][phase] * spec.steps() + (gathers ? first_gather : 0))
            << NameOf(static_cast<CollectiveOp>(op)) << " " << NameOf(static_cast<Phase>(phase));
      }
    }
  }
}

TEST(OffloadPlanTest, MemoryAndTrafficOfARunEqualThePlan) {
  const MemoryDataset data = TinyData();
  for (int world : {1, 2, 3}) {
    for (int stage : {1, 2, 3}) {
      for (Offload offload : OffloadsOf(stage)) {
        for (const char* more :
             {"steps=2", "bf16.enabled=true", "model.trainable=['blocks.1.*', 'wpe.weight']",
              "zero_optimization.stage3_param_persistence_threshold=4000",
              "zero_optimization.stage3_max_reuse_distance=1000000000", "train_batch_size=2"}) {
          SCOPED_TRACE(absl::StrFormat("stage %d world %d offload %d %s", stage, world,
                                       static_cast<int>(offload), more));
          ExpectPlanHolds(Spec(TinyGpt2(), {world, stage}, offload, {more}), world, data);
        }
      }
    }
  }
}

// What is gathered at once, with what is kept for the next, is at most max_live_parameters (and
// what shards are rounded up by).
TEST(OffloadPlanTest, PulledParametersStayUnderMaxLiveParameters) {
  const MemoryDataset data = TinyData();
  const std::vector<std::string> more = {"steps=2", "model.layers=6",
                                         "zero_optimization.stage3_max_reuse_distance=1000000000"};
  const auto buffers = [&](int world, int64_t max_live) {
    std::vector<std::string> all = more;
    all.push_back(absl::StrFormat("zero_optimization.stage3_max_live_parameters=%d", max_live));
    const v1::JobSpec spec = Spec(TinyLlama(), {world, 3}, Offload::kAll, all);
    MemoryStores stores(spec, {});
    const auto results = TrainOffloaded(spec, {.world = world}, data, &stores);
    ExpectAllOk(results);
    EXPECT_EQ(results[0].memory[static_cast<int>(MemoryKind::kParameters)], 0);
    return results[0].peak[static_cast<int>(MemoryKind::kBuffers)];
  };
  const v1::JobSpec spec = Spec(TinyLlama(), {1, 3}, Offload::kAll, more);
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok());
  int64_t widest = 0, all = 0;
  for (const UnitTable& unit : model->units) {
    widest = std::max(widest, unit.length);
    all += unit.length;
  }
  for (int world : {1, 2}) {
    // Buffers that are not gathers: the difference between two bounds is what counts.
    const int64_t least = buffers(world, widest);
    const int64_t slack = static_cast<int64_t>(model->units.size()) * 64 * world * 4;
    for (int64_t units : {2, 3}) {
      const int64_t peak = buffers(world, units * widest);
      EXPECT_LE(peak, least + (units - 1) * widest * 4 + slack) << world << " " << units;
      EXPECT_GT(peak, least) << "room that is there is used";
    }
    EXPECT_GT(buffers(world, 2 * all), least + 3 * widest * 4) << "the bound is what held it";
  }
}

// The time that ranks wait for their stores is the phase "offload", not "communication".
TEST(OffloadTest, WaitingForTheStoresIsTheOffloadPhase) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer, {"steps=2"});
  MemoryStores::Options options;
  std::mutex mutex;
  std::condition_variable changed;
  bool released = false;
  // The update of step 1 begins when rank 0 has stood in its next forward for a while.
  options.before_update = [&](uint64_t step, int) {
    if (step != 1) return;
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return released; });
  };
  MemoryStores stores(spec, options);
  RunOptions run{.world = 2};
  std::thread releases;
  constexpr std::chrono::milliseconds kHeld(200);
  run.on_step = [&](int rank, const v1::StepRecord& record) {
    if (rank != 0 || record.step() != 1) return;
    releases = std::thread([&] {
      std::unique_lock lock(mutex);
      changed.wait_for(lock, kHeld, [] { return false; });
      released = true;
      changed.notify_all();
    });
  };
  const auto results = TrainOffloaded(spec, run, data, &stores);
  releases.join();
  ExpectAllOk(results);
  for (const RankResult& result : results) {
    const auto offload = std::chrono::nanoseconds(
        static_cast<int64_t>(result.phases[static_cast<int>(StepPhase::kOffload)]));
    EXPECT_GT(offload, kHeld / 2);
    EXPECT_EQ(result.phases[static_cast<int>(StepPhase::kOptimizer)], 0u);
  }
}

// --- How it ends badly ---

// One rank's call fails: it says why, and the others end with it.
TEST(OffloadFaults, AnErrorOfAStoreEndsAllRanksPromptly) {
  const MemoryDataset data = TinyData();
  for (const auto call : {MemoryStores::Call::kPush, MemoryStores::Call::kPull}) {
    for (int stage : {1, 3}) {
      for (Offload offload : OffloadsOf(stage)) {
        const v1::JobSpec spec = Spec(TinyGpt2(), {3, stage}, offload, {"bf16.enabled=true"});
        MemoryStores::Options options;
        options.on_call = [&](MemoryStores::Call seen, int rank, uint64_t step,
                              int unit) -> absl::Status {
          if (seen != call || rank != 1 || step != 2 || unit != 1) return absl::OkStatus();
          return absl::DeadlineExceededError("store-0: chunk 1 of step 2: nothing moved for 3s");
        };
        MemoryStores stores(spec, options);
        const auto start = std::chrono::steady_clock::now();
        const auto results = TrainOffloaded(spec, {.world = 3}, data, &stores);
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
        EXPECT_TRUE(absl::IsDeadlineExceeded(results[1].status)) << results[1].status;
        EXPECT_THAT(std::string(results[1].status.message()), HasSubstr("chunk 1 of step 2"));
        for (const RankResult& result : results) EXPECT_FALSE(result.status.ok());
      }
    }
  }
}

// What a rank sees of the stores, and when it lets go of it.
class Watched : public StateStore {
 public:
  Watched(std::unique_ptr<StateStore> store, std::function<void()> gone)
      : store_(std::move(store)), gone_(std::move(gone)) {}
  ~Watched() override {
    store_.reset();
    gone_();
  }
  v1::StateVersion base() const override { return store_->base(); }
  Event Push(uint64_t step, int unit, int64_t begin, int64_t end, const void* data,
             const Event& after) override {
    return store_->Push(step, unit, begin, end, data, after);
  }
  Event Pull(uint64_t step, int unit, int64_t begin, int64_t end, void* out,
             const Event& after) override {
    return store_->Pull(step, unit, begin, end, out, after);
  }
  absl::StatusOr<v1::StepDecision> Commit(const v1::StepRecord& record, uint64_t next,
                                          uint64_t samples) override {
    return store_->Commit(record, next, samples);
  }
  void Abort(const std::string& reason) override { store_->Abort(reason); }
  const OffloadCounters& counters() const override { return store_->counters(); }

 private:
  std::unique_ptr<StateStore> store_;
  const std::function<void()> gone_;
};

// A rank that has an error to tell at the start waits neither for the others nor for its own pulls.
TEST(OffloadFaults, AFailedPullAtTheStartIsToldAtOnce) {
  const MemoryDataset data = TinyData();
  for (int stage : {1, 3}) {
    const v1::JobSpec spec = Spec(TinyGpt2(), {2, stage}, Offload::kOptimizer);
    std::mutex mutex;
    std::condition_variable changed;
    bool gone = false, in_time = true;
    MemoryStores::Options options;
    options.on_call = [&](MemoryStores::Call, int rank, uint64_t, int unit) -> absl::Status {
      if (rank == 1) {  // has nothing before the other has given up
        std::unique_lock lock(mutex);
        in_time &= changed.wait_for(lock, std::chrono::seconds(30), [&] { return gone; });
      }
      if (rank == 0 && unit == 3) return absl::DataLossError("store-0: chunk 3 is damaged");
      return absl::OkStatus();
    };
    MemoryStores stores(spec, options);
    RunOptions run{.world = 2};
    run.store = [&](int rank) -> std::unique_ptr<StateStore> {
      auto store = stores.MakeRank(rank);
      if (rank != 0) return store;
      return std::make_unique<Watched>(std::move(store), [&] {
        std::lock_guard lock(mutex);
        gone = true;
        changed.notify_all();
      });
    };
    const auto results = TrainJob(spec, run, data);
    EXPECT_EQ(results[0].status, absl::DataLossError("store-0: chunk 3 is damaged"));
    EXPECT_FALSE(results[1].status.ok());
    EXPECT_TRUE(in_time) << "stage " << stage;
  }
}

TEST(OffloadFaults, StoresThatAreAbortedEndEveryRankWithTheReason) {
  const MemoryDataset data = TinyData();
  for (int stage : {1, 2, 3}) {
    for (Offload offload : OffloadsOf(stage)) {
      const v1::JobSpec spec = Spec(TinyGpt2(), {2, stage}, offload);
      MemoryStores::Options options;
      MemoryStores* all = nullptr;
      options.before_update = [&](uint64_t step, int) {
        if (step == 2) all->Abort("generation 3 has begun");
      };
      MemoryStores stores(spec, options);
      all = &stores;
      const auto results = TrainOffloaded(spec, {.world = 2}, data, &stores);
      for (const RankResult& result : results) {
        EXPECT_FALSE(result.status.ok());
        EXPECT_THAT(std::string(result.status.message()),
                    AnyOf(HasSubstr("generation 3 has begun"), HasSubstr("a rank failed"),
                          HasSubstr("gone")));
        EXPECT_LE(result.records.size(), 2u);
      }
      const bool named = std::any_of(results.begin(), results.end(), [](const RankResult& r) {
        return r.status.message().find("generation 3 has begun") != std::string::npos;
      });
      EXPECT_TRUE(named) << results[0].status << results[1].status;
    }
  }
}

TEST(OffloadFaults, ACommitThatIsRefusedEndsTheRunAtItsStep) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer);
  MemoryStores::Options options;
  MemoryStores* all = nullptr;
  options.on_commit = [&](const v1::StepRecord& record, uint64_t, uint64_t) {
    if (record.step() == 3) all->Abort("the coordinator has another generation");
  };
  MemoryStores stores(spec, options);
  all = &stores;
  const auto results = TrainOffloaded(spec, {.world = 2}, data, &stores);
  EXPECT_TRUE(absl::IsAborted(results[0].status)) << results[0].status;
  EXPECT_THAT(std::string(results[0].status.message()), HasSubstr("another generation"));
  EXPECT_EQ(results[0].records.size(), 2u) << "step 3 was not committed";
  EXPECT_FALSE(results[1].status.ok());
  EXPECT_EQ(stores.decisions().size(), 2u);
}

TEST(OffloadFaults, NoStepIsCommittedBeforeWhatWasReportedIsDelivered) {
  const MemoryDataset data = TinyData();
  const v1::JobSpec spec = Spec(TinyGpt2(), {2, 2}, Offload::kOptimizer);
  MemoryStores stores(spec, {});
  std::vector<uint64_t> asked;
  RunOptions options{.world = 2};
  options.before_commit = [&](int rank, uint64_t step) {
    EXPECT_EQ(rank, 0);
    EXPECT_EQ(stores.decisions().size(), asked.size());
    asked.push_back(step);
    if (step != 3) return absl::OkStatus();
    stores.Abort("the report was refused");
    return absl::FailedPreconditionError("the report was refused");
  };
  const auto results = TrainOffloaded(spec, options, data, &stores);
  EXPECT_EQ(results[0].status, absl::FailedPreconditionError("the report was refused"));
  EXPECT_FALSE(results[1].status.ok());
  EXPECT_EQ(asked, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(stores.decisions().size(), 2u);
}

TEST(OffloadFaults, ANonFiniteStepIsNeverCommitted) {
  const MemoryDataset data = TinyData();
  for (int stage : {1, 2, 3}) {
    for (Offload offload : OffloadsOf(stage)) {
      const v1::JobSpec spec = Spec(TinyGpt2(), {2, stage}, offload);
      MemoryStores stores(spec, {});
      stores.Set("blocks.1.mlp.fc.bias", 5, std::numeric_limits<float>::quiet_NaN());
      const auto results = TrainOffloaded(spec, {.world = 2}, data, &stores);
      for (const RankResult& result : results) {
        EXPECT_TRUE(IsNonFinite(result.status)) << result.status;
        EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 1: non-finite loss"));
        EXPECT_EQ(result.status, results[0].status) << "one message on all ranks";
      }
      EXPECT_TRUE(stores.decisions().empty());
    }
  }
}

}  // namespace
}  // namespace zeroshard
