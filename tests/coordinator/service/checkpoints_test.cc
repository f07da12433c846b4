#include "coordinator/service/checkpoints.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_join.h"
#include "tests/common/temp_folder.h"
#include "tests/coordinator/service/checkpoint_files.h"

namespace zeroshard::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

class CheckpointsTest : public ::testing::Test {
 protected:
  CheckpointsTest() {
    spec.set_name("demo");
    v1::ModelSpec& model = *spec.mutable_model();
    model.set_architecture("llama");
    model.set_hidden_size(64);
    model.set_layers(2);
    model.set_heads(4);
    model.set_kv_heads(2);
    model.set_sequence_length(16);
    model.set_vocab_size(256);
    spec.set_steps(100);
    spec.mutable_checkpoint()->set_dir(folder / "ckpt");
  }
  std::string Refusal(const std::string& resume_from, bool weights_only = false) {
    const auto found = FindStart(spec, resume_from, weights_only);
    EXPECT_FALSE(found.ok());
    return std::string(found.status().message());
  }

  TempFolder folder;
  v1::JobSpec spec;
};

TEST_F(CheckpointsTest, AFreshStartMakesTheFolderAndLeavesNothingInIt) {
  const auto found = FindStart(spec, "", false);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_FALSE(found->has_value());
  EXPECT_TRUE(std::filesystem::is_empty(folder / "ckpt"));
}

TEST_F(CheckpointsTest, AFreshStartIntoAnothersCheckpointsIsRefusedNamingThem) {
  WriteCheckpoint(spec, "demo-1", 40);
  const auto found = FindStart(spec, "", false);
  EXPECT_EQ(found.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(found.status().message()),
              AllOf(HasSubstr(folder / "ckpt"), HasSubstr("run demo-1"), HasSubstr("step 40"),
                    HasSubstr("--resume-from latest")));
}

TEST_F(CheckpointsTest, AFolderThatCannotBeReachedIsNamedWithTheReason) {
  std::ofstream(folder / "file") << "no folder";
  spec.mutable_checkpoint()->set_dir(folder / "file/ckpt");
  EXPECT_THAT(Refusal(""), AllOf(HasSubstr("checkpoint.dir"), HasSubstr(folder / "file"),
                                 HasSubstr("Not a directory")));
  if (geteuid() == 0) return;  // may write anywhere
  std::filesystem::create_directory(folder / "locked");
  std::filesystem::permissions(folder / "locked", std::filesystem::perms::owner_read);
  spec.mutable_checkpoint()->set_dir(folder / "locked");
  EXPECT_THAT(Refusal(""), AllOf(HasSubstr(folder / "locked"), HasSubstr("Permission denied")));
}

TEST_F(CheckpointsTest, RelativePathsAreRefused) {
  EXPECT_THAT(Refusal("ckpt"), HasSubstr("\"ckpt\"; wanted latest or an absolute path"));
  spec.mutable_checkpoint()->set_dir("ckpt");
  EXPECT_THAT(Refusal(""), HasSubstr("checkpoint.dir is \"ckpt\"; wanted an absolute path"));
}

TEST_F(CheckpointsTest, LatestAFolderAndOneCheckpointAreFound) {
  WriteCheckpoint(spec, "demo-1", 20);
  const std::string newest = WriteCheckpoint(spec, "demo-1", 40);
  for (const std::string& from : {std::string("latest"), folder / "ckpt", newest}) {
    const auto found = FindStart(spec, from, false);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_TRUE(found->has_value());
    EXPECT_EQ((*found)->step, 40u);
    EXPECT_EQ((*found)->resume.checkpoint(), newest);
    EXPECT_EQ((*found)->run_id, "demo-1");
    EXPECT_EQ((*found)->dir, folder / "ckpt");
    EXPECT_THAT((*found)->skipped, ElementsAre());
  }
}

TEST_F(CheckpointsTest, WhatChangesTheStepsToComeIsNamed) {
  spec.set_seed(3);
  spec.mutable_optimizer()->mutable_params()->set_lr(0.5);
  WriteCheckpoint(spec, "demo-1", 20);
  v1::JobSpec other = spec;
  other.set_seed(spec.seed() + 1);
  other.set_steps(spec.steps() + 100);
  other.mutable_optimizer()->mutable_params()->set_lr(0.125);
  const auto found = FindStart(other, "latest", false);
  ASSERT_TRUE(found.ok()) << found.status();
  const std::string changes = absl::StrJoin((*found)->changes, "; ");
  EXPECT_THAT(changes, AllOf(HasSubstr("seed: 3 -> 4"), HasSubstr("lr: 0.5 -> 0.125")));
  EXPECT_THAT(changes, Not(HasSubstr("steps")));
}

TEST_F(CheckpointsTest, MomentsOfAnotherOptimizerAreRefusedAndWeightsAreNot) {
  spec.mutable_optimizer()->set_type("SGD");
  const std::string path = WriteCheckpoint(spec, "demo-1", 20);
  spec.mutable_optimizer()->set_type("AdamW");
  const auto found = FindStart(spec, "latest", false);
  EXPECT_EQ(found.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(found.status().message()),
              AllOf(HasSubstr("optimizer.type is AdamW"), HasSubstr("those of SGD"),
                    HasSubstr("--weights-only")));
  spec.mutable_checkpoint()->set_dir(folder / "elsewhere");
  EXPECT_TRUE(FindStart(spec, path, true).ok());
}

TEST_F(CheckpointsTest, WhatIsNewerAndNotCompleteIsSkippedAndNamed) {
  WriteCheckpoint(spec, "demo-1", 20);
  const std::string newest = WriteCheckpoint(spec, "demo-1", 40);
  std::filesystem::remove(newest + "/manifest.json");
  const auto found = FindStart(spec, "latest", false);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ((*found)->step, 20u);
  bool named = false;
  for (const std::string& skipped : (*found)->skipped) {
    named |= skipped.find("step-00000040") != std::string::npos &&
             skipped.find("manifest.json") != std::string::npos;
  }
  EXPECT_TRUE(named);
  std::filesystem::remove(folder / "ckpt/step-00000020/manifest.json");
  EXPECT_THAT(Refusal("latest"), AllOf(HasSubstr("step-00000020"), HasSubstr("step-00000040")));
}

TEST_F(CheckpointsTest, LatestNeedsACheckpointSectionAndWeightsNeedASource) {
  spec.clear_checkpoint();
  EXPECT_THAT(Refusal("latest"), HasSubstr("no checkpoint section"));
  EXPECT_THAT(Refusal("", true), HasSubstr("weights_only is set without resume_from"));
}

TEST_F(CheckpointsTest, AJobWithNoStepLeftIsRefusedWithTheNumbersUnlessOnlyWeightsAreTaken) {
  WriteCheckpoint(spec, "demo-1", 100);
  EXPECT_THAT(Refusal("latest"), AllOf(HasSubstr("job demo has 100 steps"), HasSubstr("is at 100"),
                                       HasSubstr("raise steps")));
  v1::JobSpec elsewhere = spec;
  elsewhere.mutable_checkpoint()->set_dir(folder / "other");
  EXPECT_TRUE(FindStart(elsewhere, folder / "ckpt", true).ok());
  spec.set_steps(101);
  EXPECT_TRUE(FindStart(spec, "latest", false).ok());
}

TEST_F(CheckpointsTest, WeightsAloneWantAnotherFolderForTheCheckpointsOfTheNewRun) {
  const std::string from = WriteCheckpoint(spec, "demo-1", 40);
  for (const std::string& named : {std::string("latest"), from}) {
    const auto refused = FindStart(spec, named, true);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(refused.status().message()),
                AllOf(HasSubstr(folder / "ckpt"), HasSubstr("demo-1"), HasSubstr("step 40"),
                      HasSubstr("name another checkpoint.dir")));
  }
  spec.mutable_checkpoint()->set_dir(folder / "other");
  const auto found = FindStart(spec, from, true);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE((*found)->resume.weights_only());
  spec.clear_checkpoint();
  EXPECT_TRUE(FindStart(spec, from, true).ok());
}

TEST_F(CheckpointsTest, AnotherModelIsRefusedNamingTheFirstDifference) {
  WriteCheckpoint(spec, "demo-1", 40);
  const v1::ModelSpec right = spec.model();
  const auto refusal = [&](auto change) {
    *spec.mutable_model() = right;
    change(spec.mutable_model());
    return Refusal("latest");
  };
  EXPECT_THAT(refusal([](auto* model) { model->set_layers(3); }),
              AllOf(HasSubstr("step-00000040"),
                    HasSubstr("model.layers is 2 in the checkpoint and 3 in the job")));
  EXPECT_THAT(refusal([](auto* model) { model->set_hidden_size(128); }),
              HasSubstr("model.hidden_size is 64 in the checkpoint and 128 in the job"));
  // The same shapes, other arithmetic.
  EXPECT_THAT(refusal([](auto* model) { model->set_rope_theta(500000); }),
              HasSubstr("model.rope_theta is 10000 in the checkpoint and 500000 in the job"));
  EXPECT_THAT(refusal([](auto* model) { model->set_norm_epsilon(1e-6); }),
              HasSubstr("model.norm_epsilon"));
  EXPECT_THAT(refusal([](auto* model) {
                model->set_architecture("gpt2");
                model->clear_kv_heads();
              }),
              HasSubstr("model.architecture is llama in the checkpoint and gpt2 in the job"));
  EXPECT_THAT(refusal([](auto* model) { model->set_mlp_bias(true); }), HasSubstr("mlp"));
  *spec.mutable_model() = right;
  spec.mutable_model()->set_sequence_length(32);  // no tensor of a llama depends on it
  EXPECT_TRUE(FindStart(spec, "latest", false).ok());
}

TEST_F(CheckpointsTest, AListNamesWhatIsCompleteAndWhatIsNot) {
  EXPECT_EQ(DescribeCheckpoints(folder / "ckpt")->checkpoints_size(), 0);
  WriteCheckpoint(spec, "demo-1", 20);
  const std::string newest = WriteCheckpoint(spec, "demo-1", 40);
  std::filesystem::remove(folder / "ckpt/step-00000020/manifest.json");
  const auto listed = DescribeCheckpoints(folder / "ckpt");
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->checkpoints_size(), 2);
  EXPECT_EQ(listed->checkpoints(0).step(), 20u);
  EXPECT_FALSE(listed->checkpoints(0).complete());
  EXPECT_THAT(listed->checkpoints(0).problem(), HasSubstr("manifest.json"));
  EXPECT_TRUE(listed->checkpoints(1).complete());
  EXPECT_TRUE(listed->checkpoints(1).latest());
  EXPECT_EQ(listed->checkpoints(1).path(), newest);
  EXPECT_EQ(listed->checkpoints(1).run_id(), "demo-1");
}

TEST_F(CheckpointsTest, ARunsOwnNewestIsFoundOfTheCommittedStepOrBefore) {
  const std::string& dir = spec.checkpoint().dir();
  std::vector<std::string> instead;
  const auto newest = [&](const std::string& run_id, uint64_t committed, int64_t since = 0) {
    instead.clear();
    const auto found = FindNewestOf({run_id, dir, committed, since}, &instead);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() && *found ? (*found)->step : 0;
  };
  EXPECT_EQ(newest("demo-1", 50), 0u) << "there is no folder";
  EXPECT_THAT(instead, ElementsAre(HasSubstr(dir)));
  WriteCheckpoint(spec, "demo-1", 10);
  WriteCheckpoint(spec, "demo-2", 20);
  const std::string path = WriteCheckpoint(spec, "demo-2", 40);
  EXPECT_EQ(newest("demo-2", 50), 40u);
  EXPECT_EQ(newest("demo-2", 39), 20u) << "of what came after the history does not tell";
  EXPECT_EQ(newest("demo-2", 19), 20u) << "better than none";
  EXPECT_EQ(newest("demo-1", 50), 10u);
  EXPECT_EQ(newest("demo-3", 50), 0u);
  EXPECT_EQ(newest("demo-2", 50, 1767225600001), 0u) << "it is older than the run";
  std::filesystem::remove(path + "/manifest.json");
  const auto found = FindNewestOf({"demo-2", dir, 50, 0}, &instead);
  ASSERT_TRUE(found.ok() && *found) << found.status();
  EXPECT_EQ((*found)->step, 20u);
  EXPECT_THAT((*found)->skipped, ElementsAre(HasSubstr("has no manifest.json")));
  std::filesystem::remove(folder / "ckpt/step-00000020/manifest.json");
  EXPECT_EQ(newest("demo-2", 50), 0u);
  EXPECT_THAT(instead, ElementsAre(HasSubstr("step-00000020"), HasSubstr("step-00000040")));
}

}  // namespace
}  // namespace zeroshard::coordinator
