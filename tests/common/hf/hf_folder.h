// Tiny Hugging Face folders. The value of a tensor's element says where it lies in the file:
// 4096 x (the tensor's number) + (the element's index), exact in fp32.
#pragma once

#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/hf/weights.h"
#include "common/parameter_source.h"
#include "common/plan/model_table.h"
#include "common/safetensors/safetensors.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {

constexpr char kGpt2Config[] = R"({"model_type": "gpt2", "vocab_size": 20, "n_embd": 8,
  "n_layer": 2, "n_head": 2, "n_positions": 6, "n_inner": null, "torch_dtype": "float32",
  "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"})";

constexpr char kLlamaConfig[] = R"({"model_type": "llama", "vocab_size": 20, "hidden_size": 16,
  "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
  "num_key_value_heads": 1, "max_position_embeddings": 32, "torch_dtype": "bfloat16",
  "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "hidden_act": "silu"})";

inline void WriteText(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

struct FileTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> values;

  FileTensor(std::string n, std::vector<int64_t> s, int64_t number)
      : name(std::move(n)), shape(std::move(s)) {
    int64_t size = 1;
    for (const int64_t extent : shape) size *= extent;
    for (int64_t i = 0; i < size; ++i) values.push_back(static_cast<float>(4096 * number + i));
  }
  float At(int64_t row, int64_t col) const {
    return values[static_cast<size_t>(row * shape.back() + col)];
  }
};

using FileTensors = std::map<std::string, FileTensor>;

inline void Add(FileTensors* tensors, const std::string& name, std::vector<int64_t> shape) {
  tensors->emplace(name, FileTensor(name, std::move(shape), static_cast<int64_t>(tensors->size())));
}

// As transformers' GPT2LMHeadModel saves the model of kGpt2Config; C = 8, V = 20, P = 6, I = 32.
inline FileTensors Gpt2Tensors(const std::string& prefix = "transformer.") {
  FileTensors t;
  Add(&t, prefix + "wte.weight", {20, 8});
  Add(&t, prefix + "wpe.weight", {6, 8});
  for (int layer = 0; layer < 2; ++layer) {
    const std::string h = absl::StrCat(prefix, "h.", layer, ".");
    for (const char* norm : {"ln_1", "ln_2"}) {
      Add(&t, h + norm + ".weight", {8});
      Add(&t, h + norm + ".bias", {8});
    }
    Add(&t, h + "attn.c_attn.weight", {8, 24});
    Add(&t, h + "attn.c_attn.bias", {24});
    Add(&t, h + "attn.c_proj.weight", {8, 8});
    Add(&t, h + "attn.c_proj.bias", {8});
    Add(&t, h + "mlp.c_fc.weight", {8, 32});
    Add(&t, h + "mlp.c_fc.bias", {32});
    Add(&t, h + "mlp.c_proj.weight", {32, 8});
    Add(&t, h + "mlp.c_proj.bias", {8});
  }
  Add(&t, prefix + "ln_f.weight", {8});
  Add(&t, prefix + "ln_f.bias", {8});
  return t;
}

// As LlamaForCausalLM's of kLlamaConfig; C = 16, H*D = 16, KV*D = 8, I = 24.
inline FileTensors LlamaTensors(bool attention_bias = false, bool mlp_bias = false) {
  FileTensors t;
  Add(&t, "model.embed_tokens.weight", {20, 16});
  for (int layer = 0; layer < 2; ++layer) {
    const std::string l = absl::StrCat("model.layers.", layer, ".");
    Add(&t, l + "input_layernorm.weight", {16});
    Add(&t, l + "post_attention_layernorm.weight", {16});
    const auto linear = [&](const std::string& name, int64_t out, int64_t in, bool bias) {
      Add(&t, l + name + ".weight", {out, in});
      if (bias) Add(&t, l + name + ".bias", {out});
    };
    linear("self_attn.q_proj", 16, 16, attention_bias);
    linear("self_attn.k_proj", 8, 16, attention_bias);
    linear("self_attn.v_proj", 8, 16, attention_bias);
    linear("self_attn.o_proj", 16, 16, attention_bias);
    linear("mlp.gate_proj", 24, 16, mlp_bias);
    linear("mlp.up_proj", 24, 16, mlp_bias);
    linear("mlp.down_proj", 16, 24, mlp_bias);
  }
  Add(&t, "model.norm.weight", {16});
  Add(&t, "lm_head.weight", {20, 16});
  return t;
}

inline void WriteTensors(const std::string& path, const FileTensors& tensors) {
  std::vector<SafetensorsTensor> list;
  for (const auto& [name, t] : tensors)
    list.push_back({name, DType::kF32, t.shape, t.values.data()});
  const absl::Status status = WriteSafetensors(path, list);
  ASSERT_TRUE(status.ok()) << status;
}

// The tensors over several files by `shard_of`, and their index; those without a file are left out.
inline void WriteShards(const std::string& folder, const FileTensors& tensors,
                        const std::map<std::string, std::string>& shard_of,
                        const std::string& total_size = "") {
  std::map<std::string, FileTensors> shards;
  std::string map;
  uint64_t bytes = 0;
  for (const auto& [name, file] : shard_of) {
    shards[file].emplace(name, tensors.at(name));
    absl::StrAppend(&map, map.empty() ? "" : ",", "\"", name, "\":\"", file, "\"");
    bytes += 4 * tensors.at(name).values.size();
  }
  for (const auto& [file, part] : shards) WriteTensors(folder + "/" + file, part);
  WriteText(folder + "/model.safetensors.index.json",
            absl::StrCat("{\"metadata\":{\"total_size\":",
                         total_size.empty() ? absl::StrCat(bytes) : total_size,
                         "},\"weight_map\":{", map, "}}"));
}

inline const ParameterInfo& Parameter(const ModelTable& model, const std::string& name) {
  for (const UnitTable& unit : model.units) {
    for (const ParameterInfo& p : unit.parameters) {
      if (p.name == name) return p;
    }
  }
  ADD_FAILURE() << "no tensor " << name;
  return model.units.front().parameters.front();
}

inline std::vector<float> ReadAll(const ParameterSource& source, const ParameterInfo& p) {
  std::vector<float> values(static_cast<size_t>(p.size));
  const absl::Status status = source.Read(p, 0, p.size, values.data());
  EXPECT_TRUE(status.ok()) << status;
  return values;
}

}  // namespace zeroshard
