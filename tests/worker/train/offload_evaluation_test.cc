// What an offloaded job measures and writes beside its training.
#include "tests/worker/train/offload_harness.h"

namespace zeroshard {
namespace {

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

}  // namespace
}  // namespace zeroshard
