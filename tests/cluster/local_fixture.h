// A small job and `zeroshard local` runs of it.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cluster/process.h"

namespace zeroshard::cluster {

// Generous: sanitizers and a busy machine are slow.
inline constexpr absl::Duration kPatience = absl::Seconds(120);

class LocalTest : public testing::Test {
 protected:
  LocalTest();
  ~LocalTest() override;

  // `zeroshard local` with `workers_` workers of one thread; `workdir` is a folder of the test's.
  std::unique_ptr<Process> StartLocal(const std::string& workdir,
                                      const std::vector<std::string>& more = {});
  // Any other command, to its end.
  std::unique_ptr<Process> Run(const std::vector<std::string>& args);

  std::string WorkPath(const std::string& workdir, const std::string& path) const {
    return folder_ + "/" + workdir + "/" + path;
  }
  std::vector<std::string> History(const std::string& workdir) const;
  // True once the job has done that many steps; fails the test if it never does.
  bool AwaitSteps(const std::string& workdir, size_t steps, Process* local);

  // Of a daemon, from its port file; 0 or empty while there is none.
  pid_t PidOf(const std::string& workdir, const std::string& daemon) const;
  std::string AddressOf(const std::string& workdir, const std::string& daemon) const;
  // What the last status said that `zeroshard local --output json` printed.
  static nlohmann::ordered_json LastStatus(const Process& local);
  // Of every daemon that has a port file.
  std::vector<pid_t> AllPids(const std::string& workdir) const;
  void ExpectAllGone(const std::vector<pid_t>& pids);

  // "worker-1", by its port file.
  std::vector<std::string> Daemons(const std::string& workdir) const;

  std::string folder_;
  std::string job_;
  std::string program_;
  int workers_ = 2;

 private:
  int processes_ = 0;
};

// The lines without what differs between runs that trained the same: how long steps took, and how
// many were done again.
std::vector<std::string> WithoutCosts(const std::vector<std::string>& history);

}  // namespace zeroshard::cluster
