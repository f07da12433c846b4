// Folders that transformers saved (tests/reference/make_hf.py), and the same weights as torch
// transposes and splits them.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/hf/config.h"
#include "common/hf/export.h"
#include "gmock/gmock.h"
#include "tests/common/hf/hf_folder.h"

namespace zeroshard {
namespace {

using testing::IsEmpty;

struct Loaded {
  v1::ModelSpec model;
  ModelTable table;
  std::unique_ptr<HfWeights> weights;
};

Loaded Load(const std::string& folder) {
  Loaded loaded;
  absl::StatusOr<HfConfig> config = ReadHfConfig(folder);
  EXPECT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->warnings, IsEmpty());
  config->model.set_sequence_length(8);
  const auto table = MakeModelTable(config->model);
  EXPECT_TRUE(table.ok()) << table.status();
  std::vector<std::string> warnings;
  auto weights = HfWeights::Open(folder, *table, &warnings);
  EXPECT_TRUE(weights.ok()) << weights.status();
  EXPECT_THAT(warnings, IsEmpty());
  loaded.model = config->model;
  loaded.table = *table;
  loaded.weights = *std::move(weights);
  return loaded;
}

class TransformersTest : public testing::TestWithParam<const char*> {
 protected:
  const std::string folder_ = absl::StrCat(ZEROSHARD_HF_FOLDERS, "/", GetParam());
};

TEST_P(TransformersTest, EveryTensorIsWhatTorchMakesOfTheFolder) {
  const Loaded loaded = Load(folder_);
  const auto expected = SafetensorsFile::Open(folder_ + ".expected.safetensors");
  ASSERT_TRUE(expected.ok()) << expected.status();
  size_t seen = 0;
  for (const UnitTable& unit : loaded.table.units) {
    for (const ParameterInfo& p : unit.parameters) {
      const auto entry = (*expected)->Find(p.name);
      ASSERT_TRUE(entry.ok()) << entry.status();
      EXPECT_EQ((*entry)->shape, p.shape) << p.name;
      EXPECT_EQ(ReadAll(*loaded.weights, p), (*expected)->ReadFloats(p.name).value()) << p.name;
      ++seen;
    }
  }
  EXPECT_EQ(seen, (*expected)->tensors().size());
}

// What comes back out: the names, shapes and values that transformers wrote, and its config.json.
TEST_P(TransformersTest, AnExportHoldsTheSameTensorsAsTheFolder) {
  const Loaded loaded = Load(folder_);
  TempFolder temp;
  HfExportOptions options;
  options.dtype = DType::kF32;
  options.assets = folder_;
  const absl::Status status = ExportHfFolder(loaded.model, *loaded.weights, temp / "out", options);
  ASSERT_TRUE(status.ok()) << status;
  const auto out = SafetensorsFile::Open(temp / "out/model.safetensors");
  ASSERT_TRUE(out.ok()) << out.status();
  size_t seen = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder_)) {
    if (file.path().extension() != ".safetensors") continue;
    const auto in = SafetensorsFile::Open(file.path().string());
    ASSERT_TRUE(in.ok()) << in.status();
    for (const auto& [name, entry] : (*in)->tensors()) {
      // A bare GPT2Model leaves the prefix out; what is exported is the whole model.
      const std::string whole =
          GetParam() == std::string("gpt2_bare") ? "transformer." + name : name;
      const auto found = (*out)->Find(whole);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ((*found)->shape, entry.shape) << name;
      EXPECT_EQ((*out)->ReadFloats(whole).value(), (*in)->ReadFloats(name).value()) << name;
      ++seen;
    }
  }
  EXPECT_EQ(seen, (*out)->tensors().size());
}

INSTANTIATE_TEST_SUITE_P(Folders, TransformersTest,
                         testing::Values("gpt2_bare", "llama_sharded", "qwen2"),
                         [](const auto& name) { return std::string(name.param); });

}  // namespace
}  // namespace zeroshard
