// resources.min_workers on real processes: a worker dies for good and the job goes on without it,
// with the same numbers.
#include <signal.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/pods_fixture.h"

namespace zeroshard::cluster {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

class FewerWorkersTest : public PodsTest {
 protected:
  void StartCluster() {
    StartPod("coordinator", ZEROSHARD_COORDINATOR_PROGRAM,
             {"--replacement-grace", "1", "--member-timeout", "4"});
    StartWorker("worker-0");
    StartWorker("worker-1");
  }
  // At step `steps` of a run of two workers that nothing disturbs.
  std::vector<std::string> Undisturbed(const std::vector<std::string>& args, size_t steps) {
    const auto local = StartLocal("undisturbed", args);
    EXPECT_TRUE(Eventually(kPatience, [&] { return History("undisturbed").size() >= steps; }));
    local->Signal(SIGKILL);
    local->Wait(kPatience);
    return WithoutCosts(History("undisturbed"));
  }
  void ExpectBegins(const std::vector<std::string>& seen, const std::vector<std::string>& wanted) {
    const size_t common = std::min(seen.size(), wanted.size());
    ASSERT_GT(common, 0u);
    for (size_t i = 0; i < common; ++i) ASSERT_EQ(seen[i], wanted[i]);
  }
};

TEST_F(FewerWorkersTest, WithoutOffloadItGoesOnFromItsCheckpointOnTheWorkerThatIsLeft) {
  const std::vector<std::string> numbers = {"--set", "steps=100000", "--set", "deterministic=true"};
  StartCluster();
  std::vector<std::string> args = numbers;
  args.insert(args.end(),
              {"--set", "resources.min_workers=1", "--set",
               absl::StrCat("checkpoint={dir: ", WorkPath("w", "ckpt"), ", interval_steps: 5}")});
  Submit(args);
  ExpectTrainingOn({"worker-0", "worker-1"});
  ASSERT_TRUE(Eventually(kPatience, [&] { return History("w").size() >= 12; }));
  KillPod("worker-1");
  ASSERT_TRUE(Eventually(kPatience, [&] { return Ranks() == std::set<std::string>{"worker-0"}; }))
      << Status();
  EXPECT_TRUE(AwaitMoreSteps(10)) << Status();
  const Json status = Status();
  EXPECT_EQ(status["generation"], 2);
  EXPECT_THAT(status.dump(), HasSubstr("1 of 2 workers, as resources.min_workers allows"));
  const std::vector<std::string> seen = WithoutCosts(History("w"));
  pods_.clear();
  ExpectBegins(seen, Undisturbed(numbers, seen.size()));
}

TEST_F(FewerWorkersTest, AnOffloadedJobLosesNoStepAndGrowsWhenAWorkerComes) {
  const std::vector<std::string> numbers = {
      "--set", "steps=100000",      "--set", "zero_optimization.offload_optimizer={device: cpu}",
      "--set", "deterministic=true"};
  StartCluster();
  StartPod("store-0", ZEROSHARD_STORE_PROGRAM, {"--threads", "1"});
  std::vector<std::string> args = numbers;
  args.insert(args.end(), {"--set", "resources.min_workers=1"});
  Submit(args);
  ExpectTrainingOn({"worker-0", "worker-1"});
  KillPod("worker-1");
  ExpectTrainingOn({"worker-0"});
  StartWorker("worker-2");
  ExpectTrainingOn({"worker-0", "worker-2"});
  EXPECT_EQ(Status()["steps_lost"], 0);
  const std::vector<std::string> seen = WithoutCosts(History("w"));
  pods_.clear();
  std::vector<std::string> local = numbers;
  local.insert(local.end(), {"--stores", "1"});
  ExpectBegins(seen, Undisturbed(local, seen.size()));
}

}  // namespace
}  // namespace zeroshard::cluster
