// Workers that come and go as a StatefulSet that is scaled starts and ends them: each is a process
// of its own, asked to leave with SIGTERM.
#include <signal.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/local_fixture.h"

namespace zeroshard::cluster {
namespace {

using testing::HasSubstr;
using Json = nlohmann::ordered_json;

class ScalingTest : public LocalTest {
 protected:
  ~ScalingTest() override {
    // Members first: one that lives on would only fill the log with its search for a coordinator.
    for (auto& [name, process] : pods_) {
      if (name != "coordinator") process.reset();
    }
  }

  // What the pod's container starts; its port file is where `zeroshard local` would have it.
  void StartPod(const std::string& name, const std::string& program,
                std::vector<std::string> args = {}) {
    std::filesystem::create_directories(WorkPath("w", "run"));
    const std::string port_file = WorkPath("w", absl::StrCat("run/", name, ".port"));
    std::filesystem::remove(port_file);
    std::vector<std::string> argv = {program,       "--listen",        "127.0.0.1:0",
                                     "--port-file", port_file,         "--metrics-listen",
                                     "127.0.0.1:0", "--health-listen", "127.0.0.1:0"};
    if (name == "coordinator") {
      args.insert(args.end(), {"--data-dir", WorkPath("w", "")});
    } else {
      args.insert(args.end(), {"--name", name, "--coordinator", AddressOf("w", "coordinator")});
    }
    argv.insert(argv.end(), args.begin(), args.end());
    pods_[name] =
        std::make_unique<Process>(argv, absl::StrCat(folder_, "/", name, "-", ++pods_made_));
    ASSERT_TRUE(Eventually(kPatience, [&] { return !AddressOf("w", name).empty(); })) << name;
  }
  void StartWorker(const std::string& name) {
    StartPod(name, ZEROSHARD_WORKER_PROGRAM, {"--threads", "1"});
  }
  // SIGTERM, and the end within what a pod is given.
  void EndPod(const std::string& name) {
    pods_[name]->Signal(SIGTERM);
    EXPECT_EQ(pods_[name]->Wait(absl::Seconds(60)), 0) << pods_[name]->Err();
    pods_.erase(name);
  }

  Json Ask(std::vector<std::string> args) {
    args.insert(args.end(), {"--output", "json", "--coordinator", AddressOf("w", "coordinator")});
    return Json::parse(Run(args)->Out(), nullptr, /*allow_exceptions=*/false);
  }
  Json Status() { return Ask({"status", "small"}); }
  // The members that have a rank of the job now.
  std::set<std::string> Ranks() {
    std::set<std::string> members;
    const Json status = Status();
    if (!status.is_object() || status["state"] != "RUNNING") return members;
    for (const Json& rank : status["ranks"]) members.insert(rank["member"].get<std::string>());
    return members;
  }
  std::set<std::string> Workers() {
    std::set<std::string> names;
    const Json nodes = Ask({"nodes"});
    if (!nodes.is_object()) return names;
    for (const Json& node : nodes["nodes"]) {
      if (node["hello"]["kind"] == "WORKER") names.insert(node["hello"]["name"].get<std::string>());
    }
    return names;
  }
  bool AwaitMoreSteps(size_t more) {
    const size_t before = History("w").size();
    return Eventually(kPatience, [&] { return History("w").size() >= before + more; });
  }
  // On these workers, and not standing still.
  void ExpectTrainingOn(const std::set<std::string>& workers) {
    EXPECT_TRUE(Eventually(kPatience, [&] { return Ranks() == workers; })) << Status();
    EXPECT_TRUE(AwaitMoreSteps(3)) << Status();
  }

  std::map<std::string, std::unique_ptr<Process>> pods_;

 private:
  int pods_made_ = 0;
};

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
