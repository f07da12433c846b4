#include "common/hf/config.h"

#include <algorithm>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/files.h"
#include "common/hf/json.h"
#include "common/hf/rope_fields.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr int64_t kMaxCount32 = (int64_t{1} << 31) - 1;
constexpr size_t kMaxConfig = 1 << 20;  // bytes

// Fields without an effect on what the model computes: names of things, how text is sampled and
// tokenized, what Python returns and keeps, how fresh weights are drawn, and heads for other tasks.
const std::set<std::string>& NoEffect() {
  static const auto* const names = new std::set<std::string>{
      "_attn_implementation_autoset",
      "_commit_hash",
      "_name_or_path",
      "add_bos_token",
      "architectures",
      "attn_implementation",
      "bad_words_ids",
      "begin_suppress_tokens",
      "bos_token_id",
      "chunk_size_feed_forward",
      "decoder_start_token_id",
      "diversity_penalty",
      "do_sample",
      "dtype",
      "early_stopping",
      "encoder_no_repeat_ngram_size",
      "eos_token_id",
      "exponential_decay_length_penalty",
      "finetuning_task",
      "forced_bos_token_id",
      "forced_eos_token_id",
      "gradient_checkpointing",
      "id2label",
      "initializer_range",
      "is_llama_config",
      "keys_to_ignore_at_inference",
      "label2id",
      "length_penalty",
      "max_length",
      "max_window_layers",
      "min_length",
      "n_ctx",
      "no_repeat_ngram_size",
      "num_beam_groups",
      "num_beams",
      "num_return_sequences",
      "output_attentions",
      "output_hidden_states",
      "output_past",
      "output_scores",
      "pad_token_id",
      "prefix",
      "problem_type",
      "remove_invalid_values",
      "repetition_penalty",
      "return_dict",
      "return_dict_in_generate",
      "sep_token_id",
      "summary_activation",
      "summary_first_dropout",
      "summary_proj_to_labels",
      "summary_type",
      "summary_use_proj",
      "suppress_tokens",
      "task_specific_params",
      "temperature",
      "tf_legacy_loss",
      "tokenizer_class",
      "top_k",
      "top_p",
      "torch_dtype",
      "torchscript",
      "transformers.js_config",
      "transformers_version",
      "typical_p",
      "unsloth_fixed",
      "unsloth_version",
      "use_bfloat16",
      "use_cache",
  };
  return *names;
}

void ReadDropout(JsonFields* fields, const char* name, const char* key, HfConfig* config) {
  const double rate = fields->Real(name, 0.0, /*inclusive=*/true, 0.0);
  if (rate > 0) config->dropout.push_back({name, key, rate});
}

// What no supported model has, whatever its type.
void RefuseCommon(JsonFields* fields) {
  for (const char* name : {"quantization_config", "compression_config"}) {
    if (fields->Has(name)) {
      fields->Refuse(name,
                     "no such field: quantized weights are not read; export the model to "
                     "bfloat16 or float32 first");
    }
  }
  fields->RequireFlag("add_cross_attention", false, "attention to an encoder is not supported");
  fields->RequireFlag("is_encoder_decoder", false, "only decoders are supported");
  fields->RequireFlag("tie_encoder_decoder", false, "only decoders are supported");
  fields->Flag("is_decoder", true);  // of a decoder-only model it changes nothing
  const nlohmann::ordered_json* pruned = fields->Object("pruned_heads");
  if (pruned != nullptr && !pruned->empty()) {
    fields->Refuse("pruned_heads", "{}: heads that were cut out are not supported");
  }
}

// Where the config has one that a model specification can hold.
void ReadInitializerRange(const nlohmann::ordered_json& json, v1::ModelSpec* model) {
  const auto found = json.find("initializer_range");
  if (found == json.end() || !found->is_number()) return;
  const double value = found->get<double>();
  if (value > 0 && value <= 1) model->set_initializer_range(value);
}

uint32_t ReadCount(JsonFields* fields, const char* name,
                   std::optional<int64_t> fallback = std::nullopt) {
  return static_cast<uint32_t>(fields->Count(name, 1, kMaxCount32, fallback));
}

// transformers takes the Llama family's names for GPT-2's fields too.
uint32_t ReadAliased(JsonFields* fields, const char* name, const char* alias,
                     std::optional<int64_t> fallback = std::nullopt) {
  if (!fields->Has(alias)) return ReadCount(fields, name, fallback);
  const uint32_t value = ReadCount(fields, alias);
  if (fields->Has(name) && ReadCount(fields, name) != value) {
    fields->Refuse(alias,
                   absl::StrCat("the same as ", name, ", which is ", ReadCount(fields, name)));
  }
  return value;
}

void ReadGpt2(JsonFields* fields, HfConfig* config) {
  v1::ModelSpec* model = &config->model;
  model->set_architecture("gpt2");
  model->set_vocab_size(ReadCount(fields, "vocab_size"));
  model->set_hidden_size(ReadAliased(fields, "n_embd", "hidden_size"));
  model->set_layers(ReadAliased(fields, "n_layer", "num_hidden_layers"));
  model->set_heads(ReadAliased(fields, "n_head", "num_attention_heads"));
  model->set_kv_heads(model->heads());
  model->set_head_dim(model->hidden_size() / model->heads());
  model->set_intermediate_size(ReadCount(fields, "n_inner", int64_t{4} * model->hidden_size()));
  model->set_max_position_embeddings(
      ReadAliased(fields, "n_positions", "max_position_embeddings", 1024));
  config->longest_field = "n_positions";
  model->set_norm_epsilon(fields->Real("layer_norm_epsilon", 0.0, false, 1e-5));
  model->set_tie_embeddings(fields->Flag("tie_word_embeddings", true));
  fields->RequireText("activation_function", {"gelu_new", "gelu_pytorch_tanh"},
                      "the tanh form of GELU is the one that is computed");
  fields->RequireFlag("scale_attn_weights", true,
                      "scores are divided by the square root of the head size");
  fields->RequireFlag("scale_attn_by_inverse_layer_idx", false,
                      "scores are not divided by the layer's number");
  if (fields->Flag("reorder_and_upcast_attn", false)) {
    config->warnings.push_back(
        absl::StrCat(fields->where(),
                     ": reorder_and_upcast_attn is true: the same formula in "
                     "another order of rounding; it is computed in the usual one"));
  }
  ReadDropout(fields, "embd_pdrop", "embd_pdrop", config);
  ReadDropout(fields, "attn_pdrop", "attn_pdrop", config);
  ReadDropout(fields, "resid_pdrop", "resid_pdrop", config);
}

// Attention that sees a window only computes the same as long as sequences fit into it.
void LimitToWindow(JsonFields* fields, int64_t window, HfConfig* config) {
  const uint32_t longest = config->model.max_position_embeddings();
  if (window >= longest) {
    config->warnings.push_back(absl::StrCat(fields->where(), ": sliding_window is ", window,
                                            ", no shorter than the longest sequence, ", longest,
                                            ": it has no effect"));
    return;
  }
  config->model.set_max_position_embeddings(static_cast<uint32_t>(window));
  config->longest_field = "sliding_window";
  config->warnings.push_back(absl::StrCat(fields->where(), ": sliding_window is ", window,
                                          ", which is not supported: sequences may "
                                          "have at most ",
                                          window, " tokens, where it changes nothing, instead of ",
                                          longest));
}

void ReadLlamaSizes(JsonFields* fields, int64_t positions, v1::ModelSpec* model) {
  model->set_vocab_size(ReadCount(fields, "vocab_size"));
  model->set_hidden_size(ReadCount(fields, "hidden_size"));
  model->set_layers(ReadCount(fields, "num_hidden_layers"));
  model->set_heads(ReadCount(fields, "num_attention_heads"));
  model->set_intermediate_size(ReadCount(fields, "intermediate_size"));
  model->set_max_position_embeddings(ReadCount(fields, "max_position_embeddings", positions));
  model->set_head_dim(
      ReadCount(fields, "head_dim", std::max<int64_t>(1, model->hidden_size() / model->heads())));
  model->set_norm_epsilon(fields->Real("rms_norm_eps", 0.0, false, 1e-6));
  model->set_tie_embeddings(fields->Flag("tie_word_embeddings", false));
}

void ReadLlamaFamily(const std::string& type, JsonFields* fields, HfConfig* config) {
  v1::ModelSpec* model = &config->model;
  model->set_architecture("llama");
  // What transformers takes where the field is absent; of kv heads only llama's is one that the
  // sizes beside it imply, so the others must say.
  const int64_t positions = type == "llama" ? 2048 : type == "mistral" ? 131072 : 32768;
  ReadLlamaSizes(fields, positions, model);
  config->longest_field = "max_position_embeddings";
  if (type == "llama") {
    model->set_kv_heads(ReadCount(fields, "num_key_value_heads", int64_t{model->heads()}));
    model->set_attention_bias(fields->Flag("attention_bias", false));
    model->set_mlp_bias(fields->Flag("mlp_bias", false));
    if (fields->Count("pretraining_tp", 0, kMaxCount32, 1) > 1) {
      fields->Refuse("pretraining_tp", "1: products cut into slices round otherwise");
    }
    fields->RequireFlag("rope_interleaved", false, "rotary positions turn halves, not pairs");
  } else {
    model->set_kv_heads(ReadCount(fields, "num_key_value_heads"));
    model->set_qkv_bias(type == "qwen2");
  }
  fields->RequireText("hidden_act", {"silu", "swish"}, "SwiGLU is the MLP that is computed");
  ReadRope(fields, &config->warnings, model);
  ReadDropout(fields, "attention_dropout", "attn_pdrop", config);
}

void ReadWindow(const std::string& type, const nlohmann::ordered_json& json, JsonFields* fields,
                HfConfig* config) {
  if (type == "llama") return;
  const auto layer_types = json.find("layer_types");
  if (fields->Has("layer_types") &&
      (!layer_types->is_array() ||
       !std::all_of(layer_types->begin(), layer_types->end(), [](const auto& layer) {
         return layer == "full_attention" || layer == "sliding_attention";
       }))) {
    fields->Refuse("layer_types", "a list of full_attention and sliding_attention");
  }
  const bool used = type == "mistral" || fields->Flag("use_sliding_window", false);
  // Absent it is 4096 in transformers; null is none.
  std::optional<int64_t> window;
  if (!json.contains("sliding_window")) {
    window = 4096;
  } else if (fields->Has("sliding_window")) {
    window = fields->Count("sliding_window", 1, kMaxCount32);
  }
  if (used && window && fields->status().ok()) LimitToWindow(fields, *window, config);
}

}  // namespace

absl::StatusOr<HfConfig> ParseHfConfig(absl::string_view text, const std::string& where) {
  ZS_ASSIGN_OR_RETURN(const nlohmann::ordered_json json, ParseJsonObject(text, where));
  JsonFields fields(json, where);
  HfConfig config;
  const std::string type = fields.Text("model_type");
  if (type == "gpt2") {
    ReadGpt2(&fields, &config);
  } else if (type == "llama" || type == "mistral" || type == "qwen2") {
    ReadLlamaFamily(type, &fields, &config);
    ReadWindow(type, json, &fields, &config);
  } else {
    fields.Refuse("model_type", "gpt2, llama, mistral or qwen2");
  }
  RefuseCommon(&fields);
  ZS_RETURN_IF_ERROR(fields.status());
  ReadInitializerRange(json, &config.model);
  for (const std::string& name : fields.Others(NoEffect())) {
    config.warnings.push_back(
        absl::StrCat(where, ": the field ", name, " is not known and has no effect here"));
  }
  if (type == "gpt2" && json.contains("n_ctx") &&
      json["n_ctx"] != config.model.max_position_embeddings()) {
    config.warnings.push_back(
        absl::StrCat(where, ": n_ctx is ", json["n_ctx"].dump(), "; n_positions, ",
                     config.model.max_position_embeddings(), ", is what counts"));
  }
  return config;
}

absl::StatusOr<HfConfig> ReadHfConfig(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/config.json");
  absl::StatusOr<std::string> text = ReadFile(path, kMaxConfig);
  if (absl::IsNotFound(text.status())) {
    return absl::NotFoundError(
        absl::StrCat(text.status().message(), "; wanted a folder with a Hugging Face model in it"));
  }
  ZS_RETURN_IF_ERROR(text.status());
  return ParseHfConfig(*text, path);
}

}  // namespace zeroshard
