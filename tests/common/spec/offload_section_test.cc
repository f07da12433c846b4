// What may be said of state in the shard stores, and how the rest is refused.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan/offload.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/spec/test_spec.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

const char kOffloaded[] = "zero_optimization={stage: 2, offload_optimizer: {device: cpu}}";
const char kParametersToo[] =
    "zero_optimization={stage: 3, offload_optimizer: {device: cpu}, offload_param: {device: cpu}}";

TEST(NormaliseOffload, StateStaysOnTheWorkersUnlessSaidOtherwise) {
  const v1::JobSpec spec = Normalised();
  EXPECT_FALSE(IsOffloaded(spec));
  EXPECT_FALSE(OffloadsParameters(spec));
  EXPECT_EQ(spec.zero_optimization().offload_optimizer().device(), "none");
  EXPECT_EQ(spec.zero_optimization().offload_param().device(), "none");
  EXPECT_FALSE(spec.zero_optimization().offload_optimizer().has_buffer_count());
  EXPECT_FALSE(spec.has_store());
}

TEST(NormaliseOffload, BuffersAndReplicasHaveDefaults) {
  const v1::JobSpec spec = Normalised({kParametersToo});
  EXPECT_TRUE(IsOffloaded(spec));
  EXPECT_TRUE(OffloadsParameters(spec));
  // DeepSpeed's (deepspeed/runtime/zero/offload_config.py).
  EXPECT_EQ(spec.zero_optimization().offload_optimizer().buffer_count(), 4u);
  EXPECT_EQ(spec.zero_optimization().offload_param().buffer_count(), 5u);
  EXPECT_EQ(spec.zero_optimization().offload_optimizer().buffer_size(), 100'000'000u);
  EXPECT_EQ(spec.zero_optimization().offload_param().buffer_size(), 100'000'000u);
  EXPECT_EQ(spec.store().replicas(), 1u);
}

TEST(NormaliseOffload, IsIdempotent) {
  for (const char* section : {kOffloaded, kParametersToo}) {
    v1::JobSpec spec = Normalised({section, "store.replicas=2", "optimizer.type=sgd"});
    const std::string once = spec.SerializeAsString();
    ASSERT_TRUE(NormaliseJobSpec(&spec).ok());
    EXPECT_EQ(spec.SerializeAsString(), once);
    const absl::StatusOr<v1::JobSpec> read = ParseJobSpec(FormatJobSpec(spec), "j");
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->SerializeAsString(), once);
  }
}

TEST(NormaliseOffload, EveryShardedStageTakesItInBothTypes) {
  for (int stage = 1; stage <= 3; ++stage) {
    for (const char* type : {"bf16.enabled=true", "bf16.enabled=false"}) {
      EXPECT_EQ(Refusal({kOffloaded, absl::StrCat("zero_optimization.stage=", stage), type}), "");
    }
  }
  EXPECT_EQ(Refusal({kParametersToo}), "");
}

TEST(NormaliseOffload, StageZeroHasNoPartsToSend) {
  EXPECT_THAT(Refusal({kOffloaded, "zero_optimization.stage=0"}),
              AllOf(StartsWith("zero_optimization.offload_optimizer.device: seen cpu at stage 0"),
                    HasSubstr("write stage: 1, 2 or 3")));
}

TEST(NormaliseOffload, ParametersAreInTheStoresOnlyAtStage3AndWithTheOptimizer) {
  for (int stage = 0; stage < 3; ++stage) {
    EXPECT_THAT(Refusal({kParametersToo, absl::StrCat("zero_optimization.stage=", stage)}),
                AllOf(StartsWith(absl::StrCat(
                          "zero_optimization.offload_param.device: seen cpu at stage ", stage)),
                      HasSubstr("write stage: 3")));
  }
  EXPECT_THAT(Refusal({"zero_optimization={stage: 3, offload_param: {device: cpu}}"}),
              AllOf(StartsWith("zero_optimization.offload_param.device: seen cpu"),
                    HasSubstr("write offload_optimizer: {device: cpu} too")));
}

TEST(NormaliseOffload, NvmeIsADeviceOfBoth) {
  // Neither is refused; what each needs beside it holds for nvme as for cpu.
  EXPECT_THAT(Refusal({"zero_optimization={stage: 2, offload_optimizer: {device: nvme}}",
                       "zero_optimization.stage=0"}),
              AllOf(StartsWith("zero_optimization.offload_optimizer.device: seen nvme at stage 0"),
                    HasSubstr("write stage: 1, 2 or 3")));
  EXPECT_THAT(Refusal({"zero_optimization={stage: 3, offload_param: {device: nvme}}"}),
              HasSubstr("write offload_optimizer: {device: nvme} too"));
}

TEST(NormaliseOffload, OtherDevicesAreRefusedWithTheChoices) {
  for (const char* key : {"offload_optimizer", "offload_param"}) {
    EXPECT_THAT(Refusal({absl::StrCat("zero_optimization={stage: 3, ", key, ": {device: gpu}}")}),
                AllOf(StartsWith(absl::StrCat("zero_optimization.", key, ".device:")),
                      HasSubstr("\"gpu\""), HasSubstr("cpu")));
  }
}

TEST(NormaliseOffload, BufferSizesAreBounded) {
  const auto refusal = [](const std::string& key, const std::string& value) {
    return Refusal({kParametersToo, absl::StrCat("zero_optimization.", key, "=", value)});
  };
  for (const char* section : {"offload_optimizer", "offload_param"}) {
    const std::string count = absl::StrCat(section, ".buffer_count");
    const std::string size = absl::StrCat(section, ".buffer_size");
    EXPECT_THAT(refusal(count, "0"),
                StartsWith(absl::StrCat("zero_optimization.", count, ": seen 0")));
    EXPECT_THAT(refusal(count, "65537"), HasSubstr("seen 65537"));
    EXPECT_EQ(refusal(count, "1"), "");
    EXPECT_THAT(refusal(size, "63"),
                StartsWith(absl::StrCat("zero_optimization.", size, ": seen 63")));
    EXPECT_EQ(refusal(size, "64"), "");
    EXPECT_THAT(refusal(size, "18446744073709551615"), HasSubstr("seen 18446744073709551615"));
  }
}

TEST(NormaliseOffload, BuffersOfNothingAreRefused) {
  EXPECT_THAT(Refusal({"zero_optimization.offload_optimizer.buffer_count=4"}),
              AllOf(StartsWith("zero_optimization.offload_optimizer.buffer_count: given"),
                    HasSubstr("nothing is offloaded")));
  EXPECT_THAT(Refusal({kOffloaded, "zero_optimization.offload_param.buffer_size=1e6"}),
              StartsWith("zero_optimization.offload_param.buffer_size: given"));
}

TEST(NormaliseOffload, ReplicasAreOneToEightOfOffloadedState) {
  for (int replicas = 1; replicas <= 8; ++replicas) {
    EXPECT_EQ(
        Normalised({kOffloaded, absl::StrCat("store.replicas=", replicas)}).store().replicas(),
        static_cast<uint32_t>(replicas));
  }
  EXPECT_THAT(Refusal({kOffloaded, "store.replicas=9"}), StartsWith("store.replicas: seen 9"));
  EXPECT_THAT(Refusal({"store.replicas=2"}),
              AllOf(StartsWith("store: "), HasSubstr("offload_optimizer: {device: cpu}"),
                    HasSubstr("remove the section")));
}

TEST(NormaliseOffload, AModelOfMoreChunksThanAClusterHoldsIsRefusedBeforeTheyAreMade) {
  const std::vector<std::string> huge = {kOffloaded, "model.hidden_size=65536", "model.heads=512",
                                         "model.layers=4096"};
  EXPECT_THAT(Refusal(huge),
              AllOf(HasSubstr("chunks of 1048576 elements"), HasSubstr("at most 4194304")));
  std::vector<std::string> whole = huge;
  whole[0] = "zero_optimization.stage=2";
  EXPECT_EQ(Refusal(whole), "");
}

TEST(NormaliseOffload, DeepSpeedsOtherKeysOfTheSectionAreExplained) {
  const auto error = [](const std::string& text) {
    const auto spec = ParseJobSpec(absl::StrCat(kSmallJob, text, "\n"), "job.yaml");
    EXPECT_FALSE(spec.ok()) << text;
    return std::string(spec.status().message());
  };
  for (const char* section : {"offload_optimizer", "offload_param"}) {
    for (const char* value : {"true", "false"}) {
      EXPECT_THAT(
          error(absl::StrCat("zero_optimization: {", section, ": {pin_memory: ", value, "}}")),
          AllOf(HasSubstr(".pin_memory: is a DeepSpeed key"), HasSubstr("pinned memory")));
    }
    EXPECT_THAT(error(absl::StrCat("zero_optimization: {", section, ": {nvme_path: /nvme}}")),
                AllOf(HasSubstr(".nvme_path: is a DeepSpeed key"), HasSubstr("--nvme-dir")));
  }
  EXPECT_THAT(error("zero_optimization: {cpu_offload: true}"),
              HasSubstr("write offload_optimizer: {device: cpu} instead"));
}

TEST(NormaliseSgd, HasPyTorchsDefaults) {
  const v1::OptimizerSpec optimizer = Normalised({kOffloaded, "optimizer.type=sgd"}).optimizer();
  EXPECT_EQ(optimizer.type(), "SGD");
  EXPECT_EQ(optimizer.params().lr(), 1e-3);
  EXPECT_TRUE(optimizer.params().has_momentum());
  EXPECT_EQ(optimizer.params().momentum(), 0.0);
  EXPECT_EQ(optimizer.params().weight_decay(), 0.0);
  EXPECT_TRUE(optimizer.params().betas().empty());
  EXPECT_FALSE(optimizer.params().has_eps());
}

TEST(NormaliseSgd, IsForOffloadedJobs) {
  EXPECT_THAT(Refusal({"optimizer.type=SGD"}),
              AllOf(StartsWith("optimizer.type: SGD"), HasSubstr("type: AdamW"),
                    HasSubstr("offload_optimizer: {device: cpu}")));
}

TEST(NormaliseSgd, TakesItsOwnParametersOnly) {
  const auto refusal = [](const std::string& text) {
    return Refusal({kOffloaded, "optimizer.type=SGD", absl::StrCat("optimizer.params.", text)});
  };
  EXPECT_THAT(refusal("betas=[0.9, 0.99]"), StartsWith("optimizer.params.betas: SGD"));
  EXPECT_THAT(refusal("eps=1e-8"), StartsWith("optimizer.params.eps: SGD"));
  EXPECT_EQ(refusal("momentum=0.9"), "");
  EXPECT_THAT(refusal("momentum=1"), StartsWith("optimizer.params.momentum: seen 1"));
  EXPECT_THAT(refusal("momentum=-0.1"), StartsWith("optimizer.params.momentum: seen -0.1"));
  EXPECT_THAT(refusal("lr=0"), StartsWith("optimizer.params.lr: seen 0"));
  EXPECT_THAT(refusal("weight_decay=-1"), StartsWith("optimizer.params.weight_decay: seen -1"));
  for (const char* key : {"dampening=0.1", "nesterov=true"}) {
    const auto spec = ParseJobSpec(kSmallJob, "j", {absl::StrCat("optimizer.params.", key)});
    EXPECT_THAT(
        std::string(spec.status().message()),
        AllOf(HasSubstr("DeepSpeed key"), HasSubstr("plain momentum"), Not(HasSubstr("unknown"))));
  }
}

}  // namespace
}  // namespace zeroshard
