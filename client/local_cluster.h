// A coordinator, workers and shard stores as children of this process, on free ports of 127.0.0.1.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/child_process.h"
#include "client/jobs_client.h"
#include "common/clock.h"
#include "zeroshard/v1/cluster.pb.h"

namespace zeroshard {

struct LocalClusterOptions {
  std::string workdir;                // absolute; the coordinator's data folder
  std::vector<std::string> bin_dirs;  // where the daemons are looked for, first one first
  int workers = 1;
  int needed_workers = 1;  // what the job wants: with fewer left, there is nothing to wait for
  int stores = 0;
  int needed_stores = 0;      // likewise
  uint64_t store_memory = 0;  // most bytes that each store process takes; 0: its own default
  bool nvme = false;          // stores get a folder in the workdir for state on the disk
  uint64_t store_nvme = 0;    // most bytes that each of those may hold; 0: what is free
  int threads = 1;            // of each worker
  int metrics_base_port = 0;  // 0: free ports; else coordinator, workers, stores in a row
};

// Starts the daemons, restarts those that die, tells the coordinator how they died, and ends them
// all. To be used from the main thread alone (see SpawnChild).
class LocalCluster {
 public:
  // Waits for the given time; an error ends what is going on (the user wants to stop).
  using Pause = std::function<absl::Status(absl::Duration)>;
  // Something worth a line: a daemon died, was restarted, was given up.
  using Notice = std::function<void(const std::string&)>;

  LocalCluster(LocalClusterOptions options, const Clock* clock, Pause pause, Notice notice);
  // Kills whatever Stop has not ended.
  ~LocalCluster();

  // Until the coordinator serves. NOT_FOUND: a program is missing; UNAVAILABLE,
  // FAILED_PRECONDITION: it ended (its last words are in the message) or did not come up within a
  // minute.
  absl::Status StartCoordinator();
  // Until every worker and store is a member. Likewise.
  absl::Status StartMembers(JobsClient* client);

  // Looks after the children; call it a few times a second. Returns an error when the coordinator
  // died too often to be started again, or so many workers or stores did that fewer than needed are
  // left.
  absl::Status Supervise();

  // Asks all to end, members first, and kills what has not within the grace period.
  void Stop(absl::Duration grace);

  const std::string& coordinator_address() const { return daemons_.front().grpc; }
  // Name and host:port of every daemon that serves metrics.
  std::vector<std::pair<std::string, std::string>> MetricsAddresses() const;
  std::string log_folder() const { return options_.workdir + "/logs"; }

 private:
  struct Daemon {
    std::string name;
    std::string program;
    bool coordinator = false;
    bool store = false;
    std::string listen;
    std::string metrics_listen;
    std::string grpc;  // where it listens, once known
    std::string metrics;
    pid_t pid = 0;   // 0: not running
    int deaths = 0;  // in a row
    absl::Duration started_at;
    absl::Duration restart_at;
    bool waiting = false;   // to be started again at restart_at
    bool given_up = false;  // died too often
  };
  struct Report {
    v1::ReportExitRequest request;
    absl::Duration until;
  };

  std::string PathOf(const Daemon& daemon, absl::string_view folder,
                     absl::string_view ending) const;
  absl::StatusOr<std::string> FindProgram(const Daemon& daemon) const;
  absl::Status Start(Daemon* daemon);
  // Reads the port file until it is there, or the daemon ended.
  absl::Status AwaitPorts(Daemon* daemon);
  absl::Status EndedEarly(const Daemon& daemon, const ExitInfo& exit) const;
  std::string LastWords(const Daemon& daemon) const;
  absl::Status HandleDeath(Daemon* daemon, const ExitInfo& exit);
  int Left(bool stores) const;
  void SendReports();
  void EndGroup(bool coordinator, absl::Duration deadline);

  const LocalClusterOptions options_;
  const Clock* const clock_;
  const Pause pause_;
  const Notice notice_;
  std::deque<Daemon> daemons_;  // the coordinator first
  std::unique_ptr<JobsClient> reporter_;
  std::deque<Report> reports_;
  absl::Duration report_at_;
};

}  // namespace zeroshard
