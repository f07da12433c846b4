// A save that is killed, loses power or runs out of space at any of its operations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <filesystem>

#include "common/log.h"
#include "tests/common/checkpoint/fault_file_system.h"
#include "tests/common/checkpoint/small_state.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr int kWorld = 2;

CheckpointStoreOptions Options(const std::string& dir, const std::string& run_id,
                               const std::string& resumed_from) {
  CheckpointStoreOptions options;
  options.dir = dir;
  options.job = "small";
  options.run_id = run_id;
  options.keep_last = 1;
  options.resumed_from = resumed_from;
  return options;
}

// Steps 1, 2 and 3 of an earlier run, all complete.
void MakeEarlierRun(const std::string& dir) {
  FaultFileSystem files;
  CheckpointStoreOptions options = Options(dir, "earlier", "");
  options.keep_last = 0;
  const auto store = CheckpointStore::Open(&files, options);
  ASSERT_TRUE(store.ok()) << store.status();
  for (uint64_t step : {1, 2, 3}) {
    ASSERT_TRUE(Save(store->get(), &files, step, kWorld, "earlier").ok());
  }
}

// What the later run does: goes on from step 2, moves 3 aside, saves 4, deletes 1 and 2.
absl::Status GoOn(FaultFileSystem* files, const std::string& dir) {
  const auto store = CheckpointStore::Open(files, Options(dir, "later", dir + "/step-00000002"));
  if (!store.ok()) return store.status();
  return Save(store->get(), files, 4, kWorld, "later").status();
}

// The newest complete checkpoint is whole, and a third run goes on from it and leaves the folder
// tidy.
void ExpectRecovers(const std::string& dir) {
  const auto found = FindCheckpoint(dir);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_GE(found->manifest.step, 2u);
  ASSERT_TRUE(IsWhole(found->path, found->manifest.step));
  FaultFileSystem files;
  const auto store = CheckpointStore::Open(&files, Options(dir, "third", found->path));
  ASSERT_TRUE(store.ok()) << store.status();
  const auto saved = Save(store->get(), &files, 9, kWorld, "third");
  ASSERT_TRUE(saved.ok()) << saved.status();
  EXPECT_TRUE(IsWhole(*saved, 9));
  for (const auto& entry : fs::directory_iterator(dir)) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name == "step-00000009" || name == "latest" || name == "lock" ||
                name.ends_with(".aside"))
        << name;
  }
  EXPECT_EQ(Contents(dir + "/latest"), "step-00000009\n");
}

class Crash : public testing::TestWithParam<Fault> {
 protected:
  Crash() { SetLogLevel(LogLevel::kError); }
  void SetUp() override { ASSERT_NO_FATAL_FAILURE(MakeEarlierRun(earlier_ / "checkpoints")); }
  ~Crash() override { SetLogLevel(LogLevel::kInfo); }

  // A copy of the earlier run's folder.
  std::string CopyTo(const TempFolder& folder) const {
    fs::copy(earlier_ / "checkpoints", folder / "checkpoints", fs::copy_options::recursive);
    return folder / "checkpoints";
  }

 private:
  const TempFolder earlier_;
};

TEST_P(Crash, AtAnyOperationOfASaveTheNewestCompleteCheckpointLoads) {
  int operations = 0;
  for (int at = 1;; ++at) {
    SCOPED_TRACE(at);
    const TempFolder folder;
    const std::string dir = CopyTo(folder);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      FaultFileSystem files(GetParam(), at);
      _exit(GoOn(&files, dir).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (WIFEXITED(status)) {  // it has no such operation
      ASSERT_EQ(WEXITSTATUS(status), 0);
      break;
    }
    ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    ASSERT_NO_FATAL_FAILURE(ExpectRecovers(dir));
    operations = at;
  }
  // A folder, two files of a header and their tensors, the manifest, `latest`, renames, syncs.
  EXPECT_GT(operations, 30);
}

INSTANTIATE_TEST_SUITE_P(Each, Crash,
                         testing::Values(Fault::kKillBefore, Fault::kKillAfter, Fault::kPowerCut),
                         [](const auto& info) {
                           return info.param == Fault::kKillBefore  ? "KillBefore"
                                  : info.param == Fault::kKillAfter ? "KillAfter"
                                                                    : "PowerCut";
                         });

TEST(PowerCut, LosesNoCompleteCheckpointOfATreeThatTheRunMade) {
  SetLogLevel(LogLevel::kError);
  int kept = 0;
  for (int at = 1;; ++at) {
    SCOPED_TRACE(at);
    const TempFolder folder;
    const std::string dir = folder / "models/small/checkpoints";
    const std::string told = folder / "told";
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      FaultFileSystem files(Fault::kPowerCut, at);
      const auto store = CheckpointStore::Open(&files, Options(dir, "new", ""));
      if (!store.ok() || !Save(store->get(), &files, 1, kWorld, "new").ok()) _exit(1);
      if (!WriteFileAtomically(told, "step 1").ok()) _exit(1);
      _exit(Save(store->get(), &files, 2, kWorld, "new").ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    if (WIFEXITED(status)) {
      ASSERT_EQ(WEXITSTATUS(status), 0);
      break;
    }
    if (!fs::exists(told)) continue;
    ++kept;
    const auto found = FindCheckpoint(dir);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_TRUE(IsWhole(found->path, found->manifest.step));
  }
  SetLogLevel(LogLevel::kInfo);
  EXPECT_GT(kept, 10);
}

class Failure : public Crash {};

// The same store goes on after it: the disk has room again, or the error was a passing one.
TEST_P(Failure, AtAnyOperationTheSaveIsAbandonedAndTheOldCheckpointStays) {
  int refused = 0;
  for (int at = 1;; ++at) {
    SCOPED_TRACE(at);
    const TempFolder folder;
    const std::string dir = CopyTo(folder);
    FaultFileSystem files(GetParam(), at);
    const absl::Status status = GoOn(&files, dir);
    if (files.operations() < at) {
      ASSERT_TRUE(status.ok()) << status;
      break;
    }
    if (!status.ok()) {
      ++refused;
      EXPECT_THAT(std::string(status.message()), HasSubstr(dir));
      EXPECT_THAT(
          std::string(status.message()),
          HasSubstr(GetParam() == Fault::kFull ? "No space left on device" : "Input/output error"));
      EXPECT_FALSE(fs::exists(CollectFolder(dir, 4)) && GetParam() == Fault::kFull);
    }
    ASSERT_NO_FATAL_FAILURE(ExpectRecovers(dir));
  }
  EXPECT_GT(refused, 20);
}

INSTANTIATE_TEST_SUITE_P(Each, Failure, testing::Values(Fault::kFail, Fault::kFull),
                         [](const auto& info) {
                           return info.param == Fault::kFail ? "InputOutputError" : "DiskFull";
                         });

}  // namespace
}  // namespace zeroshard
