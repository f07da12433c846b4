#include "common/hf/export.h"

#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/hf/config.h"
#include "common/hf/weights.h"
#include "gmock/gmock.h"
#include "tests/common/hf/hf_folder.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;
using testing::UnorderedElementsAre;
using Json = nlohmann::json;

// Random values of a model, by tensor name.
class Values : public ParameterSource {
 public:
  Values(const ModelTable& model, bool bf16) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal(0.0f, 0.5f);
    for (const UnitTable& unit : model.units) {
      for (const ParameterInfo& p : unit.parameters) {
        std::vector<float>& values = by_name_[p.name];
        for (int64_t i = 0; i < p.size; ++i) {
          const float value = normal(random);
          // Below 16 a multiple of 1/16 needs at most 8 bits of significand.
          values.push_back(bf16 ? std::nearbyint(value * 16) / 16 : value);
        }
      }
    }
  }
  absl::Status Read(const ParameterInfo& tensor, int64_t begin, int64_t end,
                    float* out) const override {
    largest_read_ = std::max(largest_read_, end - begin);
    const std::vector<float>& values = by_name_.at(tensor.name);
    std::copy(values.begin() + begin, values.begin() + end, out);
    if (fails_at_ == tensor.name) return absl::DataLossError(tensor.name + " is gone");
    return absl::OkStatus();
  }
  const std::vector<float>& Of(const std::string& name) const { return by_name_.at(name); }
  void FailAt(const std::string& name) { fails_at_ = name; }

  mutable int64_t largest_read_ = 0;

 private:
  std::map<std::string, std::vector<float>> by_name_;
  std::string fails_at_;
};

v1::ModelSpec Model(const std::string& architecture) {
  v1::ModelSpec model;
  model.set_architecture(architecture);
  model.set_hidden_size(32);
  model.set_layers(2);
  model.set_heads(4);
  model.set_sequence_length(12);
  model.set_max_position_embeddings(20);
  model.set_vocab_size(57);  // odd, and no multiple of anything
  if (architecture == "llama") {
    model.set_kv_heads(2);
    model.set_intermediate_size(48);
  }
  return model;
}

ModelTable Table(const v1::ModelSpec& model) {
  const absl::StatusOr<ModelTable> table = MakeModelTable(model);
  EXPECT_TRUE(table.ok()) << table.status();
  return table.ok() ? *table : ModelTable();
}

class HfExportTest : public testing::Test {
 protected:
  std::string Target() const { return folder_ / "out"; }
  HfExportOptions Fp32() const {
    HfExportOptions options;
    options.dtype = DType::kF32;
    return options;
  }
  void Export(const v1::ModelSpec& model, const Values& values, const HfExportOptions& options) {
    const absl::Status status = ExportHfFolder(model, values, Target(), options);
    ASSERT_TRUE(status.ok()) << status;
  }
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(Target())) {
      names.push_back(entry.path().filename());
    }
    return names;
  }
  // Reads the folder as the model its own config.json describes.
  void ExpectSame(const v1::ModelSpec& model, const Values& values) {
    absl::StatusOr<HfConfig> config = ReadHfConfig(Target());
    ASSERT_TRUE(config.ok()) << config.status();
    config->model.set_sequence_length(model.sequence_length());
    const ModelTable table = Table(config->model);
    std::vector<std::string> warnings;
    const auto weights = HfWeights::Open(Target(), table, &warnings);
    ASSERT_TRUE(weights.ok()) << weights.status();
    EXPECT_THAT(warnings, IsEmpty());
    for (const UnitTable& unit : Table(model).units) {
      for (const ParameterInfo& p : unit.parameters) {
        ASSERT_EQ(ReadAll(**weights, p), values.Of(p.name)) << p.name;
      }
    }
  }

  TempFolder folder_;
};

TEST_F(HfExportTest, ExportThenImportIsBitExact) {
  v1::ModelSpec untied_gpt2 = Model("gpt2");
  untied_gpt2.set_tie_embeddings(false);
  v1::ModelSpec biased = Model("llama");
  biased.set_attention_bias(true);
  biased.set_mlp_bias(true);
  biased.set_head_dim(16);  // 4 heads of 16 beside 32 hidden
  v1::ModelSpec qwen = Model("llama");
  qwen.set_qkv_bias(true);
  qwen.set_tie_embeddings(true);
  for (const v1::ModelSpec& model : {Model("gpt2"), untied_gpt2, Model("llama"), biased, qwen}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(absl::StrCat(NameOf(dtype), " ", model.ShortDebugString()));
      const Values values(Table(model), dtype != DType::kF32);
      HfExportOptions options;
      options.dtype = dtype;
      Export(model, values, options);
      ExpectSame(model, values);
      EXPECT_THAT(Files(), UnorderedElementsAre("config.json", "model.safetensors"));
      fs::remove_all(Target());
    }
  }
}

TEST_F(HfExportTest, MatricesLieAsTransformersKeepsThem) {
  const v1::ModelSpec model = Model("gpt2");
  const Values values(Table(model), false);
  Export(model, values, Fp32());
  const auto file = SafetensorsFile::Open(Target() + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  // Conv1D's [in, out], with the outputs of q, k and v side by side.
  const std::vector<float> packed =
      (*file)->ReadFloats("transformer.h.1.attn.c_attn.weight").value();
  EXPECT_THAT((*(*file)->Find("transformer.h.1.attn.c_attn.weight"))->shape, ElementsAre(32, 96));
  for (int64_t in = 0; in < 32; ++in) {
    for (int64_t out = 0; out < 32; ++out) {
      for (int64_t part = 0; part < 3; ++part) {
        const auto& ours =
            values.Of(absl::StrCat("blocks.1.attn.", std::string(1, "qkv"[part]), ".weight"));
        ASSERT_EQ(packed[static_cast<size_t>(in * 96 + part * 32 + out)],
                  ours[static_cast<size_t>(out * 32 + in)]);
      }
    }
  }
  EXPECT_EQ((*file)->ReadFloats("transformer.h.0.mlp.c_proj.weight").value(),
            values.Of("blocks.0.mlp.proj.weight"));
  // The whole position table, whatever the sequences were; no padding of the vocabulary.
  EXPECT_THAT((*(*file)->Find("transformer.wpe.weight"))->shape, ElementsAre(20, 32));
  EXPECT_THAT((*(*file)->Find("transformer.wte.weight"))->shape, ElementsAre(57, 32));
  EXPECT_EQ((*file)->metadata().at("format"), "pt");
}

TEST_F(HfExportTest, ATiedHeadIsNotWritten) {
  v1::ModelSpec model = Model("llama");
  model.set_tie_embeddings(true);
  Export(model, Values(Table(model), false), Fp32());
  const auto file = SafetensorsFile::Open(Target() + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->tensors().count("lm_head.weight"), 0u);
  EXPECT_EQ(Json::parse(Contents(Target() + "/config.json"))["tie_word_embeddings"], true);
}

TEST_F(HfExportTest, Bf16IsTheNearestValue) {
  const v1::ModelSpec model = Model("llama");
  const Values values(Table(model), false);
  Export(model, values, HfExportOptions());
  const auto file = SafetensorsFile::Open(Target() + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  const std::vector<float> read = (*file)->ReadFloats("model.embed_tokens.weight").value();
  const std::vector<float>& exact = values.Of("embed.weight");
  ASSERT_EQ(read.size(), exact.size());
  for (size_t i = 0; i < read.size(); ++i) {
    // bf16 keeps 8 bits of significand: nearest is within half of the last.
    const double half = std::ldexp(0.5, std::ilogb(exact[i]) - 7);
    ASSERT_LE(std::fabs(static_cast<double>(read[i]) - exact[i]), half) << exact[i];
  }
  EXPECT_EQ(Json::parse(Contents(Target() + "/config.json"))["torch_dtype"], "bfloat16");
}

TEST_F(HfExportTest, ShardsStayBelowTheLimitAndTheIndexCountsTheirBytes) {
  const v1::ModelSpec model = Model("llama");
  const ModelTable table = Table(model);
  const Values values(table, false);
  HfExportOptions options = Fp32();
  options.max_shard_bytes = 20'000;
  Export(model, values, options);
  ExpectSame(model, values);
  const Json index = Json::parse(Contents(Target() + "/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 4 * table.ParameterCount());
  std::map<std::string, uint64_t> bytes;
  for (const auto& [tensor, name] : index["weight_map"].items()) {
    const auto file = SafetensorsFile::Open(absl::StrCat(Target(), "/", name.get<std::string>()));
    ASSERT_TRUE(file.ok()) << file.status();
    const auto entry = (*file)->Find(tensor);
    ASSERT_TRUE(entry.ok()) << entry.status();
    bytes[name] += (*entry)->end - (*entry)->begin;
  }
  EXPECT_GT(bytes.size(), 2u);
  uint64_t total = 0;
  for (const auto& [name, held] : bytes) {
    EXPECT_LE(held, 20'000u) << name;
    total += held;
  }
  EXPECT_EQ(total, static_cast<uint64_t>(4 * table.ParameterCount()));
  EXPECT_EQ(bytes.begin()->first,
            absl::StrCat("model-00001-of-0000", bytes.size(), ".safetensors"));
}

TEST_F(HfExportTest, ATensorBeyondTheLimitHasAFileOfItsOwn) {
  const v1::ModelSpec model = Model("llama");
  const Values values(Table(model), false);
  HfExportOptions options = Fp32();
  options.max_shard_bytes = 1;
  Export(model, values, options);
  ExpectSame(model, values);
}

class HfAssetsTest : public HfExportTest {
 protected:
  HfAssetsTest() {
    assets_ = folder_ / "assets";
    fs::create_directory(assets_);
    WriteText(assets_ + "/config.json", kConfig);
    options_ = Fp32();
    options_.assets = assets_;
    absl::StatusOr<HfConfig> config = ParseHfConfig(kConfig, "config.json");
    EXPECT_TRUE(config.ok()) << config.status();
    model_ = config->model;
    model_.set_sequence_length(8);
  }

  // With a field nobody knows, an order of its own and numbers in odd forms.
  static constexpr char kConfig[] = R"({"vocab_size": 50257, "zz_own_field": [1, {"a": 1e-30}],
    "model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8,
    "torch_dtype": "float16", "eos_token_id": 50256, "layer_norm_epsilon": 0.000010})";
  std::string assets_;
  HfExportOptions options_;
  v1::ModelSpec model_;
};

TEST_F(HfAssetsTest, TheModelsOwnConfigKeepsAllButTheType) {
  Export(model_, Values(Table(model_), false), options_);
  nlohmann::ordered_json wanted = nlohmann::ordered_json::parse(kConfig);
  wanted["torch_dtype"] = "float32";
  EXPECT_EQ(nlohmann::ordered_json::parse(Contents(Target() + "/config.json")), wanted);
  // A vocabulary that is no multiple of anything: exactly its rows.
  const auto file = SafetensorsFile::Open(Target() + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT((*(*file)->Find("transformer.wte.weight"))->shape, ElementsAre(50257, 16));
}

TEST_F(HfAssetsTest, TokenizerAndGenerationFilesTravelAlongAndNothingElse) {
  const std::string odd("\0\xFF\n", 3);
  WriteText(assets_ + "/tokenizer.json", odd);
  WriteText(assets_ + "/generation_config.json", "{}");
  WriteText(assets_ + "/merges.txt", "a b\n");
  WriteText(assets_ + "/notes.txt", "x");
  WriteText(assets_ + "/model.safetensors", "x");
  fs::create_directory(assets_ + "/vocab.json");
  EXPECT_THAT(ListHfAssets(assets_),
              ElementsAre("config.json", "generation_config.json", "merges.txt", "tokenizer.json"));
  Export(model_, Values(Table(model_), false), options_);
  EXPECT_THAT(Files(), UnorderedElementsAre("config.json", "generation_config.json", "merges.txt",
                                            "tokenizer.json", "model.safetensors"));
  EXPECT_EQ(Contents(Target() + "/tokenizer.json"), odd);
}

TEST_F(HfAssetsTest, AConfigOfAnotherModelIsRefusedAndNothingIsLeft) {
  model_.set_vocab_size(50304);
  const absl::Status status =
      ExportHfFolder(model_, Values(Table(model_), false), Target(), options_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(assets_ + "/config.json"),
                    HasSubstr("model.vocab_size: seen 50304, wanted 50257")));
  EXPECT_FALSE(fs::exists(Target()));
}

TEST_F(HfAssetsTest, WhatEndsATextIsSaidForAModelThatCameWithoutAConfig) {
  fs::remove(assets_ + "/config.json");
  options_.end_of_text = 7;
  const auto json = [&](const std::string& name) {
    return nlohmann::json::parse(Contents(Target() + "/" + name));
  };
  Export(model_, Values(Table(model_), false), options_);
  EXPECT_EQ(json("config.json")["eos_token_id"], 7);
  EXPECT_EQ(json("generation_config.json")["eos_token_id"], 7);
  // What came with the model is not changed.
  fs::remove_all(Target());
  WriteText(assets_ + "/generation_config.json", R"({"eos_token_id": [8, 9]})");
  Export(model_, Values(Table(model_), false), options_);
  EXPECT_EQ(json("generation_config.json")["eos_token_id"], nlohmann::json({8, 9}));
  fs::remove_all(Target());
  fs::remove(assets_ + "/generation_config.json");
  WriteText(assets_ + "/config.json", kConfig);
  Export(model_, Values(Table(model_), false), options_);
  EXPECT_EQ(json("config.json")["eos_token_id"], 50256);
  EXPECT_FALSE(fs::exists(Target() + "/generation_config.json"));
}

std::vector<std::pair<std::string, std::string>> Carried(const std::string& tokenizer) {
  std::vector<std::pair<std::string, std::string>> carried;
  for (const HfAsset& asset : TokenizerAssets(tokenizer)) {
    carried.emplace_back(asset.name, asset.source);
    EXPECT_TRUE(IsTokenizerAsset(asset.name)) << asset.name;
  }
  return carried;
}

TEST(TokenizerAssetsTest, AFileIsTheTokenizerAndBringsWhatBelongsToIt) {
  const TempFolder folder;
  WriteText(folder / "mine.json", "{}");
  EXPECT_THAT(Carried(folder / "mine.json"),
              ElementsAre(Pair("tokenizer.json", folder / "mine.json")));
  WriteText(folder / "tokenizer_config.json", "{}");
  WriteText(folder / "special_tokens_map.json", "{}");
  WriteText(folder / "tokenizer.json", "another");
  for (const char* name : {"config.json", "generation_config.json", "model.safetensors", "a.txt"}) {
    WriteText(folder / name, "not the tokenizer's");
  }
  for (const char* name : {"mine.json", "tokenizer.json"}) {
    EXPECT_THAT(
        Carried(folder / name),
        UnorderedElementsAre(Pair("tokenizer.json", folder / name),
                             Pair("tokenizer_config.json", folder / "tokenizer_config.json"),
                             Pair("special_tokens_map.json", folder / "special_tokens_map.json")));
  }
  EXPECT_THAT(
      Carried(folder.path()),
      UnorderedElementsAre(Pair("tokenizer.json", folder / "tokenizer.json"),
                           Pair("tokenizer_config.json", folder / "tokenizer_config.json"),
                           Pair("special_tokens_map.json", folder / "special_tokens_map.json")));
  EXPECT_FALSE(IsTokenizerAsset("config.json"));
  EXPECT_FALSE(IsTokenizerAsset("generation_config.json"));
}

TEST(TokenizerAssetsTest, WhatIsNoFileBringsNothing) {
  for (const char* name : {"", "bytes", "tokens", "/no/such/tokenizer.json"}) {
    EXPECT_THAT(Carried(name), IsEmpty()) << name;
  }
}

TEST_F(HfExportTest, AFolderThatHoldsSomethingIsNotTouched) {
  const v1::ModelSpec model = Model("gpt2");
  const Values values(Table(model), false);
  fs::create_directory(Target());
  WriteText(Target() + "/mine", "x");
  absl::Status status = ExportHfFolder(model, values, Target(), Fp32());
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/out holds files"));
  EXPECT_THAT(Files(), ElementsAre("mine"));
  fs::remove(Target() + "/mine");
  status = ExportHfFolder(model, values, Target() + "/", Fp32());  // empty: fine
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(ExportHfFolder(model, values, Target() + "/config.json", Fp32()).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ExportHfFolder(model, values, "..", Fp32()).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(HfExportTest, WhatFailsHalfwayLeavesNothing) {
  const v1::ModelSpec model = Model("gpt2");
  for (const char* tensor : {"wte.weight", "blocks.1.attn.v.weight", "ln_f.bias"}) {
    Values values(Table(model), false);
    values.FailAt(tensor);
    const absl::Status status = ExportHfFolder(model, values, Target(), Fp32());
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(fs::is_empty(folder_.path()));
  }
}

TEST_F(HfExportTest, AnExportThatIsStoppedLeavesNothing) {
  const v1::ModelSpec model = Model("gpt2");
  HfExportOptions options = Fp32();
  int pieces = 0;
  options.stopped = [&pieces] { return ++pieces == 5; };
  const absl::Status status = ExportHfFolder(model, Values(Table(model), false), Target(), options);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_TRUE(fs::is_empty(folder_.path()));
}

TEST_F(HfExportTest, ProgressEndsAtAllBytesAndNeverFalls) {
  const v1::ModelSpec model = Model("gpt2");
  const ModelTable table = Table(model);
  HfExportOptions options = Fp32();
  uint64_t last = 0, all = 0;
  options.progress = [&](uint64_t done, uint64_t total) {
    EXPECT_GT(done, last);
    last = done;
    all = total;
  };
  Export(model, Values(table, false), options);
  EXPECT_EQ(last, static_cast<uint64_t>(4 * table.ParameterCount()));
  EXPECT_EQ(all, last);
}

TEST_F(HfExportTest, AnEmbeddingIsReadInPieces) {
  v1::ModelSpec model = Model("llama");
  model.set_vocab_size(100'000);  // 3.2 million values
  const Values values(Table(model), true);
  Export(model, values, HfExportOptions());
  EXPECT_LE(values.largest_read_, 1 << 20);
}

}  // namespace
}  // namespace zeroshard
