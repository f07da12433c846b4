#include "common/crash_point.h"

#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"

namespace zeroshard {
namespace {

// Each in a process of its own, which reads its environment once.
void Pass(const std::string& asked) {
  setenv("ZEROSHARD_CRASH_AT", asked.c_str(), 1);
  CrashPoint("store.mid_apply", 2);
  CrashPoint("store.mid_apply", 4);
  CrashPoint("store.before_apply", 3);
  CrashPoint("worker.mid_push", 3, /*rank=*/0);
  std::fputs("until here; ", stderr);
  CrashPoint("store.mid_apply", 3);
  CrashPoint("worker.mid_push", 3, /*rank=*/1);
  std::fputs("through", stderr);
  std::_Exit(0);
}

const auto kKilled = testing::KilledBySignal(SIGKILL);
const auto kGoesOn = testing::ExitedWithCode(0);

TEST(CrashPointDeathTest, WithoutTheVariableEveryoneGoesOn) {
  EXPECT_EXIT(Pass(""), kGoesOn, "^until here; through$");
}

TEST(CrashPointDeathTest, KillsAtItsNameAndStepAlone) {
  EXPECT_EXIT(Pass("store.mid_apply:3"), kKilled, "^until here; .*killed at store.mid_apply");
  EXPECT_EXIT(Pass("store.mid:3"), kGoesOn, "^until here; through$");
  EXPECT_EXIT(Pass("store.mid_apply:30"), kGoesOn, "^until here; through$");
}

TEST(CrashPointDeathTest, KillsTheNamedRankAlone) {
  EXPECT_EXIT(Pass("worker.mid_push@1:3"), kKilled, "^until here; .*killed at worker.mid_push");
  EXPECT_EXIT(Pass("worker.mid_push:3"), kKilled, "^[^u]*killed at worker.mid_push");
  EXPECT_EXIT(Pass("worker.mid_push@2:3"), kGoesOn, "^until here; through$");
}

TEST(CrashPointDeathTest, WithAFileItKillsOnce) {
  const TempFolder folder;
  const std::string file = folder.path() + "/a:b";
  const std::string asked = absl::StrCat("store.mid_apply:3:", file);
  EXPECT_EXIT(Pass(absl::StrCat("store.mid_apply:5:", file)), kGoesOn, "through$");
  EXPECT_FALSE(std::filesystem::exists(file));
  EXPECT_EXIT(Pass(asked), kKilled, "^until here; .*killed at");
  EXPECT_TRUE(std::filesystem::exists(file));
  EXPECT_EXIT(Pass(asked), kGoesOn, "^until here; through$");
}

TEST(CrashPointDeathTest, WhatCannotBeReadIsSaidAndKillsNobody) {
  for (const char* asked : {"store.mid_apply", "store.mid_apply:", "store.mid_apply:x", ":3",
                            "worker.mid_push@:3", "worker.mid_push@one:3", "@1:3"}) {
    EXPECT_EXIT(Pass(asked), kGoesOn, "wanted NAME\\[@RANK\\]:STEP") << asked;
  }
  EXPECT_EXIT(Pass("store.mid_apply:3:/no/such/folder/file"), kGoesOn,
              "cannot create /no/such/folder/file: No such file");
}

}  // namespace
}  // namespace zeroshard
