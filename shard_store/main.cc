// zeroshard-store: holds optimizer state of training jobs and serves it to workers.
#include <unistd.h>

#include <memory>

#include "common/bulk/transport/channel_arguments.h"
#include "common/exit_codes.h"
#include "common/log.h"
#include "common/member/host_info.h"
#include "common/member/member_daemon.h"
#include "shard_store/host_sessions.h"
#include "shard_store/process_memory.h"
#include "shard_store/service/bulk_service.h"
#include "shard_store/service/peer_reader.h"
#include "shard_store/store_agent.h"
#include "shard_store/store_metrics.h"
#include "shard_store/store_options.h"

namespace {

using namespace zeroshard;

// A peer that is asked for a chunk's state must go on answering within this.
constexpr absl::Duration kPeerTimeout = absl::Seconds(60);
// What is written when a store ends has this long; a file system that does not answer keeps no
// process for ever.
constexpr absl::Duration kEndTimeout = absl::Seconds(10);

store::StoreReadings Read(store::StoreHost* host, uint64_t memory_limit, uint64_t nvme_limit) {
  store::StoreReadings readings;
  readings.usage = host->usage();
  const store::StoreHost::Traffic traffic = host->traffic();
  readings.pushed = traffic.pushed;
  readings.pulled = traffic.pulled;
  readings.copied = traffic.copied;
  readings.memory_limit = memory_limit;
  readings.memory_used = host->memory().used;
  readings.buffer_bytes = host->buffer_bytes();
  readings.nvme_limit = nvme_limit;
  readings.jobs = host->jobs();
  readings.disk_read = host->disk_io().read_bytes;
  readings.disk_written = host->disk_io().written_bytes;
  readings.disk_errors = host->disk_io().errors;
  readings.snapshot_seconds = host->TakeSnapshotSeconds();
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
  store::StoreOptions store_options;

  CLI::App app(
      "A shard store: keeps optimizer state of training jobs in this host's memory, or on its NVMe "
      "disk, and serves it to the workers. Registers with the coordinator and runs until SIGTERM "
      "or SIGINT. What it holds is gone when it ends, also what is on the disk: store.replicas in "
      "the job and checkpoints are for that.\n"
      "Example: zeroshard-store --coordinator 10.0.0.5:7070 --name store-0 --memory-limit 64GiB "
      "--nvme-dir /mnt/nvme0/zeroshard");
  AddMemberOptions(&app, &options);
  store::AddStoreOptions(&app, &store_options);
  bool go_on = false;
  if (const int code = ParseOrExitCode(&app, argc, argv, &go_on); !go_on) return code;
  uint64_t memory_limit = store_options.memory_limit;
  if (memory_limit > MemoryLimitBytes()) {
    LogWarning("--memory-limit ", memory_limit, " is more than this host has (", MemoryLimitBytes(),
               " bytes); the host's memory counts");
    memory_limit = MemoryLimitBytes();
  }
  const auto state_bytes =
      store::StateBytes(memory_limit, store::ResidentBytes(), store_options.threads);
  if (!state_bytes.ok()) return ReportFailure(options.program, state_bytes.status());
  const auto nvme_limit = store::PrepareNvme(store_options);
  if (!nvme_limit.ok()) return ReportFailure(options.program, nvme_limit.status());

  store::StoreAgent agent;
  store::StoreHostOptions host_options;
  host_options.threads = store_options.threads;
  host_options.memory_limit = *state_bytes;
  host_options.nvme_dir = store_options.nvme_dir;
  host_options.nvme_limit = *nvme_limit;
  host_options.on_report = [&agent](const v1::StoreReport& report) { agent.OnReport(report); };
  host_options.incarnation = [&agent] { return agent.incarnation(); };
  host_options.connect_peer = [](const v1::StoreMap::Store& peer, const v1::BulkHello& hello) {
    return store::ConnectPeer(peer, hello, kPeerTimeout);
  };
  const uint64_t nvme_bytes = *nvme_limit;
  store::StoreHost host(std::move(host_options));
  agent.SetHost(&host);

  store::BulkService service(store::SessionsOf(&host));
  options.services = {&service};
  options.max_message_bytes = bulk::kMaxMessageBytes;
  options.arguments = bulk::BulkArguments();
  auto daemon = MemberDaemon::Start(options);
  if (!daemon.ok()) return ReportFailure(options.program, daemon.status());
  const auto metrics = std::make_shared<store::StoreMetrics>(
      [&host, memory = *state_bytes, nvme_bytes] { return Read(&host, memory, nvme_bytes); });
  (*daemon)->metrics().AddCollectable(metrics);

  MemberSessionOptions session_options;
  session_options.coordinator = options.coordinator;
  session_options.hello = (*daemon)->MakeHello();
  session_options.hello.set_threads(static_cast<uint32_t>(store_options.threads));
  session_options.hello.set_memory_bytes(*state_bytes);
  session_options.hello.set_nvme_bytes(nvme_bytes);
  MemberSession session(session_options, &agent);
  agent.SetSession(&session);
  const int code = (*daemon)->ServeUntilSignal(&signal, &session, [&](const std::string&) {
    const double grace = store_options.shutdown_grace;
    if (grace > 0) agent.AwaitLeave(absl::Seconds(grace));
  });
  // In the order in which they use each other.
  agent.SetSession(nullptr);
  if (const absl::Status ended = host.Finish(kEndTimeout); !ended.ok()) {
    LogError("this store ends without what it still had under way ", ended.message());
    _exit(code != kExitOk ? code : ExitCodeFor(ended));
  }
  return code;
}
