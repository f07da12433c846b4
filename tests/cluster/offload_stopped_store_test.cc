// A store that stands still for so long that it is given up, and then goes on: it must learn that
// what it holds is nobody's any more, and be of use again.
#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/offload_fixture.h"

namespace zeroshard::cluster {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

class StoppedStore : public OffloadTest {
 protected:
  Json NodeOf(const std::string& name) {
    const auto nodes = Run({"nodes", "--output", "json", "--coordinator", coordinator()});
    const Json json = Json::parse(nodes->Out(), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) return Json::object();
    for (const Json& node : json["nodes"])
      if (node["hello"]["name"] == name) return node;
    return Json::object();
  }
  // Of the job that a store holds.
  int ChunksOn(const std::string& name) {
    const auto status =
        Run({"status", "small", "--output", "json", "--coordinator", coordinator()});
    const Json json = Json::parse(status->Out(), nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("stores")) return 0;
    for (const Json& store : json["stores"])
      if (store.value("member", "") == name) return store["usage"]["chunks"];
    return 0;
  }
  std::string coordinator() const { return AddressOf("w", "coordinator"); }
};

TEST_F(StoppedStore, IsGivenUpAndFencedWhenItWakesAndFilledAnewAndNoStepIsLost) {
  std::vector<std::string> args = Endurance(2, 2);
  args.insert(args.end(), {"--set", "steps=200"});
  const Result wanted = Undisturbed(args);
  const auto local = StartJson("w", args);
  ASSERT_TRUE(AwaitSteps("w", 5, local.get()));
  const pid_t pid = PidOf("w", "store-1");
  const int chunks = ChunksOn("store-1");
  ASSERT_GT(chunks, 0);
  const Json before = NodeOf("store-1");
  ASSERT_TRUE(before.contains("hello")) << before;
  ASSERT_EQ(kill(pid, SIGSTOP), 0);
  const size_t steps = History("w").size();
  ASSERT_LT(steps, wanted.history.size());
  // Longer than a member may be silent; the other store has everything.
  ASSERT_TRUE(AwaitSteps("w", steps + 5, local.get()));
  EXPECT_EQ(NodeOf("store-1").value("state", ""), "lost");
  // The job waits while the store is made to come back, so that it is not over before.
  const pid_t worker = PidOf("w", "worker-0");
  ASSERT_EQ(kill(worker, SIGSTOP), 0);
  ASSERT_LT(History("w").size() + 5, wanted.history.size());
  ASSERT_EQ(kill(pid, SIGCONT), 0);
  const std::string log = WorkPath("w", "logs/store-1.log");
  EXPECT_TRUE(Eventually(absl::Seconds(5), [&] {
    const Json node = NodeOf("store-1");
    return node.value("state", "lost") != "lost" &&
           node["hello"]["incarnation"] != before["hello"]["incarnation"];
  })) << NodeOf("store-1");
  ASSERT_EQ(kill(worker, SIGCONT), 0);
  EXPECT_THAT(ReadText(log), HasSubstr("fenced"));
  EXPECT_EQ(PidOf("w", "store-1"), pid) << "it is the same process";
  EXPECT_TRUE(IsAlive(pid));
  EXPECT_TRUE(Eventually(kPatience, [&] { return ChunksOn("store-1") == chunks; }))
      << "it was not filled again";
  const Result seen = Finish("w", local.get());
  EXPECT_EQ(seen.history, wanted.history);
  EXPECT_EQ(seen.digest, wanted.digest);
  EXPECT_EQ(seen.status["steps_lost"], 0);
  EXPECT_EQ(seen.status["version"]["epoch"], 1) << "nothing was rolled back";
  EXPECT_TRUE(SawState(*local, "RECOVERING")) << local->Out();
}

}  // namespace
}  // namespace zeroshard::cluster
