// The loss of text that is not trained on; dropout, which it does not see.
#include <filesystem>
#include <limits>

#include "common/status_payloads.h"
#include "gmock/gmock.h"
#include "tests/worker/train/checkpoint_harness.h"
#include "worker/train/evaluator.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

v1::JobSpec EvalSpec(const std::string& text, Shape shape, uint64_t steps, uint64_t interval,
                     uint64_t batches, std::vector<std::string> more = {}) {
  v1::JobSpec spec = SavingSpec(text, shape, steps, "", std::move(more));
  spec.mutable_eval()->add_data("unused");
  spec.mutable_eval()->set_interval_steps(interval);
  spec.mutable_eval()->set_batches(batches);
  return spec;
}

MemoryDataset EvalData(int64_t samples) {
  return MemoryDataset(ChainTokens(24 * samples + 1, 61, 99), 24);
}

// Documents of 7 tokens, whatever the text.
class Documents : public MemoryDataset {
 public:
  using MemoryDataset::MemoryDataset;
  bool masks_documents() const override { return true; }
  void DocumentStarts(int64_t index, absl::Span<int32_t> starts) const override {
    for (size_t i = 0; i < starts.size(); ++i) starts[i] = static_cast<int32_t>(i / 7 * 7);
  }
};

// The same loss by training: a step of one batch that is the whole evaluation set, at weights that
// the learning rate does not move.
double TrainingLoss(const std::string& text, const TokenDataset& data,
                    std::vector<std::string> more = {}) {
  more.push_back(absl::StrFormat("train_batch_size=%d", data.sample_count()));
  more.push_back("train_micro_batch_size_per_gpu=1");
  const auto results = TrainJob(SavingSpec(text, {1, 0}, 1, "", more), {.world = 1}, data);
  EXPECT_TRUE(results[0].status.ok()) << results[0].status;
  return results[0].records.at(0).loss();
}

TEST(EvalTest, IsTheLossOfTheWholeSetAtAnyWorldSizeAndStage) {
  const MemoryDataset data = TinyData();
  // Five micro-batches and half a one: ragged at 2, 3 and 4 ranks.
  const MemoryDataset eval = EvalData(11);
  for (const char* text : {TinyGpt2(), TinyLlama()}) {
    const double wanted = TrainingLoss(text, eval);
    double first = 0;
    for (const Shape shape : AllShapes()) {
      RunOptions options{.world = shape.world};
      options.eval_data = &eval;
      const auto results = TrainJob(EvalSpec(text, shape, 1, 1, 0, Still()), options, data);
      ExpectAllOk(results);
      for (const RankResult& r : results) {
        const double seen = r.records.at(0).eval_loss();
        if (first == 0) first = seen;
        EXPECT_EQ(seen, first) << "world " << shape.world << " stage " << shape.stage;
      }
    }
    EXPECT_NEAR(first, wanted, 1e-6 * wanted);
  }
}

TEST(EvalTest, DocumentsAreMaskedAsInTraining) {
  const Documents data(ChainTokens(24 * 40 + 1, 61), 24);
  const Documents eval(ChainTokens(24 * 6 + 1, 61, 99), 24);
  const MemoryDataset joined(ChainTokens(24 * 6 + 1, 61, 99), 24);
  const double wanted = TrainingLoss(TinyLlama(), eval);
  EXPECT_NE(wanted, TrainingLoss(TinyLlama(), joined)) << "the mask does something";
  RunOptions options{.world = 2};
  options.eval_data = &eval;
  const auto results = TrainJob(EvalSpec(TinyLlama(), {2, 3}, 1, 1, 0, Still()), options, data);
  ExpectAllOk(results);
  EXPECT_NEAR(results[0].records.at(0).eval_loss(), wanted, 1e-6 * wanted);
}

TEST(EvalTest, OnlyAsManyBatchesAsAskedFor) {
  const MemoryDataset data = TinyData();
  const MemoryDataset eval = EvalData(20);
  const MemoryDataset head = EvalData(6);  // one batch
  RunOptions options{.world = 2};
  options.eval_data = &eval;
  const auto results = TrainJob(EvalSpec(TinyGpt2(), {2, 1}, 1, 1, 1, Still()), options, data);
  ExpectAllOk(results);
  const double wanted = TrainingLoss(TinyGpt2(), head);
  EXPECT_NEAR(results[0].records.at(0).eval_loss(), wanted, 1e-6 * wanted);

  v1::JobSpec spec = MakeSpec(TinyGpt2());
  spec.mutable_eval()->set_batches(1);
  EXPECT_EQ(EvalMicroBatches(spec, 20), 3);
  spec.mutable_eval()->set_batches(0);
  EXPECT_EQ(EvalMicroBatches(spec, 21), 11);
  spec.mutable_eval()->set_batches(4);
  EXPECT_EQ(EvalMicroBatches(spec, 21), 11) << "no more than there are";
}

TEST(EvalTest, HappensWhenDueAndAfterTheLastStepAndChangesNoBitOfTraining) {
  const MemoryDataset data = TinyData();
  const MemoryDataset eval = EvalData(10);
  for (const Shape shape : {Shape{1, 0}, Shape{2, 1}, Shape{3, 3}, Shape{2, 3}}) {
    RunOptions options{.world = shape.world};
    options.eval_data = &eval;
    const auto with = TrainJob(EvalSpec(TinyGpt2(), shape, 5, 2, 0), options, data);
    ExpectAllOk(with);
    const auto without =
        TrainJob(SavingSpec(TinyGpt2(), shape, 5, ""), {.world = shape.world}, data);
    EXPECT_EQ(Fingerprint(with[0]), Fingerprint(without[0]));
    std::vector<uint64_t> measured;
    for (const v1::StepRecord& record : with[0].records)
      if (record.has_eval_loss()) measured.push_back(record.step());
    EXPECT_EQ(measured, (std::vector<uint64_t>{2, 4, 5}));
    EXPECT_LT(with[0].records.back().eval_loss(), with[0].records[1].eval_loss()) << "it is learnt";
  }
}

TEST(EvalTest, SendsWhatThePlanSays) {
  const MemoryDataset data = TinyData();
  const MemoryDataset eval = EvalData(11);
  for (const Shape shape : AllShapes()) {
    RunOptions options{.world = shape.world};
    options.eval_data = &eval;
    const v1::JobSpec spec = EvalSpec(TinyGpt2(), shape, 2, 1, 0, {"bf16.enabled=true"});
    const auto results = TrainJob(spec, options, data);
    ExpectAllOk(results);
    const auto model = MakeModelTable(spec.model());
    ASSERT_TRUE(model.ok());
    const ZeroPolicy policy = MakeZeroPolicy(*model, MakeZeroOptions(spec, shape.world));
    for (int rank = 0; rank < shape.world; ++rank) {
      const RankPlan plan = PlanRank(*model, policy, rank);
      const TrafficTable once = PlanEvaluation(*model, policy, 5);
      for (int op = 0; op < kCollectiveOps; ++op)
        for (int phase = 0; phase < kPhases; ++phase)
          EXPECT_EQ(results[static_cast<size_t>(rank)].traffic[op][phase],
                    2 * (plan.step[op][phase] + once[op][phase]))
              << "world " << shape.world << " stage " << shape.stage << " "
              << NameOf(static_cast<CollectiveOp>(op));
    }
  }
}

TEST(EvalTest, ALossThatIsNotFiniteFailsTheJob) {
  const MemoryDataset data(ChainTokens(24 * 40 + 1, 60), 24);
  std::vector<int32_t> tokens = ChainTokens(24 * 10 + 1, 60);
  tokens[24 * 7 + 3] = 60;  // sample 7, micro-batch 3, rank 1 of 2
  const MemoryDataset eval(tokens, 24);
  MemoryFolder folder;
  v1::JobSpec spec = EvalSpec(TinyLlama(), {2, 2}, 4, 2, 0);
  spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  spec.mutable_checkpoint()->set_interval_steps(1);
  RunOptions options{.world = 2};
  options.eval_data = &eval;
  options.prepare = [](int, Trainer* trainer) -> absl::Status {
    auto table = trainer->GatherTensor("embed.weight");
    if (!table.ok()) return table.status();
    (*table)[60 * 32 + 1] = std::numeric_limits<float>::infinity();
    return trainer->SetTensor("embed.weight", *table);
  };
  const auto results = TrainJob(spec, options, data);
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInternal) << result.status;
    EXPECT_EQ(result.status, results[0].status);
    EXPECT_TRUE(IsNonFinite(result.status));
    EXPECT_EQ(BlamedRank(result.status), 1u);
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("step 2"));
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("samples 6 to 7 of eval.data"));
  }
  // The one before is complete, and this step is not saved.
  EXPECT_TRUE(CheckpointReader::Open(folder / "ckpt/step-00000001").ok());
  EXPECT_FALSE(std::filesystem::exists(folder / "ckpt/step-00000002"));
}

TEST(EvalTest, LessThanOneMicroBatchIsMeasuredWhole) {
  const MemoryDataset data = TinyData();
  const MemoryDataset eval = EvalData(1);
  RunOptions options{.world = 2};
  options.eval_data = &eval;
  const auto results = TrainJob(EvalSpec(TinyGpt2(), {2, 3}, 1, 1, 0, Still()), options, data);
  ExpectAllOk(results);
  const double wanted = TrainingLoss(TinyGpt2(), eval);
  EXPECT_NEAR(results[0].records.at(0).eval_loss(), wanted, 1e-6 * wanted);
}

// At once, and not after the steps before the first evaluation.
TEST(EvalTest, TextWithoutALossIsRefusedBeforeTraining) {
  const MemoryDataset data = TinyData();
  MemoryDataset eval = EvalData(10);
  eval.MaskTargets([](int64_t sample, int64_t) { return sample < 6; });
  RunOptions options{.world = 2};
  options.eval_data = &eval;
  // The first six samples are one batch.
  const auto refused = TrainJob(EvalSpec(TinyGpt2(), {2, 1}, 2, 2, 1), options, data);
  for (const RankResult& result : refused) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInvalidArgument) << result.status;
    EXPECT_THAT(std::string(result.status.message()), HasSubstr("first 6 samples of eval.data"));
    EXPECT_TRUE(result.records.empty());
  }
  ExpectAllOk(TrainJob(EvalSpec(TinyGpt2(), {2, 1}, 2, 2, 0), options, data));
}

const std::vector<std::string>& Dropout() {
  static const std::vector<std::string> rates = {"model.embd_pdrop=0.1", "model.attn_pdrop=0.2",
                                                 "model.resid_pdrop=0.1", "deterministic=true"};
  return rates;
}

TEST(DropoutTest, IsTheSameAtAnyWorldSizeStageAndMicroBatch) {
  const MemoryDataset data = TinyData();
  const std::string wanted =
      TrainFingerprint(SavingSpec(TinyGpt2(), {1, 0}, 3, "", Dropout()), {.world = 1}, data);
  EXPECT_NE(wanted, TrainFingerprint(SavingSpec(TinyGpt2(), {1, 0}, 3, "", {"deterministic=true"}),
                                     {.world = 1}, data))
      << "nothing is dropped";
  for (const Shape shape : AllShapes())
    EXPECT_EQ(TrainFingerprint(SavingSpec(TinyGpt2(), shape, 3, "", Dropout()),
                               {.world = shape.world}, data),
              wanted)
        << "world " << shape.world << " stage " << shape.stage;
}

// A mask belongs to the step and the sample: what a run drops after a resume is what it would have.
TEST(DropoutTest, GoesOnThroughAResumeAndIsNotInTheEvaluation) {
  const MemoryDataset data = TinyData();
  const MemoryDataset eval = EvalData(6);
  const std::string text = TinyGpt2();
  RunOptions options{.world = 2};
  options.eval_data = &eval;
  MemoryFolder folder;
  v1::JobSpec spec = EvalSpec(text, {2, 2}, 4, 1, 0, Dropout());
  spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  spec.mutable_checkpoint()->set_interval_steps(2);
  const auto whole = TrainJob(spec, options, data);
  ExpectAllOk(whole);
  v1::JobSpec rest = spec;
  rest.clear_checkpoint();
  RunOptions resume = Resume(2, folder / ("ckpt/" + CheckpointName(2)), 2);
  resume.eval_data = &eval;
  const auto resumed = TrainJob(rest, resume, data);
  ExpectAllOk(resumed);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(resumed[0].records.at(i).loss(), whole[0].records.at(i + 2).loss());
    EXPECT_EQ(resumed[0].records.at(i).eval_loss(), whole[0].records.at(i + 2).eval_loss());
  }
  EXPECT_EQ(resumed[0].digest, whole[0].digest);

  const std::vector<std::string> still = Still({"model.embd_pdrop=0.5", "model.resid_pdrop=0.5"});
  const auto results = TrainJob(EvalSpec(text, {2, 2}, 1, 1, 0, still), options, data);
  ExpectAllOk(results);
  const double wanted = TrainingLoss(text, eval);
  EXPECT_NEAR(results[0].records.at(0).eval_loss(), wanted, 1e-6 * wanted);
}

}  // namespace
}  // namespace zeroshard
