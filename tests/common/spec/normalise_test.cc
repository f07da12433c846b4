#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

TEST(NormaliseJobSpec, FillsInEveryDefault) {
  const v1::JobSpec spec = Normalised();
  EXPECT_EQ(spec.resources().min_workers(), 2u);
  EXPECT_EQ(spec.gradient_accumulation_steps(), 2u);
  EXPECT_EQ(spec.optimizer().type(), "AdamW");
  // DeepSpeed's FusedAdam, which is what its AdamW is.
  EXPECT_EQ(spec.optimizer().params().lr(), 1e-3);
  EXPECT_THAT(spec.optimizer().params().betas(), ElementsAre(0.9, 0.999));
  EXPECT_EQ(spec.optimizer().params().eps(), 1e-8);
  EXPECT_TRUE(spec.optimizer().params().has_weight_decay());
  EXPECT_EQ(spec.optimizer().params().weight_decay(), 0.0);
  EXPECT_EQ(spec.scheduler().type(), "constant");
  EXPECT_EQ(spec.zero_optimization().stage(), 0u);
  EXPECT_EQ(spec.zero_optimization().reduce_bucket_size(), 500'000'000u);
  EXPECT_EQ(spec.zero_optimization().stage3_prefetch_bucket_size(), 50'000'000u);
  EXPECT_EQ(spec.zero_optimization().stage3_param_persistence_threshold(), 100'000u);
  EXPECT_EQ(spec.zero_optimization().stage3_max_live_parameters(), 1'000'000'000u);
  EXPECT_EQ(spec.zero_optimization().stage3_max_reuse_distance(), 1'000'000'000u);
  EXPECT_TRUE(spec.zero_optimization().overlap_comm());
  EXPECT_EQ(spec.zero_optimization().offload_optimizer().device(), "none");
  EXPECT_EQ(spec.timeouts().start_seconds(), 120u);
  EXPECT_EQ(spec.timeouts().step_seconds(), 600u);
  EXPECT_EQ(spec.timeouts().collective_seconds(), 300u);
  EXPECT_EQ(spec.parallel().tensor(), 1u);
  EXPECT_EQ(spec.parallel().pipeline(), 1u);
}

TEST(NormaliseJobSpec, IsIdempotent) {
  for (const char* scheduler :
       {"{type: constant}", "{type: linear}", "{type: cosine, params: {warmup_steps: 3}}",
        "{type: WarmupLR}", "{type: WarmupDecayLR, params: {total_num_steps: 50}}",
        "{type: WarmupCosineLR, params: {total_num_steps: 50}}"}) {
    v1::JobSpec spec = Normalised({absl::StrCat("scheduler=", scheduler)});
    const std::string once = spec.SerializeAsString();
    ASSERT_TRUE(NormaliseJobSpec(&spec).ok());
    EXPECT_EQ(spec.SerializeAsString(), once) << scheduler;
  }
}

TEST(NormaliseJobSpec, GivenZerosAreNotDefaulted) {
  const v1::JobSpec spec = Normalised({"zero_optimization.stage3_param_persistence_threshold=0",
                                       "zero_optimization.overlap_comm=false"});
  EXPECT_EQ(spec.zero_optimization().stage3_param_persistence_threshold(), 0u);
  EXPECT_FALSE(spec.zero_optimization().overlap_comm());
}

TEST(NormaliseJobSpec, MissingPartsAreNamed) {
  v1::JobSpec spec;
  EXPECT_THAT(std::string(NormaliseJobSpec(&spec).message()), StartsWith("name: missing"));
  spec.set_name("a");
  EXPECT_THAT(std::string(NormaliseJobSpec(&spec).message()), StartsWith("model"));
  spec = Parsed();
  spec.clear_steps();
  EXPECT_THAT(std::string(NormaliseJobSpec(&spec).message()), StartsWith("steps: missing"));
  spec = Parsed();
  spec.clear_resources();
  EXPECT_THAT(std::string(NormaliseJobSpec(&spec).message()), StartsWith("resources.workers"));
  spec = Parsed();
  spec.clear_data();
  EXPECT_THAT(std::string(NormaliseJobSpec(&spec).message()), StartsWith("data.train: missing"));
}

TEST(NormaliseJobSpec, NamesMustServeAsFoldersAndLabels) {
  for (const char* name : {"a", "A-b_c.9", "0"}) {
    EXPECT_EQ(Refusal({absl::StrCat("name=\"", name, "\"")}), "") << name;
  }
  for (const std::string& name :
       {std::string("a/b"), std::string("../x"), std::string(".."), std::string("-a"),
        std::string("a b"), std::string("é"), std::string("a."), std::string(64, 'a')}) {
    EXPECT_THAT(Refusal({absl::StrCat("name=\"", name, "\"")}), StartsWith("name: seen ")) << name;
  }
  EXPECT_EQ(Refusal({absl::StrCat("name=", std::string(63, 'a'))}), "");
}

TEST(NormaliseJobSpec, ModelErrorsNameTheModel) {
  EXPECT_THAT(Refusal({"model.heads=3"}), HasSubstr("model"));
  EXPECT_THAT(Refusal({"model.architecture=gpt5"}), HasSubstr("gpt5"));
  EXPECT_THAT(Refusal({"model.hidden_size=0"}), HasSubstr("hidden_size"));
}

TEST(NormaliseJobSpec, DataMustFitTheTokenizer) {
  EXPECT_THAT(Refusal({"data.tokenizer=bpe"}), AllOf(HasSubstr("\"bpe\""), HasSubstr("bytes")));
  EXPECT_THAT(Refusal({"model.vocab_size=128"}),
              AllOf(StartsWith("model.vocab_size: seen 128"), HasSubstr("256")));
  EXPECT_EQ(Refusal({"model.vocab_size=128", "data.tokenizer=tokens"}), "");
  EXPECT_THAT(Refusal({"data.train=[]"}), StartsWith("data.train: missing"));
  EXPECT_THAT(Refusal({"data.train=[\"\"]"}), StartsWith("data.train.0: empty"));
}

TEST(NormaliseJobSpec, AJobMayGoOnWithFewerWorkersButNotStartWithMore) {
  EXPECT_THAT(Refusal({"resources.min_workers=3"}),
              AllOf(StartsWith("resources.min_workers: seen 3"), HasSubstr("which is 2")));
  EXPECT_EQ(Normalised({"resources.min_workers=1"}).resources().min_workers(), 1u);
  EXPECT_EQ(Refusal({"resources.workers=5", "resources.min_workers=3"}), "");  // ragged rounds
  EXPECT_EQ(Refusal({"resources.min_workers=2"}), "");
  EXPECT_EQ(Refusal({"resources.min_workers=0"}), "");  // as if absent
  EXPECT_EQ(Normalised({"resources.workers=4"}).resources().min_workers(), 4u);
}

TEST(NormaliseJobSpec, WorkersAreBounded) {
  EXPECT_THAT(Refusal({"resources.workers=65537"}), StartsWith("resources.workers: seen 65537"));
}

TEST(NormaliseJobSpec, OptimizersOtherThanAdamWAndSgdAreRefused) {
  EXPECT_EQ(Normalised({"optimizer.type=adamw"}).optimizer().type(), "AdamW");
  EXPECT_THAT(Refusal({"optimizer.type=Adam"}),
              AllOf(HasSubstr("\"Adam\""), HasSubstr("write AdamW")));
  EXPECT_THAT(Refusal({"optimizer.type=Lamb"}), HasSubstr("DeepSpeed"));
  EXPECT_THAT(Refusal({"optimizer.type=Foo"}), HasSubstr("wanted AdamW or SGD"));
}

TEST(NormaliseJobSpec, OptimizerNumbersAreChecked) {
  EXPECT_THAT(Refusal({"optimizer.params.lr=0"}), StartsWith("optimizer.params.lr: seen 0"));
  EXPECT_THAT(Refusal({"optimizer.params.lr=-1"}), StartsWith("optimizer.params.lr: seen -1"));
  EXPECT_THAT(Refusal({"optimizer.params.eps=0"}), StartsWith("optimizer.params.eps: seen 0"));
  EXPECT_THAT(Refusal({"optimizer.params.betas=[0.9, 1]"}),
              StartsWith("optimizer.params.betas.1: seen 1"));
  EXPECT_THAT(Refusal({"optimizer.params.betas=[0.9]"}), HasSubstr("seen 1 numbers"));
  EXPECT_EQ(Refusal({"optimizer.params.betas=[0, 0]"}), "");
  EXPECT_THAT(Refusal({"optimizer.params.weight_decay=-0.1"}),
              HasSubstr("weight_decay: seen -0.1"));
  EXPECT_THAT(Refusal({"optimizer.params.momentum=0.9"}),
              AllOf(StartsWith("optimizer.params.momentum:"), HasSubstr("betas")));
  EXPECT_THAT(Refusal({"gradient_clipping=-1"}), StartsWith("gradient_clipping: seen -1"));
  // From the network a non-finite number may come, which a file cannot hold.
  v1::JobSpec spec = Parsed();
  spec.mutable_optimizer()->mutable_params()->set_lr(std::numeric_limits<double>::quiet_NaN());
  EXPECT_FALSE(NormaliseJobSpec(&spec).ok());
}

TEST(NormaliseJobSpec, SchedulersTakeTheirOwnParametersOnly) {
  EXPECT_THAT(Refusal({"scheduler={type: cosine, params: {warmup_num_steps: 3}}"}),
              AllOf(StartsWith("scheduler.params.warmup_num_steps:"), HasSubstr("warmup_steps")));
  EXPECT_THAT(Refusal({"scheduler={type: constant, params: {min_lr: 0}}"}),
              StartsWith("scheduler.params.min_lr:"));
  EXPECT_THAT(Refusal({"scheduler={type: WarmupLR, params: {total_num_steps: 9}}"}),
              StartsWith("scheduler.params.total_num_steps:"));
  EXPECT_THAT(Refusal({"scheduler={type: WarmupCosineLR, params: {total_num_steps: 9, "
                       "warmup_max_lr: 1}}"}),
              StartsWith("scheduler.params.warmup_max_lr:"));
}

TEST(NormaliseJobSpec, UnknownSchedulersAreRefusedByName) {
  EXPECT_THAT(Refusal({"scheduler.type=OneCycle"}), HasSubstr("DeepSpeed"));
  EXPECT_THAT(Refusal({"scheduler.type=LRRangeTest"}), HasSubstr("DeepSpeed"));
  EXPECT_THAT(Refusal({"scheduler.type=cosin"}), HasSubstr("did you mean cosine?"));
  EXPECT_THAT(Refusal({"scheduler={params: {warmup_steps: 3}}"}), StartsWith("scheduler.type"));
}

TEST(NormaliseJobSpec, SchedulerNumbersAreChecked) {
  EXPECT_THAT(Refusal({"scheduler={type: cosine, params: {warmup_steps: 101, total_steps: 100}}"}),
              AllOf(HasSubstr("warmup_steps: seen 101"), HasSubstr("100")));
  EXPECT_EQ(Normalised({"scheduler={type: cosine, params: {warmup_steps: 101}}"})
                .scheduler()
                .params()
                .total_steps(),
            101u);
  EXPECT_THAT(Refusal({"scheduler={type: linear, params: {min_lr: 1}}"}), HasSubstr("min_lr"));
  EXPECT_THAT(Refusal({"scheduler={type: linear, params: {total_steps: 0}}"}),
              HasSubstr("total_steps: seen 0"));
  EXPECT_THAT(Refusal({"scheduler={type: WarmupDecayLR}"}),
              StartsWith("scheduler.params.total_num_steps: missing"));
  EXPECT_THAT(Refusal({"scheduler={type: WarmupLR, params: {warmup_num_steps: 0}}"}),
              HasSubstr("warmup_num_steps: seen 0"));
  EXPECT_THAT(Refusal({"scheduler={type: WarmupLR, params: {warmup_type: exp}}"}),
              HasSubstr("\"exp\""));
  EXPECT_THAT(Refusal({"scheduler={type: WarmupLR, params: {warmup_max_lr: -1}}"}),
              HasSubstr("warmup_max_lr: seen -1"));
  EXPECT_THAT(Refusal({"scheduler={type: WarmupCosineLR, params: {total_num_steps: 9, "
                       "cos_min_ratio: 2}}"}),
              HasSubstr("cos_min_ratio: seen 2"));
}

TEST(NormaliseJobSpec, DeepSpeedSchedulersHaveDeepSpeedsDefaults) {
  const v1::SchedulerParams warmup =
      Normalised({"scheduler.type=WarmupLR", "optimizer.params.lr=0.25"}).scheduler().params();
  EXPECT_EQ(warmup.warmup_min_lr(), 0.0);
  EXPECT_EQ(warmup.warmup_max_lr(), 0.25);
  EXPECT_EQ(warmup.warmup_num_steps(), 1000u);
  EXPECT_EQ(warmup.warmup_type(), "log");
  const v1::SchedulerParams decay =
      Normalised({"scheduler={type: WarmupDecayLR, params: {total_num_steps: 50}}",
                  "optimizer.params.lr=0.25"})
          .scheduler()
          .params();
  EXPECT_EQ(decay.warmup_max_lr(), 1e-3);
  const v1::SchedulerParams cosine =
      Normalised({"scheduler={type: WarmupCosineLR, params: {total_num_steps: 50}}"})
          .scheduler()
          .params();
  EXPECT_EQ(cosine.warmup_min_ratio(), 0.0);
  EXPECT_EQ(cosine.cos_min_ratio(), 1e-4);
}

TEST(NormaliseJobSpec, Fp16HasDeepSpeedsDefaults) {
  const v1::Fp16Spec fp16 = Normalised({"fp16.enabled=true"}).fp16();
  EXPECT_EQ(fp16.loss_scale(), 0);
  EXPECT_EQ(fp16.initial_scale_power(), 16u);
  EXPECT_EQ(fp16.loss_scale_window(), 1000u);
  EXPECT_EQ(fp16.hysteresis(), 2u);
  EXPECT_FALSE(fp16.consecutive_hysteresis());
  EXPECT_EQ(fp16.min_loss_scale(), 1);
}

TEST(NormaliseJobSpec, Fp16TakesWhatIsWrittenAndRefusesWhatCannotBeMeant) {
  const v1::Fp16Spec fp16 =
      Normalised({"fp16={enabled: true, loss_scale: 0, initial_scale_power: 8, loss_scale_window: "
                  "5, hysteresis: 1, consecutive_hysteresis: true, min_loss_scale: 0.5}"})
          .fp16();
  EXPECT_EQ(fp16.initial_scale_power(), 8u);
  EXPECT_EQ(fp16.loss_scale_window(), 5u);
  EXPECT_TRUE(fp16.consecutive_hysteresis());
  EXPECT_EQ(fp16.min_loss_scale(), 0.5);
  EXPECT_EQ(Normalised({"fp16={enabled: true, loss_scale: 128}"}).fp16().loss_scale(), 128);

  const auto refusal = [](const std::string& key) {
    return Refusal({"fp16.enabled=true", "fp16." + key});
  };
  EXPECT_THAT(refusal("loss_scale=-1"), HasSubstr("fp16.loss_scale: seen -1"));
  EXPECT_THAT(refusal("loss_scale=1e38"), HasSubstr("fp16.loss_scale"));
  EXPECT_THAT(refusal("initial_scale_power=64"), HasSubstr("fp16.initial_scale_power: seen 64"));
  EXPECT_THAT(refusal("loss_scale_window=0"), HasSubstr("fp16.loss_scale_window: seen 0"));
  EXPECT_THAT(refusal("hysteresis=0"), HasSubstr("fp16.hysteresis: seen 0"));
  EXPECT_THAT(refusal("min_loss_scale=0"), HasSubstr("fp16.min_loss_scale: seen 0"));
  EXPECT_THAT(refusal("min_loss_scale=65537"), HasSubstr("fp16.min_loss_scale: seen 65537"));
  EXPECT_THAT(Refusal({"fp16.enabled=true", "bf16.enabled=true"}), HasSubstr("both true"));
  EXPECT_EQ(Refusal({"fp16={enabled: false, hysteresis: 0}", "bf16.enabled=true"}), "");
}

TEST(NormaliseJobSpec, StochasticRoundingIsOfBf16) {
  EXPECT_EQ(Refusal({"bf16={enabled: true, stochastic_rounding: true}"}), "");
  EXPECT_EQ(Refusal({"bf16.stochastic_rounding=false"}), "");
  for (const char* fp16 : {"fp16.enabled=true", "fp16.enabled=false"})
    EXPECT_THAT(Refusal({"bf16.stochastic_rounding=true", fp16}),
                HasSubstr("bf16.stochastic_rounding"));
}

TEST(NormaliseJobSpec, Tf32IsForJobsOfFp32Alone) {
  EXPECT_FALSE(Normalised({}).tf32());
  EXPECT_TRUE(Normalised({"tf32=true"}).tf32());
  EXPECT_TRUE(Normalised({"tf32=true", "bf16.enabled=false"}).tf32());
  EXPECT_FALSE(Normalised({"tf32=false", "bf16.enabled=true"}).tf32());
  EXPECT_THAT(Refusal({"tf32=true", "bf16.enabled=true"}), HasSubstr("tf32: true beside bf16"));
  EXPECT_THAT(Refusal({"tf32=true", "fp16.enabled=true"}), HasSubstr("tf32: true beside fp16"));
}

TEST(NormaliseJobSpec, WhatThisVersionLacksIsRefusedByName) {
  EXPECT_THAT(Refusal({"zero_optimization.stage=4"}), HasSubstr("stage: seen 4"));
  EXPECT_THAT(Refusal({"zero_optimization.reduce_bucket_size=0"}), HasSubstr("seen 0"));
}

TEST(NormaliseJobSpec, ACheckpointSectionNamesItsFolder) {
  EXPECT_THAT(Refusal({"checkpoint.interval_steps=50"}),
              AllOf(HasSubstr("checkpoint.dir: missing"), HasSubstr("remove the section")));
  EXPECT_THAT(Refusal({"checkpoint={}"}), HasSubstr("checkpoint.dir: missing"));
  EXPECT_EQ(Refusal({"checkpoint={dir: ckpt, interval_steps: 50, keep_last: 2, keep_every: 500}"}),
            "");
}

TEST(NormaliseJobSpec, EvaluationSaysOnWhatAndWhen) {
  EXPECT_THAT(Refusal({"eval={interval_steps: 5}"}), HasSubstr("eval.data: missing"));
  EXPECT_THAT(Refusal({"eval={data: [val]}"}), HasSubstr("eval.interval_steps: missing or 0"));
  EXPECT_THAT(Refusal({"eval={data: ['']  , interval_steps: 5}"}), HasSubstr("eval.data.0: empty"));
  EXPECT_EQ(Refusal({"eval={data: [val], interval_steps: 5, batches: 2}"}), "");
}

TEST(NormaliseJobSpec, SamplingNeedsPromptsAndSomethingThatReadsThem) {
  EXPECT_THAT(Refusal({"sample={interval_steps: 5}"}), HasSubstr("sample.prompts: missing"));
  EXPECT_THAT(Refusal({"sample={prompts: [a, b, a], interval_steps: 5}"}),
              HasSubstr("sample.prompts.2: the same as sample.prompts.0"));
  EXPECT_THAT(Refusal({"sample={prompts: [a]}"}), HasSubstr("sample.interval_steps: missing or 0"));
  EXPECT_THAT(Refusal({"sample={prompts: [a], interval_steps: 5, temperature: -1}"}),
              HasSubstr("sample.temperature: seen -1"));
  EXPECT_THAT(Refusal({"sample={prompts: [a], interval_steps: 5}", "data.tokenizer=tokens"}),
              HasSubstr("data.tokenizer is tokens"));
  const v1::JobSpec spec = Normalised({"sample={prompts: [a], interval_steps: 5}"});
  EXPECT_EQ(spec.sample().max_tokens(), 32u);
  EXPECT_EQ(spec.sample().temperature(), 0);
}

TEST(NormaliseJobSpec, TheFormatBelongsToTheTokenizer) {
  EXPECT_EQ(Normalised().data().format(), "auto");
  EXPECT_THAT(Refusal({"data.format=megatron"}), HasSubstr("data.format: seen \"megatron\""));
  EXPECT_THAT(Refusal({"data.format=jsonl", "data.tokenizer=tokens"}),
              HasSubstr("data.format: seen \"jsonl\""));
  EXPECT_EQ(Refusal({"data.format=nanogpt", "data.tokenizer=tokens"}), "");
  EXPECT_EQ(Refusal({"data.format=jsonl", "data.tokenizer=gpt2/tokenizer.json"}), "");
}

TEST(NormaliseJobSpec, TheSeparatorIsAToken) {
  EXPECT_THAT(Refusal({"data.packing.separator=256"}),
              AllOf(HasSubstr("data.packing.separator: seen 256"), HasSubstr("below")));
  EXPECT_EQ(Refusal({"data.packing={mask_documents: true, separator: 255}"}), "");
}

TEST(NormaliseJobSpec, TimeoutsAreBounded) {
  EXPECT_THAT(Refusal({"timeouts.step_seconds=0"}), HasSubstr("timeouts.step_seconds: seen 0"));
  EXPECT_THAT(Refusal({"timeouts.start_seconds=604801"}), HasSubstr("start_seconds"));
}

// The three batch sizes, over two workers.
struct BatchCase {
  uint64_t global, micro, accumulation;  // 0: not given
  uint64_t want_global, want_micro, want_accumulation;
};

class BatchSizes : public testing::TestWithParam<BatchCase> {};

TEST_P(BatchSizes, TheMissingOnesFollow) {
  const BatchCase& c = GetParam();
  v1::JobSpec spec = Parsed();
  spec.clear_train_batch_size();
  spec.clear_train_micro_batch_size_per_gpu();
  if (c.global) spec.set_train_batch_size(c.global);
  if (c.micro) spec.set_train_micro_batch_size_per_gpu(c.micro);
  if (c.accumulation) spec.set_gradient_accumulation_steps(c.accumulation);
  const absl::Status status = NormaliseJobSpec(&spec);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(spec.train_batch_size(), c.want_global);
  EXPECT_EQ(spec.train_micro_batch_size_per_gpu(), c.want_micro);
  EXPECT_EQ(spec.gradient_accumulation_steps(), c.want_accumulation);
}

INSTANTIATE_TEST_SUITE_P(
    OverTwoWorkers, BatchSizes,
    testing::Values(BatchCase{32, 8, 2, 32, 8, 2}, BatchCase{32, 8, 0, 32, 8, 2},
                    BatchCase{32, 0, 2, 32, 8, 2}, BatchCase{0, 8, 2, 32, 8, 2},
                    BatchCase{32, 0, 0, 32, 16, 1}, BatchCase{0, 8, 0, 16, 8, 1},
                    // Ragged: 5 micro-batches on two ranks make three rounds.
                    BatchCase{40, 8, 0, 40, 8, 3}, BatchCase{40, 8, 3, 40, 8, 3},
                    BatchCase{8, 8, 0, 8, 8, 1}));

TEST(BatchSizes, ContradictionsAreRefusedWithTheNumbers) {
  EXPECT_THAT(Refusal({"train_batch_size=33"}),
              AllOf(StartsWith("train_batch_size: seen 33"), HasSubstr("which is 8")));
  EXPECT_THAT(Refusal({"gradient_accumulation_steps=3"}),
              AllOf(StartsWith("gradient_accumulation_steps: seen 3, wanted 2"), HasSubstr("32")));
  v1::JobSpec spec = Parsed({"train_batch_size=30", "gradient_accumulation_steps=4"});
  spec.clear_train_micro_batch_size_per_gpu();
  EXPECT_THAT(std::string(NormaliseJobSpec(&spec).message()),
              AllOf(StartsWith("train_batch_size: seen 30"), HasSubstr("4 * resources.workers 2")));
  spec = Parsed();
  spec.clear_train_batch_size();
  spec.clear_train_micro_batch_size_per_gpu();
  spec.set_gradient_accumulation_steps(2);
  EXPECT_THAT(std::string(NormaliseJobSpec(&spec).message()),
              StartsWith("train_batch_size: missing"));
}

TEST(BatchSizes, AreBounded) {
  EXPECT_THAT(Refusal({"train_batch_size=0"}), HasSubstr("train_batch_size: seen 0"));
  EXPECT_THAT(Refusal({"train_micro_batch_size_per_gpu=65537"}), HasSubstr("seen 65537"));
  EXPECT_THAT(Refusal({"train_batch_size=2147483648"}), HasSubstr("seen 2147483648"));
  v1::JobSpec spec = Parsed({"train_micro_batch_size_per_gpu=65536", "resources.workers=65536",
                             "gradient_accumulation_steps=2147483647"});
  spec.clear_train_batch_size();
  EXPECT_FALSE(NormaliseJobSpec(&spec).ok());
}

}  // namespace
}  // namespace zeroshard
