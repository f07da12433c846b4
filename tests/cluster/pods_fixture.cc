#include "tests/cluster/pods_fixture.h"

#include <signal.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zeroshard::cluster {

using Json = nlohmann::ordered_json;

PodsTest::~PodsTest() {
  // Members first: one that lives on would only fill the log with its search for a coordinator.
  for (auto& [name, process] : pods_) {
    if (name != "coordinator") process.reset();
  }
}

void PodsTest::StartPod(const std::string& name, const std::string& program,
                        std::vector<std::string> args) {
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

void PodsTest::StartWorker(const std::string& name) {
  StartPod(name, ZEROSHARD_WORKER_PROGRAM, {"--threads", "1"});
}

void PodsTest::EndPod(const std::string& name) {
  pods_[name]->Signal(SIGTERM);
  EXPECT_EQ(pods_[name]->Wait(absl::Seconds(60)), 0) << pods_[name]->Err();
  pods_.erase(name);
}

void PodsTest::KillPod(const std::string& name) {
  pods_[name]->Signal(SIGKILL);
  EXPECT_EQ(pods_[name]->Wait(kPatience), 128 + SIGKILL);
  pods_.erase(name);
}

void PodsTest::Submit(const std::vector<std::string>& args) {
  std::vector<std::string> command = {"submit", job_, "--coordinator",
                                      AddressOf("w", "coordinator")};
  command.insert(command.end(), args.begin(), args.end());
  const auto submitted = Run(command);
  ASSERT_EQ(submitted->Wait(kPatience), 0) << submitted->Err();
}

Json PodsTest::Ask(std::vector<std::string> args) {
  args.insert(args.end(), {"--output", "json", "--coordinator", AddressOf("w", "coordinator")});
  return Json::parse(Run(args)->Out(), nullptr, /*allow_exceptions=*/false);
}

std::set<std::string> PodsTest::Ranks() {
  std::set<std::string> members;
  const Json status = Status();
  if (!status.is_object() || status["state"] != "RUNNING") return members;
  for (const Json& rank : status["ranks"]) members.insert(rank["member"].get<std::string>());
  return members;
}

std::set<std::string> PodsTest::Workers() {
  std::set<std::string> names;
  const Json nodes = Ask({"nodes"});
  if (!nodes.is_object()) return names;
  for (const Json& node : nodes["nodes"]) {
    if (node["hello"]["kind"] == "WORKER") names.insert(node["hello"]["name"].get<std::string>());
  }
  return names;
}

bool PodsTest::AwaitMoreSteps(size_t more) {
  const size_t before = History("w").size();
  return Eventually(kPatience, [&] { return History("w").size() >= before + more; });
}

void PodsTest::ExpectTrainingOn(const std::set<std::string>& workers) {
  EXPECT_TRUE(Eventually(kPatience, [&] { return Ranks() == workers; })) << Status();
  EXPECT_TRUE(AwaitMoreSteps(3)) << Status();
}

}  // namespace zeroshard::cluster
