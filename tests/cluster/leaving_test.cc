// Shard stores that are asked to leave, on real processes.
#include <signal.h>

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

using testing::HasSubstr;

using LeavingTest = OffloadTest;

// As Kubernetes ends one to start it again.
TEST_F(LeavingTest, TheOnlyStoreIsStartedAgainAndNoStepIsLost) {
  const Result wanted = Undisturbed(Endurance(1, 1));
  std::vector<std::string> args = Endurance(1, 1);
  args.insert(args.end(), {"--set", "checkpoint={dir: ckpt, interval_steps: 100000}"});
  const auto local = StartJson("w", args);
  ASSERT_TRUE(AwaitSteps("w", 7, local.get()));
  ASSERT_EQ(kill(PidOf("w", "store-0"), SIGTERM), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0) << local->Out();
  EXPECT_GE(seen.status["version"]["epoch"], 2) << "it was not started again";
  EXPECT_THAT(local->Out(), HasSubstr("store-0"));
  ExpectSound(WorkPath("w", "ckpt/small"));
}

TEST_F(LeavingTest, AStoreThatHoldsNothingGoesAtOnce) {
  const auto local = StartLocal("w", Endless({"--stores", "1"}));
  ASSERT_TRUE(AwaitSteps("w", 2, local.get()));
  const int store = PidOf("w", "store-0");
  ASSERT_EQ(kill(store, SIGTERM), 0);
  EXPECT_TRUE(Eventually(absl::Seconds(10), [&] { return !IsAlive(store); }));
  local->Signal(SIGKILL);
}

}  // namespace
}  // namespace zeroshard::cluster
