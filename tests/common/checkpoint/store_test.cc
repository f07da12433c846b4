#include "common/checkpoint/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>

#include "common/checkpoint/files.h"
#include "common/checksum.h"
#include "common/log.h"
#include "tests/common/checkpoint/fault_file_system.h"
#include "tests/common/checkpoint/small_state.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

class StoreTest : public testing::Test {
 protected:
  StoreTest() {
    SetLogLevel(LogLevel::kError);
    options_.dir = folder_ / "checkpoints";
    options_.job = "small";
    options_.run_id = "run-a";
  }
  ~StoreTest() override { SetLogLevel(LogLevel::kInfo); }

  std::unique_ptr<CheckpointStore> Open() {
    auto store = CheckpointStore::Open(&files_, options_);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  void SaveSteps(CheckpointStore* store, std::initializer_list<uint64_t> steps) {
    ASSERT_NE(store, nullptr);
    for (const uint64_t step : steps) {
      const auto path = Save(store, &files_, step, 2, options_.run_id);
      ASSERT_TRUE(path.ok()) << path.status();
      ASSERT_EQ(*path, options_.dir + "/" + CheckpointName(step));
    }
  }
  std::vector<uint64_t> Steps() const {
    std::vector<uint64_t> steps;
    const auto list = ListCheckpoints(options_.dir);
    EXPECT_TRUE(list.ok()) << list.status();
    for (const CheckpointSummary& checkpoint : *list) steps.push_back(checkpoint.step);
    return steps;
  }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(options_.dir)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  const TempFolder folder_;
  FaultFileSystem files_;
  CheckpointStoreOptions options_;
};

TEST_F(StoreTest, ASaveIsACheckpointThatLatestNames) {
  const auto store = Open();
  SaveSteps(store.get(), {5});
  EXPECT_THAT(Names(), UnorderedElementsAre("step-00000005", "latest", "lock"));
  EXPECT_EQ(Contents(options_.dir + "/latest"), "step-00000005\n");
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000005", 5));
  SaveSteps(store.get(), {6});
  EXPECT_EQ(Contents(options_.dir + "/latest"), "step-00000006\n");
  EXPECT_THAT(Steps(), ElementsAre(5, 6));
}

TEST_F(StoreTest, WithoutItsLockNoSaveBegins) {
  const auto store = Open();
  SaveSteps(store.get(), {5});
  ASSERT_TRUE(std::filesystem::remove(options_.dir + "/lock"));
  const absl::StatusOr<std::string> folder = store->Begin(6);
  EXPECT_EQ(folder.status().code(), absl::StatusCode::kFailedPrecondition) << folder.status();
  EXPECT_THAT(std::string(folder.status().message()), HasSubstr(options_.dir + "/lock"));
  EXPECT_THAT(Steps(), ElementsAre(5));
}

TEST_F(StoreTest, NamesSortByStepAndLongStepsHaveMoreDigits) {
  EXPECT_EQ(CheckpointName(100), "step-00000100");
  EXPECT_EQ(CheckpointName(1'234'567'890), "step-1234567890");
  EXPECT_EQ(CollectFolder("/a", 7), "/a/.step-00000007.tmp");
}

TEST_F(StoreTest, WithoutKeepLastEveryCheckpointStays) {
  const auto store = Open();
  SaveSteps(store.get(), {1, 2, 3, 4});
  EXPECT_THAT(Steps(), ElementsAre(1, 2, 3, 4));
}

TEST_F(StoreTest, KeepLastAndKeepEveryDecideTogether) {
  options_.keep_last = 2;
  options_.keep_every = 4;
  const auto store = Open();
  SaveSteps(store.get(), {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11});
  EXPECT_THAT(Steps(), ElementsAre(4, 8, 10, 11));
}

TEST_F(StoreTest, KeepLastOneKeepsTheOldOneUntilTheNewOneIsComplete) {
  options_.keep_last = 1;
  const auto store = Open();
  SaveSteps(store.get(), {1});
  // Every rank's file is there, and still nothing is deleted: the manifest is missing.
  const auto begun = store->Begin(2);
  ASSERT_TRUE(begun.ok());
  Manifest manifest = SmallManifest(2, 3, options_.run_id);
  for (int rank = 0; rank < 3; ++rank) {
    const auto file = WriteStateFile(&files_, *begun, rank, 3, SmallState(2, rank, 3).pieces);
    ASSERT_TRUE(file.ok());
    manifest.files.push_back(*file);
    EXPECT_THAT(Steps(), ElementsAre(1));
  }
  ASSERT_TRUE(store->Complete(manifest).ok());
  EXPECT_THAT(Steps(), ElementsAre(2));
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000002", 2));
}

TEST_F(StoreTest, AnAbandonedSaveLeavesTheOldOneAndItsStepCanBeSavedAgain) {
  options_.keep_last = 1;
  const auto store = Open();
  SaveSteps(store.get(), {1});
  ASSERT_TRUE(store->Begin(2).ok());
  store->Abandon(2);
  EXPECT_THAT(Names(), UnorderedElementsAre("step-00000001", "latest", "lock"));
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000001", 1));
  SaveSteps(store.get(), {2});
  EXPECT_THAT(Steps(), ElementsAre(2));
}

TEST_F(StoreTest, WhatRunsGoOnFromIsDeletedOnlyAfterANewerOneIsComplete) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {1, 2});
  }
  options_.run_id = "run-b";
  options_.keep_last = 1;
  options_.resumed_from = options_.dir + "/step-00000002/";
  const auto store = Open();
  ASSERT_TRUE(store->Begin(3).ok());
  store->Abandon(3);
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  SaveSteps(store.get(), {4});
  EXPECT_THAT(Steps(), ElementsAre(4));
}

TEST_F(StoreTest, GoingOnFromAnOlderOneMovesTheNewerAsideAndOverwritesNothing) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {1, 2, 3});
  }
  options_.run_id = "run-b";
  options_.resumed_from = options_.dir + "/step-00000002";
  {
    const auto store = Open();
    EXPECT_THAT(Steps(), ElementsAre(1, 2));
    EXPECT_EQ(Contents(options_.dir + "/latest"), "step-00000002\n");
    SaveSteps(store.get(), {3});
  }
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000003.aside", 3));
  {
    const auto store = Open();  // again, from step 2
  }
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000003.aside", 3));
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000003.aside-2", 3));
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
}

TEST_F(StoreTest, SavingTheStepThatIsGoneOnFromSaysThatItIsComplete) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {2});
  }
  options_.resumed_from = options_.dir + "/step-00000002";
  const auto store = Open();
  const auto begun = store->Begin(2);
  EXPECT_EQ(begun.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(Message(begun.status()), HasSubstr(options_.dir + "/step-00000002"));
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000002", 2));
}

TEST_F(StoreTest, AFreshStartBesideAnotherRunsCheckpointsIsRefusedWithTheWaysOut) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {1, 2});
  }
  options_.run_id = "run-b";
  const auto refused = CheckpointStore::Open(&files_, options_);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(refused.status()),
              AllOf(HasSubstr(options_.dir), HasSubstr("step-00000002"), HasSubstr("run-a"),
                    HasSubstr("--resume-from latest"), HasSubstr("another checkpoint.dir"),
                    HasSubstr("remove them")));
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
}

// Another coordinator began to count its runs anew.
TEST_F(StoreTest, AFreshStartBesideCheckpointsOfARunThatHasTheSameIdIsRefusedToo) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {1, 2});
  }
  const auto refused = CheckpointStore::Open(&files_, options_);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(refused.status()), HasSubstr("another checkpoint.dir"));
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000002", 2));
}

TEST_F(StoreTest, AFreshStartBesideAnIncompleteOneMovesItAside) {
  fs::create_directories(options_.dir + "/step-00000001");
  std::ofstream(options_.dir + "/step-00000001/state-00000-of-00001.safetensors") << "half";
  const auto store = Open();
  SaveSteps(store.get(), {1});
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000001", 1));
  EXPECT_EQ(Contents(options_.dir + "/step-00000001.aside/state-00000-of-00001.safetensors"),
            "half");
}

TEST_F(StoreTest, GoingOnFromElsewhereIsRefusedWhereTheFolderIsAnotherRuns) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {1});
  }
  CheckpointStoreOptions other = options_;
  other.dir = folder_ / "other";
  other.run_id = "run-b";
  {
    const auto store = CheckpointStore::Open(&files_, other);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE(Save(store->get(), &files_, 4, 1, "run-b").ok());
  }
  options_.run_id = "run-c";
  options_.resumed_from = other.dir;
  EXPECT_EQ(CheckpointStore::Open(&files_, options_).status().code(),
            absl::StatusCode::kFailedPrecondition);
  options_.dir = folder_ / "empty";
  const auto store = Open();
  SaveSteps(store.get(), {5});
  EXPECT_TRUE(IsWhole(other.dir + "/step-00000004", 4));
}

// Two clusters of one user count their runs alike.
TEST_F(StoreTest, GoingOnFromElsewhereIsRefusedWhereTheOtherRunHasTheSameId) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {1, 7});
  }
  CheckpointStoreOptions other = options_;
  other.dir = folder_ / "other";
  {
    const auto store = CheckpointStore::Open(&files_, other);
    ASSERT_TRUE(store.ok()) << store.status();
    ASSERT_TRUE(Save(store->get(), &files_, 4, 1, other.run_id).ok());
  }
  options_.resumed_from = other.dir + "/step-00000004";
  options_.keep_last = 1;
  const auto refused = CheckpointStore::Open(&files_, options_);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(refused.status()), AllOf(HasSubstr(options_.dir), HasSubstr("step-00000007"),
                                               HasSubstr("another checkpoint.dir")));
  EXPECT_THAT(Steps(), ElementsAre(1, 7));
  // What it holds of its own is gone on from, whatever the way that it is named by.
  fs::create_directory_symlink(options_.dir, folder_ / "link");
  options_.resumed_from = folder_ / "link/step-00000007";
  EXPECT_NE(Open(), nullptr);
}

TEST_F(StoreTest, WhatWasMovedAsideStaysAsideWhenALaterMoveFailsAndThePowerIsCut) {
  {
    const auto store = Open();
    SaveSteps(store.get(), {1, 2, 3});
  }
  const std::string earlier = options_.dir;
  bool seen = false;
  for (int at = 1; !seen; ++at) {
    options_.dir = absl::StrCat(folder_ / "copy-", at);
    fs::copy(earlier, options_.dir, fs::copy_options::recursive);
    options_.resumed_from = options_.dir + "/step-00000001";
    FaultFileSystem files(Fault::kFail, at);
    const auto store = CheckpointStore::Open(&files, options_);
    ASSERT_FALSE(store.ok()) << "no operation moved step 3";
    seen = Message(store.status()).find("step-00000003") != std::string::npos;
    if (seen) files.LoseUnsynced();
  }
  EXPECT_TRUE(IsWhole(options_.dir + "/step-00000002.aside", 2));
  EXPECT_THAT(Steps(), ElementsAre(1, 3));
}

TEST_F(StoreTest, ASecondJobInTheSameFolderIsRefusedNamingTheOneThatHoldsIt) {
  const auto store = Open();
  options_.job = "intruder";
  options_.run_id = "run-b";
  const auto refused = CheckpointStore::Open(&files_, options_);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(refused.status()),
              AllOf(HasSubstr(options_.dir), HasSubstr("job small"), HasSubstr("run run-a"),
                    HasSubstr(absl::StrCat("process ", getpid())), HasSubstr("host ")));
}

TEST_F(StoreTest, AHolderThatDiesLetsGo) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto store = CheckpointStore::Open(&files_, options_);
    const char told = store.ok() ? 1 : 0;
    if (write(ready[1], &told, 1) != 1) _exit(1);
    pause();
    _exit(1);
  }
  char told = 0;
  ASSERT_EQ(read(ready[0], &told, 1), 1);
  ASSERT_EQ(told, 1);
  const auto refused = CheckpointStore::Open(&files_, options_);
  EXPECT_THAT(Message(refused.status()), HasSubstr(absl::StrCat("process ", child, " ")));
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_NE(Open(), nullptr);
  close(ready[0]);
  close(ready[1]);
}

TEST_F(StoreTest, WhatAKilledSaveLeftBehindIsSweptAndNothingElse) {
  for (const char* name : {".step-00000003.tmp", ".step-00000001.old", ".step-x.tmp", "notes"}) {
    fs::create_directories(options_.dir + "/" + name);
    std::ofstream(options_.dir + "/" + name + "/file") << "x";
  }
  std::ofstream(options_.dir + "/.latest.tmp") << "step";
  Open();
  EXPECT_THAT(Names(), UnorderedElementsAre(".step-x.tmp", "notes", "lock"));
}

TEST_F(StoreTest, AFileThatRankZeroDoesNotSeeIsNoCheckpoint) {
  const auto store = Open();
  SaveSteps(store.get(), {1});
  const auto begun = store->Begin(2);
  ASSERT_TRUE(begun.ok());
  Manifest manifest = SmallManifest(2, 2, options_.run_id);
  const auto file = WriteStateFile(&files_, *begun, 0, 2, SmallState(2, 0, 2).pieces);
  ASSERT_TRUE(file.ok());
  manifest.files = {*file, {"state-00001-of-00002.safetensors", 100, 1}};
  const auto missing = store->Complete(manifest);
  EXPECT_THAT(Message(missing.status()), AllOf(HasSubstr("state-00001-of-00002.safetensors"),
                                               HasSubstr("one folder for all hosts")));
  manifest.files = {*file};
  manifest.files[0].bytes += 1;
  EXPECT_THAT(
      Message(store->Complete(manifest).status()),
      AllOf(HasSubstr(absl::StrCat(file->bytes)), HasSubstr(absl::StrCat(file->bytes + 1))));
  store->Abandon(2);
  EXPECT_THAT(Steps(), ElementsAre(1));
}

TEST_F(StoreTest, AManifestThatCouldNotBeReadBackIsNotWritten) {
  const auto store = Open();
  ASSERT_TRUE(store->Begin(1).ok());
  Manifest manifest = SmallManifest(1, 1, options_.run_id);
  manifest.files = {{"../outside", 1, 1}};
  EXPECT_THAT(Message(store->Complete(manifest).status()), HasSubstr("../outside"));
  store->Abandon(1);
  EXPECT_THAT(Steps(), testing::IsEmpty());
}

TEST_F(StoreTest, AssetsAreCarriedAlongWithTheirChecksums) {
  std::ofstream(folder_ / "config.json") << "{\"a\": 1}";
  std::ofstream(folder_ / "mine.json") << std::string(100'000, 't');
  const auto assets = ReadAssets(
      {{"tokenizer.json", folder_ / "mine.json"}, {"config.json", folder_ / "config.json"}});
  ASSERT_TRUE(assets.ok()) << assets.status();
  // What was read is what is written, whatever becomes of where it was read from.
  fs::remove(folder_ / "config.json");
  const auto store = Open();
  const auto begun = store->Begin(1);
  ASSERT_TRUE(begun.ok());
  Manifest manifest = SmallManifest(1, 1, options_.run_id);
  ASSERT_TRUE(WriteAssets(&files_, *assets, *begun, &manifest.files).ok());
  ASSERT_EQ(manifest.files.size(), 2u);
  EXPECT_EQ(manifest.files[0].name, "assets/config.json");
  EXPECT_EQ(manifest.files[0].crc32c, Crc32c("{\"a\": 1}", 8));
  const auto state = WriteStateFile(&files_, *begun, 0, 1, SmallState(1, 0, 1).pieces);
  ASSERT_TRUE(state.ok());
  manifest.files.push_back(*state);
  const auto path = store->Complete(manifest);
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(Contents(*path + "/assets/config.json"), "{\"a\": 1}");
  EXPECT_EQ(Contents(*path + "/assets/tokenizer.json"), std::string(100'000, 't'));
  ASSERT_TRUE(IsWhole(*path, 1));
  // Damage to an asset is found as well.
  std::ofstream(*path + "/assets/config.json") << "{\"a\": 2}";
  const auto reader = CheckpointReader::Open(*path);
  ASSERT_TRUE(reader.ok());
  EXPECT_THAT(Message((*reader)->VerifyFiles(0, 1)), HasSubstr("assets/config.json"));
}

TEST_F(StoreTest, AssetsThatCannotBeCarriedAreRefused) {
  std::ofstream(folder_ / "a.json") << "12345";
  std::ofstream(folder_ / "b.json") << "67890";
  EXPECT_THAT(Message(ReadAssets({{"none", folder_ / "none"}}).status()),
              HasSubstr(folder_ / "none"));
  const std::map<std::string, std::string> two = {{"a.json", folder_ / "a.json"},
                                                  {"b.json", folder_ / "b.json"}};
  EXPECT_TRUE(ReadAssets(two, 10).ok());
  EXPECT_THAT(Message(ReadAssets(two, 9).status()),
              AllOf(HasSubstr(folder_ / "b.json"), HasSubstr("more than 9 bytes")));
  std::vector<CheckpointFile> described;
  EXPECT_THAT(Message(WriteAssets(&files_, {{"a", ""}, {"a", ""}}, folder_ / "c", &described)),
              HasSubstr("two files of this name"));
  EXPECT_THAT(Message(WriteAssets(&files_, {{"../a", ""}}, folder_ / "c", &described)),
              HasSubstr("cannot be used"));
}

}  // namespace
}  // namespace zeroshard
