// Checkpoints that the slices of one mesh write, read by others: without training, the engines of
// tests/worker/zero/slice_harness.h and a checkpointer each.
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "common/checkpoint/state_digest.h"
#include "common/files.h"
#include "common/safetensors/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"
#include "tests/worker/zero/slice_harness.h"
#include "worker/train/checkpointer.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

constexpr uint64_t kStep = 7;

v1::JobSpec SpecOf(const std::string& model, bool frozen, const std::string& dir) {
  v1::JobSpec spec;
  *spec.mutable_model() = SliceSpec(model, frozen);
  spec.mutable_data()->set_tokenizer("bytes");
  spec.mutable_checkpoint()->set_dir(dir);
  spec.mutable_zero_optimization()->set_stage3_gather_16bit_weights_on_model_save(true);
  return spec;
}

ZeroOptions OptionsOf(int stage, DType dtype) {
  return {.stage = stage, .dtype = dtype, .persistence_threshold = 0};
}

// A rank whose disk is full.
class FullDisk : public FileSystem {
 public:
  absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) override {
    return ErrnoError(ENOSPC, "create", path);
  }
  absl::Status MakeFolder(const std::string& path) override { return Real().MakeFolder(path); }
  absl::Status Rename(const std::string& from, const std::string& to) override {
    return Real().Rename(from, to);
  }
  absl::Status RemoveAll(const std::string& path) override { return Real().RemoveAll(path); }
  absl::Status SyncFolder(const std::string& path) override { return Real().SyncFolder(path); }
};

// All ranks save once; rank 0's record. `broken`: whose disk is full; -1: nobody's.
v1::CheckpointRecord Save(const v1::JobSpec& spec, const ModelTable& full, SliceMesh* mesh,
                          int broken = -1) {
  v1::CheckpointRecord record;
  FullDisk full_disk;
  mesh->Each([&](size_t r) {
    SliceRank& rank = (*mesh)[r];
    CheckpointerOptions options;
    options.spec = spec;
    options.job = options.run_id = "slices";
    options.model = &full;
    options.engine = &rank.engine();
    options.device = rank.device();
    options.comm = rank.job();
    options.files = &FileSystem::Real();
    if (static_cast<int>(r) == broken) options.files = &full_disk;
    auto checkpointer = Checkpointer::Create(options);
    ASSERT_TRUE(checkpointer.ok()) << checkpointer.status();
    (*checkpointer)->Start(kStep, {.sample = 3, .loss_scale = {}}, absl::ZeroDuration());
    std::vector<RankFlags> flags(mesh->size());
    do {
      flags[r] = {.save_state = static_cast<uint8_t>((*checkpointer)->state())};
      ASSERT_TRUE(rank.job()->AllGatherHost(flags.data(), sizeof(RankFlags), {}).ok());
      ASSERT_TRUE((*checkpointer)->Advance(flags).ok());
      if (const auto done = (*checkpointer)->TakeRecord()) record = *done;
    } while (!AllIdle(flags));
  });
  return record;
}

struct Written {
  std::string model;
  MeshShape mesh;  // that writes
  int stage = 0;
  DType dtype = DType::kF32;
  bool frozen = false;
};
void PrintTo(const Written& w, std::ostream* out) { *out << w.model << " at stage " << w.stage; }

class SliceCheckpointTest : public testing::TestWithParam<Written> {};

INSTANTIATE_TEST_SUITE_P(
    Meshes, SliceCheckpointTest,
    testing::Values(Written{"gpt2", {1, 1, 1}, 0}, Written{"gpt2", {1, 2, 2}, 3},
                    Written{"gpt2", {2, 2, 2}, 1}, Written{"gpt2", {1, 1, 4}, 2},
                    Written{"llama", {2, 1, 4}, 2}, Written{"llama", {1, 2, 4}, 3, DType::kBF16},
                    Written{"llama", {1, 2, 2}, 1, DType::kBF16, true},
                    Written{"llama_untied", {2, 1, 2}, 3, DType::kBF16, true},
                    Written{"llama_untied", {1, 2, 4}, 0}),
    [](const auto& info) {
      const Written& w = info.param;
      return absl::StrCat(w.model, "_", w.mesh.pipeline, "x", w.mesh.data, "x", w.mesh.tensor,
                          "_stage", w.stage, w.frozen ? "_frozen" : "");
    });

TEST_P(SliceCheckpointTest, IsOfFullTensorsAndEveryOtherMeshReadsIt) {
  const Written& w = GetParam();
  const TempFolder folder;
  const v1::JobSpec spec = SpecOf(w.model, w.frozen, folder / "saved");
  const ModelTable full = *MakeModelTable(spec.model());
  FullState wanted;
  {
    SliceMesh writer(full, w.mesh, OptionsOf(w.stage, w.dtype));
    const v1::CheckpointRecord record = Save(spec, full, &writer);
    ASSERT_TRUE(record.complete()) << record.message();
    wanted = writer.Saved();
  }
  const auto reader = CheckpointReader::Open(folder / ("saved/" + CheckpointName(kStep)));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_TRUE((*reader)->VerifyFiles(0, 1).ok());
  EXPECT_TRUE((*reader)->CheckModel(full, /*moments=*/true).ok());
  std::string digests;
  for (int kind = 0; kind < kStateKinds; ++kind) {
    const auto k = static_cast<StateKind>(kind);
    // What one process would have written into the manifest.
    EXPECT_EQ((*reader)->manifest().digests[kind], DigestOf(**reader, full, k).value());
    absl::StrAppend(&digests, (*reader)->manifest().digests[kind], " ");
  }
  // Exactly the vocabulary's rows, and the model's own configuration (F15).
  const auto exported = SafetensorsFile::Open((*reader)->path() + "/model/model.safetensors");
  ASSERT_TRUE(exported.ok()) << exported.status();
  const char* table = w.model == "gpt2" ? "transformer.wte.weight" : "model.embed_tokens.weight";
  const auto rows = (*exported)->Find(table);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ((*rows)->shape, (std::vector<int64_t>{53, 48}));
  const auto config = ReadFile((*reader)->path() + "/model/config.json", 1 << 20);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(*config, HasSubstr("\"vocab_size\": 53"));

  for (const MeshShape& shape : {MeshShape{1, 1, 1}, MeshShape{1, 2, 2}, MeshShape{1, 1, 4},
                                 MeshShape{2, 1, 2}, MeshShape{2, 2, 1}}) {
    SliceMesh other(full, shape, OptionsOf(3 - w.stage, w.dtype),
                    [&](StateKind kind) { return (*reader)->Source(kind); });
    EXPECT_EQ(other.LoadedDigests(), digests) << shape.data << " x " << shape.tensor;
    const FullState seen = other.Saved();
    ASSERT_EQ(seen.size(), wanted.size());
    for (const auto& [key, values] : wanted)
      EXPECT_EQ(seen.at(key), values) << NameOf(key.first) << " " << key.second;
  }
}

TEST(SliceCheckpointTest, OneRankThatCannotWriteAbandonsItOnAll) {
  const TempFolder folder;
  const v1::JobSpec spec = SpecOf("gpt2", false, folder / "saved");
  const ModelTable full = *MakeModelTable(spec.model());
  SliceMesh mesh(full, {1, 1, 4}, OptionsOf(1, DType::kF32));
  const v1::CheckpointRecord record = Save(spec, full, &mesh, /*broken=*/2);
  EXPECT_FALSE(record.complete());
  EXPECT_THAT(record.message(), HasSubstr("rank 2: "));
  EXPECT_FALSE(FindCheckpoint(folder / "saved").ok());
  // And the next is whole.
  EXPECT_TRUE(Save(spec, full, &mesh).complete());
}

}  // namespace
}  // namespace zeroshard
