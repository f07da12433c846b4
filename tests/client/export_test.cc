// zeroshard export, on checkpoints that this test writes.
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/checkpoint/files.h"
#include "common/checkpoint/store.h"
#include "common/exit_codes.h"
#include "common/hf/weights.h"
#include "common/plan/model_table.h"
#include "common/spec/job_spec.h"
#include "tests/client/command_fixture.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Json = nlohmann::json;

class ExportCommandTest : public CommandTest {
 protected:
  ExportCommandTest() {
    absl::StatusOr<v1::JobSpec> spec = ParseJobSpec(kJob, "job", {});
    EXPECT_TRUE(spec.ok()) << spec.status();
    spec_ = *spec;
    EXPECT_TRUE(NormaliseJobSpec(&spec_).ok());
    checkpoints_ = (folder_ / "checkpoints").string();
    out_ = (folder_ / "out").string();
    float value = 0;
    const auto table = MakeModelTable(spec_.model());
    EXPECT_TRUE(table.ok()) << table.status();
    for (const UnitTable& unit : table->units) {
      for (const ParameterInfo& p : unit.parameters) {
        std::vector<float>& values = values_[p.name];
        for (int64_t i = 0; i < p.size; ++i) values.push_back(value += 1.0f);
      }
    }
    table_ = *table;
  }

  // A checkpoint of the weights, every one `step` more than in step 0, that carries `assets` along;
  // returns its path.
  std::string Save(uint64_t step, const std::vector<Asset>& assets = {}) {
    std::vector<StatePiece> pieces;
    std::map<std::string, std::vector<float>> shifted = values_;
    for (const UnitTable& unit : table_.units) {
      for (const ParameterInfo& p : unit.parameters) {
        for (float& value : shifted[p.name]) value += static_cast<float>(step);
        pieces.push_back({StateKind::kMaster, p.name, p.shape, 0, p.size, shifted[p.name].data()});
      }
    }
    CheckpointStoreOptions options;
    options.dir = checkpoints_;
    options.job = "tiny";
    options.run_id = "tiny-1";
    auto store = CheckpointStore::Open(&FileSystem::Real(), options);
    EXPECT_TRUE(store.ok()) << store.status();
    const auto folder = (*store)->Begin(step);
    EXPECT_TRUE(folder.ok()) << folder.status();
    Manifest manifest;
    manifest.run_id = "tiny-1";
    manifest.job = "tiny";
    manifest.step = step;
    manifest.unix_ms = 1;
    manifest.world_size = 1;
    manifest.spec = spec_;
    const auto file = WriteStateFile(&FileSystem::Real(), *folder, 0, 1, pieces);
    EXPECT_TRUE(file.ok()) << file.status();
    manifest.files.push_back(*file);
    EXPECT_TRUE(WriteAssets(&FileSystem::Real(), assets, *folder, &manifest.files).ok());
    const auto path = (*store)->Complete(manifest);
    EXPECT_TRUE(path.ok()) << path.status();
    return path.ok() ? *path : "";
  }

  v1::JobSpec spec_;
  ModelTable table_;
  std::map<std::string, std::vector<float>> values_;
  std::string checkpoints_, out_;
};

TEST_F(ExportCommandTest, AFolderWithTheCheckpointsWeightsIsWritten) {
  const std::string path = Save(3);
  const Outcome outcome = Run({"export", checkpoints_, out_, "--dtype", "fp32"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr(out_), HasSubstr("step 3"), HasSubstr(path)));
  std::vector<std::string> warnings;
  const auto weights = HfWeights::Open(out_, table_, &warnings);
  ASSERT_TRUE(weights.ok()) << weights.status();
  for (const UnitTable& unit : table_.units) {
    for (const ParameterInfo& p : unit.parameters) {
      std::vector<float> read(static_cast<size_t>(p.size));
      ASSERT_TRUE((*weights)->Read(p, 0, p.size, read.data()).ok());
      std::vector<float> wanted = values_[p.name];
      for (float& value : wanted) value += 3.0f;
      EXPECT_EQ(read, wanted) << p.name;
    }
  }
}

TEST_F(ExportCommandTest, JsonAndShardsAndBf16ByDefault) {
  Save(1);
  const Outcome outcome =
      Run({"export", checkpoints_, out_, "--max-shard-size", "50KB", "--output", "json"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  const Json json = Json::parse(outcome.out);
  EXPECT_EQ(json["step"], 1);
  EXPECT_EQ(json["dtype"], "bf16");
  EXPECT_EQ(json["parameters"], table_.ParameterCount());
  EXPECT_EQ(json["bytes"], 2 * table_.ParameterCount());
  for (const auto& entry : fs::directory_iterator(out_)) {
    EXPECT_LE(entry.file_size(), 50'000u + 4096u) << entry.path();
  }
  EXPECT_TRUE(fs::exists(out_ + "/model.safetensors.index.json"));
}

// The vocabulary of a text of three letters, and a token that ends texts.
constexpr char kTokenizer[] = R"({"added_tokens": [{"id": 3, "content": "<|endoftext|>",
    "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2}, "merges": []}})";

TEST_F(ExportCommandTest, WhatEndsATextIsTheTokenizersOrTheSeparatorOfTheTraining) {
  const auto ends = [&](uint64_t step, const std::vector<Asset>& assets) {
    fs::remove_all(checkpoints_);
    fs::remove_all(out_);
    const Outcome outcome = Run({"export", Save(step, assets), out_});
    EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
    std::vector<Json> ends;
    for (const char* name : {"/config.json", "/generation_config.json"}) {
      if (!fs::exists(out_ + name)) continue;
      std::ifstream file(out_ + name);
      ends.push_back(Json::parse(file).at("eos_token_id"));
    }
    return ends;
  };
  EXPECT_THAT(ends(1, {}), ElementsAre(Json()));
  EXPECT_THAT(ends(2, {{"tokenizer.json", kTokenizer}}), ElementsAre(3, 3));
  EXPECT_TRUE(fs::exists(out_ + "/tokenizer.json"));
  EXPECT_THAT(
      ends(3, {{"tokenizer.json", kTokenizer}, {"tokenizer_config.json", R"({"eos_token": "b"})"}}),
      ElementsAre(1, 1));
  spec_.mutable_data()->mutable_packing()->set_separator(200);
  EXPECT_THAT(ends(4, {{"tokenizer.json", kTokenizer}}), ElementsAre(200, 200));
}

TEST_F(ExportCommandTest, ADamagedCheckpointIsNotExported) {
  const std::string path = Save(2);
  std::string state;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".safetensors") state = entry.path().string();
  }
  ASSERT_FALSE(state.empty());
  std::fstream file(state, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('\x7F');
  file.close();
  const Outcome outcome = Run({"export", path, out_});
  EXPECT_EQ(outcome.code, kExitFailed);
  ExpectOneMessage(outcome);
  EXPECT_THAT(outcome.err, HasSubstr(state));
  EXPECT_FALSE(fs::exists(out_));
}

TEST_F(ExportCommandTest, WhatCannotBeDoneHasItsExitCode) {
  const std::string path = Save(2);
  EXPECT_EQ(Run({"export", folder_ / "nowhere", out_}).code, kExitNotFound);
  EXPECT_EQ(Run({"export", path, out_, "--dtype", "fp8"}).code, kExitUsage);
  for (const char* size : {"", "GB", "-5GB", "0", "5XB", "1e40GB", "nanGB"}) {
    const Outcome outcome = Run({"export", path, out_, std::string("--max-shard-size=") + size});
    EXPECT_EQ(outcome.code, kExitUsage) << size;
  }
  fs::create_directory(out_);
  Write(out_ + "/mine", "x");
  const Outcome outcome = Run({"export", path, out_});
  EXPECT_EQ(outcome.code, kExitConflict);
  ExpectOneMessage(outcome);
}

}  // namespace
}  // namespace zeroshard
