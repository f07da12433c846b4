// A config.json of our own.
#include <charconv>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "common/hf/config.h"
#include "common/hf/json.h"
#include "common/plan/model_table.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

using Json = nlohmann::ordered_json;

// The number that a person wrote: 1e-5f as a double would be 9.999999747378752e-06.
double Shortest(float value) {
  char text[32] = {};
  std::to_chars(text, text + sizeof(text) - 1, value);
  return std::strtod(text, nullptr);
}

Json Gpt2(const ModelConfig& c) {
  Json json = {
      {"architectures", {"GPT2LMHeadModel"}},
      {"model_type", "gpt2"},
      {"vocab_size", c.vocab},
      {"n_positions", c.positions},
      {"n_embd", c.hidden},
      {"n_layer", c.layers},
      {"n_head", c.heads},
      {"n_inner", c.intermediate},
      {"activation_function", "gelu_new"},
      {"layer_norm_epsilon", Shortest(c.norm_epsilon)},
      {"embd_pdrop", Shortest(c.embd_pdrop)},
      {"attn_pdrop", Shortest(c.attn_pdrop)},
      {"resid_pdrop", Shortest(c.resid_pdrop)},
  };
  if (c.intermediate == 4 * c.hidden) json["n_inner"] = nullptr;
  return json;
}

Json RopeScaling(const RopeScale& scale) {
  if (scale.kind == RopeKind::kDefault) return nullptr;
  if (scale.kind == RopeKind::kLinear) {
    return {{"rope_type", "linear"}, {"factor", Shortest(scale.factor)}};
  }
  return {{"rope_type", "llama3"},
          {"factor", Shortest(scale.factor)},
          {"low_freq_factor", Shortest(scale.low_freq_factor)},
          {"high_freq_factor", Shortest(scale.high_freq_factor)},
          {"original_max_position_embeddings", scale.original_positions}};
}

absl::StatusOr<Json> Llama(const ModelConfig& c) {
  const bool qwen = c.qkv_bias && !c.proj_bias;
  if (qwen && c.mlp_bias) {
    return absl::InvalidArgumentError(
        "model.qkv_bias and model.mlp_bias are both true: no class of transformers has biases on "
        "q, k, v and the MLP but none on the output projection; wanted attention_bias instead, or "
        "one of the two alone");
  }
  if (qwen && c.head_dim * c.heads != c.hidden) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model.qkv_bias is true and model.head_dim is ", c.head_dim,
        ": Qwen2, the class of transformers that has biases on q, k and v alone, has heads of "
        "hidden_size / heads, here ",
        c.hidden, " / ", c.heads,
        "; wanted that head_dim, or attention_bias instead of qkv_bias, or neither"));
  }
  Json json = {
      {"architectures", {qwen ? "Qwen2ForCausalLM" : "LlamaForCausalLM"}},
      {"model_type", qwen ? "qwen2" : "llama"},
      {"vocab_size", c.vocab},
      {"max_position_embeddings", c.positions},
      {"hidden_size", c.hidden},
      {"intermediate_size", c.intermediate},
      {"num_hidden_layers", c.layers},
      {"num_attention_heads", c.heads},
      {"num_key_value_heads", c.kv_heads},
      {"head_dim", c.head_dim},
      {"hidden_act", "silu"},
      {"rms_norm_eps", Shortest(c.norm_epsilon)},
      {"rope_theta", Shortest(c.rope_theta)},
      {"rope_scaling", RopeScaling(c.rope_scale)},
      {"attention_dropout", Shortest(c.attn_pdrop)},
  };
  if (!qwen) {
    json["attention_bias"] = c.qkv_bias;
    json["mlp_bias"] = c.mlp_bias;
  }
  return json;
}

}  // namespace

absl::StatusOr<std::string> FormatHfConfig(const v1::ModelSpec& model, absl::string_view dtype,
                                           std::optional<int32_t> end_of_text) {
  ZS_ASSIGN_OR_RETURN(const ModelConfig config, MakeModelConfig(model));
  if (end_of_text.has_value() && (*end_of_text < 0 || *end_of_text >= config.vocab)) {
    return absl::InvalidArgumentError(absl::StrCat("the token that ends a text is ", *end_of_text,
                                                   "; wanted one of the model's, from 0 to ",
                                                   config.vocab - 1));
  }
  Json json;
  if (config.architecture == Architecture::kGpt2) {
    json = Gpt2(config);
  } else {
    ZS_ASSIGN_OR_RETURN(json, Llama(config));
  }
  json["initializer_range"] = Shortest(config.init_std);
  json["tie_word_embeddings"] = config.tied;
  json["use_cache"] = true;
  // The defaults of transformers are ids of other models' tokens.
  json["bos_token_id"] = nullptr;
  json["eos_token_id"] = end_of_text.has_value() ? Json(*end_of_text) : Json(nullptr);
  json["torch_dtype"] = std::string(dtype);
  return absl::StrCat(json.dump(2), "\n");
}

absl::Status CheckExportable(const v1::ModelSpec& model) {
  if (!model.init_from().empty()) return absl::OkStatus();
  return FormatHfConfig(model, "float32").status();
}

}  // namespace zeroshard
