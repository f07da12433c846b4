#include "common/checkpoint/reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/str_format.h"
#include "common/checkpoint/files.h"
#include "common/checksum.h"
#include "common/log.h"
#include "common/safetensors/safetensors.h"
#include "tests/common/checkpoint/fault_file_system.h"
#include "tests/common/checkpoint/small_state.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

class ReaderTest : public testing::Test {
 protected:
  ReaderTest() {
    SetLogLevel(LogLevel::kError);
    options_.dir = folder_ / "checkpoints";
    options_.job = "small";
    options_.run_id = "run";
    const auto store = CheckpointStore::Open(&files_, options_);
    EXPECT_TRUE(store.ok()) << store.status();
    for (const uint64_t step : {1, 2, 3}) {
      EXPECT_TRUE(Save(store->get(), &files_, step, 2, "run").ok());
    }
  }
  ~ReaderTest() override { SetLogLevel(LogLevel::kInfo); }

  std::string Path(uint64_t step) const { return options_.dir + "/" + CheckpointName(step); }
  static void Put(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  // A checkpoint of one step, whose ranks wrote these pieces.
  absl::StatusOr<std::string> Make(const std::vector<std::vector<StatePiece>>& ranks) {
    CheckpointStoreOptions options = options_;
    options.dir = folder_ / absl::StrCat("made-", ++made_);
    const int world = static_cast<int>(ranks.size());
    ZS_ASSIGN_OR_RETURN(const auto store, CheckpointStore::Open(&files_, options));
    ZS_ASSIGN_OR_RETURN(const std::string folder, store->Begin(1));
    Manifest manifest = SmallManifest(1, world, "run");
    for (int rank = 0; rank < world; ++rank) {
      ZS_ASSIGN_OR_RETURN(CheckpointFile file,
                          WriteStateFile(&files_, folder, rank, world, ranks[rank]));
      manifest.files.push_back(file);
    }
    return store->Complete(manifest);
  }
  std::string OpenError(const std::vector<std::vector<StatePiece>>& ranks) {
    const auto path = Make(ranks);
    EXPECT_TRUE(path.ok()) << path.status();
    const auto reader = CheckpointReader::Open(*path);
    EXPECT_FALSE(reader.ok());
    return Message(reader.status());
  }

  const TempFolder folder_;
  FaultFileSystem files_;
  CheckpointStoreOptions options_;
  int made_ = 0;
};

TEST_F(ReaderTest, TheNewestCompleteOneIsTaken) {
  const auto found = FindCheckpoint(options_.dir + "/");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, Path(3));
  EXPECT_EQ(found->manifest.step, 3u);
  EXPECT_THAT(found->skipped, IsEmpty());
}

TEST_F(ReaderTest, AnEmptyLatestIsToldAndTheNewestCompleteOneIsTaken) {
  Put(options_.dir + "/latest", "");
  const auto found = FindCheckpoint(options_.dir);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, Path(3));
  EXPECT_THAT(found->skipped, ElementsAre(HasSubstr("latest is empty")));
}

TEST_F(ReaderTest, ADanglingLatestIsToldAndTheNewestCompleteOneIsTaken) {
  Put(options_.dir + "/latest", "step-00000009\n");
  const auto found = FindCheckpoint(options_.dir);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, Path(3));
  EXPECT_THAT(found->skipped, ElementsAre(AllOf(HasSubstr("latest"), HasSubstr("step-00000009"))));
}

TEST_F(ReaderTest, AStepWithoutItsManifestIsSkippedAndTold) {
  fs::remove(Path(3) + "/manifest.json");
  const auto found = FindCheckpoint(options_.dir);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, Path(2));
  EXPECT_THAT(found->skipped,
              ElementsAre(AllOf(HasSubstr(Path(3)), HasSubstr("no manifest.json"))));
  // Asked for by name it is refused, and no other is taken in its place.
  const auto named = FindCheckpoint(Path(3));
  EXPECT_EQ(named.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(named.status()), HasSubstr(Path(3)));
}

TEST_F(ReaderTest, WhereNoneIsCompleteEveryReasonIsNamed) {
  for (const uint64_t step : {1, 2, 3}) fs::remove(Path(step) + "/manifest.json");
  const auto found = FindCheckpoint(options_.dir);
  EXPECT_EQ(found.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Message(found.status()),
              AllOf(HasSubstr(Path(1)), HasSubstr(Path(2)), HasSubstr(Path(3))));
  EXPECT_EQ(FindCheckpoint(folder_ / "none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(FindCheckpoint(options_.dir + "/step-00000077").status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ReaderTest, TheListSaysWhatIsThereAndWhatIsWrongWithIt) {
  fs::remove(Path(2) + "/state-00001-of-00002.safetensors");
  const auto list = ListCheckpoints(options_.dir);
  ASSERT_TRUE(list.ok()) << list.status();
  ASSERT_EQ(list->size(), 3u);
  EXPECT_TRUE((*list)[0].complete);
  EXPECT_FALSE((*list)[1].complete);
  EXPECT_THAT((*list)[1].problem,
              AllOf(HasSubstr("state-00001-of-00002.safetensors"), HasSubstr("No such file")));
  EXPECT_EQ((*list)[1].bytes, fs::file_size(Path(2) + "/state-00000-of-00002.safetensors") +
                                  fs::file_size(Path(2) + "/manifest.json"));
  EXPECT_TRUE((*list)[2].complete);
  EXPECT_TRUE((*list)[2].latest);
  EXPECT_FALSE((*list)[0].latest);
  EXPECT_EQ((*list)[2].run_id, "run");
  EXPECT_EQ((*list)[2].unix_ms, 1'700'000'000'000);
  EXPECT_EQ((*list)[2].bytes, fs::file_size(Path(3) + "/state-00000-of-00002.safetensors") +
                                  fs::file_size(Path(3) + "/state-00001-of-00002.safetensors"));
}

TEST_F(ReaderTest, ACopiedFolderOfAnotherStepIsNotTakenForIt) {
  fs::copy(Path(1), Path(7), fs::copy_options::recursive);
  const auto found = FindCheckpoint(options_.dir);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->path, Path(3));
  EXPECT_THAT(found->skipped, ElementsAre(HasSubstr("is of step 1")));
}

TEST_F(ReaderTest, ADeletedFileIsRefusedByName) {
  fs::remove(Path(3) + "/state-00001-of-00002.safetensors");
  const auto reader = CheckpointReader::Open(Path(3));
  EXPECT_EQ(reader.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(reader.status()), HasSubstr(Path(3) + "/state-00001-of-00002.safetensors"));
}

TEST_F(ReaderTest, AFlippedBitAnywhereInAnyFileIsRefusedNamingFileAndChecksum) {
  for (const auto& entry : fs::directory_iterator(Path(3))) {
    const std::string path = entry.path().string();
    const std::string sound = Contents(path);
    const size_t stride = sound.size() < 500 ? 1 : 37;
    for (size_t at = 0; at < sound.size(); at += stride) {
      std::string damaged = sound;
      damaged[at] = static_cast<char>(damaged[at] ^ 4);
      Put(path, damaged);
      const auto reader = CheckpointReader::Open(Path(3));
      const absl::Status status = reader.ok() ? (*reader)->VerifyFiles(0, 1) : reader.status();
      ASSERT_FALSE(status.ok()) << path << " byte " << at;
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(Message(status), AllOf(HasSubstr(path), HasSubstr("CRC-32C")));
      if (entry.path().extension() == ".safetensors") {
        EXPECT_THAT(
            Message(status),
            AllOf(HasSubstr(absl::StrFormat("%08x", Crc32c(damaged.data(), damaged.size()))),
                  HasSubstr(absl::StrFormat("%08x", Crc32c(sound.data(), sound.size())))));
      }
    }
    Put(path, sound);
  }
  EXPECT_TRUE(IsWhole(Path(3), 3));
}

TEST_F(ReaderTest, AFileOfAnotherSizeIsRefusedWithBothSizes) {
  const std::string path = Path(3) + "/state-00000-of-00002.safetensors";
  const uintmax_t size = fs::file_size(path);
  fs::resize_file(path, size - 4);
  EXPECT_THAT(
      Message(CheckpointReader::Open(Path(3)).status()),
      AllOf(HasSubstr(path), HasSubstr(absl::StrCat(size)), HasSubstr(absl::StrCat(size - 4))));
  EXPECT_EQ(FindCheckpoint(options_.dir)->path, Path(2));
}

TEST_F(ReaderTest, RanksVerifyTogether) {
  Put(Path(3) + "/state-00001-of-00002.safetensors",
      Contents(Path(2) + "/state-00001-of-00002.safetensors"));
  const auto reader = CheckpointReader::Open(Path(3));
  ASSERT_TRUE(reader.ok()) << reader.status();
  uint64_t bytes = 0;
  EXPECT_TRUE((*reader)->VerifyFiles(0, 2, [&](uint64_t read) { bytes += read; }).ok());
  EXPECT_EQ(bytes, (*reader)->manifest().files[0].bytes);
  EXPECT_FALSE((*reader)->VerifyFiles(1, 2).ok());
  EXPECT_TRUE((*reader)->VerifyFiles(2, 3).ok());  // more ranks than files
}

TEST_F(ReaderTest, WhatAnyWorldWroteAnyOtherReads) {
  const std::vector<ParameterInfo> parameters = ParametersOf(SmallModel());
  for (const int wrote : {1, 2, 3, 4, 11}) {
    std::vector<SmallState> states;
    std::vector<std::vector<StatePiece>> ranks;
    for (int rank = 0; rank < wrote; ++rank) {
      states.emplace_back(1, rank, wrote);
      ranks.push_back(states.back().pieces);
    }
    const auto path = Make(ranks);
    ASSERT_TRUE(path.ok()) << path.status();
    ASSERT_TRUE(IsWhole(*path, 1)) << wrote;
    const auto reader = CheckpointReader::Open(*path);
    ASSERT_TRUE(reader.ok());
    for (const int reads : {1, 2, 3, 4}) {
      for (int rank = 0; rank < reads; ++rank) {
        const SmallState wanted(1, rank, reads);
        for (const StatePiece& piece : wanted.pieces) {
          const auto parameter =
              std::find_if(parameters.begin(), parameters.end(),
                           [&](const ParameterInfo& p) { return p.name == piece.tensor; });
          std::vector<float> values(static_cast<size_t>(piece.end - piece.begin));
          const absl::Status status = (*reader)
                                          ->Source(piece.kind)
                                          ->Read(*parameter, piece.begin, piece.end, values.data());
          ASSERT_TRUE(status.ok()) << status;
          ASSERT_TRUE(std::equal(values.begin(), values.end(), piece.values))
              << wrote << " wrote, rank " << rank << " of " << reads << ": " << piece.tensor;
        }
      }
    }
  }
}

// The format's own reader, and what other programs look at.
TEST_F(ReaderTest, AStateFileIsSafetensorsWithItsFormatSaid) {
  const auto file = SafetensorsFile::Open(Path(3) + "/state-00000-of-00002.safetensors");
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->metadata().at("format"), "pt");
  const auto whole = (*file)->Find("master/wte.weight");
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_THAT((*whole)->shape, ElementsAre(7, 5));
  EXPECT_EQ((*file)->ReadFloats("master/wte.weight")->at(34),
            ValueOf(3, StateKind::kMaster, 0, 34));
  // 84 values in all, so the first of two ranks ends at the 42nd, the seventh of wpe.weight.
  const auto part = (*file)->Find("master/wpe.weight/0-7");
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_THAT((*part)->shape, ElementsAre(7));
  EXPECT_EQ((*file)->metadata().at("shape:wpe.weight"), "3x4");
}

TEST_F(ReaderTest, GapsOverlapsAndWhatIsNotOfTheFormatAreRefused) {
  const std::vector<float> values(12, 1.0f);
  const auto piece = [&](StateKind kind, int64_t begin, int64_t end,
                         std::vector<int64_t> shape = {12}) {
    return StatePiece{kind, "w", std::move(shape), begin, end, values.data()};
  };
  constexpr StateKind kMaster = StateKind::kMaster;
  EXPECT_THAT(OpenError({{piece(kMaster, 0, 5)}, {piece(kMaster, 6, 12)}}),
              AllOf(HasSubstr("master of tensor \"w\""), HasSubstr("elements 5 to 6"),
                    HasSubstr("in no file")));
  EXPECT_THAT(OpenError({{piece(kMaster, 0, 5)}}), HasSubstr("elements 5 to 12 are in no file"));
  EXPECT_THAT(OpenError({{piece(kMaster, 2, 12)}}), HasSubstr("elements 0 to 2 are in no file"));
  EXPECT_THAT(OpenError({{piece(kMaster, 0, 7)}, {piece(kMaster, 5, 12)}}),
              AllOf(HasSubstr("elements 5 to 7 are there twice"), HasSubstr("state-00000-of-00002"),
                    HasSubstr("state-00001-of-00002")));
  EXPECT_THAT(OpenError({{piece(kMaster, 0, 12)}, {piece(kMaster, 0, 12)}}),
              HasSubstr("elements 0 to 12 are there twice"));
  EXPECT_THAT(OpenError({{piece(kMaster, 0, 6)}, {piece(kMaster, 6, 12, {3, 4})}}),
              AllOf(HasSubstr("shape [3, 4]"), HasSubstr("elsewhere it is [12]")));
  EXPECT_THAT(OpenError({{piece(StateKind::kExpAvg, 0, 12)}}), HasSubstr("moments of it are"));
  EXPECT_THAT(OpenError({{piece(kMaster, 0, 12), piece(StateKind::kExpAvg, 0, 3)}}),
              HasSubstr("exp_avg of tensor \"w\""));
}

TEST_F(ReaderTest, StateThatCannotBeSavedIsRefusedByName) {
  const std::vector<float> values(12, 1.0f);
  const auto error = [&](const StatePiece& piece) {
    const auto file = WriteStateFile(&files_, folder_.path(), 0, 1, {piece});
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument);
    return Message(file.status());
  };
  EXPECT_THAT(error({StateKind::kMaster, "w", {12}, 0, 13, values.data()}),
              AllOf(HasSubstr("\"w\""), HasSubstr("within its 12 elements")));
  EXPECT_THAT(error({StateKind::kMaster, "w", {12}, 5, 4, values.data()}), HasSubstr("\"w\""));
  EXPECT_THAT(error({StateKind::kMaster, "a/w", {12}, 0, 12, values.data()}), HasSubstr("slash"));
  EXPECT_THAT(error({StateKind::kMaster, "w", {-1}, 0, 0, values.data()}), HasSubstr("negative"));
  EXPECT_THAT(error({StateKind::kMaster, "w", {1 << 30, 1 << 30, 1 << 30}, 0, 0, values.data()}),
              HasSubstr("too many"));
  EXPECT_FALSE(WriteStateFile(&files_, folder_.path(), 2, 2, {}).ok());
  EXPECT_THAT(error({StateKind::kMaster, "\xff", {12}, 0, 12, values.data()}), HasSubstr("UTF-8"));
}

TEST_F(ReaderTest, AnotherModelIsRefusedNamingItsTensors) {
  const auto reader = CheckpointReader::Open(Path(3));
  ASSERT_TRUE(reader.ok());
  ModelTable model = SmallModel();
  EXPECT_TRUE((*reader)->CheckModel(model, true).ok());
  model.units[1].parameters[0].shape = {6, 4};
  model.units[1].parameters[1].name = "head.scale";
  const absl::Status status = (*reader)->CheckModel(model, false);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status),
              AllOf(HasSubstr("\"head.weight\" has the shape [2, 3, 4]"), HasSubstr("[6, 4]"),
                    HasSubstr("\"head.scale\" [13] is not in it"),
                    HasSubstr("\"head.bias\" [13] is not in the model")));
}

TEST_F(ReaderTest, AtMostTenDifferencesAreNamed) {
  const auto reader = CheckpointReader::Open(Path(3));
  ASSERT_TRUE(reader.ok());
  ModelTable model = SmallModel();
  for (int i = 0; i < 30; ++i) {
    model.units[0].parameters.push_back(model.units[0].parameters[0]);
    model.units[0].parameters.back().name = absl::StrCat("extra.", i);
  }
  EXPECT_THAT(
      Message((*reader)->CheckModel(model, false)),
      AllOf(HasSubstr("extra.9"), testing::Not(HasSubstr("extra.10")), HasSubstr("and 20 more")));
}

TEST_F(ReaderTest, MomentsThatAFrozenTensorLacksMatterOnlyWhereTheyAreWanted) {
  const auto reader = CheckpointReader::Open(Path(3));
  ASSERT_TRUE(reader.ok());
  ModelTable model = SmallModel();
  model.units[0].parameters[1].trainable = true;  // was frozen
  EXPECT_TRUE((*reader)->CheckModel(model, false).ok());
  EXPECT_THAT(Message((*reader)->CheckModel(model, true)),
              AllOf(HasSubstr("\"wpe.weight\" has no exp_avg"), HasSubstr("frozen")));
  float value = 0;
  EXPECT_THAT(
      Message(
          (*reader)->Source(StateKind::kExpAvg)->Read(model.units[0].parameters[1], 0, 1, &value)),
      AllOf(HasSubstr(Path(3)), HasSubstr("exp_avg"), HasSubstr("wpe.weight")));
}

TEST_F(ReaderTest, RangesBeyondATensorAndUnknownTensorsAreErrors) {
  const auto reader = CheckpointReader::Open(Path(3));
  ASSERT_TRUE(reader.ok());
  const auto source = (*reader)->Source(StateKind::kMaster);
  ParameterInfo tensor = SmallModel().units[1].parameters[1];
  std::vector<float> values(20);
  EXPECT_FALSE(source->Read(tensor, 0, 14, values.data()).ok());
  EXPECT_FALSE(source->Read(tensor, -1, 3, values.data()).ok());
  EXPECT_FALSE(source->Read(tensor, 3, 2, values.data()).ok());
  EXPECT_TRUE(source->Read(tensor, 13, 13, values.data()).ok());
  tensor.shape = {13, 1};
  EXPECT_THAT(Message(source->Read(tensor, 0, 1, values.data())), HasSubstr("[13, 1]"));
  tensor.name = "none";
  EXPECT_THAT(Message(source->Read(tensor, 0, 1, values.data())), HasSubstr("\"none\""));
}

}  // namespace
}  // namespace zeroshard
