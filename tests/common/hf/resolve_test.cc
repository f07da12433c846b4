#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/hf/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/hf/hf_folder.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class ResolveTest : public testing::Test {
 protected:
  void Config(const std::string& json) { WriteText(folder_ / "config.json", json); }
  v1::JobSpec Job() const {
    v1::JobSpec spec;
    spec.mutable_model()->set_init_from(folder_.path());
    return spec;
  }
  static std::string Error(v1::JobSpec spec) {
    const auto warnings = ResolveInitFrom(&spec);
    EXPECT_FALSE(warnings.ok());
    return std::string(warnings.status().message());
  }

  TempFolder folder_;
};

TEST_F(ResolveTest, TheFolderFillsTheSectionIn) {
  Config(kLlamaConfig);
  v1::JobSpec spec = Job();
  spec.mutable_model()->set_sequence_length(16);
  spec.mutable_model()->add_trainable("*norm*");
  const auto warnings = ResolveInitFrom(&spec);
  ASSERT_TRUE(warnings.ok()) << warnings.status();
  EXPECT_THAT(*warnings, IsEmpty());
  const v1::ModelSpec& model = spec.model();
  EXPECT_EQ(model.architecture(), "llama");
  EXPECT_EQ(model.hidden_size(), 16u);
  EXPECT_EQ(model.intermediate_size(), 24u);
  EXPECT_EQ(model.kv_heads(), 1u);
  EXPECT_EQ(model.norm_epsilon(), 1e-6);
  EXPECT_EQ(model.max_position_embeddings(), 32u);
  EXPECT_EQ(model.sequence_length(), 16u);
  EXPECT_EQ(model.init_from(), folder_.path());
  EXPECT_THAT(model.trainable(), ElementsAre("*norm*"));
  // Once more changes nothing.
  v1::JobSpec again = spec;
  ASSERT_TRUE(ResolveInitFrom(&again).ok());
  EXPECT_EQ(again.SerializeAsString(), spec.SerializeAsString());
}

TEST_F(ResolveTest, WithoutAFolderNothingHappens) {
  v1::JobSpec spec;
  spec.mutable_model()->set_hidden_size(64);
  const std::string before = spec.SerializeAsString();
  EXPECT_TRUE(ResolveInitFrom(&spec).ok());
  EXPECT_EQ(spec.SerializeAsString(), before);
}

TEST_F(ResolveTest, TheSequenceIsTheLongestUpTo4096UnlessItIsGiven) {
  Config(kLlamaConfig);
  v1::JobSpec spec = Job();
  ASSERT_TRUE(ResolveInitFrom(&spec).ok());
  EXPECT_EQ(spec.model().sequence_length(), 32u);
  std::string longer = kLlamaConfig;
  longer.replace(longer.find("\"max_position_embeddings\": 32"), 29,
                 "\"max_position_embeddings\": 131072");
  Config(longer);
  spec = Job();
  ASSERT_TRUE(ResolveInitFrom(&spec).ok());
  EXPECT_EQ(spec.model().sequence_length(), 4096u);
}

TEST_F(ResolveTest, ASequenceBeyondTheModelsLongestIsRefused) {
  Config(kLlamaConfig);
  v1::JobSpec spec = Job();
  spec.mutable_model()->set_sequence_length(33);
  EXPECT_THAT(Error(spec), AllOf(HasSubstr("sequence_length: seen 33"), HasSubstr("at most 32"),
                                 HasSubstr("max_position_embeddings")));
}

TEST_F(ResolveTest, KeysThatContradictTheFolderAreAllNamedWithBothValues) {
  Config(kLlamaConfig);
  v1::JobSpec spec = Job();
  spec.mutable_model()->set_architecture("gpt2");
  spec.mutable_model()->set_hidden_size(64);
  spec.mutable_model()->set_layers(2);  // agrees
  spec.mutable_model()->set_tie_embeddings(true);
  spec.mutable_model()->set_norm_epsilon(1e-5);
  spec.mutable_model()->mutable_rope_scaling()->set_rope_type("linear");
  const std::string error = Error(spec);
  EXPECT_THAT(error, AllOf(HasSubstr("model.architecture: seen \"gpt2\", wanted \"llama\""),
                           HasSubstr("model.hidden_size: seen 64, wanted 16"),
                           HasSubstr("model.tie_embeddings: seen true, wanted false"),
                           HasSubstr("model.norm_epsilon: seen 1e-05, wanted 1e-06"),
                           HasSubstr("model.rope_scaling"), HasSubstr(folder_.path())));
  EXPECT_THAT(error, testing::Not(HasSubstr("layers")));
}

TEST_F(ResolveTest, DropoutThatTheSpecificationDoesNotAskForIsNamed) {
  std::string json = kGpt2Config;
  json.insert(json.rfind('}'), R"(, "embd_pdrop": 0.1, "attn_pdrop": 0.2, "resid_pdrop": 0.0)");
  Config(json);
  v1::JobSpec spec = Job();
  auto warnings = ResolveInitFrom(&spec);
  ASSERT_TRUE(warnings.ok()) << warnings.status();
  EXPECT_THAT(*warnings, ElementsAre(AllOf(HasSubstr("embd_pdrop"), HasSubstr("0.1")),
                                     AllOf(HasSubstr("attn_pdrop"), HasSubstr("0.2"))));
  EXPECT_EQ(spec.model().embd_pdrop(), 0.0);
  spec = Job();
  spec.mutable_model()->set_embd_pdrop(0.3);
  warnings = ResolveInitFrom(&spec);
  ASSERT_TRUE(warnings.ok()) << warnings.status();
  EXPECT_THAT(*warnings, ElementsAre(HasSubstr("attn_pdrop")));
  EXPECT_EQ(spec.model().embd_pdrop(), 0.3);
}

TEST_F(ResolveTest, LlamasDropoutIsNamedWithItsOwnFieldAndOurKey) {
  std::string json = kLlamaConfig;
  json.insert(json.rfind('}'), R"(, "attention_dropout": 0.25)");
  Config(json);
  v1::JobSpec spec = Job();
  const auto warnings = ResolveInitFrom(&spec);
  ASSERT_TRUE(warnings.ok()) << warnings.status();
  EXPECT_THAT(*warnings,
              ElementsAre(AllOf(HasSubstr("attention_dropout"), HasSubstr("model.attn_pdrop"))));
}

TEST_F(ResolveTest, AFolderWithoutAConfigIsNotFound) {
  v1::JobSpec spec = Job();
  const auto warnings = ResolveInitFrom(&spec);
  EXPECT_EQ(warnings.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(warnings.status().message()),
              AllOf(HasSubstr("model.init_from"), HasSubstr(folder_ / "config.json")));
}

}  // namespace
}  // namespace zeroshard
