// The command line of zeroshard-store, but for what it shares with workers.
#pragma once

#include <cstdint>
#include <string>

#include "CLI/App.hpp"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard::store {

// The least that --nvme-limit may say, in bytes: a file with one whole chunk of a bf16 job with
// AdamW.
uint64_t LeastNvmeBytes();

struct StoreOptions {
  uint64_t memory_limit = 0;   // bytes; 0 before parsing: this host's
  std::string nvme_dir;        // empty: none
  uint64_t nvme_limit = 0;     // bytes; 0: what is free
  int threads = 0;             // 0 before parsing: one a core
  double shutdown_grace = 30;  // seconds
};

// Adds the options, into `options`, which outlives `app`. Their defaults are filled in at once.
void AddStoreOptions(CLI::App* app, StoreOptions* options);

// Makes --nvme-dir, removes what stores that were killed left there, and says how many bytes may be
// written into it: --nvme-limit, or what is free then where that is less or nothing was said; 0
// where there is no such folder.
// INVALID_ARGUMENT: a limit without a folder, or the path is no folder in which files can be made.
// DEADLINE_EXCEEDED: another process holds the folder.
absl::StatusOr<uint64_t> PrepareNvme(const StoreOptions& options);

}  // namespace zeroshard::store
