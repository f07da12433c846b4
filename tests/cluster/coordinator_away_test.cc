// The coordinator of an offloaded job stands still for longer than ranks wait for each other: the
// job pauses, and goes on as if nothing had been.
#include <signal.h>

#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

constexpr absl::Duration kAway = absl::Seconds(9);  // collective_seconds, three times over

class CoordinatorAway : public OffloadTest, public testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(Offload, CoordinatorAway, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "ParametersToo" : "OptimizerState");
});

TEST_P(CoordinatorAway, PausesTheJobOnEveryRankAndCostsNoStepAndNoGeneration) {
  std::vector<std::string> args = Endurance(2, 1, GetParam());
  args.insert(args.end(), {"--set", "timeouts.collective_seconds=3"});
  if (GetParam()) args.insert(args.end(), {"--set", "zero_optimization.stage=3"});
  const Result wanted = Undisturbed(args);
  const auto local = StartJson("w", args);
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  const pid_t coordinator = PidOf("w", "coordinator");
  ASSERT_EQ(kill(coordinator, SIGSTOP), 0);
  const size_t steps = History("w").size();
  ASSERT_LT(steps, wanted.history.size());
  absl::SleepFor(kAway);  // the time itself is what is tested
  EXPECT_LE(History("w").size(), steps + 1) << "steps were committed by nobody";
  ASSERT_EQ(kill(coordinator, SIGCONT), 0);
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
  EXPECT_EQ(seen.status["generation"], 1) << "a rank gave up: " << local->Err();
}

}  // namespace
}  // namespace zeroshard::cluster
