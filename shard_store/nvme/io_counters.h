// What was read from disks and written to them, by all jobs of a process.
#pragma once

#include <atomic>
#include <cstdint>

namespace zeroshard::nvme {

// Thread-safe.
struct IoCounters {
  std::atomic<uint64_t> read_bytes{0}, written_bytes{0};
  // Operations that failed, and blocks that were read and are not what was written.
  std::atomic<uint64_t> errors{0};
};

}  // namespace zeroshard::nvme
