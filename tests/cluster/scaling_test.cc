// Workers that come and go as a StatefulSet that is scaled starts and ends them: each is a process
// of its own, asked to leave with SIGTERM.
#include <signal.h>

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cluster/pods_fixture.h"

namespace zeroshard::cluster {
namespace {

using testing::HasSubstr;
using ScalingTest = PodsTest;

TEST_F(ScalingTest, WorkersAddedAndRemovedAreSeenAndAnOffloadedJobGoesOnWithoutLosingAStep) {
  StartPod("coordinator", ZEROSHARD_COORDINATOR_PROGRAM);
  StartPod("store-0", ZEROSHARD_STORE_PROGRAM, {"--threads", "1"});
  StartWorker("worker-0");
  StartWorker("worker-1");
  const auto submitted = Run({"submit", job_, "--set", "steps=100000", "--set",
                              "zero_optimization.offload_optimizer={device: cpu}", "--coordinator",
                              AddressOf("w", "coordinator")});
  ASSERT_EQ(submitted->Wait(kPatience), 0) << submitted->Err();
  ExpectTrainingOn({"worker-0", "worker-1"});
  const uint64_t first = Status()["generation"];

  // Up: a third is known, and a job that needs two stays as it is.
  StartWorker("worker-2");
  EXPECT_TRUE(Eventually(kPatience, [&] {
    return Workers() == std::set<std::string>{"worker-0", "worker-1", "worker-2"};
  }));
  EXPECT_EQ(Status()["generation"], first);

  // Down: another generation, in which the third has the rank of the one that left.
  EndPod("worker-1");
  ExpectTrainingOn({"worker-0", "worker-2"});
  EXPECT_EQ(Workers(), (std::set<std::string>{"worker-0", "worker-2"}));
  const uint64_t second = Status()["generation"];
  EXPECT_GT(second, first);

  // Below what it needs it waits, and says for what.
  EndPod("worker-2");
  EXPECT_TRUE(Eventually(kPatience, [&] { return Status()["state"] == "RECOVERING"; })) << Status();
  EXPECT_THAT(Status().dump(), HasSubstr("worker-2"));
  const size_t waiting = History("w").size();

  // Up again, under a name that was there before, as a StatefulSet gives it.
  StartWorker("worker-1");
  ExpectTrainingOn({"worker-0", "worker-1"});
  EXPECT_GT(Status()["generation"], second);

  const std::vector<std::string> history = History("w");
  EXPECT_GT(history.size(), waiting);
  for (size_t i = 0; i < history.size(); ++i) {
    EXPECT_THAT(history[i], testing::StartsWith(absl::StrCat("{\"step\":", i + 1, ",")));
  }
  EXPECT_EQ(Status()["steps_lost"], 0);
}

}  // namespace
}  // namespace zeroshard::cluster
