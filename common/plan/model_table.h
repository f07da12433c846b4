// The tables that everything else is computed from: which tensors a model has, in which units, and
// where each lies in its unit's flat vector (architecture, section 4). Pure arithmetic;
// thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/types.h"
#include "zeroshard/v1/job.pb.h"

namespace zeroshard {

enum class Architecture { kGpt2, kLlama };

// Stretched rotary frequencies, as Hugging Face's rope_scaling has them (common/plan/rope.h).
enum class RopeKind : uint8_t { kDefault, kLinear, kLlama3 };
struct RopeScale {
  RopeKind kind = RopeKind::kDefault;
  float factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_positions = 0;
};

// A ModelSpec with every default filled in and every relation checked.
struct ModelConfig {
  Architecture architecture = Architecture::kGpt2;
  int64_t hidden = 0;  // C
  int64_t layers = 0;
  int64_t heads = 0;         // H
  int64_t kv_heads = 0;      // KV, divides H
  int64_t head_dim = 0;      // D; C / H unless the specification says otherwise
  int64_t intermediate = 0;  // I
  int64_t sequence = 0;      // T
  int64_t positions = 0;     // P >= T: rows of gpt2's position table; llama: the longest T
  int64_t vocab = 0;         // V
  float norm_epsilon = 1e-5f;
  float rope_theta = 10000.0f;
  float init_std = 0.02f;
  bool tied = false;
  bool qkv_bias = false;   // on q, k and v; gpt2: true
  bool proj_bias = false;  // on the attention's output projection; gpt2: true
  bool mlp_bias = false;   // on all matrices of the MLP; gpt2: true
  RopeScale rope_scale;
  float embd_pdrop = 0, attn_pdrop = 0, resid_pdrop = 0;
  // Tensor ranks of whose one heads, kv_heads, intermediate and vocab are (tensor_slices.h).
  int tensor = 1;
  // What is asked for, of a whole model as of a slice (parallel.sequence_parallel): the rows
  // between units, of norms and of the residual stream are divided among the tensor ranks.
  bool sequence_parallel = false;
  bool DividesRows() const { return sequence_parallel && tensor > 1; }
};

// How tensor parallelism splits a tensor: never, or along its outermost dimension.
enum class TensorSplit : uint8_t { kReplicated, kOutermost };

enum class InitKind : uint8_t { kZeros, kOnes, kNormal };

struct ParameterInfo {
  std::string name;  // within the whole model: "blocks.3.attn.q.weight"
  std::vector<int64_t> shape;
  int64_t offset = 0;  // elements from the start of the unit's flat vector; a multiple of 64
  int64_t size = 0;    // product of shape
  bool decay = false;  // weight decay: matrices yes, norms and biases no
  bool trainable = true;
  TensorSplit split = TensorSplit::kReplicated;
  InitKind init = InitKind::kZeros;
  float init_std = 0.0f;
};

enum class UnitKind : uint8_t { kEmbedding, kBlock, kHead };

struct UnitTable {
  std::string name;  // "embedding", "blocks.3", "head"
  UnitKind kind = UnitKind::kBlock;
  std::vector<ParameterInfo> parameters;
  int64_t length = 0;  // L: end of the last tensor rounded up to 64; elements

  // nullptr when there is none of that name ("attn.q.weight" finds "blocks.3.attn.q.weight").
  const ParameterInfo* Find(const std::string& suffix) const;
  bool AnyTrainable() const;
};

// Units in execution order: embedding, blocks, head. Names, by architecture:
//   gpt2   embedding: wte.weight [V,C], wpe.weight [P,C]
//          block: ln_1.{weight,bias} [C], attn.{q,k,v}.weight [C,C] (out,in), attn.{q,k,v}.bias
//          [C],
//            attn.proj.weight [C,C] (in,out), attn.proj.bias [C], ln_2.{weight,bias},
//            mlp.fc.weight [I,C] (out,in), mlp.fc.bias [I], mlp.proj.weight [I,C] (in,out),
//            mlp.proj.bias [C]
//          head: ln_f.{weight,bias} [C], and when untied lm_head.weight [V,C]
//   llama  embedding: embed.weight [V,C]
//          block: norm_1.weight [C], attn.q.weight [H*D,C], attn.{k,v}.weight [KV*D,C],
//            with qkv_bias attn.q.bias [H*D] and attn.{k,v}.bias [KV*D],
//            attn.proj.weight [H*D,C] (in,out), with proj_bias attn.proj.bias [C],
//            norm_2.weight [C], mlp.gate.weight [I,C], mlp.up.weight [I,C], mlp.down.weight [I,C]
//            (in,out), with mlp_bias each followed by its mlp.{gate,up}.bias [I], mlp.down.bias [C]
//          head: norm_f.weight [C], and when untied lm_head.weight [V,C]
// q, k and v weights lie side by side without a gap (their sizes are multiples of 64), so that one
// product serves the three.
//
// Rules of the layout: tensors follow each other in the order above, each starts at the next
// multiple of 64 elements, and the rest up to it is padding (zeros, never trained, not counted). A
// tied lm_head has no tensor of its own. The tensor-split dimension (TensorSplit::kOutermost) of
// every matrix is its first, so a run of rows is a contiguous run of elements; biases of split
// outputs split alike. The rows of gpt2's position table from T on are never read and get no
// gradient, but are parameters like any other: they decay, are saved and exported. Initial values:
// norms' weights one, biases zero, matrices normal with initializer_range; gpt2's attn.proj and
// mlp.proj with initializer_range / sqrt(2 x layers) (Radford et al. 2019, section 2.3).
struct ModelTable {
  ModelConfig config;
  std::vector<UnitTable> units;
  int64_t ParameterCount() const;  // without padding, tied tensors once
};

// INVALID_ARGUMENT names the field, the value seen and the value wanted; for a pattern in
// `trainable` that matches no tensor, the names nearest to it. Accepted sizes are bounded so that
// no later product of them overflows (hidden and heads x head_dim 2^16, intermediate 2^18, layers
// 4096, sequence and gpt2's position table 2^20, vocabulary 2^24).
absl::StatusOr<ModelConfig> MakeModelConfig(const v1::ModelSpec& spec);
absl::StatusOr<ModelTable> MakeModelTable(const v1::ModelSpec& spec);

// True if `name` matches `pattern`, where '*' stands for any run of characters.
bool MatchesPattern(const std::string& pattern, const std::string& name);

// Who owns what of a flat vector of `length` elements over `world` ranks.
struct ShardLayout {
  int64_t length = 0;  // L
  int world = 1;       // N
  int64_t shard = 0;   // S = ceil(L / N) rounded up to 64

  static ShardLayout Make(int64_t length, int world);
  int64_t Begin(int rank) const;  // min(r * S, L)
  int64_t End(int rank) const;    // min((r + 1) * S, L)
  int64_t Padded() const { return shard * world; }
};

}  // namespace zeroshard
