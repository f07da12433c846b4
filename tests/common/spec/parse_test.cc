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
using testing::Not;
using testing::StartsWith;

std::string ErrorOf(const std::string& text) {
  const absl::StatusOr<v1::JobSpec> spec = ParseJobSpec(text, "job.yaml");
  EXPECT_FALSE(spec.ok()) << text;
  return std::string(spec.status().message());
}

TEST(ParseJobSpec, ReadsEveryKindOfValue) {
  const auto spec = ParseJobSpec(R"(
name: licences
model: {architecture: llama, tie_embeddings: true, norm_epsilon: 1e-6, trainable: ["*.attn.*", head]}
data:
  train:
    - a.txt
    - /b
optimizer: {type: AdamW, params: {lr: 1.0e-3, betas: [0.9, .95], eps: 1E-8, weight_decay: 0}}
zero_optimization: {stage: 3, reduce_bucket_size: 5e8}
deterministic: true
steps: 18446744073709551615
)",
                                 "job.yaml");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name(), "licences");
  EXPECT_TRUE(spec->model().tie_embeddings());
  EXPECT_EQ(spec->model().norm_epsilon(), 1e-6);
  EXPECT_THAT(spec->model().trainable(), ElementsAre("*.attn.*", "head"));
  EXPECT_THAT(spec->data().train(), ElementsAre("a.txt", "/b"));
  EXPECT_THAT(spec->optimizer().params().betas(), ElementsAre(0.9, 0.95));
  EXPECT_TRUE(spec->optimizer().params().has_weight_decay());
  EXPECT_EQ(spec->optimizer().params().weight_decay(), 0.0);
  EXPECT_EQ(spec->zero_optimization().reduce_bucket_size(), 500'000'000u);
  EXPECT_TRUE(spec->deterministic());
  EXPECT_EQ(spec->steps(), 18446744073709551615u);
}

TEST(ParseJobSpec, ReadsJsonWithTabsAndEscapes) {
  const auto spec = ParseJobSpec(
      "{\n\t\"name\": \"a\\u00e9\",\n\t\"data\": {\"train\": [\"x\\/y\"]},\n\t\"bf16\": "
      "{\"enabled\": "
      "true},\n\t\"gradient_clipping\": 1.0,\n\t\"steps\": 20\n}",
      "ds_config.json");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name(), "a\xc3\xa9");
  EXPECT_EQ(spec->data().train(0), "x/y");
  EXPECT_TRUE(spec->bf16().enabled());
  EXPECT_EQ(spec->gradient_clipping(), 1.0);
}

TEST(ParseJobSpec, MisspeltKeyIsRefusedWithPositionAndNearestKey) {
  EXPECT_THAT(ErrorOf("name: a\ngradient_clipp1ng: 1.0\n"),
              AllOf(StartsWith("job.yaml:2:1: gradient_clipp1ng:"),
                    HasSubstr("did you mean gradient_clipping?")));
  EXPECT_THAT(ErrorOf("name: a\nzero_optimization:\n  stgae: 3\n"),
              AllOf(StartsWith("job.yaml:3:3: zero_optimization.stgae:"),
                    HasSubstr("did you mean stage?")));
}

TEST(ParseJobSpec, KeyInTheWrongSectionIsPointedToTheRightOne) {
  EXPECT_THAT(ErrorOf("stage: 3\n"), HasSubstr("did you mean zero_optimization.stage?"));
  EXPECT_THAT(ErrorOf("bf16: {hidden_size: 3}\n"), HasSubstr("did you mean model.hidden_size?"));
}

TEST(ParseJobSpec, UnlikeAnyKeyListsTheKnownOnes) {
  EXPECT_THAT(ErrorOf("data: {quxquxqux: 1}\n"), HasSubstr("known here are train, tokenizer"));
}

TEST(ParseJobSpec, DuplicateKeyIsRefused) {
  EXPECT_THAT(ErrorOf("steps: 1\nname: a\nsteps: 2\n"),
              StartsWith("job.yaml:3:1: steps: given twice"));
  EXPECT_THAT(ErrorOf(R"({"bf16": {"enabled": true, "enabled": false}})"),
              HasSubstr("bf16.enabled: given twice"));
}

TEST(ParseJobSpec, WrongTypesSayWhatWasSeenAndWanted) {
  EXPECT_THAT(ErrorOf("steps: many\n"), AllOf(StartsWith("job.yaml:1:8: steps: "),
                                              HasSubstr("seen the text \"many\", wanted a whole")));
  EXPECT_THAT(ErrorOf("steps: \"5\"\n"), HasSubstr("seen the text \"5\""));
  EXPECT_THAT(ErrorOf("steps: -1\n"), HasSubstr("seen the number -1"));
  EXPECT_THAT(ErrorOf("steps: 1.5\n"), HasSubstr("seen the number 1.5"));
  EXPECT_THAT(ErrorOf("steps: 1e30\n"), HasSubstr("seen the number 1e30"));
  EXPECT_THAT(ErrorOf("steps: 0x10\n"), HasSubstr("seen the text \"0x10\""));
  EXPECT_THAT(ErrorOf("steps: 18446744073709551616\n"), HasSubstr("wanted a whole number"));
  EXPECT_THAT(ErrorOf("model: {layers: 4294967296}\n"), HasSubstr("from 0 to 4294967295"));
  EXPECT_THAT(ErrorOf("steps: [1]\n"), HasSubstr("seen a list"));
  EXPECT_THAT(ErrorOf("steps:\n"), HasSubstr("seen nothing"));
  EXPECT_THAT(ErrorOf("deterministic: yes\n"), HasSubstr("wanted true or false"));
  EXPECT_THAT(ErrorOf("deterministic: 1\n"), HasSubstr("seen the number 1, wanted true or false"));
  EXPECT_THAT(ErrorOf("gradient_clipping: .inf\n"), HasSubstr("wanted a finite number"));
  EXPECT_THAT(ErrorOf("gradient_clipping: 1e999\n"), HasSubstr("wanted a finite number"));
  EXPECT_THAT(ErrorOf("name: 12\n"), HasSubstr("put it in quotes"));
  EXPECT_THAT(ErrorOf("name: true\n"), HasSubstr("put it in quotes"));
  EXPECT_THAT(ErrorOf("name: ~\n"), HasSubstr("name: seen "));
  EXPECT_THAT(ErrorOf("bf16: true\n"), HasSubstr("wanted a mapping with the keys enabled"));
  EXPECT_THAT(ErrorOf("data: {train: text}\n"), HasSubstr("wanted a list of texts"));
  EXPECT_THAT(ErrorOf("optimizer: {params: {betas: 0.9}}\n"),
              HasSubstr("wanted a list of numbers"));
  EXPECT_THAT(ErrorOf("optimizer: {params: {betas: [0.9, x]}}\n"),
              HasSubstr("optimizer.params.betas.1: seen the text \"x\""));
  EXPECT_THAT(ErrorOf("? [a]\n: 1\n"), HasSubstr("a key is a list"));
}

TEST(ParseJobSpec, TextWithControlCharactersIsRefused) {
  EXPECT_THAT(ErrorOf("name: \"a\\0b\"\n"), HasSubstr("control characters"));
  EXPECT_THAT(ErrorOf("name: \"a\\nb\"\n"), HasSubstr("control characters"));
  EXPECT_THAT(ErrorOf(absl::StrCat("name: ", std::string(5000, 'a'), "\n")),
              HasSubstr("text of 5000 bytes"));
}

TEST(ParseJobSpec, AllProblemsAreToldAtOnce) {
  const std::string error = ErrorOf("nmae: a\nsteps: x\nbf16: {enabled: maybe}\n");
  EXPECT_THAT(error, AllOf(HasSubstr("job.yaml:1:1: nmae"), HasSubstr("\njob.yaml:2:8: steps"),
                           HasSubstr("\njob.yaml:3:17: bf16.enabled")));
}

TEST(ParseJobSpec, ManyProblemsAreCutShort) {
  std::string text;
  for (int i = 0; i < 40; ++i) absl::StrAppend(&text, "zzzzzzzzzzzzzz", i, ": 1\n");
  EXPECT_THAT(ErrorOf(text), HasSubstr("and 30 more"));
}

TEST(ParseJobSpec, NoYamlIsRefusedWithItsPosition) {
  EXPECT_THAT(ErrorOf("name: [a\nsteps: 1\n"),
              AllOf(StartsWith("job.yaml:"), HasSubstr("not YAML or JSON")));
  EXPECT_THAT(ErrorOf("a: *nowhere\n"), HasSubstr("not YAML or JSON"));
  EXPECT_THAT(ErrorOf(""), HasSubstr("seen nothing"));
  EXPECT_THAT(ErrorOf("- a\n"), HasSubstr("seen a list, wanted a mapping"));
  EXPECT_THAT(ErrorOf("just text"), HasSubstr("seen the text"));
  EXPECT_THAT(ErrorOf("name: a\n---\nname: b\n"), HasSubstr("a second document"));
}

TEST(ParseJobSpec, WhatFollowsTheLastBracketIsRefusedInsteadOfReadForever) {
  // A bracket too many further up makes the rest of a pasted file look like this.
  EXPECT_THAT(ErrorOf("{name: a},"), HasSubstr("job.yaml:1:10: a second document"));
  EXPECT_THAT(ErrorOf("{name: a}, steps"), HasSubstr("a bracket too many"));
  EXPECT_THAT(ErrorOf("{name: a}}"), HasSubstr("not YAML or JSON"));
  const auto set = ParseJobSpec("name: a\n", "j", {"steps=[20],"});
  EXPECT_THAT(set.status().message(), HasSubstr("wanted one value after '='"));
}

TEST(ParseJobSpec, AnchorsAreFine) {
  const auto spec =
      ParseJobSpec("steps: &n 100\nscheduler: {type: cosine, params: {total_steps: *n}}\n", "j");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->scheduler().params().total_steps(), 100u);
}

TEST(ParseJobSpec, MergeKeysAreRefusedByName) {
  EXPECT_THAT(ErrorOf("bf16: &b {enabled: true}\nfp16: {<<: *b}\n"), HasSubstr("merge keys"));
}

TEST(ParseJobSpec, AliasBombsAreRefusedQuickly) {
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 12; ++i) {
    absl::StrAppend(&bomb, "a", i, ": &a", i, " [");
    for (int j = 0; j < 10; ++j) absl::StrAppend(&bomb, j == 0 ? "" : ", ", "*a", i - 1);
    absl::StrAppend(&bomb, "]\n");
  }
  absl::StrAppend(&bomb, "data: {train: *a11}\n");
  EXPECT_FALSE(ParseJobSpec(bomb, "j").ok());

  std::string wide = absl::StrCat("name: &long ", std::string(4000, 'a'), "\ndata:\n  train: [");
  for (int i = 0; i < 2000; ++i) absl::StrAppend(&wide, i == 0 ? "" : ", ", "*long");
  const auto spec = ParseJobSpec(wide + "]\n", "j");
  EXPECT_EQ(spec.status().code(), absl::StatusCode::kResourceExhausted) << spec.status();
}

TEST(ParseJobSpec, ACycleOfAliasesEnds) {
  EXPECT_FALSE(ParseJobSpec("data: &a {train: *a}\n", "j").ok());
  EXPECT_FALSE(ParseJobSpec("data: {train: &a [*a]}\n", "j").ok());
}

// Whatever the bytes are, the answer is a specification or an error.
TEST(ParseJobSpec, SurvivesDamage) {
  const std::string text = absl::StrCat(kSmallJob, "seed: &s 1\nparallel: {tensor: *s}\n");
  ASSERT_TRUE(ParseJobSpec(text, "j").ok());
  for (size_t i = 0; i < text.size(); ++i) {
    EXPECT_NE(ParseJobSpec(text.substr(0, i), "j").status().code(), absl::StatusCode::kInternal);
    for (const char byte : absl::string_view("\0\n\t:{[&*\"\xff-", 11)) {
      std::string damaged = text;
      damaged[i] = byte;
      const auto spec = ParseJobSpec(damaged, "j");
      EXPECT_NE(spec.ok(), !spec.status().message().empty());
    }
  }
}

TEST(ParseJobSpec, DeepNestingAndLongTextAreRefused) {
  EXPECT_FALSE(ParseJobSpec("name: " + std::string(100'000, '['), "j").ok());
  EXPECT_FALSE(ParseJobSpec(std::string(100'000, '{'), "j").ok());
  const auto spec = ParseJobSpec(std::string((1 << 20) + 1, ' '), "j");
  EXPECT_EQ(spec.status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(ParseJobSpec, UnsupportedDeepSpeedKeysAreRefusedByName) {
  const std::string error = ErrorOf(R"({
    "zero_optimization": {"stage": 2, "contiguous_gradients": true, "allgather_bucket_size": 5e8,
                          "offload_optimizer": {"device": "none", "pin_memory": true}},
    "steps_per_print": 2000, "wall_clock_breakdown": false})");
  for (const char* key :
       {"zero_optimization.contiguous_gradients", "zero_optimization.allgather_bucket_size",
        "zero_optimization.offload_optimizer.pin_memory", "steps_per_print",
        "wall_clock_breakdown"}) {
    EXPECT_THAT(error,
                HasSubstr(absl::StrCat(key, ": is a DeepSpeed key that ZeroShard does not ")));
  }
  EXPECT_THAT(error, Not(HasSubstr("unknown key")));
}

TEST(ParseJobSpec, DeepSpeedsActivationCheckpointingSectionIsExplained) {
  EXPECT_THAT(ErrorOf("activation_checkpointing: {partition_activations: true}\n"),
              AllOf(HasSubstr("DeepSpeed"), HasSubstr("write activation_checkpointing: true")));
}

TEST(ParseJobSpec, AutoIsRefusedByNameButMayNameThings) {
  for (const char* text :
       {"train_batch_size: auto", "train_batch_size: \"auto\"", "bf16: {enabled: auto}",
        "bf16: auto", "optimizer: {type: auto}", "optimizer: {params: {betas: auto}}",
        "optimizer: {params: {lr: auto}}", "zero_optimization: {offload_param: {device: auto}}"}) {
    EXPECT_THAT(ErrorOf(text), HasSubstr("the value auto"));
  }
  const auto spec = ParseJobSpec("name: auto\ndata: {train: [auto]}\n", "j");
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->name(), "auto");
}

TEST(Overrides, ReplaceValuesListsAndSections) {
  const v1::JobSpec spec =
      Parsed({"steps=20", "name=\"7\"", "optimizer.params.betas=[0.8, 0.9]",
              "optimizer.params.lr=1e-3", "bf16={enabled: true}", "model.layers=2", "steps=21"});
  EXPECT_EQ(spec.steps(), 21u);
  EXPECT_EQ(spec.name(), "7");
  EXPECT_THAT(spec.optimizer().params().betas(), ElementsAre(0.8, 0.9));
  EXPECT_EQ(spec.optimizer().params().lr(), 1e-3);
  EXPECT_TRUE(spec.bf16().enabled());
  EXPECT_EQ(spec.model().layers(), 2u);
  EXPECT_EQ(spec.model().hidden_size(), 64u);
}

TEST(Overrides, ReachListElementsByIndexAndAppend) {
  const v1::JobSpec spec = Parsed({"data.train.0=a=b", "data.train.1=c"});
  EXPECT_THAT(spec.data().train(), ElementsAre("a=b", "c"));
}

TEST(Overrides, AreCheckedAsTheFileIs) {
  const auto error = [](const std::string& text) {
    const auto spec = ParseJobSpec(kSmallJob, "job.yaml", {text});
    EXPECT_FALSE(spec.ok()) << text;
    return std::string(spec.status().message());
  };
  EXPECT_THAT(error("gradient_clipp1ng=1"), AllOf(StartsWith("--set gradient_clipp1ng=1: "),
                                                  HasSubstr("did you mean gradient_clipping?")));
  EXPECT_THAT(error("steps=abc"), HasSubstr("seen the text \"abc\""));
  EXPECT_THAT(error("steps="), HasSubstr("--set steps=: "));
  EXPECT_THAT(error("steps"), HasSubstr("wanted key.path=value"));
  EXPECT_THAT(error("=3"), HasSubstr("wanted key.path=value"));
  EXPECT_THAT(error("steps.x=3"), HasSubstr("not keys of its own"));
  EXPECT_THAT(error("data.train.2=x"), HasSubstr("wanted 0 to 1"));
  EXPECT_THAT(error("data.train.-1=x"), HasSubstr("wanted 0 to 1"));
  EXPECT_THAT(error("data.train.0.x=x"), HasSubstr("have no keys"));
  EXPECT_THAT(error("zero_optimization.sub_group_size=1e9"), HasSubstr("DeepSpeed key"));
  EXPECT_THAT(error("activation_checkpointing.profile=true"), HasSubstr("DeepSpeed key"));
  EXPECT_THAT(error("train_batch_size=auto"), HasSubstr("the value auto"));
  EXPECT_THAT(error("bf16={enabled: [}"), HasSubstr("not YAML"));
}

TEST(FormatJobSpec, ReadsBackAsTheSameMessage) {
  v1::JobSpec spec = Normalised({"optimizer.params.lr=0.1", "optimizer.params.eps=5e-324",
                                 "bf16.enabled=true", "seed=18446744073709551615",
                                 "scheduler={type: WarmupCosineLR, params: {total_num_steps: 5}}"});
  spec.mutable_data()->add_train("a \"quoted\" \\ path: #x\t");
  spec.mutable_data()->add_train("12");
  spec.mutable_data()->add_train("true");
  spec.mutable_data()->add_train("- [x]");
  spec.mutable_data()->add_train("\xc3\xa9");
  spec.mutable_checkpoint();
  const std::string text = FormatJobSpec(spec);
  // A tab is a control character, which files may not have.
  EXPECT_FALSE(ParseJobSpec(text, "j").ok());
  spec.mutable_data()->set_train(1, "a \"quoted\" \\ path: #x");
  const auto again = ParseJobSpec(FormatJobSpec(spec), "j");
  ASSERT_TRUE(again.ok()) << again.status() << FormatJobSpec(spec);
  EXPECT_EQ(again->SerializeAsString(), spec.SerializeAsString()) << FormatJobSpec(spec);
}

}  // namespace
}  // namespace zeroshard
