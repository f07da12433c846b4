// Files that travel with a model: through every save, whatever becomes of where they came from.
#include <filesystem>
#include <fstream>
#include <set>

#include "common/checkpoint/files.h"
#include "common/hf/config.h"
#include "common/hf/export.h"
#include "gmock/gmock.h"
#include "tests/worker/train/checkpoint_harness.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

constexpr char kTokenizer[] = R"({"mine": true})";

// A Hugging Face folder with weights of some run of the tiny Llama.
void MakeModelFolder(const std::string& to) {
  MemoryFolder folder;
  ExpectAllOk(TrainJob(SavingSpec(TinyLlama(), {1, 0}, 1, folder / "first", {"seed=11"}),
                       {.world = 1}, TinyData()));
  const auto first = CheckpointReader::Open(folder / ("first/" + CheckpointName(1)));
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status exported = ExportHfFolder((*first)->manifest().spec.model(),
                                               *(*first)->Source(StateKind::kMaster), to, {});
  ASSERT_TRUE(exported.ok()) << exported;
  std::ofstream(to + "/tokenizer.json") << kTokenizer;
}

v1::JobSpec SpecFrom(const std::string& model, Shape shape, uint64_t steps,
                     const std::string& dir) {
  v1::JobSpec spec = SavingSpec(TinyLlama(), shape, steps, dir);
  spec.mutable_model()->set_init_from(model);
  const auto resolved = ResolveInitFrom(&spec);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  spec.mutable_checkpoint()->set_interval_steps(1);
  return spec;
}

void ExpectHasTheFiles(const std::string& dir, uint64_t step) {
  const std::string path = dir + "/" + CheckpointName(step);
  EXPECT_EQ(Contents(path + "/assets/tokenizer.json"), kTokenizer);
  EXPECT_TRUE(ReadHfConfig(path + "/assets").ok());
  const auto reader = CheckpointReader::Open(path);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE((*reader)->VerifyFiles(0, 1).ok());
}

void ExpectAllComplete(const RankResult& result, size_t saves) {
  EXPECT_EQ(result.checkpoints.size(), saves);
  for (const v1::CheckpointRecord& record : result.checkpoints)
    EXPECT_TRUE(record.complete()) << record.step() << ": " << record.message();
}

// The checkpoint that the run goes on from is deleted by the rule after the first save.
TEST(AssetsTest, OutliveTheCheckpointThatTheRunGoesOnFrom) {
  MemoryFolder folder;
  const std::string dir = folder / "ckpt", model = folder / "model";
  MakeModelFolder(model);
  v1::JobSpec spec = SpecFrom(model, {2, 1}, 2, dir);
  spec.mutable_checkpoint()->set_keep_last(1);
  ExpectAllOk(TrainJob(spec, {.world = 2}, TinyData()));
  std::filesystem::remove_all(model);
  spec.set_steps(6);
  const auto resumed = TrainJob(spec, Resume(2, dir + "/" + CheckpointName(2), 2), TinyData());
  ExpectAllOk(resumed);
  ExpectAllComplete(resumed[0], 4);
  EXPECT_FALSE(std::filesystem::exists(dir + "/" + CheckpointName(2)));
  ExpectHasTheFiles(dir, 6);
}

TEST(AssetsTest, OutliveTheModelFolder) {
  MemoryFolder folder;
  const std::string dir = folder / "ckpt", model = folder / "model";
  MakeModelFolder(model);
  RunOptions options{.world = 1};
  options.on_step = [&](int, const v1::StepRecord& record) {
    if (record.step() == 1) std::filesystem::remove_all(model);
  };
  const auto results = TrainJob(SpecFrom(model, {1, 0}, 3, dir), options, TinyData());
  ExpectAllOk(results);
  ExpectAllComplete(results[0], 3);
  ExpectHasTheFiles(dir, 1);
  ExpectHasTheFiles(dir, 3);
}

// As the checkpoint's tokenizer it has the name by which it is found again, and nothing of the
// model's own stays beside it.
TEST(AssetsTest, ATokenizerOfTheJobsOwnTakesThePlaceOfTheModels) {
  MemoryFolder folder;
  const std::string model = folder / "model";
  MakeModelFolder(model);
  std::ofstream(model + "/tokenizer_config.json") << "{}";
  std::ofstream(model + "/generation_config.json") << "{}";
  std::ofstream(folder / "other.json") << "{}";
  for (const std::string& tokenizer : {folder / "other.json", std::string("bytes")}) {
    const std::string dir = folder / (tokenizer == "bytes" ? "bytes" : "other");
    v1::JobSpec spec = SpecFrom(model, {1, 0}, 1, dir);
    spec.mutable_data()->set_tokenizer(tokenizer);
    ExpectAllOk(TrainJob(spec, {.world = 1}, TinyData()));
    std::set<std::string> names;
    const std::string assets = dir + "/" + CheckpointName(1) + "/assets";
    for (const auto& entry : std::filesystem::directory_iterator(assets))
      names.insert(entry.path().filename().string());
    std::set<std::string> wanted = {"config.json", "generation_config.json"};
    if (tokenizer != "bytes") {
      wanted.insert("tokenizer.json");
      EXPECT_EQ(Contents(assets + "/tokenizer.json"), "{}");
    }
    EXPECT_EQ(names, wanted) << tokenizer;
  }
}

// At once, and not when the first checkpoint is due.
TEST(AssetsTest, AModelThatNoFolderCanHoldIsRefusedWhereOneIsToBeWritten) {
  MemoryFolder folder;
  v1::JobSpec spec = SavingSpec(TinyLlama(), {2, 3}, 1, folder / "ckpt",
                                {"model.qkv_bias=true", "model.mlp_bias=true"});
  ExpectAllOk(TrainJob(spec, {.world = 2}, TinyData()));
  spec.mutable_zero_optimization()->set_stage3_gather_16bit_weights_on_model_save(true);
  spec.mutable_checkpoint()->set_dir(folder / "again");
  const auto results = TrainJob(spec, {.world = 2}, TinyData());
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInvalidArgument) << result.status;
    EXPECT_THAT(std::string(result.status.message()),
                testing::AllOf(HasSubstr("stage3_gather_16bit_weights_on_model_save"),
                               HasSubstr("model.qkv_bias")));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "again"));
}

// What cannot be read is said by all ranks, before anything is trained.
TEST(AssetsTest, FilesThatCannotBeReadAreOneErrorOnAllRanks) {
  MemoryFolder folder;
  const std::string model = folder / "model";
  MakeModelFolder(model);
  std::filesystem::resize_file(model + "/tokenizer.json", kMaxAssetBytes + 1);  // a hole, no bytes
  const auto results =
      TrainJob(SpecFrom(model, {2, 1}, 1, folder / "ckpt"), {.world = 2}, TinyData());
  for (const RankResult& result : results) {
    EXPECT_EQ(result.status, results[0].status);
    EXPECT_EQ(result.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(result.status.message()), HasSubstr(model + "/tokenizer.json"));
  }
}

}  // namespace
}  // namespace zeroshard
