#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/local_fixture.h"

namespace zeroshard::cluster {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using Json = nlohmann::ordered_json;

// More steps than any of these tests lets pass.
const std::vector<std::string> kEndless = {"--set", "steps=100000"};

TEST_F(LocalTest, TrainsAJobToItsEndAndLeavesItsHistory) {
  const auto local = StartLocal("w", {"--stores", "1"});
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_THAT(local->Out(), AllOf(HasSubstr("COMPLETED"), HasSubstr("step 20/20"),
                                  HasSubstr("jobs/small/history.jsonl"), HasSubstr("tokens/s")));
  ExpectAllGone(AllPids("w"));
  EXPECT_EQ(AllPids("w").size(), 4u);

  const std::vector<std::string> history = History("w");
  ASSERT_EQ(history.size(), 20u);
  double first = 0;
  double last = 0;
  for (size_t i = 0; i < history.size(); ++i) {
    const Json step = Json::parse(history[i]);
    std::vector<std::string> keys;
    for (const auto& [key, value] : step.items()) {
      keys.push_back(key);
      EXPECT_TRUE(value.is_number()) << history[i];
    }
    EXPECT_THAT(keys,
                ElementsAre("step", "loss", "grad_norm", "learning_rate", "tokens", "seconds"));
    EXPECT_EQ(step["step"], i + 1);
    EXPECT_EQ(step["tokens"], 8 * 32);
    (i == 0 ? first : last) = step["loss"];
  }
  EXPECT_NEAR(first, 5.545, 0.5);  // an untrained model knows nothing: log 256
  EXPECT_LT(last, first - 0.5);
}

TEST_F(LocalTest, AnswersInJson) {
  const auto local = StartLocal("w", {"--output", "json", "--set", "steps=3"});
  ASSERT_EQ(local->Wait(kPatience), 0) << local->Err();
  Json last;
  for (const auto line : absl::StrSplit(local->Out(), '\n', absl::SkipEmpty())) {
    last = Json::parse(line);
  }
  EXPECT_EQ(last["result"]["state"], "COMPLETED");
  EXPECT_EQ(History("w").size(), 3u);
  EXPECT_EQ(ReadText(last["result"]["history"]),
            ReadText(WorkPath("w", "jobs/small/history.jsonl")));
}

TEST_F(LocalTest, KilledItLeavesNoProcessAndTheFolderServesAgain) {
  auto local = StartLocal("w", {"--stores", "1", "--set", "steps=100000"});
  ASSERT_TRUE(AwaitSteps("w", 3, local.get()));
  const std::vector<pid_t> pids = AllPids("w");
  ASSERT_EQ(pids.size(), 4u);
  local->Signal(SIGKILL);
  EXPECT_EQ(local->Wait(kPatience), 128 + SIGKILL);
  ExpectAllGone(pids);

  local = StartLocal("w");
  EXPECT_EQ(local->Wait(kPatience), 0) << local->Err();
  EXPECT_THAT(local->Out(), HasSubstr("left over from an earlier run"));
  EXPECT_EQ(History("w").size(), 20u);
}

TEST_F(LocalTest, InterruptedItEndsEverythingAndSaysSo) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const std::string workdir = absl::StrCat("w", signal);
    const auto local = StartLocal(workdir, kEndless);
    ASSERT_TRUE(AwaitSteps(workdir, 3, local.get()));
    const std::vector<pid_t> pids = AllPids(workdir);
    local->Signal(signal);
    EXPECT_EQ(local->Wait(kPatience), 128 + signal);
    EXPECT_THAT(local->Err(), HasSubstr("stopped by "));
    ExpectAllGone(pids);
  }
}

TEST_F(LocalTest, AKilledWorkerFailsTheJobAndIsNamedWithRankHostAndSignal) {
  const auto local = StartLocal("w", kEndless);
  ASSERT_TRUE(AwaitSteps("w", 3, local.get()));
  const std::vector<pid_t> pids = AllPids("w");
  ASSERT_EQ(kill(PidOf("w", "worker-1"), SIGKILL), 0);
  EXPECT_EQ(local->Wait(kPatience), 1);
  EXPECT_THAT(local->Err(),
              AllOf(HasSubstr("FAILED"), HasSubstr("rank "), HasSubstr("worker-1"),
                    HasSubstr("on 127.0.0.1"), AnyOf(HasSubstr("signal 9"), HasSubstr("SIGKILL"))));
  ExpectAllGone(pids);
}

TEST_F(LocalTest, AnIdleWorkerThatDiesIsStartedAgainAndTheJobGoesOn) {
  const auto local = StartLocal("w", {"--set", "resources.workers=1", "--set", "steps=100000"});
  ASSERT_TRUE(AwaitSteps("w", 3, local.get()));
  const std::string coordinator = AddressOf("w", "coordinator");
  std::string idle;
  const auto idle_pid = [&]() -> pid_t {
    const auto nodes = Run({"nodes", "--output", "json", "--coordinator", coordinator});
    const Json answer = Json::parse(nodes->Out(), nullptr, /*allow_exceptions=*/false);
    if (answer.is_discarded()) return 0;
    for (const Json& node : answer["nodes"]) {
      if (node["state"] != "idle") continue;
      idle = node["hello"]["name"];
      return node["hello"]["pid"];
    }
    return 0;
  };
  const pid_t before = idle_pid();
  ASSERT_GT(before, 0);
  ASSERT_EQ(kill(before, SIGKILL), 0);
  EXPECT_TRUE(Eventually(kPatience, [&] {
    const pid_t now = idle_pid();
    return now > 0 && now != before;
  })) << local->Out();
  EXPECT_EQ(PidOf("w", idle) == before, false);
  EXPECT_FALSE(local->Ended());
  EXPECT_THAT(local->Out(), HasSubstr(absl::StrCat(idle, " was killed by signal 9")));
}

TEST_F(LocalTest, AKilledCoordinatorComesBackAndTheHistoryIsAsIfNothingHadHappened) {
  const std::vector<std::string> steps = {"--set", "steps=60"};
  const auto undisturbed = StartLocal("a", steps);
  ASSERT_EQ(undisturbed->Wait(kPatience), 0) << undisturbed->Err();

  const auto disturbed = StartLocal("b", steps);
  ASSERT_TRUE(AwaitSteps("b", 5, disturbed.get()));
  const pid_t first = PidOf("b", "coordinator");
  const std::string address = AddressOf("b", "coordinator");
  ASSERT_EQ(kill(first, SIGKILL), 0);
  EXPECT_EQ(disturbed->Wait(kPatience), 0) << disturbed->Err();
  EXPECT_THAT(disturbed->Out(),
              AllOf(HasSubstr("coordinator was killed by signal 9"), HasSubstr("COMPLETED")));
  EXPECT_NE(PidOf("b", "coordinator"), first);
  EXPECT_EQ(AddressOf("b", "coordinator"), address);
  ASSERT_EQ(History("a").size(), 60u);
  EXPECT_EQ(WithoutCosts(History("b")), WithoutCosts(History("a")));
  ExpectAllGone(AllPids("b"));
}

TEST_F(LocalTest, ASecondJobOfTheNameIsRefusedWhileTheFirstRuns) {
  const auto local = StartLocal("w", kEndless);
  ASSERT_TRUE(AwaitSteps("w", 1, local.get()));
  const std::string coordinator = AddressOf("w", "coordinator");
  const auto second = Run({"submit", job_, "--coordinator", coordinator});
  EXPECT_EQ(second->Wait(kPatience), 4);
  EXPECT_THAT(second->Err(), HasSubstr("small"));
  EXPECT_FALSE(local->Ended());

  const auto unknown = Run({"status", "nope", "--coordinator", coordinator});
  EXPECT_EQ(unknown->Wait(kPatience), 5);
  EXPECT_THAT(unknown->Err(), AllOf(HasSubstr("nope"), HasSubstr("small")));

  // Cancelled from outside, the watching command fails and says why.
  EXPECT_EQ(Run({"cancel", "small", "--coordinator", coordinator})->Wait(kPatience), 0);
  EXPECT_EQ(local->Wait(kPatience), 1);
  EXPECT_THAT(local->Err(), HasSubstr("CANCELLED"));
}

TEST_F(LocalTest, ASecondRunInTheSameFolderIsRefused) {
  const auto local = StartLocal("w", kEndless);
  ASSERT_TRUE(AwaitSteps("w", 1, local.get()));
  const pid_t coordinator = PidOf("w", "coordinator");
  const auto second = StartLocal("w");
  EXPECT_EQ(second->Wait(kPatience), 4) << second->Err();
  EXPECT_THAT(second->Err(), HasSubstr(folder_ + "/w"));
  EXPECT_TRUE(IsAlive(coordinator));
  EXPECT_FALSE(local->Ended());
}

TEST_F(LocalTest, ATakenPortIsNamed) {
  const int holder = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(bind(holder, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(listen(holder, 1), 0);
  ASSERT_EQ(getsockname(holder, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const int port = ntohs(address.sin_port);

  const auto local = StartLocal("w", {"--metrics-base-port", absl::StrCat(port)});
  EXPECT_EQ(local->Wait(kPatience), 3);
  EXPECT_THAT(local->Err(), HasSubstr(absl::StrCat("127.0.0.1:", port)));
  close(holder);
}

TEST_F(LocalTest, DataThatNoWorkerCanUseFailsWithItsReason) {
  const auto local =
      StartLocal("w", {"--set", "data.tokenizer=tokens", "--set", "model.vocab_size=64"});
  EXPECT_EQ(local->Wait(kPatience), 1);
  EXPECT_THAT(local->Err(), AllOf(HasSubstr("FAILED"), HasSubstr("text.txt")));
}

}  // namespace
}  // namespace zeroshard::cluster
