#include "common/hf/weights.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/hf/config.h"
#include "gmock/gmock.h"
#include "tests/common/hf/hf_folder.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

ModelTable Table(const std::string& config) {
  absl::StatusOr<HfConfig> parsed = ParseHfConfig(config, "config.json");
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  parsed->model.set_sequence_length(4);
  absl::StatusOr<ModelTable> table = MakeModelTable(parsed->model);
  EXPECT_TRUE(table.ok()) << table.status();
  return table.ok() ? *table : ModelTable();
}

std::string WithFields(const std::string& config, const std::string& fields) {
  return absl::StrCat(config.substr(0, config.rfind('}')), ", ", fields, "}");
}

class HfWeightsTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<HfWeights>> Open(const ModelTable& model) {
    warnings_.clear();
    return HfWeights::Open(folder_.path(), model, &warnings_);
  }
  std::unique_ptr<HfWeights> Opened(const ModelTable& model) {
    auto weights = Open(model);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return weights.ok() ? *std::move(weights) : nullptr;
  }
  std::string Refusal(const ModelTable& model) {
    const auto weights = Open(model);
    EXPECT_EQ(weights.status().code(), absl::StatusCode::kInvalidArgument) << weights.status();
    return std::string(weights.status().message());
  }
  void Single(const FileTensors& tensors) { WriteTensors(folder_ / "model.safetensors", tensors); }

  TempFolder folder_;
  std::vector<std::string> warnings_;
};

// Element (row, col) of ours is wanted(row, col).
void ExpectMatrix(const HfWeights& weights, const ParameterInfo& p,
                  const std::function<float(int64_t, int64_t)>& wanted) {
  const std::vector<float> values = ReadAll(weights, p);
  const int64_t cols = p.shape.back();
  for (int64_t i = 0; i < p.size; ++i) {
    ASSERT_EQ(values[static_cast<size_t>(i)], wanted(i / cols, i % cols)) << p.name << " at " << i;
  }
}

// transformers' Conv1D keeps [in, out]; the rows of ours are a head's outputs for q, k, v and fc,
// and inputs for the two that lead back to the residual stream.
void ExpectGpt2(const HfWeights& weights, const ModelTable& model, const FileTensors& t,
                const std::string& prefix) {
  for (int layer = 0; layer < 2; ++layer) {
    const std::string ours = absl::StrCat("blocks.", layer, ".");
    const std::string theirs = absl::StrCat(prefix, "h.", layer, ".");
    const FileTensor& c_attn = t.at(theirs + "attn.c_attn.weight");
    const FileTensor& c_attn_bias = t.at(theirs + "attn.c_attn.bias");
    for (int part = 0; part < 3; ++part) {
      const std::string name = absl::StrCat(ours, "attn.", std::string(1, "qkv"[part]));
      ExpectMatrix(weights, Parameter(model, name + ".weight"),
                   [&](int64_t out, int64_t in) { return c_attn.At(in, 8 * part + out); });
      ExpectMatrix(weights, Parameter(model, name + ".bias"),
                   [&](int64_t, int64_t out) { return c_attn_bias.At(0, 8 * part + out); });
    }
    ExpectMatrix(weights, Parameter(model, ours + "mlp.fc.weight"), [&](int64_t out, int64_t in) {
      return t.at(theirs + "mlp.c_fc.weight").At(in, out);
    });
    const std::pair<const char*, const char*> same[] = {{"attn.proj.weight", "attn.c_proj.weight"},
                                                        {"attn.proj.bias", "attn.c_proj.bias"},
                                                        {"mlp.proj.weight", "mlp.c_proj.weight"},
                                                        {"mlp.proj.bias", "mlp.c_proj.bias"},
                                                        {"mlp.fc.bias", "mlp.c_fc.bias"},
                                                        {"ln_1.weight", "ln_1.weight"},
                                                        {"ln_1.bias", "ln_1.bias"},
                                                        {"ln_2.weight", "ln_2.weight"},
                                                        {"ln_2.bias", "ln_2.bias"}};
    for (const auto& [a, b] : same) {
      EXPECT_EQ(ReadAll(weights, Parameter(model, ours + a)), t.at(theirs + b).values) << a;
    }
  }
  for (const char* name : {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"}) {
    EXPECT_EQ(ReadAll(weights, Parameter(model, name)), t.at(prefix + name).values) << name;
  }
}

TEST_F(HfWeightsTest, Gpt2WithAndWithoutItsPrefixIsTheSameModel) {
  const ModelTable model = Table(kGpt2Config);
  for (const char* prefix : {"transformer.", ""}) {
    const FileTensors tensors = Gpt2Tensors(prefix);
    Single(tensors);
    const auto weights = Opened(model);
    ASSERT_NE(weights, nullptr);
    EXPECT_THAT(warnings_, IsEmpty());
    ExpectGpt2(*weights, model, tensors, prefix);
  }
}

TEST_F(HfWeightsTest, Gpt2sMaskBuffersAreNeitherReadNorMentioned) {
  const ModelTable model = Table(kGpt2Config);
  FileTensors tensors = Gpt2Tensors();
  for (int layer = 0; layer < 2; ++layer) {
    Add(&tensors, absl::StrCat("transformer.h.", layer, ".attn.bias"), {1, 1, 6, 6});
    Add(&tensors, absl::StrCat("transformer.h.", layer, ".attn.masked_bias"), {});
  }
  Single(tensors);
  const auto weights = Opened(model);
  ASSERT_NE(weights, nullptr);
  EXPECT_THAT(warnings_, IsEmpty());
  ExpectGpt2(*weights, model, tensors, "transformer.");
  // V C + P C + 2 (4 C^2 + 4 C + 2 I C + I + C + 4 C) + 2 C with C = 8, V = 20, P = 6, I = 32
  EXPECT_EQ(model.ParameterCount(), 160 + 48 + 2 * (256 + 32 + 512 + 32 + 8 + 32) + 16);
}

TEST_F(HfWeightsTest, LlamasOutputProjectionsAreTransposedAndTheRestIsNot) {
  const ModelTable model = Table(WithFields(kLlamaConfig, R"("attention_bias": true,
                                                             "mlp_bias": true)"));
  FileTensors t = LlamaTensors(true, true);
  Add(&t, "model.layers.0.self_attn.rotary_emb.inv_freq", {4});
  Single(t);
  const auto weights = Opened(model);
  ASSERT_NE(weights, nullptr);
  EXPECT_THAT(warnings_, IsEmpty());
  for (int layer = 0; layer < 2; ++layer) {
    const std::string ours = absl::StrCat("blocks.", layer, ".");
    const std::string theirs = absl::StrCat("model.layers.", layer, ".");
    for (const auto& [a, b] : {std::make_pair("attn.proj.weight", "self_attn.o_proj.weight"),
                               {"mlp.down.weight", "mlp.down_proj.weight"}}) {
      ExpectMatrix(*weights, Parameter(model, ours + a),
                   [&](int64_t in, int64_t out) { return t.at(theirs + b).At(out, in); });
    }
    const std::pair<const char*, const char*> same[] = {
        {"norm_1.weight", "input_layernorm.weight"},
        {"norm_2.weight", "post_attention_layernorm.weight"},
        {"attn.q.weight", "self_attn.q_proj.weight"},
        {"attn.k.weight", "self_attn.k_proj.weight"},
        {"attn.v.weight", "self_attn.v_proj.weight"},
        {"attn.q.bias", "self_attn.q_proj.bias"},
        {"attn.k.bias", "self_attn.k_proj.bias"},
        {"attn.v.bias", "self_attn.v_proj.bias"},
        {"attn.proj.bias", "self_attn.o_proj.bias"},
        {"mlp.gate.weight", "mlp.gate_proj.weight"},
        {"mlp.up.weight", "mlp.up_proj.weight"},
        {"mlp.gate.bias", "mlp.gate_proj.bias"},
        {"mlp.up.bias", "mlp.up_proj.bias"},
        {"mlp.down.bias", "mlp.down_proj.bias"}};
    for (const auto& [a, b] : same) {
      EXPECT_EQ(ReadAll(*weights, Parameter(model, ours + a)), t.at(theirs + b).values) << a;
    }
  }
  EXPECT_EQ(ReadAll(*weights, Parameter(model, "embed.weight")),
            t.at("model.embed_tokens.weight").values);
  EXPECT_EQ(ReadAll(*weights, Parameter(model, "norm_f.weight")), t.at("model.norm.weight").values);
  EXPECT_EQ(ReadAll(*weights, Parameter(model, "lm_head.weight")), t.at("lm_head.weight").values);
}

TEST_F(HfWeightsTest, AnyRangeIsThatRangeOfTheWhole) {
  const ModelTable model = Table(kGpt2Config);
  Single(Gpt2Tensors());
  const auto weights = Opened(model);
  ASSERT_NE(weights, nullptr);
  for (const char* name : {"blocks.1.attn.k.weight", "wte.weight", "blocks.0.attn.v.bias"}) {
    const ParameterInfo& p = Parameter(model, name);
    const std::vector<float> whole = ReadAll(*weights, p);
    for (int64_t begin = 0; begin <= p.size; ++begin) {
      for (int64_t end = begin; end <= p.size; end += 1 + (end - begin) / 3) {
        std::vector<float> part(static_cast<size_t>(end - begin) + 1, -1.0f);
        ASSERT_TRUE(weights->Read(p, begin, end, part.data()).ok());
        ASSERT_EQ(part.back(), -1.0f) << "written beyond the range";
        part.pop_back();
        ASSERT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + begin))
            << name << " " << begin << " " << end;
      }
    }
    EXPECT_EQ(weights->Read(p, 0, p.size + 1, nullptr).code(), absl::StatusCode::kOutOfRange);
    EXPECT_EQ(weights->Read(p, -1, 0, nullptr).code(), absl::StatusCode::kOutOfRange);
  }
}

// Larger than a tile in both directions, and no multiple of one.
TEST_F(HfWeightsTest, ATransposeAcrossTilesIsExact) {
  constexpr char kWide[] = R"({"model_type": "llama", "vocab_size": 8, "hidden_size": 136,
      "intermediate_size": 200, "num_hidden_layers": 1, "num_attention_heads": 17})";
  const ModelTable model = Table(kWide);
  FileTensors t;
  Add(&t, "model.embed_tokens.weight", {8, 136});
  for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) {
    Add(&t, absl::StrCat("model.layers.0.", norm, ".weight"), {136});
  }
  for (const char* name : {"q", "k", "v", "o"}) {
    Add(&t, absl::StrCat("model.layers.0.self_attn.", name, "_proj.weight"), {136, 136});
  }
  for (const char* name : {"gate", "up"}) {
    Add(&t, absl::StrCat("model.layers.0.mlp.", name, "_proj.weight"), {200, 136});
  }
  Add(&t, "model.layers.0.mlp.down_proj.weight", {136, 200});
  Add(&t, "model.norm.weight", {136});
  Add(&t, "lm_head.weight", {8, 136});
  Single(t);
  const auto weights = Opened(model);
  ASSERT_NE(weights, nullptr);
  const ParameterInfo& p = Parameter(model, "blocks.0.mlp.down.weight");
  const FileTensor& file = t.at("model.layers.0.mlp.down_proj.weight");
  ExpectMatrix(*weights, p, [&](int64_t in, int64_t out) { return file.At(out, in); });
  // From the middle of a row to the middle of another.
  std::vector<float> part(20000);
  ASSERT_TRUE(weights->Read(p, 1111, 21111, part.data()).ok());
  for (int64_t i = 0; i < 20000; ++i) {
    const int64_t at = 1111 + i;
    ASSERT_EQ(part[static_cast<size_t>(i)], file.At(at % 136, at / 136)) << i;
  }
  weights->DropPages();
  ExpectMatrix(*weights, p, [&](int64_t in, int64_t out) { return file.At(out, in); });
}

TEST_F(HfWeightsTest, HalfPrecisionOfBothKindsIsReadExactlyAndMayBeMixed) {
  const ModelTable model = Table(kLlamaConfig);
  // By hand: the writer has no F16. Every tensor's element i is i + 1/2 (bf16, f16 or fp32 in
  // turn), which each of the three holds exactly up to 128.
  const FileTensors tensors = LlamaTensors();
  std::string header, data;
  int turn = 0;
  for (const auto& [name, t] : tensors) {
    const size_t begin = data.size();
    const char* types[] = {"BF16", "F16", "F32"};
    const int type = turn++ % 3;
    for (size_t i = 0; i < t.values.size(); ++i) {
      const float value = static_cast<float>(i % 120) + 0.5f;
      uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      if (type == 0) bits >>= 16;
      // Normal numbers: the exponent's bias is 15 instead of 127, the significand ends 13 bits
      // earlier.
      if (type == 1) bits = (bits >> 13) - ((127 - 15) << 10);
      data.append(reinterpret_cast<const char*>(&bits), type == 2 ? 4 : 2);
    }
    std::string shape;
    for (const int64_t extent : t.shape) absl::StrAppend(&shape, shape.empty() ? "" : ",", extent);
    absl::StrAppend(&header, header.empty() ? "{" : ",", "\"", name, "\":{\"dtype\":\"",
                    types[type], "\",\"shape\":[", shape, "],\"data_offsets\":[", begin, ",",
                    data.size(), "]}");
  }
  header += "}";
  const uint64_t length = header.size();
  WriteText(folder_ / "model.safetensors",
            std::string(reinterpret_cast<const char*>(&length), 8) + header + data);
  const auto weights = Opened(model);
  ASSERT_NE(weights, nullptr);
  for (const UnitTable& unit : model.units) {
    for (const ParameterInfo& p : unit.parameters) {
      const bool transposed = p.name.find("attn.proj") != std::string::npos ||
                              p.name.find("mlp.down") != std::string::npos;
      ExpectMatrix(*weights, p, [&](int64_t row, int64_t col) {
        const int64_t at = transposed ? col * p.shape[0] + row : row * p.shape.back() + col;
        return static_cast<float>(at % 120) + 0.5f;
      });
    }
  }
}

TEST_F(HfWeightsTest, TiedWithoutAHeadSharesTheEmbedding) {
  FileTensors t = LlamaTensors();
  t.erase("lm_head.weight");
  Single(t);
  const ModelTable model = Table(WithFields(kLlamaConfig, R"("tie_word_embeddings": true)"));
  EXPECT_NE(Opened(model), nullptr);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(HfWeightsTest, UntiedWithoutAHeadIsRefusedByName) {
  FileTensors t = LlamaTensors();
  t.erase("lm_head.weight");
  Single(t);
  // Absent, Llama's tie_word_embeddings is false.
  EXPECT_THAT(Refusal(Table(kLlamaConfig)),
              AllOf(HasSubstr("lm_head.weight"), HasSubstr("tie_word_embeddings"),
                    HasSubstr(folder_.path())));
  FileTensors gpt2 = Gpt2Tensors();
  Single(gpt2);
  EXPECT_THAT(Refusal(Table(WithFields(kGpt2Config, R"("tie_word_embeddings": false)"))),
              HasSubstr("lm_head.weight"));
}

TEST_F(HfWeightsTest, TiedWithAnEqualHeadIgnoresIt) {
  FileTensors t = LlamaTensors();
  t.at("lm_head.weight").values = t.at("model.embed_tokens.weight").values;
  Single(t);
  EXPECT_NE(Opened(Table(WithFields(kLlamaConfig, R"("tie_word_embeddings": true)"))), nullptr);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(HfWeightsTest, TiedWithAnotherHeadWarnsLoudlyAndUsesTheEmbedding) {
  FileTensors t = LlamaTensors();
  t.at("lm_head.weight").values = t.at("model.embed_tokens.weight").values;
  t.at("lm_head.weight").values[3 * 16 + 5] = 77.0f;
  Single(t);
  const ModelTable model = Table(WithFields(kLlamaConfig, R"("tie_word_embeddings": true)"));
  const auto weights = Opened(model);
  ASSERT_NE(weights, nullptr);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("WARNING"), HasSubstr("lm_head.weight"),
                                           HasSubstr("row 3, column 5"), HasSubstr("77"))));
  EXPECT_EQ(ReadAll(*weights, Parameter(model, "embed.weight")),
            t.at("model.embed_tokens.weight").values);
}

TEST_F(HfWeightsTest, BiasesThatTheConfigDoesNotHaveAreListed) {
  Single(LlamaTensors(true, true));
  EXPECT_THAT(Refusal(Table(kLlamaConfig)),
              AllOf(HasSubstr("14 biases"), HasSubstr("model.layers.0.mlp.down_proj.bias"),
                    HasSubstr("attention_bias"), HasSubstr("mlp_bias"), HasSubstr("4 more")));
  Single(LlamaTensors(false, true));
  EXPECT_THAT(Refusal(Table(WithFields(kLlamaConfig, R"("attention_bias": false)"))),
              HasSubstr("model.layers.1.mlp.up_proj.bias"));
}

TEST_F(HfWeightsTest, BiasesThatTheFilesDoNotHaveAreListed) {
  Single(LlamaTensors());
  EXPECT_THAT(
      Refusal(Table(WithFields(kLlamaConfig, R"("attention_bias": true)"))),
      AllOf(HasSubstr("8 are not in the files"), HasSubstr("model.layers.0.self_attn.q_proj.bias"),
            HasSubstr("model.layers.1.self_attn.o_proj.bias")));
}

TEST_F(HfWeightsTest, MissingTensorsAndOtherShapesAreListedUpToTen) {
  FileTensors t = LlamaTensors();
  t.erase("model.layers.1.mlp.up_proj.weight");
  t.erase("model.norm.weight");
  t.at("model.embed_tokens.weight") = FileTensor("model.embed_tokens.weight", {24, 16}, 0);
  Single(t);
  EXPECT_THAT(
      Refusal(Table(kLlamaConfig)),
      AllOf(HasSubstr("2 are not in the files"), HasSubstr("model.layers.1.mlp.up_proj.weight"),
            HasSubstr("model.norm.weight"),
            HasSubstr("model.embed_tokens.weight has the shape [24, 16], wanted [20, 16]")));
  Single({});
  EXPECT_THAT(Refusal(Table(kLlamaConfig)),
              AllOf(HasSubstr("21 are not in the files"), HasSubstr("and 11 more")));
}

TEST_F(HfWeightsTest, TensorsThatAreNotTheModelsAreNamedInAWarning) {
  FileTensors t = LlamaTensors();
  Add(&t, "model.layers.2.mlp.up_proj.weight", {24, 16});  // beyond the last layer
  Add(&t, "model.layers.0.self_attn.q_norm.weight", {8});
  Single(t);
  EXPECT_NE(Opened(Table(kLlamaConfig)), nullptr);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("2 tensors"),
                                           HasSubstr("model.layers.2.mlp.up_proj.weight"),
                                           HasSubstr("model.layers.0.self_attn.q_norm.weight"))));
}

TEST_F(HfWeightsTest, IntegersAreNoWeights) {
  FileTensors t = LlamaTensors();
  std::vector<SafetensorsTensor> list;
  for (const auto& [name, tensor] : t) {
    list.push_back({name, name == "model.norm.weight" ? DType::kI32 : DType::kF32, tensor.shape,
                    tensor.values.data()});
  }
  ASSERT_TRUE(WriteSafetensors(folder_ / "model.safetensors", list).ok());
  EXPECT_THAT(Refusal(Table(kLlamaConfig)), HasSubstr("model.norm.weight is of type I32"));
}

TEST_F(HfWeightsTest, AFolderWithoutWeightsSaysWhatItHas) {
  const ModelTable model = Table(kLlamaConfig);
  EXPECT_EQ(Open(model).status().code(), absl::StatusCode::kNotFound);
  WriteText(folder_ / "pytorch_model.bin", "x");
  const absl::Status status = Open(model).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("pytorch_model.bin"));
}

class HfIndexTest : public HfWeightsTest {
 protected:
  HfIndexTest() : tensors_(LlamaTensors()), model_(Table(kLlamaConfig)) {
    for (const auto& [name, tensor] : tensors_) {
      shard_of_[name] = name.find("layers.1") == std::string::npos ? kA : kB;
    }
  }
  void Write(const std::string& total_size = "") {
    WriteShards(folder_.path(), tensors_, shard_of_, total_size);
  }
  void ReplaceInIndex(const std::string& from, const std::string& to) {
    const std::string path = folder_ / "model.safetensors.index.json";
    const std::string before = Contents(path);
    const std::string after = absl::StrReplaceAll(before, {{from, to}});
    ASSERT_NE(before, after) << from;
    WriteText(path, after);
  }

  static constexpr char kA[] = "model-00001-of-00002.safetensors";
  static constexpr char kB[] = "model-00002-of-00002.safetensors";
  static constexpr char kUp[] = "model.layers.1.mlp.up_proj.weight";  // in kB
  FileTensors tensors_;
  std::map<std::string, std::string> shard_of_;
  const ModelTable model_;
};

TEST_F(HfIndexTest, TheFilesOfAnIndexAreOneModel) {
  Write();
  const auto weights = Opened(model_);
  ASSERT_NE(weights, nullptr);
  EXPECT_THAT(warnings_, IsEmpty());
  EXPECT_EQ(ReadAll(*weights, Parameter(model_, "blocks.1.mlp.up.weight")),
            tensors_.at(kUp).values);
  EXPECT_EQ(ReadAll(*weights, Parameter(model_, "blocks.0.norm_1.weight")),
            tensors_.at("model.layers.0.input_layernorm.weight").values);
}

TEST_F(HfIndexTest, AMissingFileIsNamed) {
  Write();
  std::filesystem::remove(folder_ / kB);
  const absl::Status status = Open(model_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(folder_ / kB), HasSubstr("layers.1")));
}

TEST_F(HfIndexTest, ATensorInAnotherFileThanTheIndexSaysIsRefused) {
  Write();
  ReplaceInIndex(absl::StrCat(kUp, "\":\"", kB), absl::StrCat(kUp, "\":\"", kA));
  EXPECT_THAT(Refusal(model_), AllOf(HasSubstr(kUp), HasSubstr(absl::StrCat("in ", kA)),
                                     HasSubstr(absl::StrCat(kB, " has it"))));
}

TEST_F(HfIndexTest, OfTwoCopiesTheIndexDecidesAndAWarningSaysSo) {
  Write();
  FileTensors first;
  for (const auto& [name, file] : shard_of_) {
    if (file == kA) first.emplace(name, tensors_.at(name));
  }
  first.emplace(kUp, FileTensor(kUp, {24, 16}, 99));
  WriteTensors(folder_ / kA, first);
  const auto weights = Opened(model_);
  ASSERT_NE(weights, nullptr);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr(kUp), HasSubstr(kA), HasSubstr(kB))));
  EXPECT_EQ(ReadAll(*weights, Parameter(model_, "blocks.1.mlp.up.weight")),
            tensors_.at(kUp).values);
}

TEST_F(HfIndexTest, AStraySingleFileIsIgnoredWithAWarning) {
  Write();
  FileTensors stray = tensors_;
  for (auto& [name, tensor] : stray) std::fill(tensor.values.begin(), tensor.values.end(), -1.0f);
  Single(stray);
  const auto weights = Opened(model_);
  ASSERT_NE(weights, nullptr);
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("model.safetensors")));
  EXPECT_EQ(ReadAll(*weights, Parameter(model_, "blocks.1.mlp.up.weight")),
            tensors_.at(kUp).values);
}

TEST_F(HfIndexTest, AWrongTotalSizeIsAWarning) {
  for (const char* total : {"12", "\"x\"", "12.5"}) {
    Write(total);
    EXPECT_NE(Opened(model_), nullptr);
    EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("total_size"), HasSubstr(total))));
  }
}

TEST_F(HfIndexTest, APathOutOfTheFolderIsRefused) {
  for (const char* path : {"../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""}) {
    Write();
    ReplaceInIndex(absl::StrCat(kUp, "\":\"", kB), absl::StrCat(kUp, "\":\"", path));
    EXPECT_THAT(Refusal(model_), AllOf(HasSubstr(kUp), HasSubstr(absl::StrCat("\"", path, "\"")),
                                       HasSubstr("wanted the name of a file")));
  }
}

TEST_F(HfIndexTest, WhatIsNoIndexIsRefused) {
  for (const char* text : {"", "[]", "{}", R"({"weight_map": {}})", R"({"weight_map": ["a"]})",
                           R"({"weight_map": {"a": 3}})",
                           R"({"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}})"}) {
    WriteText(folder_ / "model.safetensors.index.json", text);
    EXPECT_THAT(Refusal(model_), HasSubstr("index.json")) << text;
  }
}

TEST_F(HfIndexTest, TensorsThatTheIndexDoesNotListAreNamedAndNotUsed) {
  Write();
  ReplaceInIndex(absl::StrCat("\"", kUp, "\":\"", kB, "\","), "");
  EXPECT_THAT(Refusal(model_), AllOf(HasSubstr("1 are not in the files"), HasSubstr(kUp)));
  EXPECT_THAT(warnings_, testing::Contains(AllOf(HasSubstr("does not list"), HasSubstr(kUp))));
}

}  // namespace
}  // namespace zeroshard
