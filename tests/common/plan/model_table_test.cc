#include "common/plan/model_table.h"

#include <cmath>

#include "absl/strings/match.h"
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

ModelTable Table(const v1::ModelSpec& spec) {
  absl::StatusOr<ModelTable> table = MakeModelTable(spec);
  EXPECT_TRUE(table.ok()) << table.status();
  return table.ok() ? *std::move(table) : ModelTable();
}

// Parameters of a llama as its publisher counts them: embeddings and head (once where tied), per
// layer queries, keys, values, output projection, three matrices of the MLP, two norms and Qwen2's
// biases, and the last norm.
struct Published {
  const char* name;
  int64_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
  bool tied, qkv_bias;
  int64_t parameters;  // of the published checkpoint

  int64_t Count() const {
    const int64_t width = heads * head_dim, kv_width = kv_heads * head_dim;
    const int64_t layer = 2 * hidden * width + 2 * hidden * kv_width + 3 * hidden * intermediate +
                          2 * hidden + (qkv_bias ? width + 2 * kv_width : 0);
    return (tied ? 1 : 2) * vocab * hidden + layers * layer + hidden;
  }
};

TEST(ModelTableTest, KnownModelsHaveTheirPublishedSizes) {
  EXPECT_EQ(Table(Gpt2()).ParameterCount(), 124'439'808);  // openai-community/gpt2
  v1::ModelSpec shorter = Gpt2();
  shorter.set_sequence_length(128);
  shorter.set_max_position_embeddings(1024);
  EXPECT_EQ(Table(shorter).ParameterCount(), 124'439'808);

  const Published models[] = {
      {"Llama 2 7B", 4096, 11008, 32, 32, 32, 128, 32000, false, false, 6'738'415'616},
      {"TinyLlama 1.1B", 2048, 5632, 22, 32, 4, 64, 32000, false, false, 1'100'048'384},
      {"Llama 3.2 1B", 2048, 8192, 16, 32, 8, 64, 128256, true, false, 1'235'814'400},
      {"SmolLM2 135M", 576, 1536, 30, 9, 3, 64, 49152, true, false, 134'515'008},
      {"Qwen2 0.5B", 896, 4864, 24, 14, 2, 64, 151936, true, true, 494'032'768},
      {"Mistral 7B", 4096, 14336, 32, 32, 8, 128, 32000, false, false, 7'241'732'096},
  };
  for (const Published& model : models) {
    v1::ModelSpec spec;
    spec.set_architecture("llama");
    spec.set_hidden_size(model.hidden);
    spec.set_intermediate_size(model.intermediate);
    spec.set_layers(model.layers);
    spec.set_heads(model.heads);
    spec.set_kv_heads(model.kv_heads);
    spec.set_head_dim(model.head_dim);
    spec.set_vocab_size(model.vocab);
    spec.set_sequence_length(2048);
    spec.set_tie_embeddings(model.tied);
    spec.set_qkv_bias(model.qkv_bias);
    ASSERT_EQ(model.Count(), model.parameters) << model.name;
    EXPECT_EQ(Table(spec).ParameterCount(), model.parameters) << model.name;
  }
}

TEST(ModelTableTest, BiasesHaveTheWidthsOfTheirMatricesOutputs) {
  v1::ModelSpec spec = Llama();
  spec.set_hidden_size(576);
  spec.set_heads(6);
  spec.set_kv_heads(2);
  spec.set_head_dim(32);
  spec.set_attention_bias(true);
  spec.set_mlp_bias(true);
  const UnitTable block = Table(spec).units[1];
  const auto shape = [&](const char* name) {
    const ParameterInfo* p = block.Find(name);
    return p == nullptr ? std::vector<int64_t>() : p->shape;
  };
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shape("attn.q.weight"), (Shape{192, 576}));
  EXPECT_EQ(shape("attn.k.weight"), (Shape{64, 576}));
  EXPECT_EQ(shape("attn.proj.weight"), (Shape{192, 576}));
  EXPECT_EQ(shape("attn.q.bias"), (Shape{192}));
  EXPECT_EQ(shape("attn.k.bias"), (Shape{64}));
  EXPECT_EQ(shape("attn.v.bias"), (Shape{64}));
  EXPECT_EQ(shape("attn.proj.bias"), (Shape{576}));
  EXPECT_EQ(shape("mlp.gate.bias"), (Shape{11008}));
  EXPECT_EQ(shape("mlp.up.bias"), (Shape{11008}));
  EXPECT_EQ(shape("mlp.down.bias"), (Shape{576}));
  spec.set_attention_bias(false);
  spec.set_mlp_bias(false);
  const UnitTable plain = Table(spec).units[1];
  for (const ParameterInfo& p : plain.parameters) {
    EXPECT_FALSE(absl::EndsWith(p.name, ".bias")) << p.name;
  }
}

TEST(ModelTableTest, ThePositionTableHasARowAPosition) {
  v1::ModelSpec spec = Gpt2();
  spec.set_sequence_length(64);
  EXPECT_EQ(Table(spec).units[0].Find("wpe.weight")->shape, (std::vector<int64_t>{64, 768}));
  spec.set_max_position_embeddings(1024);
  EXPECT_EQ(Table(spec).units[0].Find("wpe.weight")->shape, (std::vector<int64_t>{1024, 768}));
}

TEST(ModelTableTest, UnitsComeInExecutionOrder) {
  const ModelTable table = Table(Gpt2());
  ASSERT_EQ(table.units.size(), 14u);
  EXPECT_EQ(table.units.front().name, "embedding");
  EXPECT_EQ(table.units.front().kind, UnitKind::kEmbedding);
  EXPECT_EQ(table.units[1].name, "blocks.0");
  EXPECT_EQ(table.units[12].name, "blocks.11");
  EXPECT_EQ(table.units[12].kind, UnitKind::kBlock);
  EXPECT_EQ(table.units.back().name, "head");
  EXPECT_EQ(table.units.back().kind, UnitKind::kHead);
}

TEST(ModelTableTest, TensorsStartAtMultiplesOf64AndDoNotOverlap) {
  v1::ModelSpec odd = Gpt2();
  odd.set_hidden_size(24);  // biases of 24 leave gaps
  odd.set_heads(3);
  odd.set_vocab_size(257);
  v1::ModelSpec biased = Llama();
  biased.set_hidden_size(24);
  biased.set_heads(3);
  biased.set_head_dim(16);
  biased.set_intermediate_size(40);
  biased.set_attention_bias(true);
  biased.set_mlp_bias(true);
  for (const v1::ModelSpec& spec : {Gpt2(), Llama(), odd, biased}) {
    for (const UnitTable& unit : Table(spec).units) {
      int64_t end = 0;
      for (const ParameterInfo& p : unit.parameters) {
        EXPECT_EQ(p.offset % 64, 0) << p.name;
        EXPECT_GE(p.offset, end) << p.name;
        EXPECT_LT(p.offset - end, 64) << p.name;
        int64_t product = 1;
        for (int64_t extent : p.shape) product *= extent;
        EXPECT_EQ(p.size, product) << p.name;
        end = p.offset + p.size;
      }
      EXPECT_EQ(unit.length, RoundUp(end, 64)) << unit.name;
    }
  }
}

TEST(ModelTableTest, QueriesKeysAndValuesAreOneMatrixWithoutGaps) {
  v1::ModelSpec grouped = Llama();
  grouped.set_kv_heads(2);
  v1::ModelSpec small = Gpt2();
  small.set_hidden_size(8);
  small.set_heads(4);
  v1::ModelSpec biased = Llama();
  biased.set_hidden_size(8);
  biased.set_heads(6);
  biased.set_kv_heads(2);
  biased.set_head_dim(4);  // 6 x 4 = 24 against a hidden size of 8, keys of 64 elements
  biased.set_attention_bias(true);
  for (const v1::ModelSpec& spec : {Gpt2(), Llama(), grouped, small, biased}) {
    const ModelTable table = Table(spec);
    const ParameterInfo* q = table.units[1].Find("attn.q.weight");
    const ParameterInfo* k = table.units[1].Find("attn.k.weight");
    const ParameterInfo* v = table.units[1].Find("attn.v.weight");
    ASSERT_TRUE(q && k && v);
    EXPECT_EQ(k->offset, q->offset + q->size);
    EXPECT_EQ(v->offset, k->offset + k->size);
  }
}

TEST(ModelTableTest, MatricesDecayNormsAndBiasesDoNot) {
  v1::ModelSpec biased = Llama();
  biased.set_attention_bias(true);
  biased.set_mlp_bias(true);
  for (const v1::ModelSpec& spec : {Gpt2(), Llama(), biased}) {
    for (const UnitTable& unit : Table(spec).units) {
      for (const ParameterInfo& p : unit.parameters) {
        EXPECT_EQ(p.decay, p.shape.size() == 2) << p.name;
      }
    }
  }
}

TEST(ModelTableTest, InitialValuesFollowTheArchitecture) {
  const ModelTable table = Table(Gpt2());
  const UnitTable& block = table.units[5];
  EXPECT_EQ(block.Find("ln_1.weight")->init, InitKind::kOnes);
  EXPECT_EQ(block.Find("ln_1.bias")->init, InitKind::kZeros);
  EXPECT_EQ(block.Find("mlp.fc.bias")->init, InitKind::kZeros);
  EXPECT_EQ(block.Find("mlp.fc.weight")->init, InitKind::kNormal);
  EXPECT_FLOAT_EQ(block.Find("mlp.fc.weight")->init_std, 0.02f);
  EXPECT_FLOAT_EQ(block.Find("mlp.proj.weight")->init_std, 0.02f / std::sqrt(24.0f));
  EXPECT_FLOAT_EQ(block.Find("attn.proj.weight")->init_std, 0.02f / std::sqrt(24.0f));
  EXPECT_FLOAT_EQ(Table(Llama()).units[1].Find("mlp.down.weight")->init_std, 0.02f);
}

TEST(ModelTableTest, TiedHeadsHaveNoMatrixOfTheirOwn) {
  EXPECT_EQ(Table(Gpt2()).units.back().Find("lm_head.weight"), nullptr);
  const ModelTable llama = Table(Llama());
  ASSERT_NE(llama.units.back().Find("lm_head.weight"), nullptr);
  EXPECT_EQ(llama.units.back().Find("lm_head.weight")->shape, (std::vector<int64_t>{32000, 4096}));
  v1::ModelSpec untied = Gpt2();
  untied.set_tie_embeddings(false);
  EXPECT_EQ(Table(untied).ParameterCount(), 124'439'808 + 50257 * 768);
}

TEST(ModelTableTest, DefaultsAreFilledIn) {
  v1::ModelSpec llama = Llama();
  llama.set_intermediate_size(0);
  const ModelConfig config = MakeModelConfig(llama).value();
  EXPECT_EQ(config.intermediate, 10944);  // 8/3 x 4096 = 10922.7, up to a multiple of 64
  EXPECT_EQ(config.kv_heads, 32);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_FLOAT_EQ(config.rope_theta, 10000.0f);
  EXPECT_FLOAT_EQ(config.norm_epsilon, 1e-5f);
  EXPECT_FALSE(config.tied);
  EXPECT_EQ(MakeModelConfig(Gpt2()).value().intermediate, 4 * 768);
  EXPECT_TRUE(MakeModelConfig(Gpt2()).value().tied);
}

TEST(ModelTableTest, FindTakesWholePathsOnly) {
  const UnitTable block = Table(Gpt2()).units[1];
  EXPECT_NE(block.Find("blocks.0.attn.q.weight"), nullptr);
  EXPECT_NE(block.Find("q.weight"), nullptr);
  EXPECT_EQ(block.Find("n.q.weight"), nullptr);
  EXPECT_EQ(block.Find(""), nullptr);
}

TEST(ModelConfigTest, TheLargestAcceptedSizesDoNotOverflow) {
  v1::ModelSpec spec = Llama();
  spec.set_hidden_size(1 << 16);
  spec.set_heads(512);
  spec.set_layers(4096);
  spec.set_intermediate_size(1 << 18);
  spec.set_vocab_size(1 << 24);
  spec.set_sequence_length(1 << 20);
  const ModelTable table = Table(spec);
  // In 128 bits: per layer 4 C^2 + 3 C I + 2 C, twice V C, and the last norm.
  const __int128 C = 1 << 16, I = 1 << 18, V = 1 << 24;
  const __int128 wanted = 4096 * (4 * C * C + 3 * C * I + 2 * C) + 2 * V * C + C;
  EXPECT_TRUE(static_cast<__int128>(table.ParameterCount()) == wanted);
}

TEST(TrainableTest, WhatNoPatternMatchesIsFrozen) {
  v1::ModelSpec spec = Gpt2();
  spec.add_trainable("*.bias");
  spec.add_trainable("blocks.11.*");
  const ModelTable table = Table(spec);
  EXPECT_FALSE(table.units[0].AnyTrainable());
  EXPECT_TRUE(table.units[1].Find("attn.q.bias")->trainable);
  EXPECT_FALSE(table.units[1].Find("attn.q.weight")->trainable);
  EXPECT_TRUE(table.units[12].Find("attn.q.weight")->trainable);
  EXPECT_TRUE(table.units[13].AnyTrainable());
}

TEST(TrainableTest, WithoutPatternsAllIsTrained) {
  for (const UnitTable& unit : Table(Llama()).units) {
    for (const ParameterInfo& p : unit.parameters) EXPECT_TRUE(p.trainable) << p.name;
  }
}

TEST(TrainableTest, APatternThatMatchesNothingNamesTheNearestTensors) {
  v1::ModelSpec spec = Gpt2();
  spec.add_trainable("blocks.3.atn.q.weight");
  const absl::Status status = MakeModelTable(spec).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("blocks.3.atn.q.weight"), HasSubstr("blocks.3.attn.q.weight")));
}

TEST(PatternTest, StarsStandForAnyRun) {
  EXPECT_TRUE(MatchesPattern("*", ""));
  EXPECT_TRUE(MatchesPattern("*", "anything"));
  EXPECT_TRUE(MatchesPattern("a*c", "ac"));
  EXPECT_TRUE(MatchesPattern("a*b*c", "a.b.b.c"));
  EXPECT_TRUE(MatchesPattern("*.bias", "blocks.1.attn.q.bias"));
  EXPECT_TRUE(MatchesPattern("**x", "aax"));
  EXPECT_TRUE(MatchesPattern("*ab", "aab"));
  EXPECT_FALSE(MatchesPattern("", "a"));
  EXPECT_FALSE(MatchesPattern("a", ""));
  EXPECT_FALSE(MatchesPattern("a*c", "acb"));
  EXPECT_FALSE(MatchesPattern("blocks.1.*", "blocks.11.x"));
  EXPECT_FALSE(MatchesPattern("*.bias", "blocks.1.bias.x"));
}

TEST(PatternTest, ManyStarsDoNotTakeForever) {
  const std::string name(4000, 'a');
  std::string pattern;
  for (int i = 0; i < 200; ++i) pattern += "a*";
  EXPECT_FALSE(MatchesPattern(pattern + "b", name));
}

TEST(ShardLayoutTest, SixtyFourIsTheLeastShardAndALastRankMayOwnNothing) {
  const ShardLayout layout = ShardLayout::Make(200, 4);
  EXPECT_EQ(layout.shard, 64);
  EXPECT_EQ(layout.Begin(3), 192);
  EXPECT_EQ(layout.End(3), 200);
  EXPECT_EQ(layout.Padded(), 256);
  const ShardLayout tiny = ShardLayout::Make(64, 4);
  EXPECT_EQ(tiny.Begin(1), 64);
  EXPECT_EQ(tiny.End(1), 64);
  EXPECT_EQ(tiny.Begin(3), 64);
}

TEST(ShardLayoutTest, ShardsTileTheVector) {
  for (int64_t length : {64, 192, 200, 1000, 123456}) {
    for (int world : {1, 2, 3, 4, 7, 64}) {
      const ShardLayout layout = ShardLayout::Make(length, world);
      int64_t at = 0;
      for (int rank = 0; rank < world; ++rank) {
        EXPECT_EQ(layout.Begin(rank), at);
        EXPECT_GE(layout.End(rank), layout.Begin(rank));
        at = layout.End(rank);
      }
      EXPECT_EQ(at, length);
      EXPECT_EQ(layout.shard % 64, 0);
      EXPECT_GE(layout.Padded(), length);
    }
  }
}

}  // namespace
}  // namespace zeroshard
