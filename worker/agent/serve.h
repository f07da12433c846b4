// The worker's daemon: its options, and its life from the first connection to its goodbye.
#pragma once

#include <string>

#include "CLI/App.hpp"
#include "common/member/member_daemon.h"
#include "common/signals.h"

namespace zeroshard {

struct WorkerOptions {
  MemberDaemonOptions member;
  std::string device = "cpu";
  std::string collectives;  // empty: what suits the device
  int threads = 1;
  double shutdown_grace_seconds = 30;
  bool shared_memory = true;  // with stores of this host
  uint64_t memory_limit = 0;  // of the device, for a job; 0: all it has
};

// Every option of the daemon, into `options`, which outlives `app`. By default a worker computes
// with all of the host's cores.
void AddWorkerOptions(CLI::App* app, WorkerOptions* options);

// Serves jobs until a signal; returns the exit code.
int ServeWorker(const WorkerOptions& options, ShutdownSignal* signal);

}  // namespace zeroshard
