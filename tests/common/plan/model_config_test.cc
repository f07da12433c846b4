// Which model sections are refused, and what the others become.
#include <functional>
#include <limits>

#include "common/plan/model_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

v1::ModelSpec Gpt2() {
  v1::ModelSpec spec;
  spec.set_architecture("gpt2");
  spec.set_hidden_size(768);
  spec.set_layers(12);
  spec.set_heads(12);
  spec.set_sequence_length(1024);
  spec.set_vocab_size(50257);
  return spec;
}

v1::ModelSpec Llama() {
  v1::ModelSpec spec;
  spec.set_architecture("llama");
  spec.set_hidden_size(4096);
  spec.set_layers(32);
  spec.set_heads(32);
  spec.set_intermediate_size(11008);
  spec.set_sequence_length(2048);
  spec.set_vocab_size(32000);
  return spec;
}

// Llama with the scaling of Llama 3.2.
v1::ModelSpec Llama3() {
  v1::ModelSpec spec = Llama();
  v1::RopeScaling* scaling = spec.mutable_rope_scaling();
  scaling->set_rope_type("llama3");
  scaling->set_factor(32);
  scaling->set_low_freq_factor(1);
  scaling->set_high_freq_factor(4);
  scaling->set_original_max_position_embeddings(8192);
  return spec;
}

v1::ModelSpec Scaled(const char* type, double factor) {
  v1::ModelSpec spec = Llama();
  spec.mutable_rope_scaling()->set_rope_type(type);
  spec.mutable_rope_scaling()->set_factor(factor);
  return spec;
}

struct Refused {
  const char* name;
  v1::ModelSpec base;
  std::function<void(v1::ModelSpec*)> change;
  const char* field;
  const char* seen;
};

void ExpectRefused(const Refused& c) {
  v1::ModelSpec spec = c.base;
  c.change(&spec);
  const absl::Status status = MakeModelConfig(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.name;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(c.field), HasSubstr(c.seen), HasSubstr("wanted")))
      << c.name;
}

TEST(ModelConfigTest, WrongValuesAreRefusedWithFieldAndValue) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Refused cases[] = {
      {"none", Gpt2(), [](auto* s) { s->set_architecture("gtp2"); }, "model.architecture", "gtp2"},
      {"zero", Gpt2(), [](auto* s) { s->set_hidden_size(0); }, "model.hidden_size", "is 0"},
      {"huge", Gpt2(), [](auto* s) { s->set_hidden_size(4294967295); }, "model.hidden_size",
       "4294967295"},
      {"layers", Gpt2(), [](auto* s) { s->set_layers(0); }, "model.layers", "is 0"},
      {"many", Gpt2(), [](auto* s) { s->set_layers(100000); }, "model.layers", "100000"},
      {"heads", Gpt2(), [](auto* s) { s->set_heads(7); }, "model.heads", "is 7"},
      {"no heads", Gpt2(), [](auto* s) { s->set_heads(0); }, "model.heads", "is 0"},
      {"wide heads", Gpt2(), [](auto* s) { s->set_heads(1000); }, "model.heads", "1000"},
      {"T", Gpt2(), [](auto* s) { s->set_sequence_length(0); }, "model.sequence_length", "is 0"},
      {"V", Gpt2(), [](auto* s) { s->set_vocab_size(1u << 31); }, "model.vocab_size", "2147483648"},
      {"I", Gpt2(), [](auto* s) { s->set_intermediate_size(1u << 30); }, "model.intermediate_size",
       "1073741824"},
      {"gqa", Gpt2(), [](auto* s) { s->set_kv_heads(4); }, "model.kv_heads", "is 4"},
      {"kv", Llama(), [](auto* s) { s->set_kv_heads(5); }, "model.kv_heads", "is 5"},
      {"more kv", Llama(), [](auto* s) { s->set_kv_heads(64); }, "model.kv_heads", "is 64"},
      {"eps", Gpt2(), [](auto* s) { s->set_norm_epsilon(0); }, "model.norm_epsilon", "is 0"},
      {"nan", Gpt2(), [nan](auto* s) { s->set_norm_epsilon(nan); }, "model.norm_epsilon", "nan"},
      {"rope", Gpt2(), [](auto* s) { s->set_rope_theta(1e4); }, "model.rope_theta", "10000"},
      {"theta", Llama(), [](auto* s) { s->set_rope_theta(-1); }, "model.rope_theta", "-1"},
      {"std", Gpt2(), [](auto* s) { s->set_initializer_range(2); }, "model.initializer_range",
       "is 2"},
      {"gap", Gpt2(),
       [](auto* s) {
         s->set_hidden_size(12);
         s->set_heads(3);
       },
       "model.hidden_size", "is 12"},
      {"gap kv", Llama(),
       [](auto* s) {
         s->set_hidden_size(24);
         s->set_heads(6);
         s->set_kv_heads(1);
       },
       "model.kv_heads", "is 1"},
      {"odd", Llama(),
       [](auto* s) {
         s->set_hidden_size(24);
         s->set_heads(8);
       },
       "model.heads", "is 8"},
  };
  for (const Refused& c : cases) ExpectRefused(c);
}

TEST(ModelConfigTest, WrongVariantsAreRefusedWithFieldAndValue) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Refused cases[] = {
      {"gpt2 head_dim", Gpt2(), [](auto* s) { s->set_head_dim(32); }, "model.head_dim", "is 32"},
      {"odd head_dim", Llama(), [](auto* s) { s->set_head_dim(65); }, "model.head_dim", "is 65"},
      {"wide", Llama(), [](auto* s) { s->set_head_dim(1u << 31); }, "model.head_dim", "2147483648"},
      {"many heads", Llama(),
       [](auto* s) {
         s->set_head_dim(2);
         s->set_heads(1u << 31);
       },
       "model.heads", "2147483648"},
      {"gap head_dim", Llama(),
       [](auto* s) {
         s->set_hidden_size(8);
         s->set_heads(1);
         s->set_head_dim(2);
       },
       "model.head_dim", "1 x 2 x 8"},
      {"no divisor", Llama(), [](auto* s) { s->set_heads(30); }, "model.heads", "is 30"},
      {"gpt2 attention_bias", Gpt2(), [](auto* s) { s->set_attention_bias(true); },
       "model.attention_bias", "gpt2"},
      {"gpt2 qkv_bias", Gpt2(), [](auto* s) { s->set_qkv_bias(true); }, "model.qkv_bias", "gpt2"},
      {"gpt2 mlp_bias", Gpt2(), [](auto* s) { s->set_mlp_bias(true); }, "model.mlp_bias", "gpt2"},
      {"both biases", Llama(),
       [](auto* s) {
         s->set_attention_bias(true);
         s->set_qkv_bias(true);
       },
       "model.qkv_bias", "is true"},
      {"gpt2 scaling", Gpt2(), [](auto* s) { s->mutable_rope_scaling(); }, "model.rope_scaling",
       "gpt2"},
      {"no type", Llama(), [](auto* s) { s->mutable_rope_scaling(); },
       "model.rope_scaling.rope_type", "\"\""},
      {"yarn", Scaled("yarn", 4), [](auto*) {}, "model.rope_scaling.rope_type", "\"yarn\""},
      {"dynamic", Scaled("dynamic", 4), [](auto*) {}, "model.rope_scaling.rope_type", "dynamic"},
      {"default 2", Scaled("default", 2), [](auto*) {}, "model.rope_scaling.factor", "is 2"},
      {"linear 0", Scaled("linear", 0), [](auto*) {}, "model.rope_scaling.factor", "is 0"},
      {"linear nan", Scaled("linear", nan), [](auto*) {}, "model.rope_scaling.factor", "nan"},
      {"linear high", Scaled("linear", 2),
       [](auto* s) { s->mutable_rope_scaling()->set_high_freq_factor(4); },
       "model.rope_scaling.high_freq_factor", "is 4"},
      {"default original", Scaled("default", 1),
       [](auto* s) { s->mutable_rope_scaling()->set_original_max_position_embeddings(8); },
       "model.rope_scaling.original_max_position_embeddings", "is 8"},
      {"llama3 factor", Llama3(), [](auto* s) { s->mutable_rope_scaling()->set_factor(-8); },
       "model.rope_scaling.factor", "is -8"},
      {"llama3 low", Llama3(), [](auto* s) { s->mutable_rope_scaling()->set_low_freq_factor(0); },
       "model.rope_scaling.low_freq_factor", "is 0"},
      {"llama3 high", Llama3(), [](auto* s) { s->mutable_rope_scaling()->set_high_freq_factor(1); },
       "model.rope_scaling.high_freq_factor", "is 1"},
      {"llama3 original", Llama3(),
       [](auto* s) { s->mutable_rope_scaling()->set_original_max_position_embeddings(0); },
       "model.rope_scaling.original_max_position_embeddings", "is 0"},
      {"gpt2 T > P", Gpt2(), [](auto* s) { s->set_max_position_embeddings(1023); },
       "model.sequence_length", "1023"},
      {"llama T > P", Llama(), [](auto* s) { s->set_max_position_embeddings(2047); },
       "model.sequence_length", "2047"},
      {"P", Gpt2(), [](auto* s) { s->set_max_position_embeddings(1u << 31); },
       "model.max_position_embeddings", "2147483648"},
      {"embd", Gpt2(), [](auto* s) { s->set_embd_pdrop(1); }, "model.embd_pdrop", "is 1"},
      {"attn", Llama(), [](auto* s) { s->set_attn_pdrop(-0.1); }, "model.attn_pdrop", "is -0.1"},
      {"resid", Gpt2(), [nan](auto* s) { s->set_resid_pdrop(nan); }, "model.resid_pdrop", "nan"},
  };
  for (const Refused& c : cases) ExpectRefused(c);
}

ModelConfig Config(const v1::ModelSpec& spec) {
  absl::StatusOr<ModelConfig> config = MakeModelConfig(spec);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : ModelConfig();
}

TEST(ModelConfigTest, HeadsMayBeWiderOrNarrowerThanTheHiddenSize) {
  v1::ModelSpec spec = Llama();
  spec.set_hidden_size(576);
  spec.set_heads(16);  // no multiple of 576 / 16 = 36 is needed
  spec.set_kv_heads(4);
  spec.set_head_dim(128);
  const ModelConfig config = Config(spec);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.heads * config.head_dim, 2048);
  spec.set_heads(7);  // 576 / 7 is no integer
  spec.set_kv_heads(1);
  EXPECT_EQ(Config(spec).head_dim, 128);
  v1::ModelSpec gpt2 = Gpt2();
  gpt2.set_head_dim(64);  // what it is anyway
  EXPECT_EQ(Config(gpt2).head_dim, 64);
}

TEST(ModelConfigTest, BiasesAreWhereTheSpecificationPutsThem) {
  const ModelConfig gpt2 = Config(Gpt2());
  EXPECT_TRUE(gpt2.qkv_bias && gpt2.proj_bias && gpt2.mlp_bias);
  const ModelConfig llama = Config(Llama());
  EXPECT_FALSE(llama.qkv_bias || llama.proj_bias || llama.mlp_bias);
  v1::ModelSpec attention = Llama(), qkv = Llama(), mlp = Llama();
  attention.set_attention_bias(true);
  qkv.set_qkv_bias(true);
  mlp.set_mlp_bias(true);
  EXPECT_TRUE(Config(attention).qkv_bias && Config(attention).proj_bias);
  EXPECT_FALSE(Config(attention).mlp_bias);
  EXPECT_TRUE(Config(qkv).qkv_bias);
  EXPECT_FALSE(Config(qkv).proj_bias || Config(qkv).mlp_bias);
  EXPECT_TRUE(Config(mlp).mlp_bias);
  EXPECT_FALSE(Config(mlp).qkv_bias || Config(mlp).proj_bias);
}

TEST(ModelConfigTest, PositionsAreTheSequenceUnlessSaid) {
  EXPECT_EQ(Config(Gpt2()).positions, 1024);
  v1::ModelSpec gpt2 = Gpt2();
  gpt2.set_sequence_length(128);
  gpt2.set_max_position_embeddings(1024);
  EXPECT_EQ(Config(gpt2).positions, 1024);
  EXPECT_EQ(Config(gpt2).sequence, 128);
  v1::ModelSpec llama = Llama();
  llama.set_max_position_embeddings(131072);
  EXPECT_EQ(Config(llama).positions, 131072);
}

TEST(ModelConfigTest, RotaryScalingsAreTakenOver) {
  const RopeScale llama3 = Config(Llama3()).rope_scale;
  EXPECT_EQ(llama3.kind, RopeKind::kLlama3);
  EXPECT_EQ(llama3.factor, 32);
  EXPECT_EQ(llama3.low_freq_factor, 1);
  EXPECT_EQ(llama3.high_freq_factor, 4);
  EXPECT_EQ(llama3.original_positions, 8192);
  EXPECT_EQ(Config(Scaled("linear", 2.5)).rope_scale.kind, RopeKind::kLinear);
  EXPECT_EQ(Config(Scaled("linear", 2.5)).rope_scale.factor, 2.5f);
  EXPECT_EQ(Config(Scaled("default", 1)).rope_scale.kind, RopeKind::kDefault);
  EXPECT_EQ(Config(Scaled("default", 0)).rope_scale.kind, RopeKind::kDefault);
}

TEST(ModelConfigTest, ARateJustBelowOneStaysBelowOne) {
  v1::ModelSpec spec = Gpt2();
  spec.set_attn_pdrop(1 - 1e-12);  // rounds to one in fp32
  EXPECT_LT(Config(spec).attn_pdrop, 1.0f);
  spec.set_attn_pdrop(0.25);
  EXPECT_EQ(Config(spec).attn_pdrop, 0.25f);
  EXPECT_EQ(Config(spec).embd_pdrop, 0.0f);
}

}  // namespace
}  // namespace zeroshard
