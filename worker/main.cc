// zeroshard-worker: one rank of whatever job the coordinator assigns, one job after another.
#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "common/bulk/transport/channel_arguments.h"
#include "worker/agent/serve.h"
#include "worker/generate/generate_main.h"

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
  // NCCL's kernels of several communicators (the lines of a mesh) run in the order in which they
  // are launched, which is that of the rank's program (worker/comm/nccl/launch_order.h).
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
  mallopt(M_ARENA_MAX, 2);             // resident memory is what the job needs, not per thread
  mallopt(M_MMAP_THRESHOLD, 1 << 20);  // large blocks go back to the system when freed
  if (argc > 1 && std::string(argv[1]) == "generate") return GenerateMain(argc - 1, argv + 1);
  bulk::KeepReceiveMemory();
  ShutdownSignal signal;
  WorkerOptions options;
  CLI::App app(
      "A worker: trains one rank of the jobs that the coordinator assigns, one after another, "
      "until "
      "SIGTERM or SIGINT. Start one for each device, or for each share of a host's cores.\n"
      "Example: zeroshard-worker --coordinator 10.0.0.5:7070 --name worker-0 --threads 16");
  AddWorkerOptions(&app, &options);
  bool go_on = false;
  if (const int code = ParseOrExitCode(&app, argc, argv, &go_on); !go_on) return code;
  return ServeWorker(options, &signal);
}
