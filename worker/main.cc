// zeroshard-worker: one rank of whatever job the coordinator assigns, one job after another.
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "common/exit_codes.h"
#include "common/log.h"
#include "common/member/member_daemon.h"
#include "worker/agent/worker_agent.h"

namespace {

// OpenMP reads its environment before main: threads that wait must not spin, because the
// collectives and other ranks need the cores. The process starts itself again, once, with the same
// id.
void MakeOpenMpThreadsSleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr) return;
  setenv("OMP_WAIT_POLICY", "passive", 1);
  // By its path, so that it keeps its name in ps. Where this fails, training is slower, nothing
  // else.
  std::error_code error;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error).string();
  if (!error) execv(program.c_str(), argv);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace zeroshard;
  MakeOpenMpThreadsSleep(argv);
  mallopt(M_ARENA_MAX, 2);             // resident memory is what the job needs, not per thread
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // large blocks go back to the system when freed
  ShutdownSignal signal;
  MemberDaemonOptions options;
  options.kind = v1::MEMBER_KIND_WORKER;
  options.program = "zeroshard-worker";
  std::string device = "cpu";
  int threads = std::max(1u, std::thread::hardware_concurrency());

  CLI::App app(
      "A worker: trains one rank of the jobs that the coordinator assigns, one after another, "
      "until "
      "SIGTERM or SIGINT. Start one for each device, or for each share of a host's cores.\n"
      "Example: zeroshard-worker --coordinator 10.0.0.5:7070 --name worker-0 --threads 16");
  AddMemberOptions(&app, &options);
  app.add_option("--device", device, "What to compute on.")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", threads,
                 "Threads for computing. With several workers on a host, give each its share.")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  bool go_on = false;
  if (const int code = ParseOrExitCode(&app, argc, argv, &go_on); !go_on) return code;

  absl::StatusOr<WorkerBackend> backend = MakeBackend(device, threads);
  if (!backend.ok()) return ReportFailure(options.program, backend.status());
  auto daemon = MemberDaemon::Start(options);
  if (!daemon.ok()) return ReportFailure(options.program, daemon.status());
  auto metrics = std::make_shared<WorkerMetrics>();
  (*daemon)->metrics().AddCollectable(metrics);

  MemberSessionOptions session;
  session.coordinator = options.coordinator;
  session.hello = (*daemon)->MakeHello();
  session.hello.set_device(device);
  session.hello.set_threads(threads);
  session.hello.set_fingerprint(backend->make_ops()->Fingerprint());
  WorkerAgent agent(session, &*backend, metrics.get());
  SetLogSink([lines = agent.session()->log_queue()](LogLevel, const std::string& line) {
    lines->Add(line);
  });
  return (*daemon)->ServeUntilSignal(&signal, agent.session(), [&](const std::string& reason) {
    if (agent.Shutdown(reason, absl::Seconds(20))) return;
    LogError("a job did not stop within 20 s; ending without it");
    std::_Exit(kExitFailed);
  });
}
