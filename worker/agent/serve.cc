#include "worker/agent/serve.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <thread>
#include <utility>

#include "common/exit_codes.h"
#include "common/log.h"
#include "worker/agent/worker_agent.h"

namespace zeroshard {
namespace {

// What a job has to end once it is stopped.
constexpr absl::Duration kStop = absl::Seconds(20);

}  // namespace

void AddWorkerOptions(CLI::App* app, WorkerOptions* options) {
  options->member.kind = v1::MEMBER_KIND_WORKER;
  options->member.program = "zeroshard-worker";
  options->threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  AddMemberOptions(app, &options->member);
  app->add_option("--device", options->device,
                  "What to compute on: cpu, cuda or cuda:N, the host's GPU of that number.")
      ->capture_default_str();
  app->add_option("--collectives", options->collectives,
                  "What exchanges data between ranks: nccl (the default with --device cuda) or "
                  "gloo, which goes through host memory, so that workers may share a GPU. The same "
                  "for all workers.");
  app->add_option("--threads", options->threads,
                  "Threads for computing. With several workers on a host, give each its share.")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  app->add_option(
         "--shutdown-grace", options->shutdown_grace_seconds,
         "Seconds that a job with a checkpoint section has to write a checkpoint when this "
         "worker is told to leave (SIGTERM, SIGINT). 0: it is stopped at once.")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
  app->add_option("--memory-limit", options->memory_limit,
                  "What a job may take of the device's memory, for example 60GiB: jobs whose plan "
                  "takes more are not placed here. Default: all that the GPU has, or that the host "
                  "or this process's control group has for its workers together.")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/false))
      ->check(CLI::PositiveNumber)
      ->type_name("SIZE");
  app->add_flag("!--no-shared-memory", options->shared_memory,
                "Exchange gradients and parameters with shard stores of this host over their "
                "sockets too, instead of through /dev/shm. Slower; to find faults.");
}

int ServeWorker(const WorkerOptions& options, ShutdownSignal* signal) {
  absl::StatusOr<WorkerBackend> backend =
      MakeBackend(options.device, options.threads, options.collectives);
  if (!backend.ok()) return ReportFailure(options.member.program, backend.status());
  backend->open_store = [open = backend->open_store,
                         shared = options.shared_memory](StoreClientOptions store) {
    store.shared_memory = shared;
    return open(std::move(store));
  };
  auto daemon = MemberDaemon::Start(options.member);
  if (!daemon.ok()) return ReportFailure(options.member.program, daemon.status());
  auto metrics = std::make_shared<WorkerMetrics>();
  (*daemon)->metrics().AddCollectable(metrics);

  MemberSessionOptions session;
  session.coordinator = options.member.coordinator;
  session.hello = (*daemon)->MakeHello();
  session.hello.set_device(options.device.substr(0, options.device.find(':')));
  session.hello.set_threads(static_cast<uint32_t>(options.threads));
  session.hello.set_fingerprint(backend->fingerprint);
  const uint64_t has =
      backend->device_memory != 0 ? backend->device_memory : session.hello.memory_bytes();
  metrics->SetDeviceMemory(has);
  session.hello.set_device_memory_bytes(
      options.memory_limit == 0 ? has : std::min(has, options.memory_limit));
  WorkerAgent agent(session, &*backend, metrics.get());
  SetLogSink([lines = agent.session()->log_queue()](LogLevel, const std::string& line) {
    lines->Add(line);
  });
  const absl::Duration grace = absl::Seconds(options.shutdown_grace_seconds);
  return (*daemon)->ServeUntilSignal(signal, agent.session(), [&](const std::string& reason) {
    if (agent.Shutdown(reason, grace, kStop)) return;
    LogError("a job did not stop within ", absl::FormatDuration(kStop), "; ending without it");
    std::_Exit(kExitFailed);
  });
}

}  // namespace zeroshard
