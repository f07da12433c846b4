#include "common/hf/config.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/hf/json.h"
#include "common/plan/model_table.h"
#include "common/plan/rope.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

// Llama 3.2 1B, as published.
constexpr char kLlama32[] = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
  "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256})";

constexpr char kGpt2[] = R"({
  "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
  "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
  "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12,
  "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null,
  "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
  "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true}},
  "vocab_size": 50257})";

constexpr char kMistral[] = R"({"model_type": "mistral", "hidden_size": 4096, "vocab_size": 32000,
  "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
  "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": null,
  "rope_theta": 1000000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu"})";

constexpr char kQwen2[] = R"({"model_type": "qwen2", "hidden_size": 896, "vocab_size": 151936,
  "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
  "num_key_value_heads": 2, "max_position_embeddings": 32768, "sliding_window": 32768,
  "use_sliding_window": false, "max_window_layers": 24, "tie_word_embeddings": true,
  "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "hidden_act": "silu"})";

HfConfig Parse(const std::string& json) {
  absl::StatusOr<HfConfig> config = ParseHfConfig(json, "x/config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : HfConfig();
}

// `fields` come after, or instead of, those of `json` that they name.
std::string With(const std::string& json, const std::string& name, const std::string& value) {
  const std::string key = absl::StrCat("\"", name, "\": ");
  const size_t at = json.find(key);
  if (at == std::string::npos) {
    return absl::StrCat(json.substr(0, json.rfind('}')), ", ", key, value, "}");
  }
  size_t end = at + key.size();
  for (int depth = 0; depth > 0 || (json[end] != ',' && json[end] != '}'); ++end) {
    depth += json[end] == '{' || json[end] == '[';
    depth -= json[end] == '}' || json[end] == ']';
  }
  return absl::StrCat(json.substr(0, at), key, value, json.substr(end));
}

std::string Without(const std::string& json, const std::string& name) {
  return With(json, name, "null");
}

std::string Refusal(const std::string& json) {
  const absl::StatusOr<HfConfig> config = ParseHfConfig(json, "x/config.json");
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << json;
  return std::string(config.status().message());
}

void ExpectRefused(const std::string& json, const std::string& field, const std::string& seen) {
  EXPECT_THAT(Refusal(json), AllOf(HasSubstr("x/config.json"), HasSubstr(field), HasSubstr(seen),
                                   HasSubstr("wanted")));
}

TEST(HfConfigTest, Gpt2AsPublishedIsTheSmallModel) {
  const HfConfig config = Parse(kGpt2);
  v1::ModelSpec model = config.model;
  model.set_sequence_length(512);
  const absl::StatusOr<ModelTable> table = MakeModelTable(model);
  ASSERT_TRUE(table.ok()) << table.status();
  // 50257 x 768 + 1024 x 768 + 12 x (12 x 768^2 + 13 x 768) + 2 x 768
  EXPECT_EQ(table->ParameterCount(), 124439808);
  EXPECT_EQ(table->config.positions, 1024);
  EXPECT_TRUE(table->config.tied);
  EXPECT_THAT(config.warnings, IsEmpty());
  ASSERT_THAT(config.dropout, SizeIs(3));
  EXPECT_EQ(config.dropout[0].field, "embd_pdrop");
  EXPECT_EQ(config.dropout[0].rate, 0.1);
}

TEST(HfConfigTest, Llama32AsPublishedKeepsItsStretchedPositions) {
  const HfConfig config = Parse(kLlama32);
  v1::ModelSpec model = config.model;
  model.set_sequence_length(4096);
  const absl::StatusOr<ModelConfig> made = MakeModelConfig(model);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_TRUE(made->tied);
  EXPECT_EQ(made->head_dim, 64);
  EXPECT_EQ(made->kv_heads, 8);
  EXPECT_THAT(config.warnings, IsEmpty());
  // The published check values of this very configuration.
  const std::vector<float> frequencies = RopeFrequencies(*made);
  const std::pair<size_t, double> wanted[] = {{14, 3.211446e-3},
                                              {15, 1.290548e-3},
                                              {16, 4.295568e-4},
                                              {17, 9.708288e-5},
                                              {18, 1.946164e-5}};
  for (const auto& [i, value] : wanted) {
    EXPECT_NEAR(frequencies.at(i), value, 1e-6 * value) << i;
  }
}

TEST(HfConfigTest, EveryLayoutOfRotaryPositionsIsTheSameModel) {
  const std::string body = R"("factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                              "original_max_position_embeddings": 8192)";
  const std::string wanted = Parse(kLlama32).model.SerializeAsString();
  const auto scaled = [&](const std::string& kind) {
    return absl::StrCat("{", body, ", ", kind, "}");
  };
  EXPECT_EQ(Parse(With(kLlama32, "rope_scaling", scaled(R"("type": "llama3")")))
                .model.SerializeAsString(),
            wanted);
  EXPECT_EQ(
      Parse(With(kLlama32, "rope_scaling", scaled(R"("type": "llama3", "rope_type": "llama3")")))
          .model.SerializeAsString(),
      wanted);
  // The newer layout, with and without the older beside it.
  const std::string newer = scaled(R"("rope_theta": 500000.0, "rope_type": "llama3")");
  EXPECT_EQ(Parse(With(kLlama32, "rope_parameters", newer)).model.SerializeAsString(), wanted);
  const std::string alone = Without(Without(kLlama32, "rope_scaling"), "rope_theta");
  EXPECT_EQ(Parse(With(alone, "rope_parameters", newer)).model.SerializeAsString(), wanted);
}

TEST(HfConfigTest, RotaryPositionsThatContradictEachOtherAreRefused) {
  ExpectRefused(
      With(kLlama32, "rope_scaling", R"({"type": "linear", "rope_type": "llama3", "factor": 2.0})"),
      "rope_scaling.rope_type", "linear");
  ExpectRefused(With(kLlama32, "rope_parameters",
                     R"({"rope_type": "linear", "factor": 32.0, "rope_theta": 500000.0})"),
                "rope_scaling", "rope_parameters");
  ExpectRefused(With(Without(kLlama32, "rope_scaling"), "rope_parameters",
                     R"({"rope_type": "default", "rope_theta": 10000.0})"),
                "rope_theta", "10000");
}

TEST(HfConfigTest, OtherWaysToStretchPositionsAreRefusedByName) {
  for (const char* kind : {"yarn", "dynamic", "longrope", "su", "mrope"}) {
    ExpectRefused(
        With(kLlama32, "rope_scaling", absl::StrCat(R"({"factor": 2.0, "type": ")", kind, R"("})")),
        "rope_scaling.type", kind);
    ExpectRefused(With(kLlama32, "rope_scaling",
                       absl::StrCat(R"({"factor": 2.0, "rope_type": ")", kind, R"("})")),
                  "rope_scaling.rope_type", kind);
  }
  ExpectRefused(With(kLlama32, "rope_scaling", R"({"rope_type": "linear"})"), "rope_scaling.factor",
                "missing");
  ExpectRefused(With(kLlama32, "rope_scaling", R"({"rope_type": "llama3", "factor": 8})"),
                "rope_scaling.low_freq_factor", "missing");
  ExpectRefused(With(kLlama32, "rope_scaling", R"({"rope_type": "linear", "factor": 0})"),
                "rope_scaling.factor", "0");
  ExpectRefused(With(kLlama32, "rope_scaling", "2.0"), "rope_scaling", "an object");
  ExpectRefused(With(kLlama32, "partial_rotary_factor", "0.5"), "partial_rotary_factor", "0.5");
  ExpectRefused(With(Without(kLlama32, "rope_scaling"), "rope_parameters",
                     R"({"full_attention": {"rope_type": "default"}})"),
                "rope_parameters.full_attention", "object");
}

TEST(HfConfigTest, PlainPositionsMayBeSaidAloud) {
  const HfConfig config = Parse(With(kLlama32, "rope_scaling", R"({"rope_type": "default"})"));
  EXPECT_FALSE(config.model.has_rope_scaling());
  EXPECT_EQ(config.model.rope_theta(), 500000.0);
}

TEST(HfConfigTest, AnAbsentTieIsFalseForLlamaAndTrueForGpt2) {
  EXPECT_FALSE(Parse(Without(kLlama32, "tie_word_embeddings")).model.tie_embeddings());
  EXPECT_TRUE(Parse(kGpt2).model.tie_embeddings());
  EXPECT_FALSE(Parse(With(kGpt2, "tie_word_embeddings", "false")).model.tie_embeddings());
}

TEST(HfConfigTest, AnAbsentFieldMeansWhatTransformersTakesForIt) {
  std::string llama = kLlama32;
  for (const char* name : {"num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta",
                           "rope_scaling", "max_position_embeddings"}) {
    llama = Without(llama, name);
  }
  const v1::ModelSpec model = Parse(llama).model;
  EXPECT_EQ(model.kv_heads(), 32u);
  EXPECT_EQ(model.head_dim(), 64u);  // 2048 / 32
  EXPECT_EQ(model.norm_epsilon(), 1e-6);
  EXPECT_EQ(model.rope_theta(), 10000.0);
  EXPECT_EQ(model.max_position_embeddings(), 2048u);
  const v1::ModelSpec gpt2 = Parse(Without(kGpt2, "n_positions")).model;
  EXPECT_EQ(gpt2.max_position_embeddings(), 1024u);
  EXPECT_EQ(gpt2.intermediate_size(), 3072u);  // 4 x 768
}

TEST(HfConfigTest, BiasesAreWhatTheModelTypeSays) {
  const v1::ModelSpec plain = Parse(kLlama32).model;
  EXPECT_FALSE(plain.attention_bias() || plain.qkv_bias() || plain.mlp_bias());
  const v1::ModelSpec biased =
      Parse(With(With(kLlama32, "attention_bias", "true"), "mlp_bias", "true")).model;
  EXPECT_TRUE(biased.attention_bias() && biased.mlp_bias());
  EXPECT_FALSE(biased.qkv_bias());
  const v1::ModelSpec qwen = Parse(kQwen2).model;
  EXPECT_TRUE(qwen.qkv_bias());
  EXPECT_FALSE(qwen.attention_bias() || qwen.mlp_bias());
  EXPECT_FALSE(Parse(kMistral).model.qkv_bias());
}

TEST(HfConfigTest, AShortSlidingWindowLimitsTheSequence) {
  EXPECT_EQ(Parse(kMistral).model.max_position_embeddings(), 32768u);
  const HfConfig windowed = Parse(With(kMistral, "sliding_window", "4096"));
  EXPECT_EQ(windowed.model.max_position_embeddings(), 4096u);
  EXPECT_EQ(windowed.longest_field, "sliding_window");
  EXPECT_THAT(windowed.warnings, ElementsAre(HasSubstr("sliding_window is 4096")));
  const HfConfig wide = Parse(With(kMistral, "sliding_window", "32768"));
  EXPECT_EQ(wide.model.max_position_embeddings(), 32768u);
  EXPECT_THAT(wide.warnings, ElementsAre(HasSubstr("no effect")));
  // Absent, transformers takes 4096 for it.
  const std::string absent = absl::StrReplaceAll(kMistral, {{"\"sliding_window\": null,", ""}});
  EXPECT_EQ(Parse(absent).model.max_position_embeddings(), 4096u);
  // Qwen2's is off unless it is switched on.
  EXPECT_EQ(Parse(With(kQwen2, "sliding_window", "1024")).model.max_position_embeddings(), 32768u);
  EXPECT_EQ(Parse(With(With(kQwen2, "sliding_window", "1024"), "use_sliding_window", "true"))
                .model.max_position_embeddings(),
            1024u);
}

TEST(HfConfigTest, ArithmeticThatIsNotComputedIsRefusedByName) {
  ExpectRefused(With(kGpt2, "activation_function", "\"relu\""), "activation_function", "relu");
  ExpectRefused(With(kGpt2, "activation_function", "\"gelu\""), "activation_function", "\"gelu\"");
  ExpectRefused(With(kGpt2, "scale_attn_weights", "false"), "scale_attn_weights", "false");
  ExpectRefused(With(kGpt2, "scale_attn_by_inverse_layer_idx", "true"),
                "scale_attn_by_inverse_layer_idx", "true");
  ExpectRefused(With(kGpt2, "add_cross_attention", "true"), "add_cross_attention", "true");
  ExpectRefused(With(kGpt2, "pruned_heads", R"({"0": [1]})"), "pruned_heads", "[1]");
  ExpectRefused(With(kLlama32, "hidden_act", "\"gelu\""), "hidden_act", "gelu");
  ExpectRefused(With(kLlama32, "pretraining_tp", "2"), "pretraining_tp", "2");
  ExpectRefused(With(kLlama32, "is_encoder_decoder", "true"), "is_encoder_decoder", "true");
  ExpectRefused(With(kLlama32, "quantization_config", R"({"bits": 4})"), "quantization_config",
                "bits");
  for (const char* type : {"gemma2", "mixtral", "phi3", "qwen3", ""}) {
    ExpectRefused(With(kLlama32, "model_type", absl::StrCat("\"", type, "\"")), "model_type",
                  absl::StrCat("\"", type, "\""));
  }
  ExpectRefused(Without(kLlama32, "model_type"), "model_type", "null");
  EXPECT_THAT(Parse(With(kGpt2, "reorder_and_upcast_attn", "true")).warnings,
              ElementsAre(HasSubstr("reorder_and_upcast_attn")));
}

TEST(HfConfigTest, ValuesOfAnotherTypeAreRefused) {
  for (const char* value : {"\"2048\"", "2048.0", "0", "-1", "true", "[2048]", "null",
                            "18446744073709551615", "1e400"}) {
    EXPECT_THAT(Refusal(With(kLlama32, "hidden_size", value)), HasSubstr("x/config.json")) << value;
  }
  ExpectRefused(With(kLlama32, "tie_word_embeddings", "1"), "tie_word_embeddings", "1");
  ExpectRefused(With(kLlama32, "tie_word_embeddings", "\"true\""), "tie_word_embeddings", "true");
  ExpectRefused(With(kLlama32, "rms_norm_eps", "\"1e-5\""), "rms_norm_eps", "1e-5");
  ExpectRefused(With(kLlama32, "rms_norm_eps", "0"), "rms_norm_eps", "0");
  ExpectRefused(With(kLlama32, "hidden_act", "3"), "hidden_act", "3");
  EXPECT_EQ(Parse(With(kLlama32, "rope_theta", "500000")).model.rope_theta(), 500000.0);
}

TEST(HfConfigTest, WhatIsNoJsonObjectIsRefused) {
  EXPECT_THAT(Refusal(""), HasSubstr("x/config.json"));
  EXPECT_THAT(Refusal("[]"), HasSubstr("wanted an object"));
  EXPECT_THAT(Refusal("{\"model_type\": \"gpt2\""), HasSubstr("no JSON"));
  EXPECT_THAT(Refusal(R"({"model_type": "gpt2", "n_embd": 8, "n_embd": 16})"),
              HasSubstr("\"n_embd\" is there twice"));
  EXPECT_THAT(Refusal(std::string(100000, '[')), HasSubstr("x/config.json"));
  EXPECT_THAT(Refusal(absl::StrCat("{\"a\":", std::string(1000, '['), std::string(1000, ']'), "}")),
              HasSubstr("nested deeper"));
}

TEST(HfConfigTest, UnknownFieldsAreNamedInWarnings) {
  const HfConfig config = Parse(With(With(kLlama32, "brand_new_trick", "3"), "other", "null"));
  EXPECT_THAT(config.warnings, ElementsAre(HasSubstr("brand_new_trick")));
}

TEST(HfConfigTest, Gpt2TakesTheOtherNamesOfItsSizes) {
  std::string json = absl::StrReplaceAll(
      kGpt2, {{"\"n_embd\"", "\"hidden_size\""}, {"\"n_layer\"", "\"num_hidden_layers\""}});
  EXPECT_EQ(Parse(json).model.SerializeAsString(), Parse(kGpt2).model.SerializeAsString());
  ExpectRefused(With(kGpt2, "hidden_size", "1024"), "hidden_size", "1024");
}

TEST(HfConfigTest, AContextLengthThatDisagreesWithThePositionsIsAWarning) {
  EXPECT_THAT(Parse(With(kGpt2, "n_ctx", "512")).warnings, ElementsAre(HasSubstr("n_ctx is 512")));
}

v1::ModelSpec Spec(const std::string& architecture) {
  v1::ModelSpec model;
  model.set_architecture(architecture);
  model.set_hidden_size(64);
  model.set_layers(2);
  model.set_heads(4);
  model.set_sequence_length(128);
  model.set_vocab_size(256);
  return model;
}

// The model that a config.json of our own describes, once read back.
void ExpectSameModel(v1::ModelSpec model) {
  const absl::StatusOr<std::string> json = FormatHfConfig(model, "bfloat16");
  ASSERT_TRUE(json.ok()) << json.status();
  const HfConfig config = Parse(*json);
  EXPECT_THAT(config.warnings, IsEmpty()) << *json;
  v1::ModelSpec read = config.model;
  read.set_sequence_length(model.sequence_length());
  const absl::StatusOr<ModelTable> a = MakeModelTable(model);
  const absl::StatusOr<ModelTable> b = MakeModelTable(read);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  ASSERT_EQ(a->units.size(), b->units.size());
  for (size_t u = 0; u < a->units.size(); ++u) {
    ASSERT_EQ(a->units[u].parameters.size(), b->units[u].parameters.size()) << *json;
    for (size_t p = 0; p < a->units[u].parameters.size(); ++p) {
      EXPECT_EQ(a->units[u].parameters[p].name, b->units[u].parameters[p].name);
      EXPECT_EQ(a->units[u].parameters[p].shape, b->units[u].parameters[p].shape);
    }
  }
  const ModelConfig &x = a->config, &y = b->config;
  EXPECT_EQ(x.heads, y.heads);
  EXPECT_EQ(x.kv_heads, y.kv_heads);
  EXPECT_EQ(x.head_dim, y.head_dim);
  EXPECT_EQ(x.positions, y.positions);
  EXPECT_EQ(x.norm_epsilon, y.norm_epsilon);
  EXPECT_EQ(x.rope_theta, y.rope_theta);
  EXPECT_EQ(x.tied, y.tied);
  EXPECT_EQ(x.init_std, y.init_std);
  if (x.architecture == Architecture::kLlama) {
    EXPECT_EQ(RopeFrequencies(x), RopeFrequencies(y));
  }
}

TEST(HfConfigTest, AConfigOfOurOwnDescribesTheSameModel) {
  ExpectSameModel(Spec("gpt2"));
  v1::ModelSpec gpt2 = Spec("gpt2");
  gpt2.set_intermediate_size(96);
  gpt2.set_tie_embeddings(false);
  gpt2.set_max_position_embeddings(200);
  gpt2.set_norm_epsilon(1e-6);
  ExpectSameModel(gpt2);
  ExpectSameModel(Spec("llama"));
  v1::ModelSpec llama = Spec("llama");
  llama.set_kv_heads(2);
  llama.set_head_dim(32);
  llama.set_tie_embeddings(true);
  llama.set_rope_theta(1234.5);
  llama.set_attention_bias(true);
  llama.set_mlp_bias(true);
  llama.set_initializer_range(0.041666666666666664);
  llama.mutable_rope_scaling()->set_rope_type("llama3");
  llama.mutable_rope_scaling()->set_factor(8);
  llama.mutable_rope_scaling()->set_low_freq_factor(1);
  llama.mutable_rope_scaling()->set_high_freq_factor(4);
  llama.mutable_rope_scaling()->set_original_max_position_embeddings(64);
  ExpectSameModel(llama);
  v1::ModelSpec qwen = Spec("llama");
  qwen.set_qkv_bias(true);
  qwen.mutable_rope_scaling()->set_rope_type("linear");
  qwen.mutable_rope_scaling()->set_factor(2.5);
  ExpectSameModel(qwen);
}

TEST(HfConfigTest, AConfigOfOurOwnHasNumbersAsAPersonWritesThem) {
  const std::string json = FormatHfConfig(Spec("llama"), "float32").value();
  EXPECT_THAT(json, AllOf(HasSubstr("\"rms_norm_eps\": 1e-05"), HasSubstr("\"LlamaForCausalLM\""),
                          HasSubstr("\"initializer_range\": 0.02"),
                          HasSubstr("\"torch_dtype\": \"float32\"")));
}

TEST(HfConfigTest, AModelThatNoClassOfTransformersComputesIsRefused) {
  v1::ModelSpec model = Spec("llama");
  EXPECT_TRUE(CheckExportable(model).ok());
  model.set_qkv_bias(true);
  EXPECT_TRUE(CheckExportable(model).ok());
  v1::ModelSpec biased = model;
  biased.set_mlp_bias(true);
  // Qwen2 takes no head_dim.
  v1::ModelSpec wide = model;
  wide.set_head_dim(2 * model.hidden_size() / model.heads());
  for (const auto& [refused, field] :
       {std::pair(biased, "mlp_bias"), std::pair(wide, "head_dim")}) {
    const absl::Status status = FormatHfConfig(refused, "bfloat16").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("qkv_bias"), HasSubstr(field)));
    EXPECT_EQ(CheckExportable(refused), status);
    // Its own config.json says what it is.
    v1::ModelSpec own = refused;
    own.set_init_from("/models/own");
    EXPECT_TRUE(CheckExportable(own).ok());
  }
  wide.set_qkv_bias(false);
  EXPECT_TRUE(CheckExportable(wide).ok());
}

TEST(HfConfigTest, AConfigOfOurOwnNamesTheTokenThatEndsATextOnlyWhereThereIsOne) {
  const auto end = [](std::optional<int32_t> token) {
    const std::string json = FormatHfConfig(Spec("gpt2"), "float32", token).value();
    return ParseJsonObject(json, "config.json").value().at("eos_token_id");
  };
  EXPECT_TRUE(end(std::nullopt).is_null());
  EXPECT_EQ(end(0), 0);
  const auto vocab = static_cast<int32_t>(Spec("gpt2").vocab_size());
  EXPECT_EQ(end(vocab - 1), vocab - 1);
  for (const int32_t token : {-1, vocab}) {
    const absl::Status status = FormatHfConfig(Spec("gpt2"), "float32", token).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("is ", token, ";")));
  }
}

}  // namespace
}  // namespace zeroshard
