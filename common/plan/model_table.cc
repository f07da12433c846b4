#include "common/plan/model_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/plan/nearest.h"

namespace zeroshard {
namespace {

constexpr int64_t kAlign = 64;  // elements

// Appends tensors to a unit, each at the next multiple of 64.
class UnitBuilder {
 public:
  UnitBuilder(std::string name, UnitKind kind, std::string prefix) : prefix_(std::move(prefix)) {
    unit_.name = std::move(name);
    unit_.kind = kind;
  }

  void Matrix(const std::string& name, int64_t rows, int64_t cols, float std,
              TensorSplit split = TensorSplit::kOutermost) {
    ParameterInfo& p = Add(name, {rows, cols}, split);
    p.decay = true;
    p.init = InitKind::kNormal;
    p.init_std = std;
  }
  void Bias(const std::string& name, int64_t size, TensorSplit split) {
    Add(name, {size}, split).init = InitKind::kZeros;
  }
  void Gain(const std::string& name, int64_t size) {
    Add(name, {size}, TensorSplit::kReplicated).init = InitKind::kOnes;
  }
  UnitTable Take() { return std::move(unit_); }

 private:
  ParameterInfo& Add(const std::string& name, std::vector<int64_t> shape, TensorSplit split) {
    ParameterInfo p;
    p.name = prefix_ + name;
    p.size = 1;
    for (int64_t extent : shape) p.size *= extent;
    p.shape = std::move(shape);
    p.offset = unit_.length;
    p.split = split;
    unit_.length = RoundUp(p.offset + p.size, kAlign);
    unit_.parameters.push_back(std::move(p));
    return unit_.parameters.back();
  }

  std::string prefix_;
  UnitTable unit_;
};

constexpr TensorSplit kWhole = TensorSplit::kReplicated;
constexpr TensorSplit kSplit = TensorSplit::kOutermost;

UnitTable Gpt2Block(const ModelConfig& c, int64_t layer) {
  const std::string name = absl::StrCat("blocks.", layer);
  const int64_t C = c.hidden;
  // Each block adds twice to the residual stream; Radford et al. 2019, section 2.3.
  const float residual_std = c.init_std / std::sqrt(2.0f * static_cast<float>(c.layers));
  UnitBuilder b(name, UnitKind::kBlock, name + ".");
  b.Gain("ln_1.weight", C);
  b.Bias("ln_1.bias", C, kWhole);
  for (const char* part : {"attn.q.weight", "attn.k.weight", "attn.v.weight"}) {
    b.Matrix(part, C, C, c.init_std);
  }
  for (const char* part : {"attn.q.bias", "attn.k.bias", "attn.v.bias"}) b.Bias(part, C, kSplit);
  b.Matrix("attn.proj.weight", C, C, residual_std);
  b.Bias("attn.proj.bias", C, kWhole);
  b.Gain("ln_2.weight", C);
  b.Bias("ln_2.bias", C, kWhole);
  b.Matrix("mlp.fc.weight", c.intermediate, C, c.init_std);
  b.Bias("mlp.fc.bias", c.intermediate, kSplit);
  b.Matrix("mlp.proj.weight", c.intermediate, C, residual_std);
  b.Bias("mlp.proj.bias", C, kWhole);
  return b.Take();
}

UnitTable LlamaBlock(const ModelConfig& c, int64_t layer) {
  const std::string name = absl::StrCat("blocks.", layer);
  const int64_t width = c.heads * c.head_dim;
  const int64_t kv_width = c.kv_heads * c.head_dim;
  UnitBuilder b(name, UnitKind::kBlock, name + ".");
  b.Gain("norm_1.weight", c.hidden);
  b.Matrix("attn.q.weight", width, c.hidden, c.init_std);
  b.Matrix("attn.k.weight", kv_width, c.hidden, c.init_std);
  b.Matrix("attn.v.weight", kv_width, c.hidden, c.init_std);
  if (c.qkv_bias) {
    b.Bias("attn.q.bias", width, kSplit);
    b.Bias("attn.k.bias", kv_width, kSplit);
    b.Bias("attn.v.bias", kv_width, kSplit);
  }
  b.Matrix("attn.proj.weight", width, c.hidden, c.init_std);
  if (c.proj_bias) b.Bias("attn.proj.bias", c.hidden, kWhole);
  b.Gain("norm_2.weight", c.hidden);
  for (const char* part : {"mlp.gate", "mlp.up"}) {
    b.Matrix(absl::StrCat(part, ".weight"), c.intermediate, c.hidden, c.init_std);
    if (c.mlp_bias) b.Bias(absl::StrCat(part, ".bias"), c.intermediate, kSplit);
  }
  b.Matrix("mlp.down.weight", c.intermediate, c.hidden, c.init_std);
  if (c.mlp_bias) b.Bias("mlp.down.bias", c.hidden, kWhole);
  return b.Take();
}

UnitTable Embedding(const ModelConfig& c) {
  UnitBuilder b("embedding", UnitKind::kEmbedding, "");
  if (c.architecture == Architecture::kGpt2) {
    b.Matrix("wte.weight", c.vocab, c.hidden, c.init_std);
    b.Matrix("wpe.weight", c.positions, c.hidden, c.init_std, kWhole);
  } else {
    b.Matrix("embed.weight", c.vocab, c.hidden, c.init_std);
  }
  return b.Take();
}

UnitTable Head(const ModelConfig& c) {
  UnitBuilder b("head", UnitKind::kHead, "");
  if (c.architecture == Architecture::kGpt2) {
    b.Gain("ln_f.weight", c.hidden);
    b.Bias("ln_f.bias", c.hidden, kWhole);
  } else {
    b.Gain("norm_f.weight", c.hidden);
  }
  if (!c.tied) b.Matrix("lm_head.weight", c.vocab, c.hidden, c.init_std);
  return b.Take();
}

// Freezes what no pattern matches.
absl::Status ApplyTrainable(const v1::ModelSpec& spec, std::vector<UnitTable>* units) {
  if (spec.trainable().empty()) return absl::OkStatus();
  std::vector<std::string> names;
  for (UnitTable& unit : *units) {
    for (ParameterInfo& p : unit.parameters) {
      p.trainable = false;
      names.push_back(p.name);
    }
  }
  for (const std::string& pattern : spec.trainable()) {
    bool matched = false;
    for (UnitTable& unit : *units) {
      for (ParameterInfo& p : unit.parameters) {
        if (!MatchesPattern(pattern, p.name)) continue;
        p.trainable = true;
        matched = true;
      }
    }
    if (!matched) {
      return absl::InvalidArgumentError(
          absl::StrCat("model.trainable has the pattern \"", pattern,
                       "\", which matches no tensor of this model; wanted a tensor name in which "
                       "'*' stands for ",
                       "any run of characters; the nearest names are ",
                       absl::StrJoin(NearestNames(pattern, names, 3), ", ")));
    }
  }
  return absl::OkStatus();
}

}  // namespace

const ParameterInfo* UnitTable::Find(const std::string& suffix) const {
  for (const ParameterInfo& p : parameters) {
    if (p.name == suffix || absl::EndsWith(p.name, "." + suffix)) return &p;
  }
  return nullptr;
}

bool UnitTable::AnyTrainable() const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const ParameterInfo& p) { return p.trainable; });
}

int64_t ModelTable::ParameterCount() const {
  int64_t count = 0;
  for (const UnitTable& unit : units) {
    for (const ParameterInfo& p : unit.parameters) count += p.size;
  }
  return count;
}

absl::StatusOr<ModelTable> MakeModelTable(const v1::ModelSpec& spec) {
  absl::StatusOr<ModelConfig> config = MakeModelConfig(spec);
  if (!config.ok()) return config.status();
  ModelTable table;
  table.config = *config;
  table.units.push_back(Embedding(*config));
  for (int64_t layer = 0; layer < config->layers; ++layer) {
    table.units.push_back(config->architecture == Architecture::kGpt2 ? Gpt2Block(*config, layer)
                                                                      : LlamaBlock(*config, layer));
  }
  table.units.push_back(Head(*config));
  if (absl::Status s = ApplyTrainable(spec, &table.units); !s.ok()) return s;
  return table;
}

// Greedy, with one point to fall back to: the text behind the last '*' slides right until the rest
// of the pattern fits. Time is at most the product of the lengths.
bool MatchesPattern(const std::string& pattern, const std::string& name) {
  size_t p = 0;
  size_t n = 0;
  size_t star = std::string::npos;
  size_t resume = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = n;
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star != std::string::npos) {
      p = star + 1;
      n = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

ShardLayout ShardLayout::Make(int64_t length, int world) {
  ShardLayout layout;
  layout.length = length;
  layout.world = world;
  layout.shard = RoundUp(CeilDiv(length, world), kAlign);
  return layout;
}

int64_t ShardLayout::Begin(int rank) const { return std::min(rank * shard, length); }

int64_t ShardLayout::End(int rank) const { return std::min((rank + 1) * shard, length); }

}  // namespace zeroshard
