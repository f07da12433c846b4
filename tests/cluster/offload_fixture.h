// Offloaded variants of the small job, and what a run of it came to.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/cluster/local_fixture.h"

namespace zeroshard::cluster {

class OffloadTest : public LocalTest {
 protected:
  struct Result {
    std::vector<std::string> history;  // WithoutCosts
    uint64_t steps_lost = 0;           // that the history tells of
    std::string digest;                // of the weights
    nlohmann::ordered_json status;     // the last
  };

  // Arguments of `zeroshard local`.
  static std::vector<std::string> Model(const std::string& architecture);
  static std::vector<std::string> Offload(int stores, int replicas, bool parameters,
                                          const std::string& device = "cpu");
  static std::vector<std::string> Endless(std::vector<std::string> args);
  // An offloaded bf16 job with enough steps for something to die in the middle.
  static std::vector<std::string> Endurance(int stores, int replicas, bool parameters = false,
                                            const std::string& device = "cpu");

  // With JSON output.
  std::unique_ptr<Process> StartJson(const std::string& workdir,
                                     const std::vector<std::string>& args);
  // Waits until the job has completed.
  Result Finish(const std::string& workdir, Process* local);
  Result Train(const std::string& workdir, const std::vector<std::string>& args);
  // The same job when nothing happens to it.
  Result Undisturbed(const std::vector<std::string>& args) { return Train("undisturbed", args); }

  // Whether an update said that the job was in that state.
  static bool SawState(const Process& local, const std::string& state);
  std::string MemberOfRank(const std::string& workdir, int rank);
  // The manifest of one.
  std::string Checkpoint(const std::string& workdir, int step) const;
  void ExpectSound(const std::string& checkpoints);
};

}  // namespace zeroshard::cluster
