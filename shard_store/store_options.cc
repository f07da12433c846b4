#include "shard_store/store_options.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <system_error>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/files.h"
#include "common/log.h"
#include "common/member/host_info.h"
#include "common/option_checks.h"
#include "common/plan/chunk_table.h"
#include "common/plan/nvme_bytes.h"
#include "shard_store/nvme/stale_files.h"

namespace zeroshard::store {
namespace {

// Stores that share an --nvme-dir take turns there, for as long as making a file takes.
constexpr absl::Duration kFolderTimeout = absl::Seconds(60);

// A size with or without a unit, in bytes; `least` or more.
CLI::Validator Size(uint64_t least) {
  return CLI::Validator(
      [least](std::string& text) -> std::string {
        const std::string seen = text;
        uint64_t bytes = 0;
        bool good = !seen.empty() && seen[0] != '-';
        try {
          good = good && CLI::AsSizeValue(/*kb_is_1000=*/false)(text).empty() &&
                 absl::SimpleAtoi(text, &bytes) && bytes >= least;
        } catch (const CLI::Error&) {
          good = false;
        }
        if (good) return "";
        return absl::StrCat("seen ", seen, ", wanted ", least,
                            " bytes or more, for example 64GiB or 500MB");
      },
      "SIZE");
}

absl::Status NoFolder(const std::string& folder, absl::string_view problem) {
  return absl::InvalidArgumentError(
      absl::StrCat("--nvme-dir ", folder, ": ", problem,
                   "; name a folder on a local disk in which this process may make files"));
}

absl::Status MakeNvmeFolder(const std::string& folder) {
  std::error_code error;
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_directory(folder, error)) {
    return NoFolder(folder, "is there but is no folder");
  }
  if (absl::Status made = MakeFolders(folder); !made.ok()) return NoFolder(folder, made.message());
  if (access(folder.c_str(), R_OK | W_OK | X_OK) != 0) {
    return NoFolder(folder, ErrnoError(errno, "write into", folder).message());
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t LeastNvmeBytes() {
  constexpr uint64_t kElements = kChunkElements;
  ChunkBytes bytes;
  bytes.master = bytes.exp_avg = bytes.exp_avg_sq = 4 * kElements;
  bytes.parameters = bytes.staging = 2 * kElements;
  return NvmeFixedBytes(kChunkElements) + NvmeBytesOf(kChunkElements, bytes);
}

void AddStoreOptions(CLI::App* app, StoreOptions* options) {
  options->memory_limit = MemoryLimitBytes();
  options->threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  app->add_option(
         "--memory-limit", options->memory_limit,
         "Most bytes of memory that this process takes, for example 64GiB. Of them it offers "
         "jobs what it does not take itself: what it has at its start, and 40 MiB and half a MiB "
         "for each of --threads; a job on disks takes 52 MiB for its buffers. From the ninth rank "
         "of its jobs on, 2 MiB more for each should be left free. Default: this host's memory.")
      ->transform(Size(1));
  app->add_option("--nvme-dir", options->nvme_dir,
                  "Folder on a local disk, best on ext4 or XFS, for jobs with device: nvme: a file "
                  "of each, with its state, parameters and gradients. Made where it is not there. "
                  "What a store that was killed left in it is removed. Default: none, and no such "
                  "jobs here.")
      ->check([](const std::string& text) { return EmptyProblem(text, "a folder"); });
  app->add_option("--nvme-limit", options->nvme_limit,
                  "Most bytes to write into --nvme-dir, for example 500GiB. Default: what is free "
                  "there when the store starts.")
      ->transform(Size(LeastNvmeBytes()));
  app->add_option("--threads", options->threads,
                  "Threads that compute updates. Default: one a core.")
      ->check(CLI::Range(1, 4096));
  app->add_option(
         "--shutdown-grace", options->shutdown_grace,
         "Seconds that the jobs whose chunks are here alone have to write a checkpoint when "
         "this store is told to leave (SIGTERM, SIGINT). 0: it leaves at once. Then it takes up "
         "to 12 more to end, which whoever supervises it must give it too.")
      ->check(CLI::Range(0.0, 86400.0))
      ->capture_default_str();
}

absl::StatusOr<uint64_t> PrepareNvme(const StoreOptions& options) {
  const std::string& folder = options.nvme_dir;
  if (folder.empty()) {
    if (options.nvme_limit == 0) return uint64_t{0};
    return absl::InvalidArgumentError("--nvme-limit needs --nvme-dir");
  }
  if (absl::Status made = MakeNvmeFolder(folder); !made.ok()) return made;
  if (absl::Status removed = nvme::RemoveStaleFiles(folder, kFolderTimeout); !removed.ok()) {
    return absl::Status(removed.code(), absl::StrCat("--nvme-dir: ", removed.message()));
  }
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  if (error) {
    return NoFolder(folder,
                    absl::StrCat("how much is free there is not to be known: ", error.message()));
  }
  const uint64_t free = space.available;
  if (options.nvme_limit > free) {
    LogWarning("--nvme-limit ", options.nvme_limit, " is more than is free in ", folder, " (", free,
               " bytes); what is free counts");
  }
  return options.nvme_limit == 0 ? free : std::min(options.nvme_limit, free);
}

}  // namespace zeroshard::store
