// How the tensors of a model table lie in a Hugging Face folder: one table for reading and writing.
// Pure functions, thread-safe.
//
// GPT-2 there keeps matrices of its Conv1D layers as [in, out], with q, k and v side by side in one
// [C, 3C]; the Llama family keeps torch.nn.Linear's [out, in]. Ours are in
// common/plan/model_table.h.
//
//   ours                    GPT-2 (behind "transformer.")         Llama family (behind "model.")
//   wte, wpe | embed        wte, wpe                              embed_tokens
//   ln_1, ln_2 | norm_1, 2  h.N.ln_1, h.N.ln_2                    layers.N.input_layernorm,
//                                                                 layers.N.post_attention_layernorm
//   attn.q, k, v            h.N.attn.c_attn, columns, transposed  layers.N.self_attn.{q,k,v}_proj
//   attn.proj               h.N.attn.c_proj                       layers.N.self_attn.o_proj,
//                                                                 transposed
//   mlp.fc, mlp.proj        h.N.mlp.c_fc, transposed; .c_proj
//   mlp.gate, up, down                                            layers.N.mlp.gate_proj, .up_proj,
//                                                                 .down_proj, transposed
//   ln_f | norm_f           ln_f                                  norm
//   lm_head                 lm_head (no prefix)                   lm_head (no prefix)
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/plan/model_table.h"

namespace zeroshard {

// A tensor of a Hugging Face folder, made of one or three of ours.
struct HfTensor {
  std::string name;            // with its prefix
  std::vector<int64_t> shape;  // there
  bool transposed = false;     // ours [R, C] are C rows and R columns there
  // Whose columns (of a vector: elements) lie side by side, in this order.
  std::vector<ParameterInfo> parts;
};

// In the order of the model's units. A tied head has none.
std::vector<HfTensor> MakeHfTensors(const ModelTable& model);

// What precedes the names of all tensors but lm_head's; files of the bare model leave it out.
absl::string_view HfPrefix(Architecture architecture);

// True for buffers that older files carry beside the weights (masks, rotary frequencies): neither
// trained nor counted. `name` without prefix.
bool IsHfBuffer(Architecture architecture, absl::string_view name);

// True for a name (without prefix) of a bias that a model of this architecture may have, in one of
// its first `layers` layers.
bool IsHfBias(Architecture architecture, int64_t layers, absl::string_view name);

// The embedding's name there, which a tied head shares.
std::string HfEmbeddingName(Architecture architecture);

}  // namespace zeroshard
