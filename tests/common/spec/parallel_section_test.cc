// The mesh of a job: what is accepted, what is filled in, and what each refusal says.
#include "common/spec/parallel_section.h"

#include <string>
#include <vector>

#include "common/plan/job_mesh.h"
#include "common/plan/model_table.h"
#include "common/plan/tensor_slices.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// 30 layers, as in the field; 8 heads.
std::vector<std::string> Deep(std::vector<std::string> more = {}) {
  std::vector<std::string> overrides = {"model.layers=30", "model.heads=8", "resources.workers=8"};
  overrides.insert(overrides.end(), more.begin(), more.end());
  return overrides;
}

TEST(ParallelSection, AMeshIsAccepted) {
  const v1::JobSpec spec =
      Normalised(Deep({"parallel={tensor: 2, pipeline: 2, sequence_parallel: true}"}));
  EXPECT_EQ(spec.parallel().tensor(), 2u);
  EXPECT_EQ(spec.parallel().pipeline(), 2u);
  EXPECT_TRUE(spec.parallel().sequence_parallel());
  EXPECT_EQ(spec.parallel().virtual_stages(), 1u);
  EXPECT_EQ(spec.zero_optimization().pipeline_gradients(), "sharded");
  EXPECT_EQ(RanksOfReplica(spec), 4);
  const auto mesh = MeshOf(spec, 8);
  ASSERT_TRUE(mesh.ok()) << mesh.status();
  EXPECT_EQ(mesh->data, 2);
  v1::JobSpec again = spec;
  ASSERT_TRUE(NormaliseJobSpec(&again).ok());
  EXPECT_EQ(again.SerializeAsString(), spec.SerializeAsString());
}

TEST(ParallelSection, TensorAndPipelineGoAlone) {
  EXPECT_EQ(Refusal(Deep({"parallel.tensor=4"})), "");
  EXPECT_EQ(Refusal(Deep({"parallel.pipeline=4"})), "");
  EXPECT_EQ(Refusal(Deep({"parallel={pipeline: 1, virtual_stages: 1, tensor: 2}"})), "");
}

TEST(ParallelSection, AJobWithoutOneHasNothingNewInIt) {
  const v1::JobSpec spec = Normalised();
  EXPECT_FALSE(spec.parallel().has_virtual_stages());
  EXPECT_EQ(spec.zero_optimization().pipeline_gradients(), "");
  EXPECT_EQ(FormatJobSpec(spec).find("virtual_stages"), std::string::npos);
}

TEST(ParallelSection, WorkersAreWholeReplicas) {
  EXPECT_THAT(Refusal(Deep({"parallel={tensor: 2, pipeline: 2}", "resources.workers=6"})),
              AllOf(HasSubstr("resources.workers: seen 6"),
                    HasSubstr("parallel.tensor 2 x parallel.pipeline 2 = 4"),
                    HasSubstr("write 4 or 8 workers")));
  EXPECT_THAT(
      Refusal(Deep({"parallel={tensor: 2, pipeline: 2}", "resources.min_workers=6"})),
      AllOf(StartsWith("resources.min_workers: seen 6"),
            HasSubstr("parallel.tensor 2 x parallel.pipeline 2 = 4"), HasSubstr("write 4 or 8")));
  EXPECT_THAT(Refusal(Deep({"parallel.pipeline=4", "resources.min_workers=2"})),
              HasSubstr("so many; write 4"));
  EXPECT_EQ(Refusal(Deep({"parallel={tensor: 2, pipeline: 2}", "resources.min_workers=4"})), "");
  EXPECT_THAT(Refusal({"parallel.tensor=0"}), HasSubstr("parallel.tensor: seen 0"));
  EXPECT_THAT(Refusal({"parallel.pipeline=65537"}), HasSubstr("parallel.pipeline: seen 65537"));
}

// F35.
TEST(ParallelSection, AModelThatCannotBeSplitSoIsRefusedWithTheNumbers) {
  EXPECT_THAT(Refusal({"parallel.tensor=4", "resources.workers=4", "model.heads=6",
                       "model.hidden_size=96"}),
              AllOf(HasSubstr("6 heads (model.heads)"), HasSubstr("4 tensor ranks"),
                    HasSubstr("write a divisor of 6")));
  EXPECT_THAT(
      Refusal({"model={architecture: llama, hidden_size: 96, layers: 2, heads: 12, kv_heads: 3, "
               "sequence_length: 16, vocab_size: 256}",
               "parallel.tensor=2", "resources.workers=2"}),
      AllOf(HasSubstr("3 key and value heads (model.kv_heads)"), HasSubstr("2 tensor ranks")));
  EXPECT_THAT(Refusal({"parallel.pipeline=4", "resources.workers=4"}),
              AllOf(HasSubstr("seen 4 x 1 stages for 3 units"), HasSubstr("model.layers")));
  EXPECT_THAT(Refusal({"parallel={pipeline: 2, virtual_stages: 2}"}),
              HasSubstr("seen 2 x 2 stages for 3 units"));
}

// F35: no layer is dropped; stages are as even as their costs allow.
TEST(ParallelSection, ThirtyLayersInFourStagesAreAllThere) {
  const v1::JobSpec spec = Normalised(Deep({"parallel.pipeline=4"}));
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok());
  std::vector<int> seen(model->units.size(), 0);
  for (int stage = 0; stage < 4; ++stage) {
    const auto part = PartOf(spec, *model, {.pipeline = stage});
    ASSERT_TRUE(part.ok()) << part.status();
    for (size_t u = 0; u < seen.size(); ++u) seen[u] += part->Runs(static_cast<int>(u));
  }
  EXPECT_EQ(seen, std::vector<int>(32, 1));
}

TEST(ParallelSection, PartsOfTensorRanksAreTheirSlices) {
  const v1::JobSpec spec = Normalised(Deep({"parallel={tensor: 4, pipeline: 2}"}));
  const auto model = MakeModelTable(spec.model());
  ASSERT_TRUE(model.ok());
  const auto part = PartOf(spec, *model, {.pipeline = 0, .tensor = 3});
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(part->model.config.heads, 2);
  EXPECT_EQ(part->model.units.front().parameters.front().size, 256 / 4 * 64);
  EXPECT_EQ(part->model.units.back().length, 0);
}

TEST(ParallelSection, KeyAndValueHeadsThatRanksShare) {
  ModelConfig config;
  config.kv_heads = 2;
  EXPECT_EQ(KeyValueCopies(config, 1), 1);
  EXPECT_EQ(KeyValueCopies(config, 2), 1);
  EXPECT_EQ(KeyValueCopies(config, 8), 4);
}

TEST(ParallelSection, BatchSizesAreOfTheDataParallelRanks) {
  // 8 workers are 2 data-parallel ranks.
  const std::string mesh = "parallel={tensor: 2, pipeline: 2}";
  EXPECT_EQ(Normalised(Deep({mesh})).gradient_accumulation_steps(), 2u);  // 32 / (8 x 2)
  EXPECT_THAT(Refusal(Deep({mesh, "gradient_accumulation_steps=1"})),
              AllOf(HasSubstr("gradient_accumulation_steps: seen 1, wanted 2"),
                    HasSubstr("2 data-parallel ranks (resources.workers 8 / (parallel.tensor 2 x "
                              "parallel.pipeline 2))")));
}

TEST(ParallelSection, SequencesAreDividedEvenlyOrRefused) {
  EXPECT_THAT(
      Refusal(Deep({"parallel={tensor: 4, sequence_parallel: true}", "model.sequence_length=18"})),
      AllOf(HasSubstr("model.sequence_length 18"), HasSubstr("parallel.tensor 4"),
            HasSubstr("write 16 or 20")));
  EXPECT_THAT(Refusal({"parallel.sequence_parallel=true"}),
              AllOf(HasSubstr("parallel.sequence_parallel: true"), HasSubstr("tensor is 1")));
}

TEST(ParallelSection, WhatIsOfAPipelineNeedsOne) {
  EXPECT_THAT(Refusal({"parallel.virtual_stages=2"}),
              AllOf(HasSubstr("parallel.virtual_stages: seen 2"), HasSubstr("pipeline is 1")));
  EXPECT_THAT(Refusal({"zero_optimization.pipeline_gradients=full"}),
              AllOf(HasSubstr("pipeline_gradients: seen full"), HasSubstr("pipeline is 1")));
  EXPECT_THAT(Refusal(Deep({"parallel={pipeline: 2, virtual_stages: 0}"})),
              HasSubstr("parallel.virtual_stages: seen 0"));
}

TEST(ParallelSection, PipelineGradients) {
  const std::string two = "parallel.pipeline=2", full = "zero_optimization.pipeline_gradients=full";
  EXPECT_EQ(Refusal(Deep({two, full, "zero_optimization.stage=2"})), "");
  EXPECT_THAT(Refusal(Deep({two, "zero_optimization.pipeline_gradients=whole"})),
              AllOf(HasSubstr("pipeline_gradients"), HasSubstr("sharded"), HasSubstr("full")));
  EXPECT_THAT(Refusal(Deep({two, full, "zero_optimization.stage=1"})), HasSubstr("at stage 1"));
  EXPECT_THAT(Refusal(Deep({two, full, "zero_optimization.stage=3", "deterministic=true"})),
              HasSubstr("deterministic"));
}

TEST(ParallelSection, AModelInPartsWritesNoSamples) {
  const std::string samples = "sample={prompts: [The], interval_steps: 5}";
  EXPECT_THAT(Refusal(Deep({"parallel.pipeline=2", samples})),
              AllOf(StartsWith("sample.prompts"), HasSubstr("zeroshard generate")));
  EXPECT_EQ(Refusal(Deep({samples})), "");
}

TEST(ParallelSection, AStepOfTooManyComputesIsRefused) {
  EXPECT_THAT(Refusal(Deep({"parallel.pipeline=8", "train_batch_size=262144",
                            "train_micro_batch_size_per_gpu=1"})),
              AllOf(HasSubstr("262144 micro-batches of a rank"), HasSubstr("1048576;")));
  // Of tensor ranks alone, too; and where many layers make the lists of a step long.
  EXPECT_THAT(Refusal(Deep({"parallel.tensor=8", "train_batch_size=2097152",
                            "train_micro_batch_size_per_gpu=1"})),
              HasSubstr("micro-batches of a rank"));
  EXPECT_THAT(Refusal(Deep({"parallel.pipeline=8", "model.layers=600", "train_batch_size=524288",
                            "train_micro_batch_size_per_gpu=1"})),
              AllOf(HasSubstr("over 602 units"), HasSubstr("train_micro_batch_size_per_gpu")));
}

TEST(ParallelSection, DeepSpeedsNamesAreAnswered) {
  for (const auto& [key, answer] : std::vector<std::pair<std::string, std::string>>{
           {"tensor_parallel={autotp_size: 2}", "parallel: {tensor: N}"},
           {"pipeline={stages: 2}", "parallel: {pipeline: N}"},
           {"sequence_parallel_size=2", "sequence_parallel: true"}}) {
    const auto spec = ParseJobSpec(kSmallJob, "job.yaml", {key});
    ASSERT_FALSE(spec.ok()) << key;
    EXPECT_THAT(std::string(spec.status().message()), HasSubstr(answer));
  }
}

}  // namespace
}  // namespace zeroshard
