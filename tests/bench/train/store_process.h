// A shard store as a process of its own, with as much of a coordinator as decides steps: what an
// offloaded job's ranks talk to in a benchmark.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard::bench {

class StoreProcess {
 public:
  // Forks: not where this process has threads. The store begins to fill the state of this job,
  // whose specification is normalised, and updates it with `threads`. Decisions are written to a
  // file in `folder` and synced before anybody hears of them.
  static absl::StatusOr<std::unique_ptr<StoreProcess>> Start(const v1::JobSpec& spec, int threads,
                                                             const std::string& folder);
  // Ends it and waits for that.
  ~StoreProcess();
  StoreProcess(const StoreProcess&) = delete;
  StoreProcess& operator=(const StoreProcess&) = delete;

  // Both services': 127.0.0.1 and a port.
  const std::string& address() const { return address_; }
  // What a coordinator would tell a rank of the job.
  v1::Assign Assignment(int rank, int ranks) const;

 private:
  StoreProcess() = default;

  v1::JobSpec spec_;
  std::string address_;
  pid_t pid_ = -1;
  int end_ = -1;  // closing it ends the process
};

}  // namespace zeroshard::bench
