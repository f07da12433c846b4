// Jobs whose state is on their ranks lose a worker: they go on from their newest checkpoint, and
// what they end with is what an undisturbed run ends with.
#include <signal.h>

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class RecoveryTest : public OffloadTest {
 protected:
  // Long enough for something to die in the middle.
  static std::vector<std::string> Job(std::vector<std::string> more = {}) {
    std::vector<std::string> args = {"--set", "steps=300", "--set",
                                     "checkpoint={dir: ckpt, interval_steps: 20, keep_last: 1}"};
    args.insert(args.end(), more.begin(), more.end());
    return args;
  }
  void Kill(const std::string& workdir, int rank) {
    const std::string member = MemberOfRank(workdir, rank);
    ASSERT_FALSE(member.empty());
    ASSERT_EQ(kill(PidOf(workdir, member), SIGKILL), 0) << member;
  }
  // While a checkpoint's files are being collected.
  void KillWhileSaving(const std::string& workdir, const std::string& member) {
    const pid_t pid = PidOf(workdir, member);
    const fs::path folder = WorkPath(workdir, "ckpt/small");
    const absl::Time deadline = absl::Now() + kPatience;
    while (absl::Now() < deadline) {
      std::error_code error;
      for (fs::directory_iterator it(folder, error), end; !error && it != end;
           it.increment(error)) {
        const std::string name = it->path().filename().string();
        if (!absl::StartsWith(name, ".step-") || !absl::EndsWith(name, ".tmp")) continue;
        ASSERT_EQ(kill(pid, SIGKILL), 0);
        return;
      }
    }
    FAIL() << "no save was met";
  }
  void ExpectAsUndisturbed(const Result& seen, const Result& wanted) {
    EXPECT_EQ(seen.history, wanted.history);
    EXPECT_EQ(seen.digest, wanted.digest);
    EXPECT_FALSE(seen.digest.empty());
    EXPECT_EQ(seen.steps_lost, seen.status["steps_lost"]);
    EXPECT_GE(seen.status["generation"], 2);
  }
};

TEST_F(RecoveryTest, AKilledWorkerCostsTheStepsSinceTheNewestCheckpointAndNoBit) {
  const Result wanted = Undisturbed(Job());
  const auto local = StartJson("w", Job());
  ASSERT_TRUE(AwaitSteps("w", 50, local.get()));
  Kill("w", 1);
  const Result seen = Finish("w", local.get());
  ExpectAsUndisturbed(seen, wanted);
  EXPECT_TRUE(SawState(*local, "RECOVERING")) << local->Out();
  EXPECT_THAT(local->Out(), HasSubstr("goes back to the checkpoint of step "));
  ExpectSound(WorkPath("w", "ckpt/small"));
}

TEST_F(RecoveryTest, RankZeroTooAndAnotherTime) {
  const Result wanted = Undisturbed(Job());
  const auto local = StartJson("w", Job());
  ASSERT_TRUE(AwaitSteps("w", 30, local.get()));
  Kill("w", 0);
  ASSERT_TRUE(Eventually(kPatience, [&] { return History("w").size() < 30; }));
  ASSERT_TRUE(AwaitSteps("w", 90, local.get()));
  Kill("w", 0);
  const Result seen = Finish("w", local.get());
  ExpectAsUndisturbed(seen, wanted);
  EXPECT_GE(seen.status["generation"], 3);
}

TEST_F(RecoveryTest, BeforeTheFirstCheckpointItBeginsAgain) {
  const std::vector<std::string> args = {"--set", "steps=120", "--set",
                                         "checkpoint={dir: ckpt, interval_steps: 100000}"};
  const Result wanted = Undisturbed(args);
  const auto local = StartJson("w", args);
  ASSERT_TRUE(AwaitSteps("w", 10, local.get()));
  Kill("w", 0);
  const Result seen = Finish("w", local.get());
  ExpectAsUndisturbed(seen, wanted);
  EXPECT_GE(seen.steps_lost, 10);
  EXPECT_THAT(local->Out(), HasSubstr("where it began: it has completed no checkpoint"));
}

TEST_F(RecoveryTest, KilledInTheMiddleOfASaveThatOneIsLeftOut) {
  const Result wanted = Undisturbed(Job());
  for (const std::string member : {"worker-0", "worker-1"}) {
    const auto local = StartJson(member, Job());
    ASSERT_TRUE(AwaitSteps(member, 25, local.get()));
    KillWhileSaving(member, member);
    const Result seen = Finish(member, local.get());
    ExpectAsUndisturbed(seen, wanted);
    ExpectSound(WorkPath(member, "ckpt/small"));
  }
}

// A worker that is told to leave lets the job save first.
TEST_F(RecoveryTest, AWorkerThatLeavesCostsNoStep) {
  const Result wanted = Undisturbed(Job());
  const auto local = StartJson("w", Job());
  ASSERT_TRUE(AwaitSteps("w", 50, local.get()));
  ASSERT_EQ(kill(PidOf("w", "worker-1"), SIGTERM), 0);
  const Result seen = Finish("w", local.get());
  ExpectAsUndisturbed(seen, wanted);
  EXPECT_EQ(seen.steps_lost, 0u);
}

TEST_F(RecoveryTest, AnErrorThatComesAgainFailsTheJobAtOnce) {
  const auto local = StartJson("w", Job({"--set", "optimizer.params.lr=1.0e30"}));
  EXPECT_EQ(local->Wait(kPatience), 1) << local->Out();
  EXPECT_EQ(LastStatus(*local)["state"], "FAILED");
  EXPECT_EQ(LastStatus(*local)["generation"], 1);
}

}  // namespace
}  // namespace zeroshard::cluster
