// MakeModelConfig: a ModelSpec checked and completed.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/plan/model_table.h"

namespace zeroshard {
namespace {

constexpr int64_t kAlign = 64;  // elements

// No model is refused by these; a typing error is, and no size computed from them overflows int64.
constexpr int64_t kMaxHidden = int64_t{1} << 16;
constexpr int64_t kMaxIntermediate = int64_t{1} << 18;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxSequence = int64_t{1} << 20;
constexpr int64_t kMaxPositions = int64_t{1} << 24;
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr double kMaxRopeFactor = 1e6;

template <typename Seen>
absl::Status Refuse(const char* field, const Seen& seen, const std::string& wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat("model.", field, " is ", seen, "; wanted ", wanted));
}

absl::Status CheckRange(const char* field, int64_t seen, int64_t most) {
  if (seen >= 1 && seen <= most) return absl::OkStatus();
  return Refuse(field, seen, absl::StrCat("1 to ", most));
}

absl::Status CheckPositive(const char* field, double seen, double most) {
  if (std::isfinite(seen) && seen > 0 && seen <= most) return absl::OkStatus();
  return Refuse(field, seen, absl::StrCat("a number above 0 and at most ", most));
}

absl::Status CheckRate(const char* field, double seen) {
  if (seen >= 0 && seen < 1) return absl::OkStatus();  // false for NaN
  return Refuse(field, seen, "a rate from 0 up to, but not including, 1");
}

absl::Status CheckAbsent(const char* field, bool present, const char* why) {
  if (!present) return absl::OkStatus();
  return Refuse(field, "set", absl::StrCat("no such key, because ", why));
}

absl::Status FirstError(std::initializer_list<absl::Status> checks) {
  for (const absl::Status& check : checks) {
    if (!check.ok()) return check;
  }
  return absl::OkStatus();
}

// What gpt2 has no use for: a key that would do nothing is a mistake.
absl::Status CheckGpt2Keys(const v1::ModelSpec& spec) {
  const char* const biased = "gpt2 always has biases on all its matrices";
  return FirstError({
      CheckAbsent("attention_bias", spec.attention_bias(), biased),
      CheckAbsent("qkv_bias", spec.qkv_bias(), biased),
      CheckAbsent("mlp_bias", spec.mlp_bias(), biased),
      CheckAbsent("rope_scaling", spec.has_rope_scaling(), "gpt2 has learned positions"),
  });
}

absl::Status SetSizes(const v1::ModelSpec& spec, ModelConfig* c) {
  c->hidden = spec.hidden_size();
  c->layers = spec.layers();
  c->heads = spec.heads();
  c->head_dim = spec.head_dim();
  c->sequence = spec.sequence_length();
  c->vocab = spec.vocab_size();
  return FirstError({
      CheckRange("hidden_size", c->hidden, kMaxHidden),
      CheckRange("layers", c->layers, kMaxLayers),
      // Without a head_dim of its own a head has at least one of the hidden dimensions.
      CheckRange("heads", c->heads, c->head_dim == 0 ? c->hidden : kMaxHidden),
      CheckRange("sequence_length", c->sequence, kMaxSequence),
      CheckRange("vocab_size", c->vocab, kMaxVocab),
  });
}

absl::Status SetHeadDim(bool llama, ModelConfig* c) {
  const bool divides = c->hidden % c->heads == 0;
  if (c->head_dim == 0) {
    if (!divides) {
      return Refuse("heads", c->heads,
                    absl::StrCat("a divisor of hidden_size, ", c->hidden,
                                 llama ? ", or a head_dim beside it" : ""));
    }
    c->head_dim = c->hidden / c->heads;
    return absl::OkStatus();
  }
  if (!llama && c->head_dim * c->heads != c->hidden) {
    return Refuse("head_dim", c->head_dim,
                  absl::StrCat("no such key, or hidden_size / heads = ", c->hidden, " / ", c->heads,
                               ", because gpt2 has no other head size"));
  }
  if (c->head_dim > kMaxHidden / c->heads) {
    return Refuse(
        "head_dim", c->head_dim,
        absl::StrCat("heads x head_dim to be at most ", kMaxHidden, "; heads is ", c->heads));
  }
  return absl::OkStatus();
}

absl::Status SetHeads(const v1::ModelSpec& spec, ModelConfig* c) {
  const bool llama = c->architecture == Architecture::kLlama;
  c->kv_heads = spec.kv_heads() == 0 ? c->heads : int64_t{spec.kv_heads()};
  if (!llama && c->kv_heads != c->heads) {
    return Refuse("kv_heads", c->kv_heads,
                  absl::StrCat("0 or the number of heads, ", c->heads,
                               ", because gpt2 has no grouped queries"));
  }
  if (absl::Status s = SetHeadDim(llama, c); !s.ok()) return s;
  if (c->kv_heads > c->heads || c->heads % c->kv_heads != 0) {
    return Refuse("kv_heads", c->kv_heads, absl::StrCat("a divisor of heads, ", c->heads));
  }
  // What makes q, k and v one matrix.
  const int64_t width = c->heads * c->head_dim;
  if (width * c->hidden % kAlign != 0) {
    if (width == c->hidden) return Refuse("hidden_size", c->hidden, "a multiple of 8");
    return Refuse("head_dim", c->head_dim,
                  absl::StrCat("heads x head_dim x hidden_size = ", c->heads, " x ", c->head_dim,
                               " x ", c->hidden, " to be a multiple of 64"));
  }
  if (c->kv_heads * c->head_dim * c->hidden % kAlign != 0) {
    return Refuse("kv_heads", c->kv_heads,
                  absl::StrCat("kv_heads x head size x hidden_size = ", c->kv_heads, " x ",
                               c->head_dim, " x ", c->hidden, " to be a multiple of 64"));
  }
  if (llama && c->head_dim % 2 != 0) {
    if (spec.head_dim() != 0) {
      return Refuse("head_dim", c->head_dim, "an even number: rotary positions turn pairs");
    }
    return Refuse(
        "heads", c->heads,
        absl::StrCat("hidden_size / heads to be even (rotary positions turn pairs); it is ",
                     c->head_dim));
  }
  return absl::OkStatus();
}

absl::Status SetPositions(const v1::ModelSpec& spec, ModelConfig* c) {
  c->positions =
      spec.max_position_embeddings() == 0 ? c->sequence : int64_t{spec.max_position_embeddings()};
  // gpt2's are rows of a table, llama's only a promise.
  const int64_t most = c->architecture == Architecture::kGpt2 ? kMaxSequence : kMaxPositions;
  if (absl::Status s = CheckRange("max_position_embeddings", c->positions, most); !s.ok()) return s;
  if (c->positions >= c->sequence) return absl::OkStatus();
  return Refuse("sequence_length", c->sequence,
                absl::StrCat("at most max_position_embeddings, ", c->positions));
}

absl::Status SetBiases(const v1::ModelSpec& spec, ModelConfig* c) {
  if (c->architecture == Architecture::kGpt2) {
    c->qkv_bias = c->proj_bias = c->mlp_bias = true;
    return absl::OkStatus();
  }
  if (spec.attention_bias() && spec.qkv_bias()) {
    return Refuse("qkv_bias", "true",
                  "it or attention_bias: the one puts biases on q, k and v alone, the other on the "
                  "output projection too");
  }
  c->qkv_bias = spec.attention_bias() || spec.qkv_bias();
  c->proj_bias = spec.attention_bias();
  c->mlp_bias = spec.mlp_bias();
  return absl::OkStatus();
}

// The keys that only llama3 has.
absl::Status CheckNoLlama3Keys(const v1::RopeScaling& scaling) {
  const std::string why = absl::StrCat("no such key with rope_type ", scaling.rope_type());
  if (scaling.low_freq_factor() != 0) {
    return Refuse("rope_scaling.low_freq_factor", scaling.low_freq_factor(), why);
  }
  if (scaling.high_freq_factor() != 0) {
    return Refuse("rope_scaling.high_freq_factor", scaling.high_freq_factor(), why);
  }
  if (scaling.original_max_position_embeddings() != 0) {
    return Refuse("rope_scaling.original_max_position_embeddings",
                  scaling.original_max_position_embeddings(), why);
  }
  return absl::OkStatus();
}

absl::Status SetLlama3Scale(const v1::RopeScaling& scaling, RopeScale* scale) {
  const double low = scaling.low_freq_factor();
  const double high = scaling.high_freq_factor();
  const int64_t original = scaling.original_max_position_embeddings();
  absl::Status status = FirstError({
      CheckPositive("rope_scaling.low_freq_factor", low, kMaxRopeFactor),
      CheckPositive("rope_scaling.high_freq_factor", high, kMaxRopeFactor),
      CheckRange("rope_scaling.original_max_position_embeddings", original, kMaxPositions),
  });
  if (!status.ok()) return status;
  // Between the two the frequencies are blended with a weight that divides by their difference.
  if (static_cast<float>(high) <= static_cast<float>(low)) {
    return Refuse("rope_scaling.high_freq_factor", high,
                  absl::StrCat("more than low_freq_factor, ", low));
  }
  scale->low_freq_factor = static_cast<float>(low);
  scale->high_freq_factor = static_cast<float>(high);
  scale->original_positions = original;
  return absl::OkStatus();
}

absl::Status SetRopeScale(const v1::ModelSpec& spec, RopeScale* scale) {
  if (!spec.has_rope_scaling()) return absl::OkStatus();
  const v1::RopeScaling& scaling = spec.rope_scaling();
  const std::string& type = scaling.rope_type();
  if (type == "default") {
    if (scaling.factor() != 0 && scaling.factor() != 1) {
      return Refuse("rope_scaling.factor", scaling.factor(),
                    "1 or no such key with rope_type default");
    }
    return CheckNoLlama3Keys(scaling);
  }
  if (type != "linear" && type != "llama3") {
    return Refuse("rope_scaling.rope_type", absl::StrCat("\"", type, "\""),
                  "default, linear or llama3; other ways to stretch rotary positions are not "
                  "supported");
  }
  absl::Status status = CheckPositive("rope_scaling.factor", scaling.factor(), kMaxRopeFactor);
  if (!status.ok()) return status;
  scale->factor = static_cast<float>(scaling.factor());
  scale->kind = type == "linear" ? RopeKind::kLinear : RopeKind::kLlama3;
  return scale->kind == RopeKind::kLinear ? CheckNoLlama3Keys(scaling)
                                          : SetLlama3Scale(scaling, scale);
}

absl::Status SetNumbers(const v1::ModelSpec& spec, ModelConfig* c) {
  const double epsilon = spec.has_norm_epsilon() ? spec.norm_epsilon() : 1e-5;
  const double theta = spec.has_rope_theta() ? spec.rope_theta() : 10000.0;
  const double init_std = spec.has_initializer_range() ? spec.initializer_range() : 0.02;
  if (c->architecture == Architecture::kGpt2 && spec.has_rope_theta()) {
    return Refuse("rope_theta", theta, "no such key, because gpt2 has learned positions");
  }
  if (absl::Status s = FirstError({
          CheckRange("intermediate_size", c->intermediate, kMaxIntermediate),
          CheckPositive("norm_epsilon", epsilon, 1.0),
          CheckPositive("rope_theta", theta, 1e12),
          CheckPositive("initializer_range", init_std, 1.0),
          CheckRate("embd_pdrop", spec.embd_pdrop()),
          CheckRate("attn_pdrop", spec.attn_pdrop()),
          CheckRate("resid_pdrop", spec.resid_pdrop()),
      });
      !s.ok()) {
    return s;
  }
  c->norm_epsilon = static_cast<float>(epsilon);
  c->rope_theta = static_cast<float>(theta);
  c->init_std = static_cast<float>(init_std);
  // The largest float below one, where rounding would make it one.
  const float most = std::nextafter(1.0f, 0.0f);
  c->embd_pdrop = std::min(most, static_cast<float>(spec.embd_pdrop()));
  c->attn_pdrop = std::min(most, static_cast<float>(spec.attn_pdrop()));
  c->resid_pdrop = std::min(most, static_cast<float>(spec.resid_pdrop()));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> MakeModelConfig(const v1::ModelSpec& spec) {
  ModelConfig c;
  if (spec.architecture() == "gpt2") {
    c.architecture = Architecture::kGpt2;
  } else if (spec.architecture() == "llama") {
    c.architecture = Architecture::kLlama;
  } else {
    return Refuse("architecture", absl::StrCat("\"", spec.architecture(), "\""), "gpt2 or llama");
  }
  const bool llama = c.architecture == Architecture::kLlama;
  c.intermediate = spec.intermediate_size();
  c.tied = spec.has_tie_embeddings() ? spec.tie_embeddings() : !llama;
  if (!llama) {
    if (absl::Status s = CheckGpt2Keys(spec); !s.ok()) return s;
  }
  if (absl::Status s = SetSizes(spec, &c); !s.ok()) return s;
  if (c.intermediate == 0) {
    c.intermediate = llama ? RoundUp(CeilDiv(8 * c.hidden, 3), kAlign) : 4 * c.hidden;
  }
  if (absl::Status s = SetHeads(spec, &c); !s.ok()) return s;
  if (absl::Status s = SetPositions(spec, &c); !s.ok()) return s;
  if (absl::Status s = SetBiases(spec, &c); !s.ok()) return s;
  if (absl::Status s = SetRopeScale(spec, &c.rope_scale); !s.ok()) return s;
  if (absl::Status s = SetNumbers(spec, &c); !s.ok()) return s;
  return c;
}

}  // namespace zeroshard
