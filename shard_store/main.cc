// zeroshard-store: holds optimizer state of training jobs and serves it to workers.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/bulk/transport/channel_arguments.h"
#include "common/exit_codes.h"
#include "common/files.h"
#include "common/log.h"
#include "common/member/host_info.h"
#include "common/member/member_daemon.h"
#include "shard_store/host_sessions.h"
#include "shard_store/nvme/stale_files.h"
#include "shard_store/service/bulk_service.h"
#include "shard_store/service/peer_reader.h"
#include "shard_store/store_agent.h"
#include "shard_store/store_metrics.h"

namespace {

using namespace zeroshard;

// A peer that is asked for a chunk's state must go on answering within this.
constexpr absl::Duration kPeerTimeout = absl::Seconds(60);
// What is written when a store ends has this long; a file system that does not answer keeps no
// process for ever.
constexpr absl::Duration kEndTimeout = absl::Seconds(10);
// Stores that share an --nvme-dir take turns there, for as long as making a file takes.
constexpr absl::Duration kFolderTimeout = absl::Seconds(60);

// Makes the folder, removes what stores that were killed left there, and says what may be written
// into it: `limit`, or what is free then where that is less or nothing was said.
absl::StatusOr<uint64_t> NvmeBytes(const std::string& folder, uint64_t limit) {
  if (absl::Status made = MakeFolders(folder); !made.ok()) {
    return absl::Status(made.code(), absl::StrCat("--nvme-dir: ", made.message()));
  }
  if (absl::Status removed = nvme::RemoveStaleFiles(folder, kFolderTimeout); !removed.ok()) {
    return absl::Status(removed.code(), absl::StrCat("--nvme-dir: ", removed.message()));
  }
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (error) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--nvme-dir ", folder, ": how much is free there is not to be known: ", error.message()));
  }
  const uint64_t free = space.available;
  if (limit > free) {
    LogWarning("--nvme-limit ", limit, " is more than is free in ", folder, " (", free,
               " bytes); what is free counts");
  }
  return limit == 0 ? free : std::min(limit, free);
}

store::StoreReadings Read(store::StoreHost* host, uint64_t memory_limit, uint64_t nvme_limit) {
  store::StoreReadings readings;
  readings.usage = host->usage();
  const store::StoreHost::Traffic traffic = host->traffic();
  readings.pushed = traffic.pushed;
  readings.pulled = traffic.pulled;
  readings.copied = traffic.copied;
  readings.memory_limit = memory_limit;
  readings.memory_used = host->memory().used;
  readings.nvme_limit = nvme_limit;
  readings.jobs = host->jobs();
  readings.update_seconds = host->TakeUpdateSeconds();
  return readings;
}

}  // namespace

int main(int argc, char** argv) {
  bulk::KeepReceiveMemory();
  ShutdownSignal signal;
  MemberDaemonOptions options;
  options.kind = v1::MEMBER_KIND_STORE;
  options.program = "zeroshard-store";
  uint64_t memory_limit = MemoryLimitBytes();
  uint64_t nvme_limit = 0;
  store::StoreHostOptions host_options;
  host_options.threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));

  CLI::App app(
      "A shard store: keeps optimizer state of training jobs in this host's memory, or on its NVMe "
      "disk, and serves it to the workers. Registers with the coordinator and runs until SIGTERM "
      "or SIGINT. What it holds is gone when it ends, also what is on the disk: store.replicas in "
      "the job and checkpoints are for that.\n"
      "Example: zeroshard-store --coordinator 10.0.0.5:7070 --name store-0 --memory-limit 64GiB "
      "--nvme-dir /mnt/nvme0/zeroshard");
  AddMemberOptions(&app, &options);
  app.add_option(
         "--memory-limit", memory_limit,
         "Most bytes of state to hold in memory, for example 64GiB; of a job on disks these "
         "are its buffers. Default: this host's memory.")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::PositiveNumber);
  app.add_option("--nvme-dir", host_options.nvme_dir,
                 "Folder on a local disk, best on ext4 or XFS, for jobs with device: nvme: a file "
                 "of each, with its state, parameters and gradients. Made where it is not there. "
                 "What a store that was killed left in it is removed. Default: none, and no such "
                 "jobs here.");
  app.add_option("--nvme-limit", nvme_limit,
                 "Most bytes to write into --nvme-dir, for example 500GiB. Default: what is free "
                 "there when the store starts.")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", host_options.threads,
                 "Threads that compute updates. Default: one a core.")
      ->check(CLI::Range(1, 4096));
  double shutdown_grace = 30;
  app.add_option(
         "--shutdown-grace", shutdown_grace,
         "Seconds that the jobs whose chunks are here alone have to write a checkpoint when "
         "this store is told to leave (SIGTERM, SIGINT). 0: it leaves at once. Give the process "
         "15 s more than this before it is killed")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  bool go_on = false;
  if (const int code = ParseOrExitCode(&app, argc, argv, &go_on); !go_on) return code;
  if (host_options.nvme_dir.empty() && nvme_limit != 0) {
    return ReportFailure(options.program,
                         absl::InvalidArgumentError("--nvme-limit needs --nvme-dir"));
  }
  if (memory_limit > MemoryLimitBytes()) {
    LogWarning("--memory-limit ", memory_limit, " is more than this host has (", MemoryLimitBytes(),
               " bytes); the host's memory counts");
    memory_limit = MemoryLimitBytes();
  }
  if (!host_options.nvme_dir.empty()) {
    auto bytes = NvmeBytes(host_options.nvme_dir, nvme_limit);
    if (!bytes.ok()) return ReportFailure(options.program, bytes.status());
    host_options.nvme_limit = *bytes;
  }

  store::StoreAgent agent;
  host_options.memory_limit = memory_limit;
  host_options.on_report = [&agent](const v1::StoreReport& report) { agent.OnReport(report); };
  host_options.connect_peer = [](const v1::StoreMap::Store& peer, const v1::BulkHello& hello) {
    return store::ConnectPeer(peer, hello, kPeerTimeout);
  };
  const uint64_t nvme_bytes = host_options.nvme_limit;
  const auto threads = static_cast<uint32_t>(host_options.threads);
  store::StoreHost host(std::move(host_options));
  agent.SetHost(&host);

  store::BulkService service(store::SessionsOf(&host));
  options.services = {&service};
  options.max_message_bytes = bulk::kMaxMessageBytes;
  options.arguments = bulk::BulkArguments();
  auto daemon = MemberDaemon::Start(options);
  if (!daemon.ok()) return ReportFailure(options.program, daemon.status());
  const auto metrics = std::make_shared<store::StoreMetrics>(
      [&host, memory_limit, nvme_bytes] { return Read(&host, memory_limit, nvme_bytes); });
  (*daemon)->metrics().AddCollectable(metrics);

  MemberSessionOptions session_options;
  session_options.coordinator = options.coordinator;
  session_options.hello = (*daemon)->MakeHello();
  session_options.hello.set_threads(threads);
  session_options.hello.set_memory_bytes(memory_limit);
  session_options.hello.set_nvme_bytes(nvme_bytes);
  MemberSession session(session_options, &agent);
  agent.SetSession(&session);
  const int code = (*daemon)->ServeUntilSignal(&signal, &session, [&](const std::string&) {
    if (shutdown_grace > 0) agent.AwaitLeave(absl::Seconds(shutdown_grace));
  });
  // In the order in which they use each other.
  agent.SetSession(nullptr);
  if (const absl::Status ended = host.Finish(kEndTimeout); !ended.ok()) {
    LogError("this store ends without what it still had under way ", ended.message());
    _exit(code);
  }
  return code;
}
