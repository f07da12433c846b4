// Hugging Face's config.json as a model specification, and back. Pure functions, thread-safe.
//
// Read: GPT-2 (model_type gpt2) and the Llama family (llama, mistral without a sliding window,
// qwen2). Every field that changes the arithmetic is honoured or refused by name; fields that do
// not are listed in the source; an unknown one is named in a warning.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

struct HfConfig {
  v1::ModelSpec model;  // without init_from and sequence_length; max_position_embeddings is set
  std::vector<std::string> warnings;  // a line each, naming the field
  // Dropout rates above 0, which training does not take over: the field's name, the specification's
  // name for it, the rate.
  struct Dropout {
    std::string field, key;
    double rate = 0;
  };
  std::vector<Dropout> dropout;
  // The field that max_position_embeddings is from: a sliding window may be shorter than the rest.
  std::string longest_field;
};

// INVALID_ARGUMENT names `where`, the field, the value seen and the values wanted.
absl::StatusOr<HfConfig> ParseHfConfig(absl::string_view json, const std::string& where);
// Reads <folder>/config.json. NOT_FOUND names it.
absl::StatusOr<HfConfig> ReadHfConfig(const std::string& folder);

// A config.json for a model that did not come with one: of GPT2LMHeadModel, LlamaForCausalLM or,
// with qkv_bias, Qwen2ForCausalLM. `dtype` is what torch_dtype says: "bfloat16" or "float32".
// `end_of_text` is its eos_token_id, null where there is none.
// INVALID_ARGUMENT: no valid model, one that no class of transformers computes, or no such token.
absl::StatusOr<std::string> FormatHfConfig(const v1::ModelSpec& model, absl::string_view dtype,
                                           std::optional<int32_t> end_of_text = std::nullopt);

// Whether ExportHfFolder can write the model: one of init_from with its own config.json, any other
// with FormatHfConfig's. INVALID_ARGUMENT as there, so that a job is refused before it is trained.
absl::Status CheckExportable(const v1::ModelSpec& model);

// In what `seen` differs from `wanted`, a line each, naming the key and both values: what is set in
// either counts, except init_from, sequence_length, trainable and the dropout rates.
std::vector<std::string> ModelDifferences(const v1::ModelSpec& seen, const v1::ModelSpec& wanted);

// Where spec->model().init_from() is set: fills the rest of the section in from that folder's
// config.json and checks what was written beside it (see ModelSpec.init_from). A sequence_length
// that is not given becomes the model's longest, at most 4096. Returns the warnings. Call between
// ParseJobSpec and NormaliseJobSpec; without init_from it does nothing. Idempotent.
absl::StatusOr<std::vector<std::string>> ResolveInitFrom(v1::JobSpec* spec);

}  // namespace zeroshard
