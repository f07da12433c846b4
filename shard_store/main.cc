// zeroshard-store: holds optimizer state in host memory. This version registers, is seen alive and
// healthy, and holds nothing yet.
#include <algorithm>

#include "common/exit_codes.h"
#include "common/log.h"
#include "common/member/host_info.h"
#include "common/member/member_daemon.h"
#include "shard_store/store_metrics.h"

int main(int argc, char** argv) {
  using namespace zeroshard;
  ShutdownSignal signal;
  MemberDaemonOptions options;
  options.kind = v1::MEMBER_KIND_STORE;
  options.program = "zeroshard-store";
  uint64_t memory_limit = MemoryLimitBytes();

  CLI::App app(
      "A shard store: keeps optimizer state of training jobs in this host's memory and serves it "
      "to "
      "the workers. Registers with the coordinator and runs until SIGTERM or SIGINT.\n"
      "Example: zeroshard-store --coordinator 10.0.0.5:7070 --name store-0 --memory-limit 64GiB");
  AddMemberOptions(&app, &options);
  app.add_option("--memory-limit", memory_limit,
                 "Most bytes of state to hold, for example 64GiB. Default: this host's memory.")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::PositiveNumber);
  bool go_on = false;
  if (const int code = ParseOrExitCode(&app, argc, argv, &go_on); !go_on) return code;

  auto daemon = MemberDaemon::Start(options);
  if (!daemon.ok()) return ReportFailure(options.program, daemon.status());
  AddStoreMetrics((*daemon)->metrics().registry().get());
  if (memory_limit > MemoryLimitBytes()) {
    LogWarning("--memory-limit ", memory_limit, " is more than this host has (", MemoryLimitBytes(),
               " bytes); the host's memory counts");
  }

  MemberHandler idle;  // nothing is assigned to a store of this version
  MemberSessionOptions session_options;
  session_options.coordinator = options.coordinator;
  session_options.hello = (*daemon)->MakeHello();
  session_options.hello.set_memory_bytes(std::min(memory_limit, MemoryLimitBytes()));
  MemberSession session(session_options, &idle);
  return (*daemon)->ServeUntilSignal(&signal, &session, [](const std::string&) {});
}
