#include "common/hf/tensor_map.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace zeroshard {
namespace {

// Ours without ".weight" or ".bias", and within a block without "blocks.N.".
struct Rule {
  const char* ours;
  const char* theirs;
  bool transposed = false;
};

constexpr Rule kGpt2Top[] = {{"wte", "wte"}, {"wpe", "wpe"}, {"ln_f", "ln_f"}};
constexpr Rule kGpt2Block[] = {
    {"ln_1", "ln_1"},
    {"attn.q", "attn.c_attn", true},
    {"attn.k", "attn.c_attn", true},
    {"attn.v", "attn.c_attn", true},
    {"attn.proj", "attn.c_proj"},
    {"ln_2", "ln_2"},
    {"mlp.fc", "mlp.c_fc", true},
    {"mlp.proj", "mlp.c_proj"},
};
constexpr Rule kLlamaTop[] = {{"embed", "embed_tokens"}, {"norm_f", "norm"}};
constexpr Rule kLlamaBlock[] = {
    {"norm_1", "input_layernorm"},           {"attn.q", "self_attn.q_proj"},
    {"attn.k", "self_attn.k_proj"},          {"attn.v", "self_attn.v_proj"},
    {"attn.proj", "self_attn.o_proj", true}, {"norm_2", "post_attention_layernorm"},
    {"mlp.gate", "mlp.gate_proj"},           {"mlp.up", "mlp.up_proj"},
    {"mlp.down", "mlp.down_proj", true},
};

const char* LayerWord(Architecture architecture) {
  return architecture == Architecture::kGpt2 ? "h" : "layers";
}

template <size_t N>
const Rule* FindRule(const Rule (&rules)[N], absl::string_view ours) {
  for (const Rule& rule : rules) {
    if (ours == rule.ours) return &rule;
  }
  return nullptr;
}

// The name there, with its prefix, and whether it is transposed there.
std::pair<std::string, bool> Translate(Architecture architecture, absl::string_view name) {
  const bool gpt2 = architecture == Architecture::kGpt2;
  const size_t dot = name.rfind('.');
  const absl::string_view kind = name.substr(dot);  // ".weight"
  absl::string_view stem = name.substr(0, dot);
  std::string layer;
  const Rule* rule = nullptr;
  if (absl::ConsumePrefix(&stem, "blocks.")) {
    const size_t end = stem.find('.');
    layer = absl::StrCat(LayerWord(architecture), ".", stem.substr(0, end), ".");
    stem = stem.substr(end + 1);
    rule = gpt2 ? FindRule(kGpt2Block, stem) : FindRule(kLlamaBlock, stem);
  } else {
    rule = gpt2 ? FindRule(kGpt2Top, stem) : FindRule(kLlamaTop, stem);
  }
  if (rule == nullptr) return {std::string(name), false};  // lm_head.weight
  return {absl::StrCat(HfPrefix(architecture), layer, rule->theirs, kind), rule->transposed};
}

// "h.3.attn.bias" -> 3 and "attn.bias". False where the name is none of a layer.
bool SplitLayer(Architecture architecture, absl::string_view name, int64_t* layer,
                absl::string_view* rest) {
  if (!absl::ConsumePrefix(&name, LayerWord(architecture)) || !absl::ConsumePrefix(&name, ".")) {
    return false;
  }
  const size_t dot = name.find('.');
  if (dot == absl::string_view::npos || !absl::SimpleAtoi(name.substr(0, dot), layer)) return false;
  *rest = name.substr(dot + 1);
  return true;
}

}  // namespace

absl::string_view HfPrefix(Architecture architecture) {
  return architecture == Architecture::kGpt2 ? "transformer." : "model.";
}

std::string HfEmbeddingName(Architecture architecture) {
  return architecture == Architecture::kGpt2 ? "transformer.wte.weight"
                                             : "model.embed_tokens.weight";
}

std::vector<HfTensor> MakeHfTensors(const ModelTable& model) {
  std::vector<HfTensor> tensors;
  for (const UnitTable& unit : model.units) {
    const size_t first = tensors.size();
    for (const ParameterInfo& p : unit.parameters) {
      auto [name, transposed] = Translate(model.config.architecture, p.name);
      transposed = transposed && p.shape.size() == 2;
      const auto same = std::find_if(tensors.begin() + static_cast<int64_t>(first), tensors.end(),
                                     [&name = name](const HfTensor& t) { return t.name == name; });
      std::vector<int64_t> shape = p.shape;
      if (transposed) std::reverse(shape.begin(), shape.end());
      if (same == tensors.end()) {
        tensors.push_back({std::move(name), std::move(shape), transposed, {p}});
      } else {
        same->shape.back() += shape.back();
        same->parts.push_back(p);
      }
    }
  }
  return tensors;
}

bool IsHfBuffer(Architecture architecture, absl::string_view name) {
  if (name == "rotary_emb.inv_freq") return architecture == Architecture::kLlama;
  int64_t layer = 0;
  absl::string_view rest;
  if (!SplitLayer(architecture, name, &layer, &rest)) return false;
  return architecture == Architecture::kGpt2 ? rest == "attn.bias" || rest == "attn.masked_bias"
                                             : rest == "self_attn.rotary_emb.inv_freq";
}

bool IsHfBias(Architecture architecture, int64_t layers, absl::string_view name) {
  int64_t layer = 0;
  absl::string_view rest;
  if (!SplitLayer(architecture, name, &layer, &rest) || layer < 0 || layer >= layers) return false;
  if (!absl::ConsumeSuffix(&rest, ".bias")) return false;
  const auto is_theirs = [&rest](const Rule& rule) { return rest == rule.theirs; };
  return architecture == Architecture::kGpt2
             ? std::any_of(std::begin(kGpt2Block), std::end(kGpt2Block), is_theirs)
             : std::any_of(std::begin(kLlamaBlock), std::end(kLlamaBlock), is_theirs);
}

}  // namespace zeroshard
