#include "common/plan/model_table.h"

#include <cmath>
#include <functional>
#include <limits>

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

TEST(ModelTableTest, KnownModelsHaveTheirPublishedSizes) {
  EXPECT_EQ(Table(Gpt2()).ParameterCount(), 124'439'808);     // openai-community/gpt2
  EXPECT_EQ(Table(Llama()).ParameterCount(), 6'738'415'616);  // Llama 2 7B
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
  for (const v1::ModelSpec& spec : {Gpt2(), Llama(), odd}) {
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
  for (const v1::ModelSpec& spec : {Gpt2(), Llama(), grouped, small}) {
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
  for (const v1::ModelSpec& spec : {Gpt2(), Llama()}) {
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

struct Refused {
  const char* name;
  v1::ModelSpec base;
  std::function<void(v1::ModelSpec*)> change;
  const char* field;
  const char* seen;
};

TEST(ModelConfigTest, WrongValuesAreRefusedWithFieldAndValue) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Refused cases[] = {
      {"none", Gpt2(), [](auto* s) { s->set_architecture("gtp2"); }, "model.architecture", "gtp2"},
      {"zero", Gpt2(), [](auto* s) { s->set_hidden_size(0); }, "model.hidden_size", "is 0"},
      {"huge", Gpt2(), [](auto* s) { s->set_hidden_size(4294967295); }, "model.hidden_size",
       "4294967295"},
      {"layers", Gpt2(), [](auto* s) { s->set_layers(0); }, "model.layers", "is 0"},
      {"many", Gpt2(), [](auto* s) { s->set_layers(100000); }, "model.layers", "100000"},
      {"heads", Gpt2(), [](auto* s) { s->set_heads(7); }, "model.heads", "is 7"},
      {"no heads", Gpt2(), [](auto* s) { s->set_heads(0); }, "model.heads", "is 0"},
      {"wide heads", Gpt2(), [](auto* s) { s->set_heads(1000); }, "model.heads", "1000"},
      {"T", Gpt2(), [](auto* s) { s->set_sequence_length(0); }, "model.sequence_length", "is 0"},
      {"V", Gpt2(), [](auto* s) { s->set_vocab_size(1u << 31); }, "model.vocab_size", "2147483648"},
      {"I", Gpt2(), [](auto* s) { s->set_intermediate_size(1u << 30); }, "model.intermediate_size",
       "1073741824"},
      {"gqa", Gpt2(), [](auto* s) { s->set_kv_heads(4); }, "model.kv_heads", "is 4"},
      {"kv", Llama(), [](auto* s) { s->set_kv_heads(5); }, "model.kv_heads", "is 5"},
      {"more kv", Llama(), [](auto* s) { s->set_kv_heads(64); }, "model.kv_heads", "is 64"},
      {"eps", Gpt2(), [](auto* s) { s->set_norm_epsilon(0); }, "model.norm_epsilon", "is 0"},
      {"nan", Gpt2(), [nan](auto* s) { s->set_norm_epsilon(nan); }, "model.norm_epsilon", "nan"},
      {"rope", Gpt2(), [](auto* s) { s->set_rope_theta(1e4); }, "model.rope_theta", "10000"},
      {"theta", Llama(), [](auto* s) { s->set_rope_theta(-1); }, "model.rope_theta", "-1"},
      {"std", Gpt2(), [](auto* s) { s->set_initializer_range(2); }, "model.initializer_range",
       "is 2"},
      {"gap", Gpt2(),
       [](auto* s) {
         s->set_hidden_size(12);
         s->set_heads(3);
       },
       "model.hidden_size", "is 12"},
      {"gap kv", Llama(),
       [](auto* s) {
         s->set_hidden_size(24);
         s->set_heads(6);
         s->set_kv_heads(1);
       },
       "model.kv_heads", "is 1"},
      {"odd", Llama(),
       [](auto* s) {
         s->set_hidden_size(24);
         s->set_heads(8);
       },
       "model.heads", "is 8"},
  };
  for (const Refused& c : cases) {
    v1::ModelSpec spec = c.base;
    c.change(&spec);
    const absl::Status status = MakeModelConfig(spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.name;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(c.field), HasSubstr(c.seen), HasSubstr("wanted")))
        << c.name;
  }
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
