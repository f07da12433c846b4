// A cluster whose members are processes of their own, as pods are: nobody starts them again.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/cluster/local_fixture.h"

namespace zeroshard::cluster {

class PodsTest : public LocalTest {
 protected:
  ~PodsTest() override;

  // What the pod's container starts; its port file is where `zeroshard local` would have it.
  void StartPod(const std::string& name, const std::string& program,
                std::vector<std::string> args = {});
  void StartWorker(const std::string& name);
  // SIGTERM, and the end within what a pod is given.
  void EndPod(const std::string& name);
  // SIGKILL, and its port file goes.
  void KillPod(const std::string& name);
  void Submit(const std::vector<std::string>& args);

  nlohmann::ordered_json Ask(std::vector<std::string> args);
  nlohmann::ordered_json Status() { return Ask({"status", "small"}); }
  // The members that have a rank of the job now.
  std::set<std::string> Ranks();
  std::set<std::string> Workers();
  bool AwaitMoreSteps(size_t more);
  // On these workers, and not standing still.
  void ExpectTrainingOn(const std::set<std::string>& workers);

  std::map<std::string, std::unique_ptr<Process>> pods_;

 private:
  int pods_made_ = 0;
};

}  // namespace zeroshard::cluster
