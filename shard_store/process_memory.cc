#include "shard_store/process_memory.h"

#include <unistd.h>

#include <fstream>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/plan/chunk_table.h"
#include "common/plan/nvme_bytes.h"
#include "shard_store/state/writer_buffer.h"

namespace zeroshard::store {

static_assert(kWritersBytes == kMostWriters * kChunkElements * sizeof(float));

uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t pages = 0, resident = 0;
  if (!(statm >> pages >> resident)) return 0;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

uint64_t BesideState(uint64_t resident, int threads) {
  return resident + kServingBytes + kWritersBytes + static_cast<uint64_t>(threads) * kThreadBytes;
}

absl::StatusOr<uint64_t> StateBytes(uint64_t limit, uint64_t resident, int threads) {
  const uint64_t beside = BesideState(resident, threads);
  if (limit > beside) return limit - beside;
  return absl::InvalidArgumentError(absl::StrCat(
      "--memory-limit ", limit, " bytes: this process alone takes ", beside, " (", resident,
      " at its start, ", beside - resident, " for messages, snapshots and ", threads,
      " threads), and nothing is left for training state; wanted more than that, by the state of a "
      "job in memory, or by ",
      NvmeMemoryBytes(kChunkElements), " for each job on disks"));
}

}  // namespace zeroshard::store
