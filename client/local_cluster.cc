#include "client/local_cluster.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "common/exit_codes.h"
#include "common/files.h"
#include "common/status_macros.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kStartDeadline = absl::Seconds(60);
constexpr absl::Duration kPollInterval = absl::Milliseconds(50);
constexpr int kMostDeathsInARow = 5;
// A daemon that lived this long starts with a clean record.
constexpr absl::Duration kHealthyAfter = absl::Seconds(30);
constexpr absl::Duration kReportDeadline = absl::Seconds(30);

// 0.25, 0.5, 1, 2 and 4 s: there is no sixth.
absl::Duration BackoffAfter(int deaths) {
  return absl::Milliseconds(250) * (1 << (std::min(deaths, kMostDeathsInARow) - 1));
}

}  // namespace

LocalCluster::LocalCluster(LocalClusterOptions options, const Clock* clock, Pause pause,
                           Notice notice)
    : options_(std::move(options)),
      clock_(clock),
      pause_(std::move(pause)),
      notice_(std::move(notice)) {
  int metrics_port = options_.metrics_base_port;
  const auto add = [&](const std::string& name, const std::string& program) -> Daemon& {
    Daemon& daemon = daemons_.emplace_back();
    daemon.name = name;
    daemon.program = program;
    daemon.listen = "127.0.0.1:0";
    daemon.metrics_listen = absl::StrCat("127.0.0.1:", metrics_port);
    if (metrics_port != 0) ++metrics_port;
    return daemon;
  };
  add("coordinator", "zeroshard-coordinator").coordinator = true;
  for (int i = 0; i < options_.workers; ++i) {
    add(absl::StrCat("worker-", i), "zeroshard-worker");
  }
  for (int i = 0; i < options_.stores; ++i) {
    add(absl::StrCat("store-", i), "zeroshard-store").store = true;
  }
}

LocalCluster::~LocalCluster() { Stop(absl::ZeroDuration()); }

std::string LocalCluster::PathOf(const Daemon& daemon, absl::string_view folder,
                                 absl::string_view ending) const {
  return absl::StrCat(options_.workdir, "/", folder, "/", daemon.name, ending);
}

absl::StatusOr<std::string> LocalCluster::FindProgram(const Daemon& daemon) const {
  for (const std::string& folder : options_.bin_dirs) {
    const std::string path = absl::StrCat(folder, "/", daemon.program);
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return absl::NotFoundError(absl::StrCat("the program ", daemon.program, " is not in ",
                                          absl::StrJoin(options_.bin_dirs, ", "),
                                          "; build it, or say where it is with --bin-dir DIR"));
}

absl::Status LocalCluster::Start(Daemon* daemon) {
  ZS_ASSIGN_OR_RETURN(const std::string program, FindProgram(*daemon));
  const std::string port_file = PathOf(*daemon, "run", ".port");
  ZS_RETURN_IF_ERROR(MakeFolders(absl::StrCat(options_.workdir, "/run")));
  ZS_RETURN_IF_ERROR(MakeFolders(log_folder()));
  std::error_code ignored;
  std::filesystem::remove(port_file, ignored);

  std::vector<std::string> argv = {
      program,       "--listen", daemon->listen, "--metrics-listen", daemon->metrics_listen,
      "--port-file", port_file};
  const auto option = [&](const std::string& name, const std::string& value) {
    argv.push_back(name);
    argv.push_back(value);
  };
  if (daemon->coordinator) {
    option("--data-dir", options_.workdir);
  } else {
    option("--coordinator", coordinator_address());
    option("--name", daemon->name);
    if (!daemon->store) {
      option("--threads", absl::StrCat(options_.threads));
    } else {
      if (options_.store_memory > 0) option("--memory-limit", absl::StrCat(options_.store_memory));
      if (options_.nvme) {
        option("--nvme-dir", PathOf(*daemon, "nvme", ""));
        if (options_.store_nvme > 0) option("--nvme-limit", absl::StrCat(options_.store_nvme));
      }
    }
  }
  ZS_ASSIGN_OR_RETURN(daemon->pid, SpawnChild(argv, PathOf(*daemon, "logs", ".log")));
  daemon->started_at = clock_->Now();
  daemon->waiting = false;
  return absl::OkStatus();
}

std::string LocalCluster::LastWords(const Daemon& daemon) const {
  constexpr size_t kLongest = 500;
  constexpr std::streamoff kTail = 8192;
  std::ifstream log(PathOf(daemon, "logs", ".log"), std::ios::ate);
  const std::streamoff size = log.tellg();
  if (size < 0) return "";
  log.seekg(std::max<std::streamoff>(0, size - kTail));
  std::string last;
  for (std::string line; std::getline(log, line);) {
    if (!line.empty()) last = line;
  }
  return last.substr(0, kLongest);
}

absl::Status LocalCluster::EndedEarly(const Daemon& daemon, const ExitInfo& exit) const {
  const std::string words = LastWords(daemon);
  const std::string message = absl::StrCat(daemon.name, " ", exit.ToString(),
                                           " before it was ready", words.empty() ? "" : ": ", words,
                                           " (log: ", PathOf(daemon, "logs", ".log"), ")");
  switch (exit.signal == 0 ? exit.exit_code : -1) {
    case kExitUsage:
      return absl::InvalidArgumentError(message);
    case kExitUnavailable:
      return absl::UnavailableError(message);
    case kExitConflict:
      return absl::FailedPreconditionError(message);
    case kExitNotFound:
      return absl::NotFoundError(message);
    default:
      return absl::InternalError(message);
  }
}

absl::Status LocalCluster::AwaitPorts(Daemon* daemon) {
  const absl::Duration deadline = clock_->Now() + kStartDeadline;
  while (true) {
    // Exit first: a daemon that wrote the file and then died is not ready.
    if (const auto exit = ReapChild(daemon->pid)) {
      daemon->pid = 0;
      return EndedEarly(*daemon, *exit);
    }
    const absl::StatusOr<PortFile> ports = ReadPortFile(PathOf(*daemon, "run", ".port"));
    if (ports.ok()) {
      daemon->grpc = ports->grpc;
      daemon->metrics = ports->metrics;
      return absl::OkStatus();
    }
    if (!absl::IsNotFound(ports.status())) return ports.status();
    if (clock_->Now() > deadline) {
      return absl::UnavailableError(absl::StrCat(daemon->name, " did not listen within ",
                                                 absl::FormatDuration(kStartDeadline),
                                                 " (log: ", PathOf(*daemon, "logs", ".log"), ")"));
    }
    ZS_RETURN_IF_ERROR(pause_(kPollInterval));
  }
}

absl::Status LocalCluster::StartCoordinator() {
  Daemon& coordinator = daemons_.front();
  ZS_RETURN_IF_ERROR(Start(&coordinator));
  ZS_RETURN_IF_ERROR(AwaitPorts(&coordinator));
  // A coordinator that is started again must be found where its members look for it.
  coordinator.listen = coordinator.grpc;
  if (!coordinator.metrics.empty()) coordinator.metrics_listen = coordinator.metrics;
  ZS_ASSIGN_OR_RETURN(reporter_, JobsClient::Create(coordinator.grpc, absl::Seconds(2)));
  return absl::OkStatus();
}

absl::Status LocalCluster::StartMembers(JobsClient* client) {
  for (Daemon& daemon : daemons_) {
    if (!daemon.coordinator) ZS_RETURN_IF_ERROR(Start(&daemon));
  }
  for (Daemon& daemon : daemons_) {
    if (!daemon.coordinator) ZS_RETURN_IF_ERROR(AwaitPorts(&daemon));
  }
  const absl::Duration deadline = clock_->Now() + kStartDeadline;
  while (true) {
    std::set<std::string> members;
    const absl::StatusOr<v1::NodesResponse> nodes = client->Nodes();
    if (nodes.ok()) {
      for (const v1::Node& node : nodes->nodes()) {
        if (node.state() != "lost") members.insert(node.hello().name());
      }
    }
    std::vector<std::string> missing;
    for (Daemon& daemon : daemons_) {
      if (const auto exit = ReapChild(daemon.pid)) {
        daemon.pid = 0;
        return EndedEarly(daemon, *exit);
      }
      if (!daemon.coordinator && members.count(daemon.name) == 0) missing.push_back(daemon.name);
    }
    if (missing.empty()) return absl::OkStatus();
    if (clock_->Now() > deadline) {
      return absl::UnavailableError(
          absl::StrCat(absl::StrJoin(missing, ", "), " did not join the coordinator within ",
                       absl::FormatDuration(kStartDeadline), "; see ", log_folder()));
    }
    ZS_RETURN_IF_ERROR(pause_(kPollInterval));
  }
}

absl::Status LocalCluster::HandleDeath(Daemon* daemon, const ExitInfo& exit) {
  const absl::Duration now = clock_->Now();
  if (!daemon->coordinator) {
    v1::ReportExitRequest request;
    request.set_member(daemon->name);
    request.set_pid(daemon->pid);
    request.set_exit_code(exit.exit_code);
    request.set_signal(exit.signal);
    reports_.push_back({request, now + kReportDeadline});
    report_at_ = now;
  }
  daemon->pid = 0;
  daemon->deaths = now - daemon->started_at > kHealthyAfter ? 1 : daemon->deaths + 1;
  const std::string what = absl::StrCat(daemon->name, " ", exit.ToString());
  if (daemon->deaths > kMostDeathsInARow) {
    const std::string message =
        absl::StrCat(what, ", for the ", daemon->deaths,
                     "th time in a row; it is not started again: ", LastWords(*daemon),
                     " (log: ", PathOf(*daemon, "logs", ".log"), ")");
    daemon->given_up = true;
    if (daemon->coordinator) return absl::InternalError(message);
    const int needed = daemon->store ? options_.needed_stores : options_.needed_workers;
    if (const int left = Left(daemon->store); left < needed) {
      const char* what = daemon->store ? "store" : "worker";
      return absl::InternalError(absl::StrCat(
          message, "; ", left, " ", what, left == 1 ? " is" : "s are", " left, the job needs ",
          needed, ": see why it dies", daemon->store ? "" : ", or run with fewer --workers"));
    }
    notice_(message);
    return absl::OkStatus();
  }
  daemon->waiting = true;
  daemon->restart_at = now + BackoffAfter(daemon->deaths);
  notice_(absl::StrCat(what, "; it is started again"));
  return absl::OkStatus();
}

int LocalCluster::Left(bool stores) const {
  return static_cast<int>(
      std::count_if(daemons_.begin(), daemons_.end(), [stores](const Daemon& daemon) {
        return !daemon.coordinator && daemon.store == stores && !daemon.given_up;
      }));
}

void LocalCluster::SendReports() {
  constexpr absl::Duration kRetry = absl::Milliseconds(500);
  while (!reports_.empty() && clock_->Now() >= report_at_) {
    const absl::Status status = reporter_->ReportExit(reports_.front().request);
    // Only a coordinator that is away is worth another try.
    if (absl::IsUnavailable(status) && clock_->Now() < reports_.front().until) {
      report_at_ = clock_->Now() + kRetry;
      return;
    }
    reports_.pop_front();
  }
}

absl::Status LocalCluster::Supervise() {
  for (Daemon& daemon : daemons_) {
    if (daemon.pid != 0) {
      if (const auto exit = ReapChild(daemon.pid)) ZS_RETURN_IF_ERROR(HandleDeath(&daemon, *exit));
    } else if (daemon.waiting && clock_->Now() >= daemon.restart_at) {
      ZS_RETURN_IF_ERROR(Start(&daemon));
    }
  }
  SendReports();
  return absl::OkStatus();
}

void LocalCluster::EndGroup(bool coordinator, absl::Duration deadline) {
  const auto each = [&](const auto& act) {
    for (Daemon& daemon : daemons_) {
      if (daemon.coordinator == coordinator && daemon.pid != 0) act(&daemon);
    }
  };
  bool any = false;
  each([&](Daemon* daemon) {
    any = true;
    kill(daemon->pid, SIGTERM);
  });
  bool killed = false;
  while (any) {
    any = false;
    each([&](Daemon* daemon) {
      if (ReapChild(daemon->pid)) {
        daemon->pid = 0;
      } else {
        any = true;
        if (!killed && clock_->Now() >= deadline) kill(daemon->pid, SIGKILL);
      }
    });
    killed = killed || clock_->Now() >= deadline;
    if (any) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void LocalCluster::Stop(absl::Duration grace) {
  EndGroup(/*coordinator=*/false, clock_->Now() + grace);
  EndGroup(/*coordinator=*/true, clock_->Now() + grace);
}

std::vector<std::pair<std::string, std::string>> LocalCluster::MetricsAddresses() const {
  std::vector<std::pair<std::string, std::string>> addresses;
  for (const Daemon& daemon : daemons_) {
    if (!daemon.metrics.empty()) addresses.emplace_back(daemon.name, daemon.metrics);
  }
  return addresses;
}

}  // namespace zeroshard
